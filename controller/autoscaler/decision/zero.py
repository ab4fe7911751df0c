# SPDX-License-Identifier: Apache-2.0
"""From zero at once, and to zero only when nobody can be lost by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.combine import BOUNDS
from controller.autoscaler.decision.freshness import REQUESTS_A_REPLICA, not_for_scale_in, too_old

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.autoscaler.decision.answer import Answer
    from controller.autoscaler.decision.law import Recommendation
    from controller.autoscaler.decision.memory import StageMemory
    from controller.autoscaler.decision.situation import Situation

# A start may take so many times as long as usual before its replicas may go again.
_PATIENCE: Final = 3.0


def followed(memory: StageMemory, situation: Situation) -> StageMemory:
    """``memory`` with what the situation says about activity. A gap in the data counts as activity."""
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


def why_not_zero(policy: AutoscalingPolicySpec, situation: Situation, memory: StageMemory) -> str:
    """Why the stage must keep a replica; empty if it may have none."""
    rule = policy.scale_to_zero
    if rule is None:
        return "the policy does not scale to zero"
    why = too_old(situation, policy) or not_for_scale_in(situation, policy)
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


def to_zero(
    answer: Answer,
    policy: AutoscalingPolicySpec,
    situation: Situation,
    memory: StageMemory,
    recommendations: Sequence[Recommendation],
) -> Answer:
    """Idle for long enough, the last replica goes although laws ask for it: the few requests of their longer windows,
    or speeds that so few did not teach, say nothing about the next one. Lower bounds hold, and so does it if a law does
    not know.
    """
    if not 0 < answer.replicas <= 1 or any(one.replicas is None for one in recommendations):
        return answer
    is_bound = any(one.law in BOUNDS and one.replicas for one in recommendations)
    if is_bound or why_not_zero(policy, situation, memory):
        return answer
    return answer.at_most("Idle", 0.0, f"idle for {situation.now_s - memory.active_at_s:.0f} s")


def from_zero(answer: Answer, policy: AutoscalingPolicySpec, situation: Situation) -> Answer:
    """Requests wait and nothing is there, or will be: so many that all who wait can be taken on."""
    waiting = situation.waiting
    if not (waiting.at_zero or waiting.requests) or situation.current > 0:
        return answer
    activation = policy.scale_to_zero.activation_replicas if policy.scale_to_zero is not None else 1
    replicas = max(activation, math.ceil(max(waiting.at_zero, waiting.requests) / REQUESTS_A_REPLICA))
    return answer.at_least("FromZero", replicas, f"{max(waiting.at_zero, waiting.requests)} requests wait at zero")
