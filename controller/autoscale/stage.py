# SPDX-License-Identifier: Apache-2.0
"""How many replicas one stage of a binding needs, from its situation and what is remembered of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.autoscale.answer import Answer
from controller.autoscale.combine import carried_by_the_rest, combined
from controller.autoscale.decision import StageDecision
from controller.autoscale.freshness import held_by_age, with_fresh_metrics
from controller.autoscale.interim_behavior import Past, Recommended, Scaled, behaved, remembered
from controller.autoscale.law import Law, Recommendation
from controller.autoscale.load import PerRequest, load_of
from controller.autoscale.memory import StageMemory
from controller.autoscale.situation import Situation, Speed, Target
from controller.autoscale.speeds import seconds_of_replica, smoothed
from controller.autoscale.start_times import StartTimes, expected_start_s
from controller.autoscale.zero import followed, from_zero, why_not_zero

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.autoscale.schedule import Bounds
    from controller.resources.autoscaling import AutoscalingPolicySpec, Behavior

# What a behaviour block leaves out. HPA waits 300 s before it scales in, as its metrics know nothing of what comes. Our
# laws look ahead, and ask for room before they scale in; this is for what they cannot know.
SCALE_IN_WINDOW_S: Final = 120
# Of rounding.
_EPSILON: Final = 1e-6
# Where the mix of requests is not known yet, speeds are compared by this one.
_TYPICAL_REQUEST: Final = PerRequest(prefill_work=1000.0, prompt_tokens=1000.0, output_tokens=200.0)
# The mix of requests in which targets are compared.
_MIX_WINDOW_S: Final = 120.0


class StageAnswer(msgspec.Struct, frozen=True):
    """``answer``: replicas of the first target. ``situation``: with what is remembered of speeds and starts."""

    situation: Situation
    recommendations: tuple[Recommendation, ...]
    combined: Answer
    answer: Answer
    memory: StageMemory


def prepared(
    situation: Situation, before: StageMemory | None, policy: AutoscalingPolicySpec
) -> tuple[Situation, StageMemory]:
    """The situation with smoothed speeds, relative capacities and measured start times, and the memory that knows them."""
    now_s = situation.now_s
    memory = before or StageMemory(began_at_s=now_s, decided_at_s=now_s, active_at_s=now_s)
    elapsed_s = max(0.0, now_s - memory.decided_at_s)
    speeds: dict[str, Speed] = {}
    starts: dict[str, StartTimes] = {}
    for target in situation.targets:
        speed = smoothed(memory.speeds.get(target.name), target.speed, elapsed_s)
        if speed is not None:
            speeds[target.name] = speed
        starts[target.name] = memory.starts.get(target.name, StartTimes()).seen(target)
    capacities = _capacities(situation, speeds)
    targets = tuple(
        _known(one, capacities[one.name], speeds.get(one.name), starts[one.name]) for one in situation.targets
    )
    situation = with_fresh_metrics(msgspec.structs.replace(situation, targets=targets), policy.staleness)
    current = situation.current
    past = memory.past
    if memory.current is not None and memory.current != current:
        past = Past(past.recommendations, (*past.changes, Scaled(now_s, current - memory.current)))
    woken = memory.woken_at_s
    if current > 0 and memory.current == 0:
        woken = now_s
    memory = msgspec.structs.replace(
        memory, decided_at_s=now_s, speeds=speeds, starts=starts, current=current, past=past, woken_at_s=woken
    )
    return situation, followed(memory, situation)


def decided(
    situation: Situation, memory: StageMemory, policy: AutoscalingPolicySpec, bounds: Bounds, laws: Sequence[Law[Any]]
) -> StageAnswer:
    """Laws, their combination, then each rule in turn. ``situation`` and ``memory``: as ``prepared``."""
    recommendations = []
    kept: dict[str, object] = {}
    for law in laws:
        recommendation, law_memory = law.recommend(situation, memory.laws.get(law.name))
        recommendations.append(recommendation)
        if law_memory is not None:
            kept[law.name] = law_memory
    first = combined(recommendations, situation.current)
    answer = carried_by_the_rest(first, situation)
    answer = held_by_age(answer, situation, policy)
    answer, past = _behaved(answer, memory.past, situation, behavior_of(policy))
    answer = _after_restart(answer, memory, situation, policy)
    answer = from_zero(answer, policy, situation)
    answer = _bounded(answer, situation, bounds)
    memory = msgspec.structs.replace(memory, laws=kept, past=past)
    return StageAnswer(situation, tuple(recommendations), first, answer, memory)


def told(stage: StageAnswer, answer: Answer) -> StageDecision:
    """The record. ``answer``: after the rules that look at all stages."""
    situation = stage.situation
    return StageDecision(
        stage=situation.targets[0].spec.stage,
        recommendations=stage.recommendations,
        combined=stage.combined.replicas,
        steps=answer.steps,
        waiting=situation.waiting,
        freshness=situation.freshness,
    )


def keeps_one(stage: StageAnswer, policy: AutoscalingPolicySpec) -> str:
    """Why the stage must not go to zero; empty if it may."""
    return why_not_zero(policy, stage.situation, stage.memory)


def behavior_of(policy: AutoscalingPolicySpec) -> Behavior:
    """The policy's, with our default for the window before a scale-in."""
    down = policy.behavior.scale_down
    if down.stabilization_window_seconds is not None:
        return policy.behavior
    down = msgspec.structs.replace(down, stabilization_window_seconds=SCALE_IN_WINDOW_S)
    return msgspec.structs.replace(policy.behavior, scale_down=down)


