# SPDX-License-Identifier: Apache-2.0
"""What was learned of a binding fits into its annotation, and comes back from it."""

from __future__ import annotations

import random
from collections import Counter

from controller.autoscaler.decision.decision import Decision, StageDecision
from controller.autoscaler.decision.replica_performance import EngineStart, StartDurations, expected_start_s
from controller.autoscaler.decision.saved_state import BindingMemory, ServingStageMemory, decode_memory, encode_memory
from controller.autoscaler.decision.situation import ReplicaSpeed
from controller.autoscaler.decision.strategies.predictive import MOST_PLACES, PredictiveMemory
from controller.autoscaler.reconciler.binding_state import (
    AnnotationWriteSchedule,
    decode_annotation,
    encode_annotation,
    new_binding_state,
    signal_wait_s,
)


def test_the_largest_binding_fits_and_comes_back() -> None:
    rng = random.Random(1)
    names = [f"llama-3-70b-instruct-{index}"[:20] for index in range(16)]

    def starts() -> StartDurations:
        pods = (f"{rng.getrandbits(160):x}-{rng.getrandbits(40):x}" for _ in range(32))
        return StartDurations(tuple(EngineStart(pod, rng.uniform(10, 600)) for pod in pods))

    def stage(targets: list[str]) -> ServingStageMemory:
        season = PredictiveMemory(0.0, profile=tuple(rng.uniform(0, 99) for _ in range(MOST_PLACES)), season_s=86400.0)
        speeds = {one: ReplicaSpeed(rng.uniform(1e3, 1e5), rng.random(), rng.random() / 1e6) for one in targets}
        known = {one: starts() for one in targets}
        return ServingStageMemory(
            began_at_s=0.0, decided_at_s=0.0, strategies={"Predictive": season}, speeds=speeds, starts=known
        )

    memory = BindingMemory({"Prefill": stage(names[:8]), "Decode": stage(names[8:])})
    text = encode_annotation(encode_memory(memory))
    assert text
    again = decode_memory(decode_annotation(text), 5.0)
    assert again.stages["Decode"].starts == memory.stages["Decode"].starts
    assert again.stages["Prefill"].speeds == memory.stages["Prefill"].speeds
    season = again.stages["Prefill"].strategies["Predictive"]
    assert isinstance(season, PredictiveMemory)
    assert len(season.profile) == MOST_PLACES


def test_measured_starts_count_before_what_the_target_says_after_a_restart_too() -> None:
    stage = ServingStageMemory(
        began_at_s=0.0, decided_at_s=0.0, starts={"main": StartDurations((EngineStart("a", 33.0),))}
    )
    again = decode_memory(decode_annotation(encode_annotation(encode_memory(BindingMemory({"Both": stage})))), 5.0)
    assert expected_start_s(again.stages["Both"].starts["main"], 240.0) == 33.0


def test_what_is_not_ours_is_nothing() -> None:
    assert decode_annotation("no base64!") == b""
    assert encode_annotation(b"") == ""


def written_by(learned: str, hours: float) -> list[tuple[float, str]]:
    """When a hundred bindings were written that a new leader decides about every five seconds, each time with new
    speeds.
    """
    rng = random.Random(1)
    states = {f"b{one}": AnnotationWriteSchedule(rng) for one in range(100)}
    return [
        (float(now_s), name)
        for now_s in range(0, int(hours * 3600), 5)
        for name, one in states.items()
        if one.is_due(learned, float(now_s)) and one.next_annotation(b"%d" % now_s, learned, float(now_s))
    ]


def test_a_new_leader_does_not_write_anew_at_once_what_one_before_has_kept() -> None:
    written = written_by(encode_annotation(b"before"), 0.2)
    assert not [one for one in written if one[0] < 60]
    assert {name for _, name in written} == {f"b{one}" for one in range(100)}
    by_minute = Counter(int(at_s // 60) for at_s, _ in written)
    assert max(by_minute.values()) <= 25


def test_bindings_that_began_together_write_apart_later_on_and_ever_less() -> None:
    written = written_by("", 3)
    assert len([one for one in written if one[0] == 0]) == 100
    late = Counter(int(at_s // 60) for at_s, _ in written if at_s > 3600)
    assert max(late.values()) <= 20
    assert sum(late.values()) <= 100 * 4


def decision(*combined: float | None) -> Decision:
    stages = tuple(StageDecision("Both", (), one, ()) for one in combined)
    return Decision(binding="default/one", at_s=0.0, mode="Auto", targets=(), stages=stages)


def test_data_are_awaited_for_six_periods_and_three_seconds_at_least() -> None:
    assert (signal_wait_s(5.0), signal_wait_s(0.1)) == (30.0, 3.0)
    state = new_binding_state("1", random.Random(1), conflict_s=(0.2, 5.0))

    def awaits_data(now_s: float, *combined: float | None) -> bool:
        return state.is_waiting_for_data(decision(*combined), 5.0, now_s)

    assert awaits_data(100.0, None)
    assert awaits_data(129.0, 3.0, None)
    assert not awaits_data(129.0, 3.0)
    assert not awaits_data(130.0, None)
    # what is lost later is missing at once
    assert not awaits_data(500.0, None)


def test_a_decision_without_stages_knows_nothing() -> None:
    assert new_binding_state("1", random.Random(1), conflict_s=(0.2, 5.0)).is_waiting_for_data(decision(), 5.0, 7.0)
