# SPDX-License-Identifier: Apache-2.0
"""The whole way of a scaling decision: from situations and memory to what each target should have, with reasons.

laws -> combined -> carried by the rest? -> fresh? -> behaviour -> restarted? -> from zero -> schedules and bounds
     -> one is kept? -> shared out among targets -> ratios -> somebody else's hand -> mode
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscale.decision import Decision, TargetDecision
from controller.autoscale.interim_allocation import shared_out
from controller.autoscale.laws.registry import laws_of
from controller.autoscale.memory import Memory, StageMemory
from controller.autoscale.preparing import prepared
from controller.autoscale.schedule import Bounds, bounds_at
from controller.autoscale.situation import EngineState, Situation, Target
from controller.autoscale.stage import StageAnswer, decided, keeps_one, told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscale.answer import Answer
    from controller.autoscale.law import Recommendation
    from controller.resources.autoscaling import AutoscalingPolicySpec
    from controller.resources.autoscaling_binding import AutoscalingPolicyBinding

_ONE: Final = 1.0


def decide(
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBinding,
    situations: Sequence[Situation],
    memory: Memory | None,
    now_s: float,
) -> tuple[Decision, Memory]:
    """``situations``: one a stage. ``memory``: what this returned last; None at first, and after a restart.

    ``now_s``: since 1970, as schedules need it. Written down is what each target should have; what is done with it
    depends on the mode, and is the caller's.
    """
    before = memory or Memory()
    if policy.mode == "Paused":
        targets = tuple(_as_it_is(target, "the policy is paused") for one in situations for target in one.targets)
        return _decision(policy, binding, now_s, targets), Memory(schedules=before.schedules, bounds=before.bounds)
    bounds = _bounds(policy, before, now_s)
    stages = [_stage(one, before.stages.get(_name(one)), policy, bounds) for one in situations]
    answers = _not_below_one(stages, policy, bounds)
    targets = tuple(
        one for stage, answer in zip(stages, answers, strict=True) for one in _targets(stage, answer, policy)
    )
    decision = msgspec.structs.replace(
        _decision(policy, binding, now_s, targets),
        stages=tuple(told(stage, answer) for stage, answer in zip(stages, answers, strict=True)),
        inputs={f"start_s_{target.name}": target.start_s for stage in stages for target in stage.situation.targets},
    )
    kept = {_name(stage.situation): stage.memory for stage in stages}
    return decision, Memory(kept, policy.schedules, bounds)


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


def _not_below_one(stages: Sequence[StageAnswer], policy: AutoscalingPolicySpec, bounds: Bounds) -> list[Answer]:
    """Stages go to zero together, or not at all."""
    is_at_zero = all(stage.situation.current == 0 for stage in stages)
    if bounds.most == 0 or (is_at_zero and policy.scale_to_zero is not None):
        return [stage.answer for stage in stages]
    why = next((reason for stage in stages if (reason := keeps_one(stage, policy))), "")
    return [stage.answer.at_least("KeepOne", _ONE, why) if why else stage.answer for stage in stages]


def _targets(stage: StageAnswer, answer: Answer, policy: AutoscalingPolicySpec) -> list[TargetDecision]:
    """What each target of a stage should have. Targets that are held count with what they have."""
    targets, now_s = stage.situation.targets, stage.situation.now_s
    fixed = {target.name: why for target in targets if (why := _why_fixed(target, policy, now_s))}
    free = [target for target in targets if target.name not in fixed]
    left = answer.replicas - sum((one.current or 0) * one.capacity for one in targets if one.name in fixed)
    replicas = shared_out(max(0.0, left), free) if free else {}
    why = answer.steps[-1].reason if answer.steps else max(stage.recommendations, key=_asked).reason
    return [
        _as_it_is(target, fixed[target.name])
        if target.name in fixed
        else _target(target, _by_mode(target, replicas[target.name], policy), why)
        for target in targets
    ]


def _asked(recommendation: Recommendation) -> float:
    return recommendation.replicas if recommendation.replicas is not None else -1.0


def _why_fixed(target: Target, policy: AutoscalingPolicySpec, now_s: float) -> str:
    if target.current is None:
        return "the object is not there"
    held_s = target.set_at_s + policy.manual_hold - now_s
    if target.set_by and held_s > 0:
        return f"{target.set_by} set the replicas; they stay so for another {held_s:.0f} s"
    return ""


def _by_mode(target: Target, replicas: int, policy: AutoscalingPolicySpec) -> int:
    return max(replicas, target.current or 0) if policy.mode == "ScaleUpOnly" else replicas


def _target(target: Target, desired: int, reason: str) -> TargetDecision:
    return TargetDecision(
        name=target.name,
        current=target.current,
        desired=desired,
        ready=len(target.having(EngineState.READY)),
        starting=len(target.having(EngineState.STARTING)),
        reason=reason,
    )


def _as_it_is(target: Target, reason: str) -> TargetDecision:
    """Nothing is asked for."""
    made = _target(target, 0, reason)
    return msgspec.structs.replace(made, desired=target.current)
