# SPDX-License-Identifier: Apache-2.0
"""After a start of the manager nothing is scaled in before enough has been seen, whatever the policy's window is."""

from __future__ import annotations

import msgspec
import pytest

from controller.api.autoscaling import Behavior, MetricTarget, ScalingRules
from controller.api.autoscaling_policy import AutoscalingPolicySpec, Strategy
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.saved_state import BindingMemory, decode_memory, encode_memory
from controller.autoscaler.decision.situation import EngineReport, Freshness
from controller.autoscaler.decision.stage_replica_need import LEAST_KNOWN_S
from tests.controller.autoscaler.decision.situations import (
    NOW_S,
    binding_of,
    situation_of,
    spec_of,
    target_of,
    traffic_of,
)

IMPATIENT = Behavior(scale_down=ScalingRules(stabilization_window_seconds=0))
BY_WORK = AutoscalingPolicySpec(behavior=IMPATIENT)
BY_METRIC = AutoscalingPolicySpec(
    behavior=IMPATIENT,
    strategies=(Strategy(name="Target"),),
    metrics=(MetricTarget(name="requests_in_flight", source="Gateway", value=4.0),),
)


def asked_for(
    policy: AutoscalingPolicySpec, memory: BindingMemory | None, at_s: float
) -> tuple[int | None, BindingMemory]:
    """Of five replicas with little to do."""
    now_s = NOW_S + at_s
    situation = situation_of(target_of(ready=5), traffic=traffic_of(0.5, now_s=now_s), now_s=now_s)
    decision, memory = decide(policy, binding_of(spec_of()), [situation], memory, now_s)
    return decision.targets[0].desired, memory


@pytest.mark.parametrize("policy", [BY_WORK, BY_METRIC], ids=["work", "gateway metric"])
def test_without_a_window_it_waits_a_minute_and_then_scales_in(policy: AutoscalingPolicySpec) -> None:
    memory, seen = None, dict[float, int | None]()
    for at_s in range(0, 90, 5):
        seen[at_s], memory = asked_for(policy, memory, at_s)
    assert {replicas for at_s, replicas in seen.items() if at_s < LEAST_KNOWN_S} == {5}
    assert seen[LEAST_KNOWN_S] == 1


def test_what_an_earlier_leader_has_learned_does_not_shorten_that() -> None:
    memory = None
    for at_s in range(0, 90, 5):
        _, memory = asked_for(BY_WORK, memory, at_s)
    assert memory is not None
    kept = decode_memory(encode_memory(memory), NOW_S + 90)
    for at_s in range(90, 90 + LEAST_KNOWN_S, 5):
        replicas, kept = asked_for(BY_WORK, kept, at_s)
        assert replicas == 5


def test_nothing_goes_while_the_api_server_does_not_tell_of_pods_but_what_is_missed_comes() -> None:
    cut_off, policy = Freshness(cut_off_s=20.0), BY_METRIC
    memory, asked = None, dict[tuple[int, float], int | None]()
    for at_s in range(0, 200, 5):
        now_s, rate = NOW_S + at_s, 0.5 if at_s < 150 else 500.0
        target = target_of(ready=5)
        if rate > 1:
            engines = [msgspec.structs.replace(one, report=EngineReport(now_s, in_flight=8)) for one in target.engines]
            target = msgspec.structs.replace(target, engines=tuple(engines))
        is_away = at_s >= 100
        found = situation_of(target, freshness=cut_off if is_away else None, now_s=now_s)
        decision, memory = decide(policy, binding_of(spec_of()), [found], memory, now_s)
        asked[at_s, rate] = decision.targets[0].desired
    assert asked[95, 0.5] == 1
    assert {asked[at_s, 0.5] for at_s in range(100, 150, 5)} == {5}
    assert asked[195, 500.0] == 10
