# SPDX-License-Identifier: Apache-2.0
"""Rules that change an answer: the remaining replicas must carry the load, old data scale nothing in, zero is safe."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling_policy import STRATEGIES
from controller.autoscaler.decision.decision import StageReplicas
from controller.autoscaler.decision.situation import EngineState, Freshness, MetricReading, Situation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling import StalenessLimits
    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.decision import Recommendation
    from controller.autoscaler.decision.saved_state import ServingStageMemory
    from extproc.api.quantities import Duration

# Caches of the remaining replicas may be in use to this share.
_MOST_CACHE: Final = 0.8
# Shorter waits are for the engine's next scheduling step, not for capacity.
_SHORT_WAIT_S: Final = 1.0
# With latency above this share of the objective no replica is removed.
_NEAR_OBJECTIVE: Final = 0.9
_LATENCY_WINDOW_S: Final = 60.0
# Requests that one replica serves concurrently, where its capacity is unknown.
REQUESTS_A_REPLICA: Final = 32
# A start may take so many times as long as usual before its replicas may go again.
_PATIENCE: Final = 3.0


def combine_recommendations(recommendations: Sequence[Recommendation], current: float) -> StageReplicas | None:
    """The largest recommendation; not below ``current`` while one is unknown. None: all are unknown."""
    known = [one.replicas for one in recommendations if one.replicas is not None]
    if not known:
        return None
    answer = StageReplicas(max(known))
    unknown = [one.strategy for one in recommendations if one.replicas is None and not _is_bound(one.strategy)]
    if unknown:
        return answer.floored_at("Unknown", current, f"{', '.join(unknown)} cannot tell")
    if all(_is_bound(one.strategy) for one in recommendations):
        return answer.floored_at("Unknown", current, "no strategy says that fewer are enough")
    return answer


def _is_bound(strategy: str) -> bool:
    """Whether the strategy gives a lower bound only: if it is unknown, the other strategies decide."""
    type_ = STRATEGIES.get(strategy)
    return type_ is not None and type_.is_lower_bound


def limit_scale_in(answer: StageReplicas, situation: Situation) -> StageReplicas:
    """Refuse to scale in while something waits, while latency is near the objective, or if caches would be too full."""
    current = situation.current_replicas
    if answer.replicas >= current:
        return answer
    waiting = situation.waiting
    if waiting.requests and waiting.oldest_s >= _SHORT_WAIT_S:
        return answer.floored_at(
            "Waiting", current, f"{waiting.requests} requests wait, the first {waiting.oldest_s:.1f} s"
        )
    late = _late(situation)
    if late:
        return answer.floored_at("Latency", current, late)
    usage = [
        one.report.kv_usage
        for one in situation.ready_engines
        if one.report is not None and one.report.kv_usage is not None
    ]
    needed = sum(usage) / _MOST_CACHE
    if usage and needed > answer.replicas:
        reason = f"the caches in use fill {needed:.2f} replicas to {_MOST_CACHE:.0%}"
        return answer.floored_at("Caches", min(current, needed), reason)
    return answer


def _late(situation: Situation) -> str:
    objective, now_s = situation.objective, situation.now_s
    if objective is None:
        return ""
    ttft_s, tpot_s = situation.traffic.latencies_s(objective.percentile, _LATENCY_WINDOW_S, now_s)
    for name, value, limit in (("TTFT", ttft_s, objective.ttft), ("TPOT", tpot_s, objective.tpot)):
        if value is not None and limit is not None and value > _NEAR_OBJECTIVE * limit:
            return f"P{objective.percentile:g} of {name} is {value:.3g} s, the objective {limit}"
    return ""


def needs_gateways(policy: AutoscalingPolicySpec) -> bool:
    """Whether the policy uses a metric that only gateways report."""
    by_load = not all(one.type.by_metrics for one in policy.strategies)
    metrics = any(one.source == "Gateway" for one in policy.metrics)
    return by_load or metrics or policy.scale_to_zero is not None or policy.objective is not None


def drop_stale_metrics(situation: Situation, staleness: StalenessLimits) -> Situation:
    """Metrics whose samples are older than ``hard`` have a problem instead of a value."""
    metrics: Mapping[str, MetricReading] = {
        name: metric
        if situation.now_s - metric.at_s <= staleness.hard
        else MetricReading(metric.at_s, problem=f"its sample is {situation.now_s - metric.at_s:.0f} s old")
        for name, metric in situation.metrics.items()
    }
    return msgspec.structs.replace(situation, metrics=metrics) if metrics else situation


def why_data_too_old(situation: Situation, policy: AutoscalingPolicySpec) -> str:
    """Why the data count for nothing; empty if they do."""
    age_s = situation.freshness.age_s
    if needs_gateways(policy) and age_s > policy.staleness.hard:
        return f"data are {age_s:.0f} s old, more than {policy.staleness.hard}"
    return ""


def why_no_scale_in(situation: Situation, policy: AutoscalingPolicySpec) -> str:
    """Why the data do not scale in; empty if they may."""
    cut_off_s = situation.freshness.cut_off_s
    if cut_off_s is not None:
        return f"the API server has not told of pods and targets for {cut_off_s:.0f} s"
    soft = policy.staleness.soft
    old = sorted(name for name, one in situation.metrics.items() if situation.now_s - one.at_s > soft or one.problem)
    if old:
        return f"no recent value of {', '.join(old)}"
    return _doubt(situation.freshness, soft) if needs_gateways(policy) else ""


def _doubt(fresh: Freshness, soft: Duration) -> str:
    if fresh.gateways == 0:
        return "no gateway tells anything"
    if fresh.silent:
        return f"{len(fresh.silent)} of {fresh.gateways} gateways are silent: {', '.join(fresh.silent[:3])}"
    if fresh.age_s > soft:
        return f"data are {fresh.age_s:.0f} s old, more than {soft}"
    if fresh.unreported:
        return f"nothing recent is known of {', '.join(fresh.unreported[:3])}"
    return ""


def limit_by_data_age(answer: StageReplicas, situation: Situation, policy: AutoscalingPolicySpec) -> StageReplicas:
    """The answer as far as the data's age allows."""
    stale = why_data_too_old(situation, policy)
    if stale:
        # what waits is there, whatever else is unknown
        ready = situation.engine_units(EngineState.READY)
        for_waiting = ready + situation.waiting.requests / REQUESTS_A_REPLICA
        return answer.adjusted_to("Stale", max(situation.current_replicas, min(answer.replicas, for_waiting)), stale)
    why = why_no_scale_in(situation, policy)
    return answer.floored_at("Stale", situation.current_replicas, why) if why else answer


