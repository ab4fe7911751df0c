# SPDX-License-Identifier: Apache-2.0
"""A scaling decision: from situations and memory to the replicas that each target should have, with reasons.

strategies -> combined -> carried by the remaining replicas? -> fresh? -> behaviour -> restarted? -> from zero
     -> schedules and bounds -> one is kept? -> shared out among targets -> ratios -> manual override -> mode
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.autoscaler.decision.allocation.allocate import allocate_stages, allocation_rules, enforce_ratios
from controller.autoscaler.decision.allocation.variants import variant_from_target
from controller.autoscaler.decision.behavior import ReplicaBounds, scheduled_bounds
from controller.autoscaler.decision.decision import AppliedRule, Decision, Strategy, TargetDecision
from controller.autoscaler.decision.saved_state import BindingMemory, CachedAllocation, ServingStageMemory
from controller.autoscaler.decision.situation import EngineState, Situation, TargetSituation
from controller.autoscaler.decision.stage_replica_need import (
    StageReplicaNeed,
    decide_stage,
    prepare_stage,
    stage_decision,
    why_stage_keeps_replica,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.api.autoscaling_binding import AutoscalingPolicyBinding, AutoscalingPolicyBindingSpec
    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.allocation.variants import Allocation, AllocationRules, Variant
    from controller.autoscaler.decision.decision import Recommendation, StageDecision

_ONE: Final = 1.0
# Where targets differ, needs and capacities are rounded to these steps: noise of learned speeds moves no replicas.
_NEED_STEP: Final = 0.1
_CAPACITY_DIGITS: Final = 2
_EPSILON: Final = 1e-6
# Of the cost without other targets' new replicas.
_WORTH_MOVING: Final = 0.9
UNPROVEN: Final = "not proven the cheapest"


def decide(
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBinding,
    situations: Sequence[Situation],
    memory: BindingMemory | None,
    now_s: float,
    *,
    free: Mapping[str, int] | None = None,
) -> tuple[Decision, BindingMemory]:
    """``situations``: one a stage. ``memory``: the one that the last call returned; None at first, and after a restart.
    ``free``: free accelerators of nodes, by pool; None if unknown.

    ``now_s``: since 1970, as schedules need it. The decision has the desired replicas of each target; the caller
    applies them as the mode requires.
    """
    before = memory or BindingMemory()
    if policy.mode == "Paused":
        targets = tuple(_as_it_is(target) for one in situations for target in one.targets)
        paused = BindingMemory(schedules=before.schedules, bounds=before.bounds)
        return _decision(policy, binding, now_s, targets), paused
    bounds = _bounds(policy, before, now_s)
    stages = [_stage(one, before.stages.get(_name(one)), policy, bounds) for one in situations]
    stages = _not_below_one(stages, policy, bounds)
    sharing = share_capacity(stages, policy, binding.spec, free, before.shared)
    decision = msgspec.structs.replace(
        _decision(policy, binding, now_s, _targets(stages, sharing)),
        stages=tuple(_stage_decision(stage, sharing) for stage in stages),
        lacks=sharing.lacks,
        blocked={
            target.name: target.blocked for stage in stages for target in stage.situation.targets if target.blocked
        },
        inputs={f"start_s_{target.name}": target.start_s for stage in stages for target in stage.situation.targets},
    )
    kept = {_name(stage.situation): stage.memory for stage in stages}
    return decision, BindingMemory(kept, policy.schedules, bounds, sharing.shared)


def _decision(
    policy: AutoscalingPolicySpec, binding: AutoscalingPolicyBinding, now_s: float, targets: tuple[TargetDecision, ...]
) -> Decision:
    return Decision(
        binding=binding.metadata.key,
        at_s=now_s,
        mode=policy.mode,
        targets=targets,
        requeue_at_s=now_s + policy.period,
    )


def _name(situation: Situation) -> str:
    return situation.targets[0].spec.stage


def _bounds(policy: AutoscalingPolicySpec, before: BindingMemory, now_s: float) -> ReplicaBounds:
    """Cron lines are slow to read, so bounds are kept until they end."""
    if policy.schedules == before.schedules and now_s < before.bounds.until_s:
        return before.bounds
    return scheduled_bounds(policy.schedules, now_s)


def _stage(
    situation: Situation, before: ServingStageMemory | None, policy: AutoscalingPolicySpec, bounds: ReplicaBounds
) -> StageReplicaNeed:
    known, memory = prepare_stage(situation, before, policy)
    return decide_stage(known, memory, policy, bounds, make_strategies(policy))


def make_strategies(policy: AutoscalingPolicySpec) -> tuple[Strategy[Any], ...]:
    """In the order of the policy."""
    return tuple(one.type.make(one.parameters, policy) for one in policy.strategies)


def _not_below_one(
    stages: list[StageReplicaNeed], policy: AutoscalingPolicySpec, bounds: ReplicaBounds
) -> list[StageReplicaNeed]:
    """Stages go to zero together, or not at all."""
    is_at_zero = all(stage.situation.current_replicas == 0 for stage in stages)
    if bounds.most == 0 or (is_at_zero and policy.scale_to_zero is not None):
        return stages
    why = next((reason for stage in stages if (reason := why_stage_keeps_replica(stage, policy))), "")
    staying = next((_name(stage.situation) for stage in stages if stage.answer.replicas > 0), "")
    if staying and not why:
        why = f"{staying} is not at zero yet"
    if not why:
        return stages
    return [msgspec.structs.replace(stage, answer=stage.answer.floored_at("KeepOne", _ONE, why)) for stage in stages]


def _targets(stages: Sequence[StageReplicaNeed], sharing: AllocatedReplicas) -> tuple[TargetDecision, ...]:
    found = []
    for stage in stages:
        steps, targets = stage.answer.steps, stage.situation.targets
        why = steps[-1].reason if steps else max(stage.recommendations, key=_asked).reason
        for target in targets:
            reason = sharing.reasons.get(target.name, "") if len(targets) > 1 else ""
            limit = sharing.limits.get(_name(stage.situation))
            reason = limit.reason if limit is not None and not reason else reason
            found.append(_target(target, sharing.replicas[target.name], reason or why))
    return tuple(found)


def _stage_decision(stage: StageReplicaNeed, sharing: AllocatedReplicas) -> StageDecision:
    name = _name(stage.situation)
    limit = sharing.limits.get(name)
    found = stage_decision(stage, sharing.steps, () if limit is None else (limit,))
    return msgspec.structs.replace(found, is_proven=False) if name in sharing.unproven else found


def _asked(recommendation: Recommendation) -> float:
    return recommendation.replicas if recommendation.replicas is not None else -1.0


def _target(target: TargetSituation, desired: int | None, reason: str) -> TargetDecision:
    return TargetDecision(
        name=target.name,
        current=target.current,
        desired=desired,
        ready=len(target.engines_in_state(EngineState.READY)),
        starting=len(target.engines_in_state(EngineState.STARTING)),
        reason=reason,
    )


def _as_it_is(target: TargetSituation) -> TargetDecision:
    return _target(target, target.current, "the policy is paused")


class AllocatedReplicas(msgspec.Struct, frozen=True):
    """``replicas`` and ``reasons``: by target. ``steps``: changes by ratios. ``limits``: limits that keep a stage below
    its need, by stage. ``lacks``: replicas missing for want of accelerators, by target. ``unproven``: stages for which
    a slightly cheaper set of targets may exist. ``shared``: for the next call.
    """

    replicas: Mapping[str, int | None]
    reasons: Mapping[str, str]
    steps: tuple[AppliedRule, ...]
    limits: Mapping[str, AppliedRule]
    lacks: Mapping[str, int]
    unproven: frozenset[str]
    shared: CachedAllocation | None


def share_capacity(
    stages: Sequence[StageReplicaNeed],
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBindingSpec,
    free: Mapping[str, int] | None,
    before: CachedAllocation | None,
) -> AllocatedReplicas:
    """``free``: free accelerators of nodes, by pool. ``before``: ``shared`` of the last result."""
    now_s = stages[0].situation.now_s
    fixed = {
        target.name: why
        for stage in stages
        for target in stage.situation.targets
        if (why := _why_fixed(target, policy, now_s))
    }
    needs: dict[str, float] = {}
    variants: dict[str, tuple[Variant, ...]] = {}
    for stage in stages:
        targets = [one for one in stage.situation.targets if one.name not in fixed]
        if targets:
            name = targets[0].spec.stage
            held = sum((one.current or 0) * one.capacity for one in stage.situation.targets if one.name in fixed)
            variants[name] = tuple(_variant(one, stage, policy) for one in targets)
            needs[name] = _need(max(0.0, stage.answer.replicas - held), stage)
            if stage.answer.replicas <= stage.situation.current_replicas + _EPSILON:
                # rounding up must not exceed the current replicas, or each decision would add one
                there = [(one.current or 0) * each.capacity for one, each in zip(targets, variants[name], strict=True)]
                needs[name] = min(needs[name], sum(there))
    rules = allocation_rules(binding, free)
    shared = before
    if before is None or (before.needs, before.variants, before.rules) != (needs, variants, rules):
        found = _without_moving_about(needs, variants, rules) if needs else {}
        shared = CachedAllocation(needs, variants, rules, found) if needs else None
    return _with_ratios(stages, fixed, shared if needs else None, binding)


def _without_moving_about(
    needs: Mapping[str, float], variants: Mapping[str, tuple[Variant, ...]], rules: AllocationRules
) -> dict[str, Allocation]:
    """The allocation, with the running replicas kept where they are enough: replicas of one target replace another's
    only if that saves a tenth of the cost. Needs and learned capacities vary by less than that between reconciles.
    """
    found = allocate_stages(needs, variants, rules)
    if rules.mode != "Cheapest" or not any(_is_move(found[stage], variants[stage]) for stage in found):
        return found
    there = {stage: tuple(_no_more(one) for one in several) for stage, several in variants.items()}
    fewer = allocate_stages(needs, there, rules)
    is_enough = not any(one.missing for one in fewer.values())
    return fewer if is_enough and _cost(found, variants) > _WORTH_MOVING * _cost(fewer, variants) else found


def _is_move(found: Allocation, variants: Sequence[Variant]) -> bool:
    changes = [found.replicas[one.name] - one.running for one in variants]
    return min(changes) < 0 < max(changes)


def _no_more(variant: Variant) -> Variant:
    return msgspec.structs.replace(variant, most=max(variant.least, min(variant.most, variant.running)))


def _cost(found: Mapping[str, Allocation], variants: Mapping[str, Sequence[Variant]]) -> float:
    return sum(one.cost * found[stage].replicas[one.name] for stage in found for one in variants[stage])


def _with_ratios(
    stages: Sequence[StageReplicaNeed],
    fixed: Mapping[str, str],
    shared: CachedAllocation | None,
    binding: AutoscalingPolicyBindingSpec,
) -> AllocatedReplicas:
    found = {} if shared is None else shared.found
    replicas = {name: count for allocation in found.values() for name, count in allocation.replicas.items()}
    reasons = {
        name: reason if allocation.is_proven else f"{reason}; {UNPROVEN}"
        for allocation in found.values()
        for name, reason in allocation.reasons.items()
    }
    targets = [target for stage in stages for target in stage.situation.targets]
    there = {one.name: one.current or 0 if one.name in fixed else replicas[one.name] for one in targets}
    most = {one.name: there[one.name] if one.name in fixed else one.spec.max_replicas for one in targets}
    repaired, steps = enforce_ratios(there, binding.ratios, most)
    by_name = {one.name: one for one in targets}
    return AllocatedReplicas(
        replicas={name: by_name[name].current if name in fixed else count for name, count in repaired.items()},
        reasons={**reasons, **fixed},
        steps=tuple(steps),
        limits={} if shared is None else {name: one for name in found if (one := _limit(name, shared)) is not None},
        lacks={} if shared is None else _lacks(shared),
        unproven=frozenset(stage for stage, one in found.items() if not one.is_proven),
        shared=shared,
    )


def _limit(stage: str, shared: CachedAllocation) -> AppliedRule | None:
    """What budgets and nodes do not allow."""
    need, found = shared.needs[stage], shared.found[stage]
    if found.missing <= _EPSILON:
        return None
    return AppliedRule(
        "Budget", need, need - found.missing, "; ".join(found.problems) or "limits leave no room for more"
    )


def _lacks(shared: CachedAllocation) -> dict[str, int]:
    """Of each stage that is short: what the target would take that does the most for its cost among those without
    room.
    """
    lacks: dict[str, int] = {}
    for stage, found in shared.found.items():
        short = [
            one
            for one in shared.variants[stage]
            if one.headroom is not None and not one.blocked and found.replicas[one.name] < one.most
        ]
        if found.missing > _EPSILON and short:
            best = min(short, key=lambda one: (one.cost / one.capacity, one.name))
            wanted = math.ceil(found.missing / best.capacity - _EPSILON)
            lacks[best.name] = min(wanted, best.most - found.replicas[best.name])
    return lacks


def _need(units: float, stage: StageReplicaNeed) -> float:
    """Whole replicas as they are; otherwise in steps."""
    if len(stage.situation.targets) == 1:
        return units
    return math.ceil(units / _NEED_STEP - 1e-6) * _NEED_STEP


def _variant(target: TargetSituation, stage: StageReplicaNeed, policy: AutoscalingPolicySpec) -> Variant:
    """The target as input of the allocation. In doubt, and if scale-in is not allowed, it keeps its replicas.

    An upper bound below the current replicas holds in doubt as well: it does not depend on data.
    """
    variant = variant_from_target(target)
    least = variant.least
    is_held = bool(stage.doubt) and stage.answer.replicas >= stage.situation.current_replicas
    if is_held or policy.mode == "ScaleUpOnly":
        least = max(least, min(target.current or 0, variant.most))
    return msgspec.structs.replace(variant, least=least, capacity=round(variant.capacity, _CAPACITY_DIGITS) or 0.01)


def _why_fixed(target: TargetSituation, policy: AutoscalingPolicySpec, now_s: float) -> str:
    if target.current is None:
        return "the object is not there"
    held_s = target.set_at_s + policy.manual_hold - now_s
    if target.set_by and held_s > 0:
        return f"{target.set_by} set the replicas; they stay so for another {held_s:.0f} s"
    return ""
