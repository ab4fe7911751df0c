# SPDX-License-Identifier: Apache-2.0
"""How many replicas one stage of a binding needs, from its situation and memory.

``prepare_stage`` adds to the situation from the memory: smoothed speeds, relative capacities, measured start times.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.autoscaling import Behavior, ScalingRule
from controller.autoscaler.decision.allocation.target_backoff import TargetBackoff, update_backoff
from controller.autoscaler.decision.behavior import (
    PanicState,
    PastRecommendation,
    ReplicaChange,
    ScalingHistory,
    add_recommendation,
    apply_behavior,
    update_panic,
)
from controller.autoscaler.decision.decision import Recommendation, StageDecision, StageReplicas, Strategy
from controller.autoscaler.decision.offered_load import MeanRequestWork
from controller.autoscaler.decision.replica_performance import (
    StartDurations,
    expected_start_s,
    replica_seconds_per_request,
    smooth_speed,
)
from controller.autoscaler.decision.safety_rules import (
    combine_recommendations,
    drop_stale_metrics,
    limit_by_data_age,
    limit_scale_in,
    record_activity,
    scale_from_zero,
    scale_to_zero,
    why_data_too_old,
    why_no_scale_in,
    why_not_zero,
)
from controller.autoscaler.decision.saved_state import MOST_TURNS, TURNS_COUNT_S, ServingStageMemory
from controller.autoscaler.decision.situation import EngineState, Situation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.behavior import ReplicaBounds
    from controller.autoscaler.decision.decision import AppliedRule
    from controller.autoscaler.decision.situation import ReplicaSpeed, TargetSituation

SCALE_IN_WINDOW_S: Final = 60
_ANY_GROWTH: Final = (ScalingRule("Pods", 1_000_000, 1),)
_HPA_WINDOW_S: Final = 300
# After a start, even if the policy's window is shorter: rates need two points, and gateways and engines must have
# reported.
LEAST_KNOWN_S: Final = 60
# The share of needed replicas that is held back, one at least, after replicas came and went.
_HELD_BACK: Final = 0.1
# Sixteen targets of a million replicas, each a thousand times the first.
_MOST_REPLICAS: Final = 1.6e10
# Of rounding.
_EPSILON: Final = 1e-6
# The mix of requests by which speeds are compared until one is measured.
_TYPICAL_REQUEST: Final = MeanRequestWork(prefill_work=1000.0, prompt_tokens=1000.0, output_tokens=200.0)
# The mix of requests in which targets are compared.
# Of a replica, in those of the first target.
_MOST_CAPACITY: Final = 1000.0
_MIX_WINDOW_S: Final = 120.0
# Replicas that grow again after this share of them had gone, or one, follow noise; after more, they follow the load.
_SMALL_SWING: Final = 0.2
_NO_STARTS: Final = StartDurations()
_NEVER_BLOCKED: Final = TargetBackoff()
# So many periods without a decision are a gap.
_GAP_PERIODS: Final = 6


class StageReplicaNeed(msgspec.Struct, frozen=True):
    """``answer``: replicas of the first target. ``situation``: with smoothed speeds and measured start times.
    ``doubt``: why no target may scale in; empty if it may.
    """

    situation: Situation
    recommendations: tuple[Recommendation, ...]
    combined: StageReplicas | None
    answer: StageReplicas
    memory: ServingStageMemory
    doubt: str = ""


def decide_stage(
    situation: Situation,
    memory: ServingStageMemory,
    policy: AutoscalingPolicySpec,
    bounds: ReplicaBounds,
    strategies: Sequence[Strategy[Any]],
) -> StageReplicaNeed:
    """Strategies, their combination, then each rule in turn. ``situation`` and ``memory``: as ``prepare_stage``."""
    recommendations = []
    kept: dict[str, object] = {}
    for strategy in strategies:
        recommendation, strategy_memory = _asked(strategy, situation, memory)
        recommendations.append(recommendation)
        if strategy_memory is not None:
            kept[strategy.name] = strategy_memory
    first = combine_recommendations(recommendations, situation.current_replicas)
    answer = first if first is not None else StageReplicas(situation.current_replicas)
    answer = limit_scale_in(answer, situation)
    answer = limit_by_data_age(answer, situation, policy)
    memory = _remembered(memory, first, situation, policy)
    answer, panic = _steadied(answer, memory, situation, policy)
    answer = _after_restart(answer, memory, situation, policy)
    doubt = (
        why_data_too_old(situation, policy)
        or why_no_scale_in(situation, policy)
        or _just_begun(memory, situation, policy)
    )
    if not doubt:
        answer = scale_to_zero(answer, policy, situation, memory, recommendations)
    answer = scale_from_zero(answer, policy, situation)
    answer = _bounded(answer, situation, bounds)
    memory = msgspec.structs.replace(memory, strategies=kept, panic=panic)
    return StageReplicaNeed(situation, tuple(recommendations), first, answer, memory, doubt)


def _asked(strategy: Strategy[Any], situation: Situation, memory: ServingStageMemory) -> tuple[Recommendation, object]:
    """The recommendation of a strategy. Values of policies, engines and gateways may cause an arithmetic error: then
    the recommendation is unknown.
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


