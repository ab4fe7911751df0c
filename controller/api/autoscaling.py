# SPDX-License-Identifier: Apache-2.0
"""What an AutoscalingPolicy is made of: metrics, behaviour, panic, objective, schedules, staleness."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from controller.api.common import Positive, Replicas, Share
from extproc.api.quantities import Duration
from extproc.api.spec import Name, NonEmpty, Rule, Spec


class PrometheusSource(Spec, frozen=True):
    """A query. ``address``: of the server, with http or https. ``query``: in PromQL, with one number as its answer; a
    metric without ``total`` is divided by the replicas, so the query sums. ``secret_ref``: a Secret with any of
    ``token``, ``ca.crt``, ``tls.crt`` and ``tls.key``, which are read anew when they change.
    """

    address: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]+$", max_length=2048)]
    query: Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
    secret_ref: Name | None = None


class EngineSource(Spec, frozen=True):
    """The engines' own pages. ``port``: of the page; that of the ModelServer, if left out. ``path``: its path."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    path: NonEmpty = "/metrics"


class MetricTarget(Spec, frozen=True):
    """A metric and the value that it should have. ``name``: of the metric; of Gateway requests_in_flight,
    requests_queued, requests_running, requests_per_second, tokens_in_flight or kv_usage, of Resource cpu or memory, as
    a share of what pods request. ``value``: the target, of one replica. ``source``: who knows it, extproc (Gateway),
    the engines' own pages (Engine), Prometheus, or Kubernetes' resource metrics (Resource). ``engine``: where on the
    engines.
    ``prometheus``: which server, and its query. ``total``: ``value`` is for all replicas together.
    """

    CEL: ClassVar = (
        Rule(
            "(has(self.source) && self.source == 'Prometheus') == has(self.prometheus)",
            "source: Prometheus and the field prometheus go together",
        ),
        Rule(
            "!has(self.engine) || (has(self.source) && self.source == 'Engine')",
            "the field engine is for source: Engine",
        ),
    )

    name: NonEmpty
    value: Positive
    source: Literal["Gateway", "Engine", "Prometheus", "Resource"] = "Gateway"
    engine: EngineSource | None = None
    prometheus: PrometheusSource | None = None
    total: bool = False


class ScalingRule(Spec, frozen=True):
    """The most that may change in a period, as in HorizontalPodAutoscaler v2. ``type``: what ``value`` counts.
    ``value``: how many replicas, or per cent of them. ``period_seconds``: the period.
    """

    type: Literal["Pods", "Percent"]
    value: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    period_seconds: Annotated[int, msgspec.Meta(ge=1, le=1800)]


class ScalingRules(Spec, frozen=True):
    """One direction, as in HorizontalPodAutoscaler v2. ``stabilization_window_seconds``: the most careful
    recommendation of this time counts. ``select_policy``: which of the ``policies`` counts. ``policies``: limits of
    change.
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
    """``ttft``: time to first token. ``tpot``: time for each further token. ``percentile``: of requests that have
    them.
    """

    CEL: ClassVar = (Rule("has(self.ttft) || has(self.tpot)", "write ttft, tpot or both"),)

    ttft: Duration | None = None
    tpot: Duration | None = None
    percentile: Annotated[float, msgspec.Meta(gt=0, lt=100)] = 90.0


class ScaleToZero(Spec, frozen=True):
    """``idle``: no requests for so long. ``activation_replicas``: how many start for the first request.
    ``hold_timeout``: how long it waits for them.
    """

    idle: Duration = Duration("10m")
    activation_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    hold_timeout: Duration = Duration("10m")


class Schedule(Spec, frozen=True):
    """Bounds that hold at some times. ``start``: a cron line that begins it. ``duration``: how long it holds.
    ``time_zone``: of ``start``, such as Europe/Berlin. ``min_replicas`` and ``max_replicas``: the bounds.
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
