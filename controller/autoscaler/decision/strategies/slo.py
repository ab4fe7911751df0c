# SPDX-License-Identifier: Apache-2.0
"""Measured latency as a share of the objective.

Source: llm-d, ``docs/architecture/autoscaling/slo-aware-keda.md``. With ``n`` replicas, ``r`` of them ready::

    s = max(TTFT / its objective, TPOT / its objective), each the objective's percentile of the last minute, at most 2,
        mean of the ``smoothing`` window
    s > scale_up_threshold:   n + ceil(n * (s * c / scale_up_threshold - 1)), c = r / n while some start, else 1
    s < scale_down_threshold: n - floor(n * (1 - s / scale_down_threshold))

The credit ``c`` prevents a second order of starting replicas; it never scales in. Differences from the original: a
latency without samples is unknown, not 0. It is 0 only if no request arrived and none is in progress. And the last
replica stays.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from controller.api.autoscaling import LatencyObjective
from controller.api.shared_types import Utilization
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.strategies.engine_loads import (
    capacity_after_scale_in,
    ready_loads,
    ready_units,
    round_down_units,
    round_up_units,
)
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation

LATENCY_WINDOW_S: Final = 60.0
LARGEST_SHARE: Final = 2.0


class SloParameters(Spec, frozen=True):
    """The larger of TTFT and TPOT, each as a share of its objective. ``scale_up_threshold``: above it, more in
    proportion.
    ``scale_down_threshold``: below it, fewer. ``smoothing``: of the measured latencies. ``credit``: whether replicas
    that are starting count as being there already.
    """

    CEL: ClassVar = (
        CelRule(
            "self.scaleDownThreshold < self.scaleUpThreshold",
            "scaleDownThreshold must be below scaleUpThreshold; what lies between is the zone without changes",
        ),
    )

    scale_up_threshold: Utilization = 0.55
    scale_down_threshold: Utilization = 0.4
    smoothing: Duration = Duration("45s")
    credit: bool = True


class SloRatioSample(msgspec.Struct, frozen=True):
    """The larger latency as a share of its objective, at an instant."""

    at_s: float
    value: float


class SloMemory(msgspec.Struct, frozen=True):
    """``shares``: of the smoothing window, by time, at most one a second."""

    shares: tuple[SloRatioSample, ...] = ()


class SloStrategy(msgspec.Struct, frozen=True):
    """``objective``: of the policy; the situation's own, if it has one, counts instead."""

    parameters: SloParameters = SloParameters()
    objective: LatencyObjective | None = None
    name: str = "Slo"

    def recommend(self, situation: Situation, memory: SloMemory | None) -> tuple[Recommendation, SloMemory | None]:
        """More in proportion to the excess, fewer in proportion to the room."""
        objective = situation.objective or self.objective
        if objective is None:
            return Recommendation(self.name, None, "no objective is written"), memory
        now_s, window_s = situation.now_s, float(self.parameters.smoothing)
        shares = tuple(one for one in (memory.shares if memory is not None else ()) if one.at_s > now_s - window_s)
        found = slo_ratio(situation, objective)
        if found is not None:
            recent = shares[:-1] if shares and shares[-1].at_s // 1 == now_s // 1 else shares
            shares = (*recent, SloRatioSample(now_s, min(found, LARGEST_SHARE)))
        after = SloMemory(shares)
        if not shares:
            return Recommendation(self.name, None, "no latency is known of the last minute"), after
        share = statistics.fmean(one.value for one in shares)
        current, ready = situation.current_replicas, ready_units(situation)
        desired = self.desired(share, current, ready, situation)
        inputs = {"share_of_objective": share, "ready_replicas": ready}
        reason = f"latency is {share:.2f} of its objective (fewer below {self.parameters.scale_down_threshold:g}, "
        reason += f"more above {self.parameters.scale_up_threshold:g})"
        if desired < current and (found is None or situation.freshness.silent):
            return Recommendation(self.name, None, f"{reason}, but not all of it is known now", inputs), after
        return Recommendation(self.name, desired, reason, inputs), after

    def desired(self, share: float, current: float, ready: float, situation: Situation) -> float:
        """The formula."""
        up, down = self.parameters.scale_up_threshold, self.parameters.scale_down_threshold
        if share > up:
            credit = ready / current if self.parameters.credit and 0 < ready < current else 1.0
            return current + max(round_up_units(current * (share * credit / up - 1), situation), 0.0)
        if share < down:
            return capacity_after_scale_in(situation, round_down_units(current * (1 - share / down), situation))
        return current


def slo_ratio(situation: Situation, objective: LatencyObjective) -> float | None:
    """The largest known latency as a share of its objective; if none is known, 0 when idle, else None."""
    traffic, now_s, percent = situation.traffic, situation.now_s, objective.percentile
    shares = []
    for promised, measured in (
        (objective.ttft, traffic.ttft_s(percent, LATENCY_WINDOW_S, now_s)),
        (objective.tpot, traffic.tpot_s(percent, LATENCY_WINDOW_S, now_s)),
    ):
        if promised and measured is not None and math.isfinite(measured):
            shares.append(measured / promised)
    if shares:
        return max(shares)
    return 0.0 if is_idle(situation) else None


def is_idle(situation: Situation) -> bool:
    """Whether data show that no request arrived in the window, and that none waits or is in progress."""
    rates = situation.traffic.rates(LATENCY_WINDOW_S, situation.now_s)
    if rates is None or rates.arrivals > 0 or situation.waiting.requests or situation.freshness.silent:
        return False
    return all(load.report is not None and not load.report.in_flight for load in ready_loads(situation))


SLO: Final = StrategyType(
    summary="measured latency",
    make=lambda parameters, policy: SloStrategy(parameters, policy.objective),
    defaults=SloParameters(),
    needs="objective",
)
