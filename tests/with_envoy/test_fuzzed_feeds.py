# SPDX-License-Identifier: Apache-2.0
"""A while of the fuzzer over engines and Redis: ``python -m tests.fuzz feeds`` runs it for as long as is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fuzz.bodies import FuzzSettings, report_text
from tests.fuzz.feeds import fuzz_feeds
from tests.programs import program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
async def test_broken_answers_of_engines_and_of_redis_harm_no_honest_request(tmp_path: Path) -> None:
    settings = FuzzSettings(seconds=120, cases=200, first_seed=30_000, clients=4, patience_s=60.0)
    report = await fuzz_feeds(tmp_path, program("redis-server"), settings)
    assert report.is_clean, report_text(report)
    assert report.cases == 200
    assert report.statuses["200"] > 0
    assert report.innocent > 0
