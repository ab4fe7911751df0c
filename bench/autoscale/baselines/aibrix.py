# SPDX-License-Identifier: Apache-2.0
"""AIBrix' APA: in proportion to the mean of engines, at most doubled or halved, in only after a cooldown.

Source: vllm-project/aibrix, ``pkg/controller/podautoscaler/algorithm/apa.go``. With x = mean / target: above 1 +
tolerance ``min(ceil(n * x), ceil(n * up rate))``, below 1 - tolerance ``max(ceil(n * x), floor(n / down rate))``. The
largest answer of the cooldown counts before it scales in. Every 10 s.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from bench.autoscale.baselines.baseline import (
    HpaState,
    clamp_to_bounds,
    current_replicas,
    initial_history,
    ready_reports,
    waiting_per_engine,
)
from controller.api.autoscaling import Behavior, ScalingRules
from controller.autoscaler.decision.behavior import PastRecommendation, ScalingHistory, add_recommendation, stabilize
from controller.autoscaler.decision.strategies.engine_loads import kv_cache_usage, running_requests

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import EngineReport, Situation


class AibrixApa(msgspec.Struct, frozen=True):
    """``target``: of the metric, in the mean of ready engines. ``down_cooldown_s``: of scaling in."""

    target: float
    metric: Literal["running", "in_flight", "kv_usage"] = "in_flight"
    tolerance: float = 0.1
    max_rate: float = 2.0
    down_cooldown_s: int = 300
    period_s: float = 10.0

    def desired_replicas(self, situation: Situation, memory: HpaState | None) -> tuple[int, HpaState | None]:
        """The algorithm, then the cooldown."""
        past = memory.past if memory is not None else initial_history(situation)
        reports = [one for one in ready_reports(situation) if one is not None]
        current = current_replicas(situation)
        if not reports:
            return clamp_to_bounds(current, situation), HpaState(past)
        held = waiting_per_engine(situation) if self.metric == "in_flight" else 0.0
        mean = sum(self._value(one) for one in reports) / len(reports) + held
        asked = clamp_to_bounds(self.replicas_for_mean(mean, current), situation)
        behavior = Behavior(ScalingRules(0), ScalingRules(self.down_cooldown_s))
        found = stabilize(behavior, past.recommendations, recommended=asked, current=current, now_s=situation.now_s)
        past = add_recommendation(
            behavior, ScalingHistory(past.recommendations), PastRecommendation(situation.now_s, asked)
        )
        return clamp_to_bounds(found, situation), HpaState(past)

    def replicas_for_mean(self, mean: float, current: int) -> int:
        """Replicas by the mean of the metric."""
        share = mean / self.target
        asked = math.ceil(current * share)
        if share > 1 + self.tolerance:
            return min(asked, math.ceil(current * self.max_rate))
        if share < 1 - self.tolerance:
            return max(asked, math.floor(current / self.max_rate))
        return current

    def _value(self, report: EngineReport) -> float:
        if self.metric == "kv_usage":
            return kv_cache_usage(report) or 0.0
        return running_requests(report) if self.metric == "running" else float(report.in_flight)
