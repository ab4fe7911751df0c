# SPDX-License-Identifier: Apache-2.0
"""A soak of seconds: the harness itself works, with and without hostile engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bench.soak.soak_loops import SoakSettings, soak
from bench.soak.verdict import SoakLimits, judge

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.asyncio
async def test_a_short_soak_of_few_models_loses_nothing(tmp_path: Path) -> None:
    settings = SoakSettings(minutes=0.2, models=8, rate=10.0, fill_rate=10.0, sample_s=3.0, engines=2)

    record = await soak(settings, tmp_path / "soak", asyncio.Event())

    # how long changes take depends on the machine
    failed = [one for one in judge(record, SoakLimits()) if one.is_ok is False and one.name != "changes"]
    assert failed == []
    assert record.totals["honest"]["ok"] > 50
    assert any(one.extproc_s is not None and one.envoy_s is not None for one in record.uptakes)
    assert record.samples[-1].processes.keys() == {"extproc", "bundle", "envoy"}
    assert record.samples[-1].counters["feed KV events"] > 0


@pytest.mark.asyncio
async def test_a_hostile_engine_is_asked_and_harms_nobody_else(tmp_path: Path) -> None:
    settings = SoakSettings(
        minutes=0.1,
        models=4,
        rate=5.0,
        fill_rate=5.0,
        hostile=("resets", "redirect-page"),
        hostile_rate=10.0,
        sample_s=2.0,
        engines=2,
    )

    record = await soak(settings, tmp_path / "soak", asyncio.Event())

    assert record.totals["hostile"]["lost"] > 0
    assert record.totals["mixed"]["ok"] > 0
    assert "lost" not in record.totals["honest"]
    assert record.trapped == 0
