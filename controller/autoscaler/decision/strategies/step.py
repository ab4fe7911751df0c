# SPDX-License-Identifier: Apache-2.0
"""Steps: the further a metric is from its target, the more replicas are added or removed at once.

Source: Amazon EC2 Auto Scaling, "Step and simple scaling policies". With ``n`` replicas, ``r`` of them ready, and for
each metric of the policy its value of one ready replica (of all, if ``total``) over its target::

    s = the largest of these ratios
    the step of scale_up with the largest ratio below s:     max(n, r + change of r)
    else that of scale_down with the smallest ratio above s: n - change of n

``Percent`` is rounded up, so that a small number changes, too. Replicas that are starting count towards a step and are
not ordered twice, as instances that warm up do there. The cooldown is the behaviour block, with HPA's defaults. What is
different from the original: one ratio for all metrics, instead of an alarm and a policy for each; and the last replica
stays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, NamedTuple

import msgspec

from controller.api.autoscaling import MetricTarget
from controller.api.shared_types import Count, Positive
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.situation import EngineState, MetricReading
from controller.autoscaler.decision.strategies.engine_loads import (
    capacity_after_scale_in,
    gateway_metric,
    ready_units,
    round_up_units,
)
from extproc.api.spec import CelRule, Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation


class StepAdjustment(Spec, frozen=True):
    """``ratio``: of a metric to its target, beyond which the step is taken. ``type``: what ``value`` counts. ``value``:
    how many replicas, or per cent of them.
    """

    ratio: Positive
    value: Count
    type: Literal["Pods", "Percent"] = "Pods"

    def replica_delta(self, replicas: float, situation: Situation) -> float:
        """How many of ``replicas`` it adds or takes away."""
        if self.type == "Pods":
            return float(self.value)
        return round_up_units(replicas * self.value / 100, situation)


Steps = Annotated[tuple[StepAdjustment, ...], msgspec.Meta(max_length=16)]


class StepParameters(Spec, frozen=True):
    """Steps by the largest ratio of a metric to its target. ``scale_up``: above their ratio, so many more than are
    ready; of several the one with the largest ratio is taken. ``scale_down``: below their ratio, so many fewer; of
    several the one with the smallest ratio is taken.
    """

    CEL: ClassVar = (
        CelRule(
            "self.scaleUp.all(up, self.scaleDown.all(down, down.ratio <= up.ratio))",
            "the ratios of scaleDown must not be above those of scaleUp; what lies between is the zone without changes",
        ),
    )

    scale_up: Steps = (
        StepAdjustment(ratio=1.0, value=1),
        StepAdjustment(ratio=2.0, value=50, type="Percent"),
    )
    scale_down: Steps = (StepAdjustment(ratio=0.5, value=1),)


class MetricRatio(NamedTuple):
    """Of a metric to its target. ``value``: None if unknown; ``problem`` has the reason. ``is_sure``: it is no
    larger.
    """

    value: float | None
    problem: str = ""
    is_sure: bool = True


class StepStrategy(msgspec.Struct, frozen=True):
    """``metrics``: of the policy, with their targets."""

    parameters: StepParameters = StepParameters()
    metrics: tuple[MetricTarget, ...] = ()
    name: str = "Step"

    def recommend(self, situation: Situation, memory: None) -> tuple[Recommendation, None]:  # noqa: ARG002 - it needs none
        """One step up or down, or the current replicas."""
        found = {one.name: metric_ratio(one, situation) for one in self.metrics}
        known = {name: one.value for name, one in found.items() if one.value is not None}
        doubts = "; ".join(f"{name}: {one.problem}" for name, one in found.items() if one.value is None)
        if not known:
            return Recommendation(self.name, None, doubts or "there are no metrics"), None
        name = max(known, key=known.__getitem__)
        ratio, current, ready = known[name], situation.current_replicas, ready_units(situation)
        inputs = {f"{one}_ratio": value for one, value in known.items()} | {"ready_replicas": ready}
        reason = f"{name} is {ratio:.2f} times its target"
        above = [one for one in self.parameters.scale_up if ratio > one.ratio]
        if above:
            step = max(above, key=lambda one: one.ratio)
            desired = max(current, ready + step.replica_delta(ready, situation))
            return Recommendation(self.name, desired, f"{reason}, above {step.ratio:g}", inputs), None
        below = [one for one in self.parameters.scale_down if ratio < one.ratio]
        if not below:
            return Recommendation(self.name, current, f"{reason}: no step", inputs), None
        step = min(below, key=lambda one: one.ratio)
        if doubts or not all(one.is_sure for one in found.values()):
            why = doubts or "values of some engines are unknown"
            return Recommendation(self.name, None, f"{why}; {reason}, which is no reason to scale in", inputs), None
        desired = capacity_after_scale_in(situation, step.replica_delta(current, situation))
        return Recommendation(self.name, desired, f"{reason}, below {step.ratio:g}", inputs), None


def metric_ratio(wanted: MetricTarget, situation: Situation) -> MetricRatio:
    """The mean of ready engines over the target; of a total its share of one of them."""
    if wanted.source == "Gateway":
        metric = gateway_metric(wanted.name, situation)
    else:
        metric = situation.metrics.get(wanted.name, MetricReading(at_s=situation.now_s, problem="no value yet"))
    units = {
        engine.name: target.capacity
        for target in situation.targets
        for engine in target.engines_in_state(EngineState.READY)
    }
    total, is_sure = metric.total, not metric.is_lower_bound
    if metric.by_engine is not None:
        values = {one: value for one, value in metric.by_engine.items() if one in units and math.isfinite(value)}
        is_sure = values.keys() == units.keys()
        # a mean of those that have a value
        units = {one: units[one] for one in values}
        total = sum(values.values())
    if total is None or not math.isfinite(total):
        return MetricRatio(None, metric.problem or "its value is not a number")
    replicas = 1.0 if wanted.total else sum(units.values())
    if not replicas:
        return MetricRatio(None, "no ready engine has a value")
    return MetricRatio(total / (wanted.value * replicas), is_sure=is_sure)


STEP: Final = StrategyType(
    summary="more at once the further metrics are from their targets",
    make=lambda parameters, policy: StepStrategy(parameters, policy.metrics),
    defaults=StepParameters(),
    needs="metrics",
    by_metrics=True,
)
