# SPDX-License-Identifier: Apache-2.0
"""The interface of another project's autoscaler, the HPA that stands behind most of them, and Knative's KPA.

A baseline returns replicas of the situation's first target, within that target's bounds; one that supports several
kinds of engine returns them for each. A value that a baseline's own collector lacks is replaced as in its program:
mostly by 0.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeVar

import msgspec

from controller.api.autoscaling import Behavior, MetricTarget
from controller.autoscaler.decision.behavior import (
    PastRecommendation,
    ReplicaChange,
    ScalingHistory,
    add_recommendation,
    apply_behavior,
)
from controller.autoscaler.decision.decision import Strategy
from controller.autoscaler.decision.situation import EngineReport, EngineState, Situation
from controller.autoscaler.decision.strategies.concurrency import ConcurrencyParameters, ConcurrencyStrategy
from controller.autoscaler.decision.strategies.target import (
    TargetStrategy,
    Tolerance,
    WeightedEngines,
    replicas_for_total_metric,
)

Memory = TypeVar("Memory")


class Baseline(Protocol[Memory]):
    """A pure function: its state is part of its result."""

    @property
    def period_s(self) -> float:
        """Between two decisions."""
        ...

    def desired_replicas(self, situation: Situation, memory: Memory | None) -> tuple[int, Memory | None]:
        """Replicas, and what to pass in the next time; ``memory`` is None at first."""
        ...


class HpaState(msgspec.Struct, frozen=True):
    """``past``: of the HPA. ``inner``: memory of the baseline behind it."""

    past: ScalingHistory = ScalingHistory()
    inner: Any = None


class StrategyWithHpa(msgspec.Struct, frozen=True):
    """A strategy of ours that is a baseline's own, with an HPA's behaviour block behind it; None: without one.

    An unknown recommendation changes nothing.
    """

    strategy: Strategy[Any]
    behavior: Behavior | None
    period_s: float

    def desired_replicas(self, situation: Situation, memory: HpaState | None) -> tuple[int, HpaState | None]:
        """The strategy's answer, as fast as the behaviour allows it."""
        found, inner = self.strategy.recommend(situation, memory.inner if memory is not None else None)
        past = memory.past if memory is not None else initial_history(situation)
        if found.replicas is None:
            return clamp_to_bounds(current_replicas(situation), situation), HpaState(past, inner)
        if self.behavior is None:
            return clamp_to_bounds(found.replicas, situation), HpaState(past, inner)
        replicas, past = apply_hpa_behavior(self.behavior, past, found.replicas, situation)
        return replicas, HpaState(past, inner)


def initial_history(situation: Situation) -> ScalingHistory:
    """An HPA's history when it first observes its target: the current replicas."""
    return ScalingHistory((PastRecommendation(situation.now_s, current_replicas(situation)),))


def apply_hpa_behavior(
    behavior: Behavior, past: ScalingHistory, recommended: float, situation: Situation
) -> tuple[int, ScalingHistory]:
    """What an HPA makes of a recommendation, and its memory after it."""
    current, now_s = current_replicas(situation), situation.now_s
    found, _ = apply_behavior(behavior, past, recommended=recommended, current=current, now_s=now_s)
    desired = clamp_to_bounds(found, situation)
    past = add_recommendation(behavior, past, PastRecommendation(now_s, recommended))
    if desired != current:
        past = ScalingHistory(past.recommendations, (*past.changes, ReplicaChange(now_s, desired - current)))
    return desired, past


def apply_hpa(
    behavior: Behavior, past: ScalingHistory, wanted: float, situation: Situation
) -> tuple[int, ScalingHistory]:
    """A number of replicas that is exported as a metric, with AverageValue 1, and its tolerance of 10 %."""
    pool = WeightedEngines(current=current_replicas(situation), ready={}, unready={})
    found = replicas_for_total_metric(math.ceil(wanted * 1000), 1000, pool, Tolerance(), for_all=False)
    return apply_hpa_behavior(behavior, past, found.replicas or 0.0, situation)


def split_by_target(situation: Situation) -> list[Situation]:
    """One for each target, as if there were no other: what an HPA of its own sees."""
    return [msgspec.structs.replace(situation, targets=(one,)) for one in situation.targets]


def merge_targets(situation: Situation) -> Situation:
    """All targets as if they were one: bounds, replicas and engines of all together."""
    first, targets = situation.targets[0], situation.targets
    spec = msgspec.structs.replace(
        first.spec,
        min_replicas=sum(one.spec.min_replicas for one in targets),
        max_replicas=sum(one.spec.max_replicas for one in targets),
    )
    whole = msgspec.structs.replace(
        first, spec=spec, current=sum(one.current or 0 for one in targets), engines=situation.engines
    )
    return msgspec.structs.replace(situation, targets=(whole,))


def current_replicas(situation: Situation) -> int:
    """Replicas in the spec of the first target."""
    return situation.targets[0].current or 0


def ready_reports(situation: Situation) -> list[EngineReport | None]:
    """Of the first target's ready engines."""
    return [engine.report for engine in situation.targets[0].engines_in_state(EngineState.READY)]


def waiting_per_engine(situation: Situation) -> float:
    """Requests that wait at the gateways, for each ready engine of the first target."""
    return situation.waiting.requests / max(len(ready_reports(situation)), 1)


def clamp_to_bounds(replicas: float, situation: Situation) -> int:
    """Within the bounds of the first target."""
    spec = situation.targets[0].spec
    return min(max(math.ceil(replicas), spec.min_replicas), spec.max_replicas)


def kpa(*, target: float = 100.0, utilization: float = 0.7, period_s: float = 2.0) -> StrategyWithHpa:
    """``target``: requests in flight that one replica takes; ``utilization``: the share of it that is aimed at."""
    return StrategyWithHpa(ConcurrencyStrategy(ConcurrencyParameters(target, utilization)), None, period_s)


def hpa(
    *, running: float, waiting: float | None = None, behavior: Behavior | None = None, period_s: float = 15.0
) -> StrategyWithHpa:
    """``running`` and ``waiting``: requests that one replica should have; without ``waiting`` all count as one."""
    if waiting is None:
        metrics: tuple[MetricTarget, ...] = (MetricTarget("requests_in_flight", running),)
    else:
        metrics = (MetricTarget("requests_running", running), MetricTarget("requests_queued", waiting))
    return StrategyWithHpa(TargetStrategy(metrics, careful=False), behavior or Behavior(), period_s)
