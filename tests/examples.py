# SPDX-License-Identifier: Apache-2.0
"""How many examples tests try where one takes long: all of them in ``make test-all``, a fifth of them elsewhere; and
parameters that only ``make test-all`` tries.

There hypothesis tries other examples every time; in CI it tries the same ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

IS_CI: Final = bool(os.environ.get("CI"))
# what is marked slow runs, too
IS_SLOW: Final = bool(os.environ.get("SLOW"))
_PART: Final = 5


def examples(of_all: int) -> int:
    """How many examples to try: ``of_all``, or a fifth of them."""
    return of_all if IS_SLOW else max(of_all // _PART, 5)


def slow(value: object) -> ParameterSet:
    """A parameter that takes long and shows what others show in part, as the mark says of tests."""
    return pytest.param(value, marks=pytest.mark.slow)
