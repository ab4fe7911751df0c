# SPDX-License-Identifier: Apache-2.0
"""Room for load to come back to where it was."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.autoscaler.decision.saved_state import BindingMemory, ServingStageMemory, decode_memory, encode_memory
from controller.autoscaler.decision.strategies.work import (
    MOST_PLACES,
    LoadPeaks,
    WorkMemory,
    WorkStrategy,
    with_headroom,
)
from tests.controller.autoscaler.decision.situations import NOW_S, situation_of, target_of, traffic_of


def seen(*loads: tuple[float, float]) -> LoadPeaks:
    """``loads``: when, counted from ``NOW_S``, and how much."""
    peaks = LoadPeaks(NOW_S + loads[0][0])
    for at_s, per_s in loads:
        peaks = peaks.with_load(per_s, NOW_S + at_s)
    return peaks


def test_there_is_room_for_what_was_seen() -> None:
    assert with_headroom(4.0, 2.0, most=6.0) == 6.0
    assert with_headroom(2.0, 2.0, most=6.0) == 4.0


def test_a_peak_gets_no_room_above_it() -> None:
    assert with_headroom(6.0, 2.0, most=6.0) == 6.0


def test_while_little_is_known_there_is_room_for_all() -> None:
    assert seen((-299, 4.0), (0, 4.0)).highest_load(NOW_S) == math.inf
    assert seen((-301, 4.0), (0, 4.0)).highest_load(NOW_S) == 4.0


def test_the_highest_load_counts_for_an_hour() -> None:
    peaks = seen((-4000, 9.0), (-3590, 7.0), (-1800, 5.0), (0, 4.0))
    assert peaks.highest_load(NOW_S) == 7.0
    assert peaks.with_load(4.0, NOW_S + 20).highest_load(NOW_S + 20) == 5.0


def test_after_a_gap_of_an_hour_nothing_is_known() -> None:
    assert seen((-9000, 9.0), (0, 4.0)).highest_load(NOW_S) == math.inf


def test_a_clock_that_goes_back_forgets_what_is_yet_to_come() -> None:
    peaks = seen((0, 9.0)).with_load(4.0, NOW_S - 1000)
    assert [one.per_s for one in peaks.places] == [4.0]


@given(st.lists(st.tuples(st.floats(0, 3000), st.floats(0, 1e6)), min_size=1, max_size=60))
def test_it_stays_small_and_never_below_load(looks: list[tuple[float, float]]) -> None:
    now_s, peaks = NOW_S, LoadPeaks(NOW_S)
    for more_s, per_s in looks:
        now_s += more_s
        peaks = peaks.with_load(per_s, now_s)
        assert len(peaks.places) <= MOST_PLACES
        assert peaks.highest_load(now_s) >= per_s
        assert with_headroom(per_s, 1.5, peaks.highest_load(now_s)) >= per_s


def memory_of(*loads: tuple[float, float]) -> WorkMemory:
    """Of the strategy, with these loads."""
    return WorkMemory(NOW_S, peaks=seen(*loads))


@pytest.mark.parametrize(("highest", "expected"), [(12.0, 12.0), (15.0, 15.0), (30.0, 18.0)])
def test_the_strategy_keeps_as_much_room_as_the_last_hour_asks_for(highest: float, expected: float) -> None:
    situation = situation_of(target_of(ready=4), traffic=traffic_of(12.0))
    found = WorkStrategy().recommend(situation, memory_of((-1800, highest), (-1, 12.0)))[0]
    assert found.inputs["arrivals_per_s_with_room"] == pytest.approx(expected)
    # 0.21 s of an engine each, 0.8 of its time
    assert found.inputs["replicas_for_rate"] == pytest.approx(expected * 0.21 / 0.8)


def test_what_was_seen_outlives_a_restart() -> None:
    memory = memory_of((-3000, 12.3456), (-1, 12.0))
    stage = ServingStageMemory(began_at_s=0.0, decided_at_s=0.0, strategies={"Work": memory})
    kept = decode_memory(encode_memory(BindingMemory({"Both": stage})), NOW_S + 30).stages["Both"].strategies["Work"]
    assert isinstance(kept, WorkMemory)
    assert kept.peaks is not None
    assert kept.peaks.highest_load(NOW_S + 30) == 12.3


@pytest.mark.parametrize(
    "peaks",
    [
        LoadPeaks(NOW_S + 9000),
        LoadPeaks(-1.0),
        msgspec.structs.replace(seen((0, 1.0)), since_s=NOW_S + 100),
        seen((0, 1e13)),
        seen((0, -1.0)),
        LoadPeaks(0.0, seen((0, 1.0)).places * 20),
    ],
)
def test_what_cannot_have_been_seen_is_not_restored(peaks: LoadPeaks) -> None:
    stage = ServingStageMemory(began_at_s=0.0, decided_at_s=0.0, strategies={"Work": WorkMemory(NOW_S, peaks=peaks)})
    assert "Work" not in decode_memory(encode_memory(BindingMemory({"Both": stage})), NOW_S).stages["Both"].strategies
