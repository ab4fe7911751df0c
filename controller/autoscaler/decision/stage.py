# SPDX-License-Identifier: Apache-2.0
"""How many replicas one stage of a binding needs, from its situation and what is remembered of it.

``prepared`` adds to the situation what is remembered: smoothed speeds, relative capacities, measured start times.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.autoscaling import Behavior, ScalingRule
from controller.autoscaler.decision.allocation.blocked import Blockage, judge
from controller.autoscaler.decision.behavior import (
    PanicState,
    Past,
    Recommended,
    Scaled,
    behaved,
    panicking,
    remembered,
)
from controller.autoscaler.decision.decision import Answer, Recommendation, StageDecision, Strategy
from controller.autoscaler.decision.load import PerRequest
from controller.autoscaler.decision.memory import MOST_TURNS, TURNS_COUNT_S, StageMemory
from controller.autoscaler.decision.rules import (
    carried_by_the_rest,
    combined,
    followed,
    from_zero,
    held_by_age,
    not_for_scale_in,
    to_zero,
    too_old,
    why_not_zero,
    with_fresh_metrics,
)
from controller.autoscaler.decision.situation import EngineState, Situation
from controller.autoscaler.decision.speeds import StartTimes, expected_start_s, seconds_of_replica, smoothed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.behavior import Bounds
    from controller.autoscaler.decision.decision import Step
    from controller.autoscaler.decision.situation import Speed, Target

SCALE_IN_WINDOW_S: Final = 60
_ANY_GROWTH: Final = (ScalingRule("Pods", 1_000_000, 1),)
_HPA_WINDOW_S: Final = 300
# After a start, even if the policy's window is shorter: rates need two points, gateways and engines must have been
# heard.
LEAST_KNOWN_S: Final = 60
# The share of needed replicas that is held back, one at least, after replicas came and went.
_HELD_BACK: Final = 0.1
# Sixteen targets of a million replicas, each a thousand times the first.
_MOST_REPLICAS: Final = 1.6e10
# Of rounding.
_EPSILON: Final = 1e-6


class StageAnswer(msgspec.Struct, frozen=True):
    """``answer``: replicas of the first target. ``situation``: with what is remembered of speeds and starts. ``doubt``:
    why no target may have fewer than now; empty if it may.
    """

    situation: Situation
    recommendations: tuple[Recommendation, ...]
    combined: Answer | None
    answer: Answer
    memory: StageMemory
    doubt: str = ""


def decided(
    situation: Situation,
    memory: StageMemory,
    policy: AutoscalingPolicySpec,
    bounds: Bounds,
    strategies: Sequence[Strategy[Any]],
) -> StageAnswer:
    """Strategies, their combination, then each rule in turn. ``situation`` and ``memory``: as ``prepared``."""
    recommendations = []
    kept: dict[str, object] = {}
    for strategy in strategies:
        recommendation, strategy_memory = _asked(strategy, situation, memory)
        recommendations.append(recommendation)
        if strategy_memory is not None:
            kept[strategy.name] = strategy_memory
    first = combined(recommendations, situation.current)
    answer = first if first is not None else Answer(situation.current)
    answer = carried_by_the_rest(answer, situation)
    answer = held_by_age(answer, situation, policy)
    memory = _remembered(memory, first, situation, policy)
    answer, panic = _steadied(answer, memory, situation, policy)
    answer = _after_restart(answer, memory, situation, policy)
    doubt = too_old(situation, policy) or not_for_scale_in(situation, policy) or _just_begun(memory, situation, policy)
    if not doubt:
        answer = to_zero(answer, policy, situation, memory, recommendations)
    answer = from_zero(answer, policy, situation)
    answer = _bounded(answer, situation, bounds)
    memory = msgspec.structs.replace(memory, strategies=kept, panic=panic)
    return StageAnswer(situation, tuple(recommendations), first, answer, memory, doubt)


def _asked(strategy: Strategy[Any], situation: Situation, memory: StageMemory) -> tuple[Recommendation, object]:
    """What a strategy asks for. Numbers of policies, engines and gateways may be such that nothing follows from them:
    then it knows nothing.
    """
    try:
        found, kept = strategy.recommend(situation, memory.strategies.get(strategy.name))
    except (ArithmeticError, ValueError) as error:
        return Recommendation(strategy.name, None, f"nothing follows from these numbers: {error}"), None
    if found.replicas is None or 0 <= found.replicas <= _MOST_REPLICAS:
        return found, kept
    if found.replicas > 0:
        return msgspec.structs.replace(found, replicas=_MOST_REPLICAS), kept
    return msgspec.structs.replace(found, replicas=None, reason="nothing follows from these numbers"), kept


def told(stage: StageAnswer, ratios: Sequence[Step], limits: Sequence[Step] = ()) -> StageDecision:
    """The record. ``ratios``: what the ratios between targets changed. ``limits``: what budgets and nodes did not
    allow.
    """
    situation = stage.situation
    names = {f"{target.name}:" for target in situation.targets}
    return StageDecision(
        stage=situation.targets[0].spec.stage,
        recommendations=stage.recommendations,
        combined=stage.combined.replicas if stage.combined is not None else None,
        steps=(*stage.answer.steps, *limits, *(one for one in ratios if one.reason.split(" ", 1)[0] in names)),
        waiting=situation.waiting,
        freshness=situation.freshness,
    )


def keeps_one(stage: StageAnswer, policy: AutoscalingPolicySpec) -> str:
    """Why the stage must not go to zero; empty if it may."""
    return why_not_zero(policy, stage.situation, stage.memory)


def behavior_of(policy: AutoscalingPolicySpec, turns: int = 0) -> Behavior:
    """The policy's, with what it leaves out: HPA's values if metrics alone decide, else ours. ``turns``: how often
    replicas grew after a small scale-in lately.

    HPA waits 300 s before it scales in and limits each step, as its metrics know nothing of what comes or is starting.
    Strategies that know both need less of it: a shorter window, and no limit of growth. Each turn doubles the window
    of the last of them, so load at an edge does not make replicas come and go. Load that really falls is followed.
    """
    written = policy.behavior
    if all(one.type.by_metrics for one in policy.strategies):
        return written
    up, down = written.scale_up, written.scale_down
    if not up.policies:
        up = msgspec.structs.replace(up, policies=_ANY_GROWTH)
    if down.stabilization_window_seconds is None:
        down = msgspec.structs.replace(down, stabilization_window_seconds=SCALE_IN_WINDOW_S * 2**turns)
    return Behavior(up, down)


def _remembered(
    memory: StageMemory, asked: Answer | None, situation: Situation, policy: AutoscalingPolicySpec
) -> StageMemory:
    """With what the strategies asked for, before any rule changed it. Without an answer, a gap begins."""
    now_s = situation.now_s
    if asked is None or too_old(situation, policy):
        return msgspec.structs.replace(memory, began_at_s=now_s)
    new = Recommended(now_s, _whole(asked.replicas, situation))
    return msgspec.structs.replace(memory, past=remembered(behavior_of(policy, MOST_TURNS), memory.past, new))


def _steadied(
    answer: Answer, memory: StageMemory, situation: Situation, policy: AutoscalingPolicySpec
) -> tuple[Answer, PanicState | None]:
    """What panic asks for, else what the behaviour block allows."""
    now_s, asked = situation.now_s, _whole(answer.replicas, situation)
    panic = None
    if policy.panic is not None and not too_old(situation, policy):
        ready = situation.units(EngineState.READY)
        panic = panicking(policy.panic, memory.panic, recommended=asked, ready=ready, now_s=now_s)
    if panic is not None:
        return Answer(asked, answer.steps).at_least(
            "Panic", panic.most, "load rises steeply, so replicas only grow"
        ), panic
    turns = len(memory.turned_at_s)
    allowed, steps = _behaved(policy, memory, situation, asked, turns=turns)
    if turns:
        # noise is no more than that, and what is beyond goes as soon as ever
        soon, why = _behaved(policy, memory, situation, asked, turns=0)
        if soon + _held_back(soon) < allowed:
            return Answer(soon + _held_back(soon), (*answer.steps, *why)), None
    return Answer(allowed, (*answer.steps, *steps)), None


def _behaved(
    policy: AutoscalingPolicySpec, memory: StageMemory, situation: Situation, asked: float, *, turns: int
) -> tuple[float, tuple[Step, ...]]:
    return behaved(
        behavior_of(policy, turns),
        memory.past,
        recommended=asked,
        current=situation.current,
        now_s=situation.now_s,
        whole=_is_whole(situation),
    )


def _held_back(replicas: float) -> float:
    """Of those that are not needed, so many stay for the longer window."""
    return float(max(1, math.floor(_HELD_BACK * replicas)))


def _just_begun(memory: StageMemory, situation: Situation, policy: AutoscalingPolicySpec) -> str:
    """Why too little of the past is known to scale in; empty if enough is: a whole window, and at least a minute."""
    window_s = behavior_of(policy).scale_down.stabilization_window_seconds
    window_s = max(LEAST_KNOWN_S, _HPA_WINDOW_S if window_s is None else window_s)
    seen_s = situation.now_s - memory.began_at_s
    return "" if seen_s >= window_s else f"what is needed is known for {seen_s:.0f} s, not yet {window_s} s"


def _after_restart(answer: Answer, memory: StageMemory, situation: Situation, policy: AutoscalingPolicySpec) -> Answer:
    """Nothing is scaled in right after a start."""
    why = _just_begun(memory, situation, policy)
    return answer.at_least("Restarted", situation.current, why) if why else answer


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


# Where the mix of requests is not known yet, speeds are compared by this one.
_TYPICAL_REQUEST: Final = PerRequest(prefill_work=1000.0, prompt_tokens=1000.0, output_tokens=200.0)
# The mix of requests in which targets are compared.
# Of a replica, in those of the first target.
_MOST_CAPACITY: Final = 1000.0
_MIX_WINDOW_S: Final = 120.0
# Replicas that grow again after this share of them had gone, or one, follow noise; after more, they follow the load.
_SMALL_SWING: Final = 0.2
_NO_STARTS: Final = StartTimes()
_NEVER_BLOCKED: Final = Blockage()
# So many periods without a decision are a gap.
_GAP_PERIODS: Final = 6


def prepared(
    situation: Situation, before: StageMemory | None, policy: AutoscalingPolicySpec
) -> tuple[Situation, StageMemory]:
    """The situation with smoothed speeds, relative capacities and measured start times, and the memory that knows
    them.
    """
    now_s = situation.now_s
    memory = before or StageMemory(began_at_s=now_s, decided_at_s=now_s, active_at_s=now_s)
    elapsed_s = max(0.0, now_s - memory.decided_at_s)
    began_at_s = memory.began_at_s if elapsed_s <= _GAP_PERIODS * policy.period else now_s
    speeds: dict[str, Speed] = {}
    starts: dict[str, StartTimes] = {}
    for target in situation.targets:
        speed = smoothed(memory.speeds.get(target.name), target.speed, elapsed_s)
        if speed is not None:
            speeds[target.name] = speed
        starts[target.name] = memory.starts.get(target.name, _NO_STARTS).seen(target)
    capacities = _capacities(situation, speeds)
    targets = tuple(
        _known(one, capacities[one.name], speeds.get(one.name), starts[one.name]) for one in situation.targets
    )
    blockages = {one.name: judge(one, memory.blockages.get(one.name, _NEVER_BLOCKED), now_s) for one in targets}
    targets = tuple(
        one if one.blocked or not (why := blockages[one.name].at(now_s)) else msgspec.structs.replace(one, blocked=why)
        for one in targets
    )
    situation = with_fresh_metrics(msgspec.structs.replace(situation, targets=targets), policy.staleness)
    memory = msgspec.structs.replace(
        _noticed(memory, situation),
        began_at_s=began_at_s,
        decided_at_s=now_s,
        speeds=speeds,
        starts=starts,
        blockages=blockages,
    )
    return situation, followed(memory, situation)


def _noticed(memory: StageMemory, situation: Situation) -> StageMemory:
    """With the change of replicas since the last look, whoever made it."""
    now_s, current = situation.now_s, situation.current
    turned = tuple(at_s for at_s in memory.turned_at_s if now_s - at_s < TURNS_COUNT_S)
    if memory.current is None or memory.current == current:
        return msgspec.structs.replace(memory, current=current, turned_at_s=turned)
    fell_from = memory.fell_from
    if current < memory.current:
        fell_from = memory.current if fell_from is None else fell_from
    elif fell_from is not None:
        if fell_from - memory.current <= max(1.0, _SMALL_SWING * fell_from):
            turned = (*turned, now_s)[-MOST_TURNS:]
        fell_from = None
    past = Past(memory.past.recommendations, (*memory.past.changes, Scaled(now_s, current - memory.current)))
    woken_at_s = now_s if memory.current == 0 else memory.woken_at_s
    return msgspec.structs.replace(
        memory, current=current, past=past, woken_at_s=woken_at_s, fell_from=fell_from, turned_at_s=turned
    )


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
    mix = _mix(situation)
    stage = targets[0].spec.stage
    of_first_s = seconds_of_replica(mix, first, stage, situation.objective)
    return {
        target.name: _ratio(of_first_s, seconds_of_replica(mix, speeds[target.name], stage, situation.objective))
        if target.name in speeds
        else target.capacity
        for target in targets
    }


def _ratio(of_first_s: float, of_this_s: float) -> float:
    """What is beyond all bounds was declared or learned wrongly."""
    if not (of_first_s > 0 and of_this_s > 0):
        return 1.0
    return min(_MOST_CAPACITY, max(1 / _MOST_CAPACITY, of_first_s / of_this_s))


def _mix(situation: Situation) -> PerRequest:
    """The mean request of the last minutes."""
    rates = situation.traffic.rates(_MIX_WINDOW_S, situation.now_s)
    if rates is None or rates.arrivals <= 0 or rates.finished <= 0:
        return _TYPICAL_REQUEST
    return PerRequest(
        prefill_work=rates.prefill_work / rates.arrivals,
        prompt_tokens=rates.prompt_tokens / rates.finished,
        output_tokens=rates.output_tokens / rates.finished,
    )