def stage_decision(
    stage: StageReplicaNeed, ratios: Sequence[AppliedRule], limits: Sequence[AppliedRule] = ()
) -> StageDecision:
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


def why_stage_keeps_replica(stage: StageReplicaNeed, policy: AutoscalingPolicySpec) -> str:
    """Why the stage must not go to zero; empty if it may."""
    return why_not_zero(policy, stage.situation, stage.memory)


def effective_behavior(policy: AutoscalingPolicySpec, turns: int = 0) -> Behavior:
    """The policy's, with what it leaves out: HPA's values if metrics alone decide, else ours. ``turns``: how often
    replicas grew after a small scale-in lately.

    HPA waits 300 s before it scales in and limits each step, as its metrics include neither coming load nor starting
    replicas. Strategies that include both need less of it: a shorter window, and no limit of growth. Each turn doubles
    the window for the last of the replicas, so load at a threshold does not add and remove replicas alternately. A
    lasting fall of load still scales in.
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
    memory: ServingStageMemory, recommended: StageReplicas | None, situation: Situation, policy: AutoscalingPolicySpec
) -> ServingStageMemory:
    """With the recommendation of the strategies, before any rule changed it. Without one, a gap begins."""
    now_s = situation.now_s
    if recommended is None or why_data_too_old(situation, policy):
        return msgspec.structs.replace(memory, began_at_s=now_s)
    new = PastRecommendation(now_s, _whole(recommended.replicas, situation))
    return msgspec.structs.replace(
        memory, past=add_recommendation(effective_behavior(policy, MOST_TURNS), memory.past, new)
    )


def _steadied(
    answer: StageReplicas, memory: ServingStageMemory, situation: Situation, policy: AutoscalingPolicySpec
) -> tuple[StageReplicas, PanicState | None]:
    """The replicas of a panic, else those that the behaviour block allows."""
    now_s, recommended = situation.now_s, _whole(answer.replicas, situation)
    panic = None
    if policy.panic is not None and not why_data_too_old(situation, policy):
        ready = situation.engine_units(EngineState.READY)
        panic = update_panic(policy.panic, memory.panic, recommended=recommended, ready=ready, now_s=now_s)
    if panic is not None:
        return StageReplicas(recommended, answer.steps).floored_at(
            "Panic", panic.most, "load rises steeply, so replicas only grow"
        ), panic
    turns = len(memory.turned_at_s)
    allowed, steps = _behaved(policy, memory, situation, recommended, turns=turns)
    if turns:
        # noise is no more than that, and what is beyond goes as soon as ever
        soon, why = _behaved(policy, memory, situation, recommended, turns=0)
        if soon + _held_back(soon) < allowed:
            return StageReplicas(soon + _held_back(soon), (*answer.steps, *why)), None
    return StageReplicas(allowed, (*answer.steps, *steps)), None


def _behaved(
    policy: AutoscalingPolicySpec, memory: ServingStageMemory, situation: Situation, recommended: float, *, turns: int
) -> tuple[float, tuple[AppliedRule, ...]]:
    return apply_behavior(
        effective_behavior(policy, turns),
        memory.past,
        recommended=recommended,
        current=situation.current_replicas,
        now_s=situation.now_s,
        whole=_is_whole(situation),
    )


def _held_back(replicas: float) -> float:
    """Of those that are not needed, so many stay for the longer window."""
    return float(max(1, math.floor(_HELD_BACK * replicas)))


def _just_begun(memory: ServingStageMemory, situation: Situation, policy: AutoscalingPolicySpec) -> str:
    """Why the history is too short to scale in; empty if it covers the whole window and at least a minute."""
    window_s = effective_behavior(policy).scale_down.stabilization_window_seconds
    window_s = max(LEAST_KNOWN_S, _HPA_WINDOW_S if window_s is None else window_s)
    seen_s = situation.now_s - memory.began_at_s
    return "" if seen_s >= window_s else f"what is needed is known for {seen_s:.0f} s, not yet {window_s} s"


def _after_restart(
    answer: StageReplicas, memory: ServingStageMemory, situation: Situation, policy: AutoscalingPolicySpec
) -> StageReplicas:
    """Nothing is scaled in right after a start."""
    why = _just_begun(memory, situation, policy)
    return answer.floored_at("Restarted", situation.current_replicas, why) if why else answer


def _bounded(answer: StageReplicas, situation: Situation, bounds: ReplicaBounds) -> StageReplicas:
    """Bounds of the schedules, then those of the targets."""
    targets = situation.targets
    if bounds.least is not None:
        answer = answer.floored_at("Schedule", bounds.least, f"a schedule wants at least {bounds.least}")
    if bounds.most is not None:
        answer = answer.capped_at("Schedule", bounds.most, f"a schedule allows at most {bounds.most}")
    least = sum(one.spec.min_replicas * one.capacity for one in targets)
    most = sum(one.spec.max_replicas * one.capacity for one in targets)
    answer = answer.capped_at("ScalingLimited", most, f"maxReplicas allow {most:g}")
    return answer.floored_at("ScalingLimited", least, f"minReplicas want {least:g}")


def _is_whole(situation: Situation) -> bool:
    """Whether every target's replica does the same work."""
    return all(target.capacity == 1.0 for target in situation.targets)


