# SPDX-License-Identifier: Apache-2.0
"""The whole way of a scaling decision: from situations and memory to what each target should have, with reasons.

laws -> combined -> carried by the rest? -> fresh? -> behaviour -> restarted? -> from zero -> schedules and bounds
     -> one is kept? -> shared out among targets -> ratios -> somebody else's hand -> mode
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.decision import Decision, TargetDecision
from controller.autoscaler.decision.memory import Memory, StageMemory
from controller.autoscaler.decision.preparing import prepared
from controller.autoscaler.decision.resting import rest_of, rested, stands
from controller.autoscaler.decision.schedule import Bounds, bounds_at
from controller.autoscaler.decision.sharing import shared_out
from controller.autoscaler.decision.situation import EngineState, Situation, Target
from controller.autoscaler.decision.stage import StageAnswer, decided, keeps_one, told
from controller.autoscaler.decision.strategies.registry import laws_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.autoscaler.decision.decision import StageDecision
    from controller.autoscaler.decision.law import Recommendation
    from controller.autoscaler.decision.sharing import Sharing

_ONE: Final = 1.0


def decide(
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBinding,
    situations: Sequence[Situation],
    memory: Memory | None,
    now_s: float,
    *,
    free: Mapping[str, int] | None = None,
) -> tuple[Decision, Memory]:
    """``situations``: one a stage. ``memory``: what this returned last; None at first, and after a restart. ``free``:
    accelerators that nodes have left, by pool, as far as that is known.

    ``now_s``: since 1970, as schedules need it. Written down is what each target should have; what is done with it
    depends on the mode, and is the caller's. While nothing but time has changed, the last decision may be returned
    again, as the same object: see ``resting``.
    """
    before = memory or Memory()
    if policy.mode == "Paused":
        targets = tuple(_as_it_is(target) for one in situations for target in one.targets)
        paused = Memory(schedules=before.schedules, bounds=before.bounds)
        return _decision(policy, binding, now_s, targets), paused
    if before.rest is not None and stands(before.rest, policy, binding, situations, free=free):
        return before.rest.decision, rested(before, now_s)
    bounds = _bounds(policy, before, now_s)
    stages = [_stage(one, before.stages.get(_name(one)), policy, bounds) for one in situations]
    stages = _not_below_one(stages, policy, bounds)
    sharing = shared_out(stages, policy, binding.spec, free, before.shared)
    decision = msgspec.structs.replace(
        _decision(policy, binding, now_s, _targets(stages, sharing)),
        stages=tuple(_told(stage, sharing) for stage in stages),
        lacks=sharing.lacks,
        inputs={f"start_s_{target.name}": target.start_s for stage in stages for target in stage.situation.targets},
    )
    kept = {_name(stage.situation): stage.memory for stage in stages}
    after = Memory(kept, policy.schedules, bounds, sharing.shared)
    rest = rest_of(policy, binding, situations, after, decision, free=free)
    return decision, after if rest is None else msgspec.structs.replace(after, rest=rest)


def _decision(
    policy: AutoscalingPolicySpec, binding: AutoscalingPolicyBinding, now_s: float, targets: tuple[TargetDecision, ...]
) -> Decision:
    return Decision(
        binding=binding.metadata.key,
        at_s=now_s,
        mode=policy.mode,
        targets=targets,
        look_again_at_s=now_s + policy.period,
    )


def _name(situation: Situation) -> str:
    return situation.targets[0].spec.stage


def _bounds(policy: AutoscalingPolicySpec, before: Memory, now_s: float) -> Bounds:
    """Cron lines are slow to read, so bounds are kept until they end."""
    if policy.schedules == before.schedules and now_s < before.bounds.until_s:
        return before.bounds
    return bounds_at(policy.schedules, now_s)


def _stage(
    situation: Situation, before: StageMemory | None, policy: AutoscalingPolicySpec, bounds: Bounds
) -> StageAnswer:
    known, memory = prepared(situation, before, policy)
    return decided(known, memory, policy, bounds, laws_of(policy))


def _not_below_one(stages: list[StageAnswer], policy: AutoscalingPolicySpec, bounds: Bounds) -> list[StageAnswer]:
    """Stages go to zero together, or not at all."""
    is_at_zero = all(stage.situation.current == 0 for stage in stages)
    if bounds.most == 0 or (is_at_zero and policy.scale_to_zero is not None):
        return stages
    why = next((reason for stage in stages if (reason := keeps_one(stage, policy))), "")
    if not why:
        return stages
    return [msgspec.structs.replace(stage, answer=stage.answer.at_least("KeepOne", _ONE, why)) for stage in stages]


def _targets(stages: Sequence[StageAnswer], sharing: Sharing) -> tuple[TargetDecision, ...]:
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


def _told(stage: StageAnswer, sharing: Sharing) -> StageDecision:
    name = _name(stage.situation)
    limit = sharing.limits.get(name)
    found = told(stage, sharing.steps, () if limit is None else (limit,))
    return msgspec.structs.replace(found, is_proven=False) if name in sharing.unproven else found


def _asked(recommendation: Recommendation) -> float:
    return recommendation.replicas if recommendation.replicas is not None else -1.0


def _target(target: Target, desired: int | None, reason: str) -> TargetDecision:
    return TargetDecision(
        name=target.name,
        current=target.current,
        desired=desired,
        ready=len(target.having(EngineState.READY)),
        starting=len(target.having(EngineState.STARTING)),
        reason=reason,
    )


def _as_it_is(target: Target) -> TargetDecision:
    return _target(target, target.current, "the policy is paused")
