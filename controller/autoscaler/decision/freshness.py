# SPDX-License-Identifier: Apache-2.0
"""What may be decided from old data: nothing is scaled in, and very old data do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.situation import EngineState, Freshness, Metric, Situation

# Requests that one replica takes on, where nothing better is known.
REQUESTS_A_REPLICA: Final = 32

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.api.autoscaling import AutoscalingPolicySpec, Staleness
    from controller.autoscaler.decision.answer import Answer
    from extproc.api.quantities import Duration


def needs_gateways(policy: AutoscalingPolicySpec) -> bool:
    """Whether the policy looks at anything that only gateways know."""
    laws = any(one.name != "Target" for one in policy.strategies)
    metrics = any(one.source == "Gateway" for one in policy.metrics)
    return laws or metrics or policy.scale_to_zero is not None or policy.objective is not None


def with_fresh_metrics(situation: Situation, staleness: Staleness) -> Situation:
    """Metrics whose samples are older than ``hard`` have a problem instead of a value."""
    metrics: Mapping[str, Metric] = {
        name: metric
        if situation.now_s - metric.at_s <= staleness.hard
        else Metric(metric.at_s, problem=f"its sample is {situation.now_s - metric.at_s:.0f} s old")
        for name, metric in situation.metrics.items()
    }
    return msgspec.structs.replace(situation, metrics=metrics) if metrics else situation


def too_old(situation: Situation, policy: AutoscalingPolicySpec) -> str:
    """Why the data count for nothing; empty if they do."""
    age_s = situation.freshness.age_s
    if needs_gateways(policy) and age_s > policy.staleness.hard:
        return f"data are {age_s:.0f} s old, more than {policy.staleness.hard}"
    return ""


def not_for_scale_in(situation: Situation, policy: AutoscalingPolicySpec) -> str:
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


def held_by_age(answer: Answer, situation: Situation, policy: AutoscalingPolicySpec) -> Answer:
    """The answer as far as the data's age allows."""
    stale = too_old(situation, policy)
    if stale:
        # what waits is there, whatever else is unknown
        ready = situation.units(EngineState.READY)
        for_waiting = ready + situation.waiting.requests / REQUESTS_A_REPLICA
        return answer.changed("Stale", max(situation.current, min(answer.replicas, for_waiting)), stale)
    why = not_for_scale_in(situation, policy)
    return answer.at_least("Stale", situation.current, why) if why else answer
