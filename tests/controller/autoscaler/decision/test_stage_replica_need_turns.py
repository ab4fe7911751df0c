# SPDX-License-Identifier: Apache-2.0
"""When replicas that come and go make the next scale-in wait longer."""

from __future__ import annotations

import pytest

from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.saved_state import MOST_TURNS, TURNS_COUNT_S, ServingStageMemory
from controller.autoscaler.decision.stage_replica_need import SCALE_IN_WINDOW_S, effective_behavior, prepare_stage
from tests.controller.autoscaler.decision.situations import NOW_S, situation_of, target_of

POLICY = AutoscalingPolicySpec()


def memory_after(*replicas: int, apart_s: float = 60.0) -> ServingStageMemory:
    """After looks at so many replicas, one after the other."""
    memory = None
    for index, count in enumerate(replicas):
        situation = situation_of(target_of(ready=count), now_s=NOW_S + index * apart_s)
        _, memory = prepare_stage(situation, memory, POLICY)
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("replicas", "turns"),
    [
        ((5, 5, 5), 0),
        ((5, 4, 3, 2), 0),
        ((5, 4, 5), 1),
        ((20, 17, 18), 1),
        ((5, 4, 5, 4, 5), 2),
        ((5, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5), MOST_TURNS),
    ],
)
def test_one_replica_or_a_fifth_that_goes_and_comes_again_is_a_turn(replicas: tuple[int, ...], turns: int) -> None:
    assert len(memory_after(*replicas).turned_at_s) == turns


@pytest.mark.parametrize("replicas", [(10, 9, 8, 7, 8, 9, 10), (5, 3, 5), (20, 15, 20), (5, 0, 1)])
def test_load_that_falls_and_rises_again_is_none(replicas: tuple[int, ...]) -> None:
    assert not memory_after(*replicas).turned_at_s


def test_a_turn_doubles_the_window_for_a_while() -> None:
    memory = memory_after(5, 4, 5)
    found = effective_behavior(POLICY, len(memory.turned_at_s)).scale_down.stabilization_window_seconds
    assert found == 2 * SCALE_IN_WINDOW_S
    later = situation_of(target_of(ready=5), now_s=NOW_S + 120.0 + TURNS_COUNT_S)
    assert not prepare_stage(later, memory, POLICY)[1].turned_at_s