def record_activity(memory: ServingStageMemory, situation: Situation) -> ServingStageMemory:
    """``memory`` with the activity in the situation. A gap in the data counts as activity."""
    traffic = situation.traffic
    totals = traffic.counters(len(traffic.points) - 1) if traffic.points else None
    arrivals, finished = (
        (totals.arrivals, totals.finished) if totals is not None else (memory.arrivals, memory.finished)
    )
    is_active = arrivals != memory.arrivals or finished != memory.finished or _is_busy(situation)
    # replicas have served since they were woken
    woken_at_s = None if finished > memory.finished else memory.woken_at_s
    return msgspec.structs.replace(
        memory,
        arrivals=arrivals,
        finished=finished,
        active_at_s=situation.now_s if is_active else memory.active_at_s,
        woken_at_s=woken_at_s,
    )


def _is_busy(situation: Situation) -> bool:
    reports = [one.report for one in situation.engines if one.report is not None]
    has_requests = any(one.in_flight or one.waiting or one.running for one in reports)
    return bool(situation.waiting.requests or situation.waiting.at_zero or has_requests or situation.freshness.silent)


def why_not_zero(policy: AutoscalingPolicySpec, situation: Situation, memory: ServingStageMemory) -> str:
    """Why the stage must keep a replica; empty if it may have none."""
    rule = policy.scale_to_zero
    if rule is None:
        return "the policy does not scale to zero"
    why = why_data_too_old(situation, policy) or why_no_scale_in(situation, policy)
    if why:
        return why
    idle_s = situation.now_s - memory.active_at_s
    if idle_s < rule.idle:
        return f"idle for {idle_s:.0f} s, not yet {rule.idle}"
    if situation.freshness.since_s < rule.idle:
        return f"data are without a gap for {situation.freshness.since_s:.0f} s, not yet {rule.idle}"
    start_s = max(target.start_s for target in situation.targets)
    if memory.woken_at_s is not None and situation.now_s - memory.woken_at_s < _PATIENCE * start_s:
        return "it has just been woken and has served nobody yet"
    return ""


def scale_to_zero(
    answer: StageReplicas,
    policy: AutoscalingPolicySpec,
    situation: Situation,
    memory: ServingStageMemory,
    recommendations: Sequence[Recommendation],
) -> StageReplicas:
    """Remove the last replica after the idle time although strategies recommend it: the few requests in their longer
    windows, and speeds learned from so few, do not predict the next one. Lower bounds hold, and an unknown strategy
    keeps the replica.
    """
    if not 0 < answer.replicas <= 1 or any(one.replicas is None for one in recommendations):
        return answer
    is_bound = any(_is_bound(one.strategy) and one.replicas for one in recommendations)
    if is_bound or why_not_zero(policy, situation, memory):
        return answer
    return answer.capped_at("Idle", 0.0, f"idle for {situation.now_s - memory.active_at_s:.0f} s")


def scale_from_zero(answer: StageReplicas, policy: AutoscalingPolicySpec, situation: Situation) -> StageReplicas:
    """Replicas that admit all requests held at zero, where none runs or starts."""
    waiting = situation.waiting
    if not (waiting.at_zero or waiting.requests) or situation.current_replicas > 0:
        return answer
    activation = policy.scale_to_zero.activation_replicas if policy.scale_to_zero is not None else 1
    replicas = max(activation, math.ceil(max(waiting.at_zero, waiting.requests) / REQUESTS_A_REPLICA))
    return answer.floored_at("FromZero", replicas, f"{max(waiting.at_zero, waiting.requests)} requests wait at zero")
