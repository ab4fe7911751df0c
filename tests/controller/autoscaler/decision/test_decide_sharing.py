# SPDX-License-Identifier: Apache-2.0
"""What becomes of a stage's need where there are several targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.api.autoscaling_binding import AutoscalingPolicyBinding, Budget, RatioConstraint
from controller.api.autoscaling_policy import AutoscalingPolicySpec, Strategy
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.situation import Engine, EngineState, Freshness, Situation, TargetSituation
from controller.autoscaler.decision.strategies.work import WorkParameters
from tests.controller.autoscaler.decision.situations import (
    NOW_S,
    SPEED,
    binding_of,
    situation_of,
    spec_of,
    target_of,
    traffic_of,
)

if TYPE_CHECKING:
    from controller.autoscaler.decision.decision import Decision
    from controller.autoscaler.decision.saved_state import BindingMemory

# numbers are worked out for load as it is
POLICY = AutoscalingPolicySpec(strategies=(Strategy(name="Work", work=WorkParameters(headroom=1.0)),))
# Half as fast as SPEED, and a quarter of its cost.
HALF = msgspec.structs.replace(
    SPEED, prefill_tokens_per_s=SPEED.prefill_tokens_per_s / 2, step_s_per_token=SPEED.step_s_per_token * 2
)
LARGE = msgspec.structs.replace(spec_of("large", least=0, most=10), cost=4.0)
SMALL = msgspec.structs.replace(spec_of("small", least=0, most=10), cost=1.0)
BINDING = binding_of(LARGE, SMALL)


def pair(large: int = 0, small: int = 0) -> tuple[TargetSituation, TargetSituation]:
    """So many replicas of each, all ready."""
    return target_of(ready=large, spec=LARGE), target_of(ready=small, spec=SMALL, speed=HALF)


def after_minutes(
    targets: tuple[TargetSituation, ...],
    rate: float,
    *,
    binding: AutoscalingPolicyBinding = BINDING,
    policy: AutoscalingPolicySpec = POLICY,
    freshness: Freshness | None = None,
) -> dict[str, int | None]:
    """What each should have after some minutes of this; the last look has this freshness."""
    memory: BindingMemory | None = None
    for look in range(40):
        now_s = NOW_S + 5 * look
        situation = situation_of(
            targets,
            traffic=traffic_of(rate, now_s=now_s),
            now_s=now_s,
            freshness=freshness if look == 39 else None,
        )
        decision, memory = decide(policy, binding, [situation], memory, now_s)
    return {one.name: one.desired for one in decision.targets}


def test_the_cheapest_kind_carries_the_work() -> None:
    # 12 * 0.21 s at 0.8: 3.15 large ones, or twice as many small ones at half the price in all
    assert after_minutes(pair(small=7), 12.0) == {"large": 0, "small": 7}


@pytest.mark.parametrize(("price", "expected"), [(2.1, {"large": 4, "small": 0}), (4.0, {"large": 0, "small": 8})])
def test_replicas_move_to_another_target_for_a_tenth_of_the_cost_not_for_less(
    price: float, expected: dict[str, int]
) -> None:
    # 15% of room: 3.62 large ones carry it, so one of five goes, or eight small ones carry it, for 8 instead of 4 *
    # price
    large, small = pair(large=5)
    large = msgspec.structs.replace(large, spec=msgspec.structs.replace(large.spec, cost=price))
    assert after_minutes((large, small), 12.0, binding=binding_of(large.spec, small.spec)) == expected


def test_in_doubt_no_target_loses_a_replica_to_another() -> None:
    silent = Freshness(gateways=2, silent=("b",))
    found = after_minutes(pair(large=4, small=1), 12.0, freshness=silent)
    assert found["large"] is not None
    assert found["small"] is not None
    assert found["large"] >= 4
    assert found["small"] >= 1


def test_a_target_whose_pods_find_no_node_is_left_out() -> None:
    large, small = pair(large=1)
    stuck = tuple(Engine(f"small-{index}", EngineState.UNSCHEDULABLE, NOW_S - 900) for index in range(6))
    small = msgspec.structs.replace(small, engines=stuck, current=6)
    found = after_minutes((large, small), 12.0)
    # 2.52 engines' work, and twice what the one that is ready does not get done: 5.76
    assert found["large"] == 6


def test_a_held_target_counts_with_what_it_has() -> None:
    large, small = pair(large=2, small=0)
    large = msgspec.structs.replace(large, set_by="kubectl-scale", set_at_s=NOW_S + 100)
    # 2.52 engines' work and twice what the two do not get done: 3.96. Of these 2 are held: 1.96 in halves
    assert after_minutes((large, small), 12.0) == {"large": 2, "small": 4}


def test_ratios_raise_the_short_side() -> None:
    prefill, decode = spec_of("prefill", stage="Prefill"), spec_of("decode", stage="Decode")
    binding = binding_of(prefill, decode)
    ratio = RatioConstraint(numerator="prefill", denominator="decode", min=1.0, max=4.0)
    binding = msgspec.structs.replace(binding, spec=msgspec.structs.replace(binding.spec, ratios=(ratio,)))
    situations: list[Situation] = [
        situation_of(target_of(ready=5, spec=spec), traffic=traffic_of(40.0)) for spec in (prefill, decode)
    ]
    decision, _ = decide(POLICY, binding, situations, None, NOW_S)
    # decode needs 5.5, so 6, and prefill alone would need 5
    assert [one.desired for one in decision.targets] == [6, 6]
    assert [step.rule for stage in decision.stages for step in stage.steps] == ["Ratio"]


def test_replicas_that_stay_do_not_grow_by_rounding_of_nearly_equal_speeds() -> None:
    almost = msgspec.structs.replace(SPEED, prefill_tokens_per_s=SPEED.prefill_tokens_per_s * 1.000_01)
    third = msgspec.structs.replace(SPEED, prefill_tokens_per_s=SPEED.prefill_tokens_per_s * 1.37)
    memory, current = None, 3
    for look in range(30):
        now_s = NOW_S + 5 * look
        first = target_of(ready=current, spec=LARGE)
        others = [target_of(ready=1, spec=SMALL, speed=almost), target_of(ready=1, spec=spec_of("third"), speed=third)]
        found = situation_of([first, *others], traffic=traffic_of(1.0, now_s=now_s), now_s=now_s)
        decision, memory = decide(POLICY, binding_of(LARGE, SMALL, spec_of("third")), [found], memory, now_s)
        if now_s - NOW_S < 55:
            # a start holds them
            assert [one.desired for one in decision.targets] == [3, 1, 1], decision.stages[0].steps


def test_one_target_keeps_to_the_budget_and_says_so() -> None:
    alone = target_of(ready=2, spec=LARGE)
    spec = msgspec.structs.replace(binding_of(LARGE).spec, budget=Budget(cost_per_hour=12.0))
    binding = msgspec.structs.replace(BINDING, spec=spec)
    assert after_minutes((alone,), 24.0, binding=binding_of(LARGE)) == {"large": 10}
    assert after_minutes((alone,), 24.0, binding=binding) == {"large": 3}
    decision = decided_once((alone,), 24.0, binding)
    steps = [one for one in decision.stages[0].steps if one.rule == "Budget"]
    assert [one.reason for one in steps] == ["the budget of cost leaves no room for more"]
    assert decision.targets[0].reason == "the budget of cost leaves no room for more"


def test_free_accelerators_limit_what_is_started() -> None:
    large, small = pair(large=1)
    h100 = [msgspec.structs.replace(one.spec, accelerator="h100", accelerators=2) for one in (large, small)]
    targets = tuple(
        msgspec.structs.replace(one, spec=spec, headroom=2) for one, spec in zip((large, small), h100, strict=True)
    )
    decision = decided_once(targets, 24.0, binding_of(*h100), free={"h100": 4})
    found = {one.name: one.desired or 0 for one in decision.targets}
    assert found["large"] - 1 + found["small"] == 2
    assert sum(decision.lacks.values()) > 0


def test_a_set_that_is_not_proven_the_cheapest_is_told() -> None:
    # stages that share a limit are served in turn
    large, small = (msgspec.structs.replace(one, stage="Prefill", accelerator="h100") for one in (LARGE, SMALL))
    decode = msgspec.structs.replace(spec_of("decode", stage="Decode"), accelerator="h100")
    made = binding_of(large, small, decode)
    binding = msgspec.structs.replace(
        made, spec=msgspec.structs.replace(made.spec, budget=Budget(accelerators={"h100": 5}))
    )
    stages = [
        (target_of(ready=1, spec=large), target_of(ready=1, spec=small, speed=HALF)),
        (target_of(ready=1, spec=decode),),
    ]
    memory: BindingMemory | None = None
    for look in range(40):
        now_s = NOW_S + 5 * look
        situations = [situation_of(one, traffic=traffic_of(40.0, now_s=now_s), now_s=now_s) for one in stages]
        decision, memory = decide(POLICY, binding, situations, memory, now_s)
    assert not any(one.is_proven for one in decision.stages)
    assert all(one.reason.endswith("; not proven the cheapest") for one in decision.targets[:2])
    few = decided_once(pair(small=7), 12.0, BINDING)
    assert few.stages[0].is_proven
    assert not any("not proven" in one.reason for one in few.targets)


def decided_once(
    targets: tuple[TargetSituation, ...],
    rate: float,
    binding: AutoscalingPolicyBinding,
    free: dict[str, int] | None = None,
) -> Decision:
    """After some minutes of this."""
    memory: BindingMemory | None = None
    for look in range(40):
        now_s = NOW_S + 5 * look
        situation = situation_of(targets, traffic=traffic_of(rate, now_s=now_s), now_s=now_s)
        decision, memory = decide(POLICY, binding, [situation], memory, now_s, free=free)
    return decision
