# SPDX-License-Identifier: Apache-2.0
"""Loads have the rates that their shapes say, and the oracle orders in time and no earlier."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from bench.autoscale.load_profiles import (
    LOADS,
    DataSplit,
    PiecewiseLinearLoad,
    SineLoad,
    arrival_times,
    daily_load,
    replicate_sessions,
    spiky_load,
    step_load,
)
from bench.autoscale.policies import hindsight_orders, required_engines, work_by_second
from bench.autoscale.simulated_fleet import ONE, MeanRequestTokens, engine_capacity, prompt_prefill_s
from bench.workload.sessions import Session, SessionTurn, single_piece

if TYPE_CHECKING:
    from pathlib import Path


def test_lines_and_steps_and_spikes() -> None:
    assert PiecewiseLinearLoad(((10, 2), (20, 4))).load_at(15) == pytest.approx(3)
    shape = step_load((0, 2), (100, 7))
    assert (shape.load_at(0), shape.load_at(99.9), shape.load_at(100), shape.load_at(1000)) == (2, 2, 7, 7)
    spiky = spiky_load(3, (50, 10, 8))
    assert (spiky.load_at(49), spiky.load_at(55), spiky.load_at(61)) == (3, 8, 3)


def test_a_day_has_its_mean_and_begins_when_asked() -> None:
    shape = daily_load(5.0, 240.0, begins_at=6)
    assert sum(shape.load_at(second / 10) for second in range(1800)) / 1800 == pytest.approx(5.0, rel=0.25)
    assert shape.load_at(0.0) == daily_load(5.0, 240.0).load_at(60.0)


@pytest.mark.parametrize(
    "shape", [PiecewiseLinearLoad(((0, 2), (500, 6))), SineLoad(4, ((300, 3),)), step_load((0, 1), (250, 7))]
)
def test_arrivals_follow_the_shape(shape: PiecewiseLinearLoad | SineLoad) -> None:
    found = list(arrival_times(shape, 4.0, 500.0, random.Random(1)))
    assert found == sorted(found)
    for begin in range(0, 500, 125):
        wanted = sum(4.0 * shape.load_at(begin + second) for second in range(125))
        counted = sum(begin <= one < begin + 125 for one in found)
        assert abs(counted - wanted) < 5 * wanted**0.5


def test_both_halves_of_a_generated_load_differ_in_shape_and_equal_seeds_are_equal(tmp_path: Path) -> None:
    for load in LOADS.values():
        if not load.trace:
            assert load.shapes[DataSplit.TUNING] != load.shapes[DataSplit.HELD]
    one = LOADS["ramps"].workload(DataSplit.HELD, 3, tmp_path)
    assert one == LOADS["ramps"].workload(DataSplit.HELD, 3, tmp_path)
    assert one != LOADS["ramps"].workload(DataSplit.HELD, 4, tmp_path)


def test_copies_raise_the_rate_and_share_no_text() -> None:
    sessions = [Session(float(number), (SessionTurn(single_piece(f"{number}", 5), 1),)) for number in range(400)]
    made = replicate_sessions(sessions, 2.5, random.Random(1))
    assert len(made) == pytest.approx(1000, rel=0.1)
    assert len({one.turns[0].pieces[0].key for one in made}) == len(made)
    assert [one.begins_at_s for one in made] == sorted(one.begins_at_s for one in made)


def test_the_capacity_leaves_no_time_over() -> None:
    kind = ONE[0].engine_profile()
    found = engine_capacity(kind, MeanRequestTokens(3000, 1500, 450), 0.075)
    used_s = prompt_prefill_s(kind, 3000, 1500) + 450 * found.output_token_s
    assert found.requests_per_s * used_s == pytest.approx(1.0)
    assert engine_capacity(kind, MeanRequestTokens(3000, 1500, 450), 0.05).requests_per_s < found.requests_per_s


def test_the_oracle_has_engines_when_they_are_needed_and_not_longer() -> None:
    need = [1] * 100 + [4] * 50 + [1] * 100
    plan = hindsight_orders(need, lead_s=20.0, min_replicas=1)
    assert plan.index(4) == 79
    assert plan[149] == 4
    assert plan[150] == 1
    gap = [4] * 50 + [1] * 15 + [4] * 50
    assert set(hindsight_orders(gap, lead_s=20.0, min_replicas=1)) == {4}


def test_what_is_needed_is_the_mean_work_over_the_utilization(tmp_path: Path) -> None:
    assert required_engines([2.0] * 60, 0.5) == [4] * 60
    load = LOADS["noise"]
    work = work_by_second(load, load.workload(DataSplit.TUNING, 0, tmp_path))
    assert sum(work) / len(work) == pytest.approx(5.0, rel=0.1)