def _known(target: Target, relative: float, speed: Speed | None, starts: StartTimes) -> Target:
    return msgspec.structs.replace(
        target, speed=speed, capacity=relative, start_s=expected_start_s(starts, target.start_s)
    )


def _capacities(situation: Situation, speeds: Mapping[str, Speed]) -> dict[str, float]:
    """Of each target, in replicas of the first: by the time that the present mix of requests takes.

    Targets whose speed is unknown keep what they came with.
    """
    targets = situation.targets
    given = {target.name: target.capacity for target in targets}
    first = speeds.get(targets[0].name)
    if len(targets) == 1 or first is None:
        return given | {targets[0].name: 1.0}
    load = load_of(situation.traffic, window_s=_MIX_WINDOW_S, trend_span_s=_MIX_WINDOW_S, now_s=situation.now_s)
    mix = load.per_request if load is not None and load.per_request is not None else _TYPICAL_REQUEST
    stage = targets[0].spec.stage
    of_first_s = seconds_of_replica(mix, first, stage, situation.objective)
    return {
        target.name: of_first_s / seconds_of_replica(mix, speeds[target.name], stage, situation.objective)
        if target.name in speeds
        else target.capacity
        for target in targets
    }


def _behaved(answer: Answer, past: Past, situation: Situation, behavior: Behavior) -> tuple[Answer, Past]:
    """What the behaviour block allows, and the past with what the laws asked for."""
    now_s, asked = situation.now_s, _whole(answer.replicas, situation)
    allowed, steps = behaved(
        behavior, past, recommended=asked, current=situation.current, now_s=now_s, whole=_is_whole(situation)
    )
    past = remembered(behavior, past, Recommended(now_s, asked))
    return Answer(allowed, (*answer.steps, *steps)), past


def _after_restart(answer: Answer, memory: StageMemory, situation: Situation, policy: AutoscalingPolicySpec) -> Answer:
    """Nothing is scaled in until a whole window has been seen."""
    window_s = behavior_of(policy).scale_down.stabilization_window_seconds or 0
    seen_s = situation.now_s - memory.began_at_s
    if seen_s >= window_s and memory.past.recommendations:
        return answer
    return answer.at_least(
        "Restarted", situation.current, f"decisions are known for {seen_s:.0f} s, not yet {window_s} s"
    )


def _bounded(answer: Answer, situation: Situation, bounds: Bounds) -> Answer:
    """Bounds of the schedules, then those of the targets."""
    targets = situation.targets
    if bounds.least is not None:
        answer = answer.at_least("Schedule", bounds.least, f"a schedule wants at least {bounds.least}")
    if bounds.most is not None:
        answer = answer.at_most("Schedule", bounds.most, f"a schedule allows at most {bounds.most}")
    least = sum(one.spec.min_replicas * one.capacity for one in targets)
    most = sum(one.spec.max_replicas * one.capacity for one in targets)
    answer = answer.at_most("ScalingLimited", most, f"maxReplicas allow {most:g}")
    return answer.at_least("ScalingLimited", least, f"minReplicas want {least:g}")


def _is_whole(situation: Situation) -> bool:
    """Whether every target's replica does the same work."""
    return all(target.capacity == 1.0 for target in situation.targets)


def _whole(replicas: float, situation: Situation) -> float:
    return float(math.ceil(replicas - _EPSILON)) if _is_whole(situation) else replicas
