# SPDX-License-Identifier: Apache-2.0
"""Keep metrics at their targets, as Kubernetes' HorizontalPodAutoscaler v2 does.

Source: kubernetes, ``pkg/controller/podautoscaler/replica_calculator.go`` and ``horizontal.go`` (1.36). As there,
values are whole thousandths, so that a rounding error never costs a replica.

| metric | usage ratio | recommended replicas |
|---|---|---|
| by engine | mean of engines / target | ``ceil(ratio * engines)`` |
| total, target of one replica (``AverageValue``) | total / (target * current) | ``ceil(total / target)`` |
| total, target of all (``Value``) | total / target | ``ceil(ratio * ready)``; from zero ``ceil(ratio)`` |

A ratio within the tolerance changes nothing. Of metrics by engine: a ready engine without a value counts as at the
target when the others would shrink, as idle when they would grow; an engine that is not ready counts as idle when they
would grow; if that turns the direction, nothing changes. Of several metrics the largest answer counts; if one is
unknown, only growth is allowed.

Beyond Kubernetes: an engine that drains counts nowhere (there, it is still ready for a target of all). And if
``careful``: with a value missing, only growth is allowed, and a replica in the spec without a pod yet counts as an
engine that is not ready (there, pods are created before the next reconcile).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling import MetricTarget
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.behavior import DEFAULT_TOLERANCE, hpa_tolerance
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.situation import EngineState, MetricReading, Situation
from controller.autoscaler.decision.strategies.engine_loads import are_units_replicas, gateway_metric

if TYPE_CHECKING:
    from controller.api.autoscaling_policy import AutoscalingPolicySpec


class Tolerance(msgspec.Struct, frozen=True):
    """Shares of the target by which a metric may be above (``up``) and below (``down``) it."""

    up: float = DEFAULT_TOLERANCE
    down: float = DEFAULT_TOLERANCE

    def covers(self, ratio: float) -> bool:
        """Whether a usage ratio is as good as 1."""
        return 1.0 - self.down <= ratio <= 1.0 + self.up


class WeightedEngines(msgspec.Struct, frozen=True):
    """Engines as the calculation sees them, each with the units that it counts. ``unready``: not serving yet."""

    current: float
    ready: Mapping[str, float]
    unready: Mapping[str, float]
    whole: bool = True

    def ceil(self, units: float) -> float:
        """Rounded up, where replicas are whole."""
        return float(math.ceil(units)) if self.whole else units


class MetricRecommendation(msgspec.Struct, frozen=True):
    """The recommendation from one metric; ``replicas`` is None, with ``reason``, if unknown. ``is_sure``: it may scale
    in.
    """

    replicas: float | None
    reason: str
    ratio: float = 1.0
    is_sure: bool = True


class TargetStrategy(msgspec.Struct, frozen=True):
    """``metrics``: with their targets. ``tolerance``: as in the behaviour block. ``careful``: see above."""

    metrics: tuple[MetricTarget, ...]
    tolerance: Tolerance = Tolerance()
    careful: bool = True
    name: str = "Target"

    def recommend(self, situation: Situation, memory: None) -> tuple[Recommendation, None]:  # noqa: ARG002 - it needs none
        """The largest proposal of all metrics."""
        pool = engine_pool(situation, with_ordered=self.careful)
        found = {metric.name: self.proposal(metric, situation, pool) for metric in self.metrics}
        inputs = {f"{name}_ratio": one.ratio for name, one in found.items() if one.replicas is not None}
        known = {name: one for name, one in found.items() if one.replicas is not None}
        doubts = "; ".join(f"{name}: {one.reason}" for name, one in found.items() if one.replicas is None)
        largest = max(known.values(), key=lambda one: one.replicas or 0.0, default=None)
        if largest is None or largest.replicas is None:
            return Recommendation(self.name, None, doubts or "there are no metrics", inputs), None
        is_sure = not doubts and all(one.is_sure for one in known.values())
        if largest.replicas < pool.current and not is_sure:
            why = doubts or "values of some engines are unknown"
            return Recommendation(
                self.name, None, f"{why}; {largest.reason}, which is no reason to scale in", inputs
            ), None
        return Recommendation(self.name, largest.replicas, largest.reason, inputs), None

    def proposal(self, wanted: MetricTarget, situation: Situation, pool: WeightedEngines) -> MetricRecommendation:
        """Of one metric."""
        if wanted.source == "Gateway":
            metric = gateway_metric(wanted.name, situation)
        else:
            metric = situation.metrics.get(wanted.name, MetricReading(at_s=situation.now_s, problem="no value yet"))
        if metric.by_engine is not None and wanted.total:
            metric = _summed(metric, pool)
        target = _milli(wanted.value)
        if metric.by_engine is not None:
            values = {name: _milli(value) for name, value in metric.by_engine.items() if math.isfinite(value)}
            found = replicas_for_engine_metric(values, target, pool, self.tolerance)
            is_sure = not self.careful or pool.ready.keys() <= values.keys()
        elif metric.total is not None and math.isfinite(metric.total):
            found = replicas_for_total_metric(_milli(metric.total), target, pool, self.tolerance, for_all=wanted.total)
            # by a target for all, the answer is in proportion to what is ready: above it, it takes nothing back
            takes_back = wanted.total and not (self.tolerance.covers(found.ratio) or found.ratio < 1.0)
            is_sure = not metric.is_lower_bound and not (self.careful and takes_back)
        else:
            return MetricRecommendation(None, metric.problem or "its value is not a number")
        reason = f"{wanted.name} {found.reason} (target {wanted.value:g}{' in all' if wanted.total else ' a replica'})"
        return MetricRecommendation(found.replicas, reason, found.ratio, is_sure)


def engine_pool(situation: Situation, *, with_ordered: bool = False) -> WeightedEngines:
    """The engines of all targets. Those that drain are left out. ``with_ordered``: replicas without a pod are
    unready.
    """
    gone = (EngineState.READY, EngineState.DRAINING)
    ready: dict[str, float] = {}
    unready: dict[str, float] = {}
    for target in situation.targets:
        ready |= {engine.name: target.capacity for engine in target.engines_in_state(EngineState.READY)}
        coming = [engine.name for engine in target.engines if engine.state not in gone]
        unready |= dict.fromkeys(coming, target.capacity)
        ordered = (target.current or 0) - len(target.engines_in_state(EngineState.READY)) - len(coming)
        if with_ordered and ordered > 0:
            unready[f"{target.name}: ordered"] = ordered * target.capacity
    return WeightedEngines(
        current=situation.current_replicas, ready=ready, unready=unready, whole=are_units_replicas(situation)
    )


def replicas_for_engine_metric(
    values: Mapping[str, int], target: int, pool: WeightedEngines, tolerance: Tolerance
) -> MetricRecommendation:
    """A metric by engine; ``values`` and ``target`` in thousandths."""
    measured = [name for name in pool.ready if name in values]
    if not measured:
        return MetricRecommendation(None, "no ready engine has a value")
    total, units = sum(values[name] for name in measured), sum(pool.ready[name] for name in measured)
    missing = sum(unit for name, unit in pool.ready.items() if name not in values)
    unready = sum(pool.unready.values())
    usage = _mean(total, units)
    ratio = usage / target
    reason = f"is {usage / 1000:g} in the mean of {len(measured)} engines"
    if not missing and not (unready and ratio > 1.0):
        if tolerance.covers(ratio):
            return MetricRecommendation(pool.current, f"{reason}, within the tolerance", ratio)
        return MetricRecommendation(pool.ceil(ratio * units), reason, ratio)
    return _corrected(
        MetricRecommendation(None, reason, ratio), pool, tolerance, total=total, units=units, target=target
    )


def _corrected(
    first: MetricRecommendation, pool: WeightedEngines, tolerance: Tolerance, *, total: float, units: float, target: int
) -> MetricRecommendation:
    """With what engines without values may have: at the target against shrinking, idle against growing."""
    missing, ratio = sum(pool.ready.values()) - units, first.ratio
    if ratio < 1.0:
        total, units = total + missing * target, units + missing
    elif ratio > 1.0:
        units += missing + sum(pool.unready.values())
    corrected = _mean(total, units) / target
    flips = (ratio < 1.0 < corrected) or (corrected < 1.0 < ratio)
    if tolerance.covers(corrected) or flips:
        return MetricRecommendation(pool.current, f"{first.reason}; with engines without values: no change", corrected)
    asked = pool.ceil(corrected * units)
    if (corrected < 1.0 and asked > pool.current) or (corrected > 1.0 and asked < pool.current):
        return MetricRecommendation(pool.current, f"{first.reason}; with engines without values: no change", corrected)
    return MetricRecommendation(
        asked, f"{first.reason}; engines without values were counted against a change", corrected
    )


def replicas_for_total_metric(
    total: int, target: int, pool: WeightedEngines, tolerance: Tolerance, *, for_all: bool
) -> MetricRecommendation:
    """One value for all replicas, in thousandths. ``for_all``: so is the target."""
    reason = f"is {total / 1000:g} in all"
    divisor = target if for_all else target * pool.current
    ratio = total / divisor if divisor else math.inf
    if pool.current and tolerance.covers(ratio):
        return MetricRecommendation(pool.current, f"{reason}, within the tolerance", ratio)
    if for_all and pool.current:
        if not pool.ready and not pool.unready:
            return MetricRecommendation(None, "there are no engines yet")
        return MetricRecommendation(pool.ceil(ratio * sum(pool.ready.values())), reason, ratio)
    return MetricRecommendation(pool.ceil(total / target), reason, ratio if pool.current else 1.0)


def _summed(metric: MetricReading, pool: WeightedEngines) -> MetricReading:
    values = {name: value for name, value in (metric.by_engine or {}).items() if math.isfinite(value)}
    is_lower_bound = not pool.ready.keys() <= values.keys()
    return MetricReading(at_s=metric.at_s, total=sum(values.values()), is_lower_bound=is_lower_bound)


def _mean(total: float, units: float) -> float:
    """In whole thousandths, rounded down as Kubernetes does."""
    return total // units


def _milli(value: float) -> int:
    """In thousandths, rounded up as a Kubernetes quantity is; what a float is off by does not count."""
    return math.ceil(round(value * 1000, 6))


def _target(_: None, policy: AutoscalingPolicySpec) -> TargetStrategy:
    behavior = policy.behavior
    return TargetStrategy(
        policy.metrics, Tolerance(hpa_tolerance(behavior.scale_up), hpa_tolerance(behavior.scale_down))
    )


TARGET: Final = StrategyType(
    summary="takes the policy's ``metrics`` and has no parameters",
    make=_target,
    needs="metrics",
    by_metrics=True,
)
