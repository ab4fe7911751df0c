# SPDX-License-Identifier: Apache-2.0
"""Parts of an AutoscalingPolicy: metrics, behaviour, panic, objective, schedules, staleness."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec
from cronsim import CronSim, CronSimError

from controller.api.shared_types import Positive, Replicas, Share
from extproc.api.calendar_windows import parse_time_zone
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Name, NonEmpty, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GATEWAY_METRICS: Final = (
    "requests_in_flight",
    "requests_queued",
    "requests_running",
    "tokens_in_flight",
    "kv_usage",
    "requests_per_second",
)
"""Metrics of source Gateway, by their names in a policy."""


class PrometheusSource(Spec, frozen=True):
    """A query. ``address``: of the server, with http or https. ``query``: in PromQL, with one number as its answer; a
    metric without ``total`` is divided by the replicas, so the query sums. ``secret_ref``: a Secret with any of
    ``token``, ``ca.crt``, ``tls.crt`` and ``tls.key``; changes of it are reloaded.
    """

    address: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]+$", max_length=2048)]
    query: Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
    secret_ref: Name | None = None


class EngineMetricsSource(Spec, frozen=True):
    """The engines' metrics pages. ``port``: of the page; by default that of the ModelServer. ``path``: its path."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    path: NonEmpty = "/metrics"


class MetricTarget(Spec, frozen=True):
    """A metric and its target value. ``name``: of the metric; with source Gateway requests_in_flight, requests_queued,
    requests_running, requests_per_second, tokens_in_flight or kv_usage, with source Resource cpu or memory, as a share
    of the pods' requests. ``value``: the target of one replica. ``source``: where the metric is read: extproc
    (Gateway), the engines' metrics pages (Engine), Prometheus, or Kubernetes' resource metrics (Resource). ``engine``:
    port and path of the engines' metrics page. ``prometheus``: the server and the query. ``total``: ``value`` is the
    target of all replicas together.
    """

    CEL: ClassVar = (
        CelRule(
            "(has(self.source) && self.source == 'Prometheus') == has(self.prometheus)",
            "source: Prometheus and the field prometheus go together",
        ),
        CelRule(
            "!has(self.engine) || (has(self.source) && self.source == 'Engine')",
            "the field engine is for source: Engine",
        ),
    )

    name: NonEmpty
    value: Positive
    source: Literal["Gateway", "Engine", "Prometheus", "Resource"] = "Gateway"
    engine: EngineMetricsSource | None = None
    prometheus: PrometheusSource | None = None
    total: bool = False


class ScalingRule(Spec, frozen=True):
    """The largest change in a period, as in HorizontalPodAutoscaler v2. ``type``: unit of ``value``. ``value``:
    replicas, or per cent of them. ``period_seconds``: the period.
    """

    type: Literal["Pods", "Percent"]
    value: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    period_seconds: Annotated[int, msgspec.Meta(ge=1, le=1800)]


class ScalingRules(Spec, frozen=True):
    """One direction, as in HorizontalPodAutoscaler v2. ``stabilization_window_seconds``: the most careful
    recommendation of this time counts. ``select_policy``: which of the ``policies`` counts. ``policies``: limits of
    change. ``tolerance``: deviations from the target below this share do not scale.
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
    """A short window that decides while load rises steeply. ``window_percent``: its length, as a percentage of the
    stable window. ``threshold_percent``: panic begins when the replicas recommended by the short window reach this
    percentage of the ready replicas. ``hold``: how long panic lasts after that, without scale-in.
    """

    window_percent: Annotated[float, msgspec.Meta(gt=0, le=100)] = 10.0
    threshold_percent: Annotated[float, msgspec.Meta(ge=110, le=1000)] = 200.0
    hold: Duration = Duration("60s")


class LatencyObjective(Spec, frozen=True):
    """``ttft``: time to first token. ``tpot``: time for each further token. ``percentile``: of requests that have
    them.
    """

    CEL: ClassVar = (CelRule("has(self.ttft) || has(self.tpot)", "write ttft, tpot or both"),)

    ttft: Duration | None = None
    tpot: Duration | None = None
    percentile: Annotated[float, msgspec.Meta(gt=0, lt=100)] = 90.0


class ScaleToZero(Spec, frozen=True):
    """``idle``: time without requests before the last replica is removed. ``activation_replicas``: replicas started for
    the first request. ``hold_timeout``: how long that request is held for them.
    """

    idle: Duration = Duration("10m")
    activation_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    hold_timeout: Duration = Duration("10m")


class Schedule(Spec, frozen=True):
    """Bounds of replicas at certain times. ``start``: when the bounds begin, as a cron line. ``duration``: how long
    they hold. ``time_zone``: of ``start``, such as Europe/Berlin. ``min_replicas`` and ``max_replicas``: the bounds.
    """

    CEL: ClassVar = (
        CelRule("has(self.minReplicas) || has(self.maxReplicas)", "write minReplicas, maxReplicas or both"),
    )

    start: NonEmpty
    duration: Duration
    time_zone: NonEmpty = "UTC"
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None


class StalenessLimits(Spec, frozen=True):
    """``soft``: data older than this do not scale in. ``hard``: data older than this are ignored."""

    soft: Duration = Duration("15s")
    hard: Duration = Duration("60s")


def schedule_mistakes(schedules: Iterable[Schedule]) -> Iterator[str]:
    """One message for each schedule that cannot be parsed; such a schedule is ignored."""
    for one in schedules:
        try:
            CronSim(one.start, datetime.fromtimestamp(0, UTC).astimezone(parse_time_zone(one.time_zone)))
        except (CronSimError, ValueError) as error:
            yield f"schedule '{one.start}' in {one.time_zone}: {error}"
