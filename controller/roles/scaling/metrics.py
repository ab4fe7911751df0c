# SPDX-License-Identifier: Apache-2.0
"""Metrics of scaling: those by which HPAs and KEDA scale, named as llm-d names them, and our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.autoscale.decision import StageDecision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

# llm-d's labels, and the kind: a Deployment and a StatefulSet may have one name.
_TARGET: Final = ("variant_name", "namespace", "accelerator_type", "model_name", "variant_kind")
_STAGE: Final = ("namespace", "binding", "stage")


class TargetSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One target. ``labels``: values of ``_TARGET``. ``desired``: the last that was known. ``pending``: replicas that
    start. ``cost``: of its current replicas in an hour.
    """

    labels: tuple[str, str, str, str, str]
    current: int
    desired: int
    ready: int
    pending: int
    blocked: bool
    held: bool
    cost: float
    scalings: int


class BindingSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One binding: its last decision. ``at_s``: when that was. ``saturation``: the mean of its engines, 0 to 1."""

    namespace: str
    name: str
    at_s: float
    age_s: float
    saturation: float | None
    targets: tuple[TargetSeries, ...]
    stages: tuple[StageDecision, ...]


class ScalingMetrics(Collector):
    """In a manager's registry. Series of targets and bindings come from what ``follow`` was given at the scrape, so they end
    with their object.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series: Callable[[], Sequence[BindingSeries]] = tuple
        self._seconds = Histogram(
            "attache_scaling_decision_seconds",
            "Time of a look at a binding, with its writes",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0),
            registry=registry,
        )
        self._looks = Counter(
            "attache_scaling_looks_total",
            "Looks at bindings: decided, waiting (not all is known yet), invalid, paused, again (a target had changed "
            "meanwhile), gone, error",
            ("outcome",),
            registry=registry,
        )
        self._writes = Counter(
            "attache_scaling_writes_total", "Writes to the API server", ("kind", "verb"), registry=registry
        )
        registry.register(self)

    def follow(self, series: Callable[[], Sequence[BindingSeries]]) -> None:
        """Those of the present term."""
        self._series = series

    def looked(self, outcome: str, seconds: float) -> None:
        """One look has ended."""
        self._looks.labels(outcome).inc()
        self._seconds.observe(seconds)

    def wrote(self, kind: str, verb: str) -> None:
        """One write has been answered."""
        self._writes.labels(kind, verb).inc()

    def collect(self) -> Iterator[Metric]:
        """Called in the thread of a scrape."""
        bindings = self._series()
        targets = [(one, each) for one in bindings for each in one.targets]
        yield from _of_targets([each for _, each in targets])
        yield from _of_bindings(bindings)
        total = CounterMetricFamily("wva_replica_scaling", "Writes of replicas", labels=_TARGET)
        for _, one in targets:
            total.add_metric(one.labels, float(one.scalings))
        yield total
        decided = GaugeMetricFamily("wva_last_scaling_decision_timestamp", "When it was last decided", labels=_TARGET)
        saturation = GaugeMetricFamily("wva_saturation_level", "Mean saturation of the engines, 0 to 1", labels=_TARGET)
        for binding, one in targets:
            decided.add_metric(one.labels, binding.at_s)
            if binding.saturation is not None:
                saturation.add_metric(one.labels, binding.saturation)
        yield decided
        yield saturation

    def describe(self) -> Iterator[Metric]:
        """Nothing: what is collected depends on the bindings."""
        return iter(())


def _of_targets(targets: list[TargetSeries]) -> Iterator[Metric]:
    def family(name: str, said: str, value: Callable[[TargetSeries], float]) -> Metric:
        made = GaugeMetricFamily(name, said, labels=_TARGET)
        for one in targets:
            made.add_metric(one.labels, value(one))
        return made

    yield family("wva_desired_replicas", "Replicas that it should have", lambda one: one.desired)
    yield family("wva_current_replicas", "Replicas that it has", lambda one: one.current)
    yield family(
        "wva_desired_ratio",
        "Desired over current replicas; the desired ones where there are none",
        lambda one: one.desired / one.current if one.current else float(one.desired),
    )
    yield family("attache_scaling_ready_replicas", "Replicas that serve", lambda one: one.ready)
    yield family("attache_scaling_pending_replicas", "Replicas that start", lambda one: one.pending)
    yield family("attache_scaling_blocked", "1 while no more replicas can be had", lambda one: float(one.blocked))
    yield family("attache_scaling_held", "1 while what was decided is not written", lambda one: float(one.held))
    yield family("attache_scaling_cost_rate", "Cost of the current replicas in an hour", lambda one: one.cost)


def _of_bindings(bindings: Sequence[BindingSeries]) -> Iterator[Metric]:
    by_law = GaugeMetricFamily(
        "attache_scaling_law_replicas", "What a law asks for, in replicas of the first target", labels=(*_STAGE, "law")
    )
    need = GaugeMetricFamily("attache_scaling_need_replicas", "What the laws ask for together", labels=_STAGE)
    kept = GaugeMetricFamily(
        "attache_scaling_kept_replicas",
        "By how much a rule has changed what the laws ask for",
        labels=(*_STAGE, "rule"),
    )
    age = GaugeMetricFamily(
        "attache_scaling_data_age_seconds", "Age of the oldest data", labels=("namespace", "binding")
    )
    for binding in bindings:
        for stage in binding.stages:
            labels = (binding.namespace, binding.name, stage.stage)
            for one in stage.recommendations:
                if one.replicas is not None:
                    by_law.add_metric((*labels, one.law), one.replicas)
            if stage.combined is not None:
                need.add_metric(labels, stage.combined)
            changes: dict[str, float] = {}
            for step in stage.steps:
                changes[step.rule] = changes.get(step.rule, 0.0) + step.after - step.before
            for rule, change in changes.items():
                kept.add_metric((*labels, rule), change)
        age.add_metric((binding.namespace, binding.name), binding.age_s)
    yield from (by_law, need, kept, age)