def _whole(replicas: float, situation: Situation) -> float:
    return float(math.ceil(replicas - _EPSILON)) if _is_whole(situation) else replicas


def prepare_stage(
    situation: Situation, before: ServingStageMemory | None, policy: AutoscalingPolicySpec
) -> tuple[Situation, ServingStageMemory]:
    """The situation with smoothed speeds, relative capacities and measured start times, and the memory updated with
    them.
    """
    now_s = situation.now_s
    memory = before or ServingStageMemory(began_at_s=now_s, decided_at_s=now_s, active_at_s=now_s)
    elapsed_s = max(0.0, now_s - memory.decided_at_s)
    began_at_s = memory.began_at_s if elapsed_s <= _GAP_PERIODS * policy.period else now_s
    speeds: dict[str, ReplicaSpeed] = {}
    starts: dict[str, StartDurations] = {}
    for target in situation.targets:
        speed = smooth_speed(memory.speeds.get(target.name), target.speed, elapsed_s)
        if speed is not None:
            speeds[target.name] = speed
        starts[target.name] = memory.starts.get(target.name, _NO_STARTS).with_started_engines(target)
    capacities = _capacities(situation, speeds)
    targets = tuple(
        _known(one, capacities[one.name], speeds.get(one.name), starts[one.name]) for one in situation.targets
    )
    blockages = {
        one.name: update_backoff(one, memory.blockages.get(one.name, _NEVER_BLOCKED), now_s) for one in targets
    }
    targets = tuple(
        one
        if one.blocked or not (why := blockages[one.name].reason_at(now_s))
        else msgspec.structs.replace(one, blocked=why)
        for one in targets
    )
    situation = drop_stale_metrics(msgspec.structs.replace(situation, targets=targets), policy.staleness)
    memory = msgspec.structs.replace(
        _noticed(memory, situation),
        began_at_s=began_at_s,
        decided_at_s=now_s,
        speeds=speeds,
        starts=starts,
        blockages=blockages,
    )
    return situation, record_activity(memory, situation)


def _noticed(memory: ServingStageMemory, situation: Situation) -> ServingStageMemory:
    """With the change of replicas since the last decision, by any writer."""
    now_s, current = situation.now_s, situation.current_replicas
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
    past = ScalingHistory(
        memory.past.recommendations, (*memory.past.changes, ReplicaChange(now_s, current - memory.current))
    )
    woken_at_s = now_s if memory.current == 0 else memory.woken_at_s
    return msgspec.structs.replace(
        memory, current=current, past=past, woken_at_s=woken_at_s, fell_from=fell_from, turned_at_s=turned
    )


def _known(
    target: TargetSituation, relative: float, speed: ReplicaSpeed | None, starts: StartDurations
) -> TargetSituation:
    return msgspec.structs.replace(
        target, speed=speed, capacity=relative, start_s=expected_start_s(starts, target.start_s)
    )


def _capacities(situation: Situation, speeds: Mapping[str, ReplicaSpeed]) -> dict[str, float]:
    """Of each target, in replicas of the first: by the time that the present mix of requests takes.

    Targets of unknown speed keep their previous capacity.
    """
    targets = situation.targets
    given = {target.name: target.capacity for target in targets}
    first = speeds.get(targets[0].name)
    if len(targets) == 1 or first is None:
        return given | {targets[0].name: 1.0}
    mix = _mix(situation)
    stage = targets[0].spec.stage
    of_first_s = replica_seconds_per_request(mix, first, stage, situation.objective)
    return {
        target.name: _ratio(
            of_first_s, replica_seconds_per_request(mix, speeds[target.name], stage, situation.objective)
        )
        if target.name in speeds
        else target.capacity
        for target in targets
    }


def _ratio(of_first_s: float, of_this_s: float) -> float:
    """What is beyond all bounds was declared or learned wrongly."""
    if not (of_first_s > 0 and of_this_s > 0):
        return 1.0
    return min(_MOST_CAPACITY, max(1 / _MOST_CAPACITY, of_first_s / of_this_s))


def _mix(situation: Situation) -> MeanRequestWork:
    """The mean request of the last minutes."""
    rates = situation.traffic.rates(_MIX_WINDOW_S, situation.now_s)
    if rates is None or rates.arrivals <= 0 or rates.finished <= 0:
        return _TYPICAL_REQUEST
    return MeanRequestWork(
        prefill_work=rates.prefill_work / rates.arrivals,
        prompt_tokens=rates.prompt_tokens / rates.finished,
        output_tokens=rates.output_tokens / rates.finished,
    )
