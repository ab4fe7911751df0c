# SPDX-License-Identifier: Apache-2.0
"""AutoscalingPolicy and AutoscalingPolicyBinding: how to scale, and what."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from controller.resources.common import ObjectReference, Replicas, ShortName
from controller.resources.statuses import AutoscalingPolicyBindingStatus, AutoscalingPolicyStatus
from extproc.config.cel import Rule
from extproc.config.quantities import Duration
from extproc.config.spec import Metadata, Name, NonEmpty, Spec, keyed_by

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class MetricTarget(Spec, frozen=True):
    """A metric and the value that it should have, a replica. ``name``: of the metric. ``value``: the target. ``source``:
    who knows it: extproc (``Gateway``), the engines' own pages, Prometheus, or Kubernetes' resource metrics.
    ``query``: for Prometheus. ``total``: ``value`` is for all replicas together.
    """

    CEL: ClassVar = (
        Rule("(self.source == 'Prometheus') == has(self.query)", "source: Prometheus and the field query go together"),
    )

    name: NonEmpty
    value: Positive
    source: Literal["Gateway", "Engine", "Prometheus", "Resource"] = "Gateway"
    query: NonEmpty | None = None
    total: bool = False


class ScalingRule(Spec, frozen=True):
    """The most that may change in a period, as in HorizontalPodAutoscaler v2. ``type``: what ``value`` counts.
    ``value``: how many replicas, or per cent of them. ``period_seconds``: the period.
    """

    type: Literal["Pods", "Percent"]
    value: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    period_seconds: Annotated[int, msgspec.Meta(ge=1, le=1800)]


class ScalingRules(Spec, frozen=True):
    """One direction, as in HorizontalPodAutoscaler v2. ``stabilization_window_seconds``: the most careful recommendation
    of this time counts. ``select_policy``: which of the ``policies`` counts. ``policies``: limits of change.
    ``tolerance``: differences from the target below this share change nothing.
    """

    stabilization_window_seconds: Annotated[int, msgspec.Meta(ge=0, le=3600)] | None = None
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    policies: Annotated[tuple[ScalingRule, ...], msgspec.Meta(max_length=16)] = ()
    tolerance: Share | None = None


class Behavior(Spec, frozen=True):
    """``scale_up`` and ``scale_down``: the block of HorizontalPodAutoscaler v2, with its meaning."""

    scale_up: ScalingRules = ScalingRules()
    scale_down: ScalingRules = ScalingRules()


class Panic(Spec, frozen=True):
    """A short window that counts while load rises steeply. ``window_percent``: its length, of the stable one.
    ``threshold_percent``: it counts when it asks for this share of what is there. ``hold``: no scale-in for so long.
    """

    window_percent: Annotated[float, msgspec.Meta(gt=0, le=100)] = 10.0
    threshold_percent: Annotated[float, msgspec.Meta(ge=110, le=1000)] = 200.0
    hold: Duration = Duration("60s")


class LatencyObjective(Spec, frozen=True):
    """``ttft``: time to first token. ``tpot``: time for each further token. ``percentile``: of requests that have them."""

    CEL: ClassVar = (Rule("has(self.ttft) || has(self.tpot)", "write ttft, tpot or both"),)

    ttft: Duration | None = None
    tpot: Duration | None = None
    percentile: Annotated[float, msgspec.Meta(gt=0, lt=100)] = 90.0


class ScaleToZero(Spec, frozen=True):
    """``idle``: no requests for so long. ``activation_replicas``: how many start for the first request. ``hold_timeout``:
    how long it waits for them.
    """

    idle: Duration = Duration("10m")
    activation_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    hold_timeout: Duration = Duration("10m")


class Schedule(Spec, frozen=True):
    """Bounds that hold at some times. ``start``: a cron line that begins it. ``duration``: how long it holds.
    ``time_zone``: of ``start``. ``min_replicas`` and ``max_replicas``: the bounds.
    """

    CEL: ClassVar = (Rule("has(self.minReplicas) || has(self.maxReplicas)", "write minReplicas, maxReplicas or both"),)

    start: NonEmpty
    duration: Duration
    time_zone: NonEmpty = "UTC"
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None


class Staleness(Spec, frozen=True):
    """``soft``: older data do not scale in. ``hard``: older data count for nothing."""

    soft: Duration = Duration("15s")
    hard: Duration = Duration("60s")


class Strategy(Spec, frozen=True):
    """One law. ``name``: which. ``parameters``: its own."""

    name: Literal[
        "Work", "Target", "Concurrency", "Saturation", "SpareCapacity", "Tokens", "LatencyObjective", "Predictive"
    ]
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class AutoscalingPolicySpec(Spec, frozen=True):
    """How to scale; one policy serves many bindings.

    ``strategies``: laws; the largest answer scales out, and only if all agree, in. ``metrics``: targets of the law
    ``Target``. ``objective``: latencies to keep. ``behavior``: how fast. ``panic``: for steep rises. ``scale_to_zero``:
    whether, and when. ``schedules``: bounds by time. ``staleness``: how old data may be. ``mode``: what is done with
    decisions.
    """

    strategies: Annotated[
        tuple[Strategy, ...], msgspec.Meta(min_length=1, max_length=8, extra_json_schema=keyed_by("name"))
    ] = (Strategy(name="Work"),)
    metrics: Annotated[tuple[MetricTarget, ...], msgspec.Meta(max_length=16, extra_json_schema=keyed_by("name"))] = ()
    objective: LatencyObjective | None = None
    behavior: Behavior = Behavior()
    panic: Panic | None = None
    scale_to_zero: ScaleToZero | None = None
    schedules: Annotated[tuple[Schedule, ...], msgspec.Meta(max_length=16)] = ()
    staleness: Staleness = Staleness()
    mode: Literal["Auto", "Recommend", "Export", "Paused", "ScaleUpOnly"] = "Auto"

    CEL: ClassVar = (
        Rule(
            "!has(self.strategies) || !self.strategies.exists(one, one.name == 'Target') || has(self.metrics)",
            "the strategy Target needs metrics",
        ),
        Rule(
            "!has(self.strategies) || !self.strategies.exists(one, one.name == 'LatencyObjective') || has(self.objective)",
            "the strategy LatencyObjective needs an objective",
        ),
    )


class ScaleTarget(Spec, frozen=True):
    """Something with replicas. ``name``: of the target, in the status and in ratios. ``ref``: the object, by its scale subresource. ``role``: of a ModelInfer's groups, if not
    the groups themselves. ``min_replicas`` and ``max_replicas``: bounds. ``cost``: of a replica, relative to other
    targets. ``accelerator``: its kind of GPU. ``priority``: higher is filled first. ``spot``: may be taken away.
    """

    CEL: ClassVar = (Rule("self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas"),)

    name: ShortName
    ref: ObjectReference
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    role: NonEmpty | None = None
    min_replicas: Replicas = 1
    cost: Positive = 1.0
    accelerator: NonEmpty | None = None
    priority: int = 0
    spot: bool = False


class RatioConstraint(Spec, frozen=True):
    """How many replicas of one target go with one of another. ``numerator`` and ``denominator``: targets by name.
    ``min`` and ``max``: of the ratio.
    """

    CEL: ClassVar = (Rule("self.min <= self.max", "min is above max"),)

    numerator: ShortName
    denominator: ShortName
    min: Positive
    max: Positive


class AutoscalingPolicyBindingSpec(Spec, frozen=True):
    """What a policy scales. ``policy_ref``: the policy, of the same namespace. ``targets``: what carries the load
    together. ``allocation``: how replicas are shared out among several targets. ``ratios``: between targets.
    """

    CEL: ClassVar = (
        Rule(
            "!has(self.ratios) || self.ratios.all(one, self.targets.exists(target, target.name == one.numerator) && "
            "self.targets.exists(target, target.name == one.denominator))",
            "a ratio names a target that is not there",
        ),
    )

    policy_ref: Name
    targets: Annotated[
        tuple[ScaleTarget, ...], msgspec.Meta(min_length=1, max_length=16, extra_json_schema=keyed_by("name"))
    ]
    allocation: Literal["Cheapest", "Priority", "Weights", "Expansion"] = "Cheapest"
    ratios: Annotated[tuple[RatioConstraint, ...], msgspec.Meta(max_length=4)] = ()


class AutoscalingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """An AutoscalingPolicy object."""

    metadata: Metadata
    spec: AutoscalingPolicySpec = AutoscalingPolicySpec()
    status: AutoscalingPolicyStatus = AutoscalingPolicyStatus()


class AutoscalingPolicyBinding(msgspec.Struct, frozen=True, kw_only=True):
    """An AutoscalingPolicyBinding object."""

    metadata: Metadata
    spec: AutoscalingPolicyBindingSpec
    status: AutoscalingPolicyBindingStatus = AutoscalingPolicyBindingStatus()
