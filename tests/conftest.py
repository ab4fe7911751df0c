# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: how hypothesis chooses its examples, and that nothing outlives a runner that is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from bench.guard import Guard
from tests.examples import IS_CI

if TYPE_CHECKING:
    from collections.abc import Iterator

# A machine that is busy must not fail a test by its time. In CI the examples are the same every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if IS_CI else "local")


@pytest.fixture(scope="session")
def guard() -> Iterator[Guard]:
    """Ends the process groups that were added to it if this runner is killed."""
    with Guard() as one:
        yield one
