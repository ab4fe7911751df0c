# SPDX-License-Identifier: Apache-2.0
"""Panic over combined recommendations."""

from __future__ import annotations

from controller.api.autoscaling import Panic
from controller.autoscaler.decision.behavior import PanicState, update_panic
from extproc.api.quantities import Duration

PANIC = Panic(threshold_percent=200.0, hold=Duration("30s"))


def test_a_panic_begins_at_the_threshold_and_keeps_its_largest_answer_for_the_hold() -> None:
    state: PanicState | None = None
    story = [(0.0, 3.0, 2.0), (5.0, 4.0, 2.0), (10.0, 7.0, 4.0), (30.0, 2.0, 7.0), (35.0, 2.0, 7.0), (36.0, 2.0, 7.0)]
    answers = []
    for now_s, recommended, ready in story:
        state = update_panic(PANIC, state, recommended=recommended, ready=ready, now_s=now_s)
        answers.append(state.most if state is not None else None)
    assert answers == [None, 4.0, 7.0, 7.0, 7.0, None]


def test_reaching_the_threshold_again_prolongs_it() -> None:
    state = update_panic(PANIC, None, recommended=4.0, ready=1.0, now_s=0.0)
    state = update_panic(PANIC, state, recommended=8.0, ready=4.0, now_s=29.0)
    assert state == PanicState(29.0, 8.0)
    assert update_panic(PANIC, state, recommended=1.0, ready=8.0, now_s=59.0) == PanicState(29.0, 8.0)
    assert update_panic(PANIC, state, recommended=1.0, ready=8.0, now_s=59.5) is None


def test_no_ready_replica_counts_as_one() -> None:
    assert update_panic(PANIC, None, recommended=1.0, ready=0.0, now_s=0.0) is None
    assert update_panic(PANIC, None, recommended=2.0, ready=0.0, now_s=0.0) is not None
