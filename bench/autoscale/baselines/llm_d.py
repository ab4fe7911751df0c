# SPDX-License-Identifier: Apache-2.0
"""llm-d's two recipes for KEDA: queue and running requests of its picker, and latency against objectives.

Source: llm-d, ``guides/workload-autoscaling/keda-epp`` and ``slo-aware``, ``docs/architecture/autoscaling``.

Queue: the picker's flow-control queue with a target of 1 a replica, its running requests with 16; out by 100 % in 15 s,
in by 100 % in 15 s after 300 s. (Its variant against overshoot also waits 300 s before it scales out: ``up_window_s``.)

Latency: the strategy of ``controller.autoscaler.decision.strategies.slo`` as in the original: unknown values are 0, the
credit may turn an excess into fewer replicas than now, and the answer goes through an HPA with AverageValue 1: out by
100 % or 4 pods in 60 s after 30 s, in by 1 pod in 120 s after 180 s.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from bench.autoscale.baselines.baseline import (
    HpaState,
    StrategyWithHpa,
    apply_hpa,
    current_replicas,
    initial_history,
    ready_reports,
)
from controller.api.autoscaling import Behavior, LatencyObjective, MetricTarget, ScalingRule, ScalingRules
from controller.autoscaler.decision.behavior import ScalingHistory
from controller.autoscaler.decision.situation import MetricReading, Situation
from controller.autoscaler.decision.strategies.target import TargetStrategy

_CLAMP = 2.0
_LATENCY_WINDOW_S = 60.0
SLO_BEHAVIOR = Behavior(
    ScalingRules(30, "Max", (ScalingRule("Percent", 100, 60), ScalingRule("Pods", 4, 60))),
    ScalingRules(180, "Max", (ScalingRule("Pods", 1, 120),)),
)


class KedaQueue(msgspec.Struct, frozen=True):
    """``queue`` and ``running``: requests a replica. ``up_window_s``: stabilisation of scaling out."""

    queue: float = 1.0
    running: float = 16.0
    up_window_s: int = 0
    period_s: float = 15.0

    def desired_replicas(self, situation: Situation, memory: HpaState | None) -> tuple[int, HpaState | None]:
        """The larger answer of both triggers."""
        doubling = (ScalingRule("Percent", 100, 15),)
        behavior = Behavior(ScalingRules(self.up_window_s, "Max", doubling), ScalingRules(300, "Max", doubling))
        running = sum(one.in_flight for one in ready_reports(situation) if one is not None)
        known = {
            "epp_queue": MetricReading(situation.now_s, total=float(situation.waiting.requests)),
            "epp_running": MetricReading(situation.now_s, total=float(running)),
        }
        strategy = TargetStrategy(
            (
                MetricTarget("epp_queue", self.queue, source="Prometheus"),
                MetricTarget("epp_running", self.running, source="Prometheus"),
            ),
            careful=False,
        )
        seen = msgspec.structs.replace(situation, metrics=known)
        return StrategyWithHpa(strategy, behavior, self.period_s).desired_replicas(seen, memory)


class KedaSloState(msgspec.Struct, frozen=True):
    """``shares``: (when, share of the objective), of the smoothing window."""

    past: ScalingHistory
    shares: tuple[tuple[float, float], ...] = ()


class KedaSlo(msgspec.Struct, frozen=True):
    """``objective``: latencies that are promised. ``up`` and ``down``: the band of their share without changes."""

    objective: LatencyObjective
    up: float = 0.55
    down: float = 0.40
    smoothing_s: float = 45.0
    period_s: float = 15.0

    def desired_replicas(self, situation: Situation, memory: KedaSloState | None) -> tuple[int, KedaSloState | None]:
        """The formula, and the HPA behind it."""
        now_s = situation.now_s
        before = memory if memory is not None else KedaSloState(initial_history(situation))
        recent = tuple(one for one in before.shares if one[0] > now_s - self.smoothing_s)
        shares = (*recent, (now_s, min(self._share(situation), _CLAMP)))
        share = statistics.fmean(value for _, value in shares)
        wanted = self.replicas_for_latency_share(share, current_replicas(situation), len(ready_reports(situation)))
        desired, past = apply_hpa(SLO_BEHAVIOR, before.past, max(wanted, 0), situation)
        return desired, KedaSloState(past, shares)

    def replicas_for_latency_share(self, share: float, provisioned: int, ready: int) -> int:
        """Replicas by the share of the objective that latencies have."""
        if share > self.up:
            credit = ready / provisioned if 0 < ready < provisioned else 1.0
            return provisioned + math.ceil(provisioned * (share * credit / self.up - 1))
        if share < self.down:
            return provisioned - math.floor(provisioned * (1 - share / self.down))
        return provisioned

    def _share(self, situation: Situation) -> float:
        traffic, now_s, percent = situation.traffic, situation.now_s, self.objective.percentile
        ttft = traffic.ttft_s(percent, _LATENCY_WINDOW_S, now_s) or 0.0
        tpot = traffic.tpot_s(percent, _LATENCY_WINDOW_S, now_s) or 0.0
        return max(
            ttft / self.objective.ttft if self.objective.ttft else 0.0,
            tpot / self.objective.tpot if self.objective.tpot else 0.0,
        )
