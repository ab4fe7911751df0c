# SPDX-License-Identifier: Apache-2.0
"""Metrics of scaling: those by which HPAs and KEDA scale, named as llm-d names them, and our own.

A value that is unknown now keeps its last one, so that no series has gaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.registry import Collector

from controller.autoscaler.decision.decision import StageDecision
from controller.autoscaler.decision.situation import EngineState
from controller.kube.metrics_and_health import MetricFamily, encode_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from controller.autoscaler.decision.situation import Situation, TargetSituation
    from controller.autoscaler.reconciler.binding_state import BindingState
    from controller.autoscaler.reconciler.target_resolver import ResolvedTarget

# llm-d's labels, and the kind: a Deployment and a StatefulSet may have one name.
_TARGET: Final = ("variant_name", "namespace", "accelerator_type", "model_name", "variant_kind")
_STAGE: Final = ("namespace", "binding", "stage")
_BINDING: Final = ("namespace", "binding")
# A queue of so many counts as full, as in the gateways.
_FULL_QUEUE = 5.0


class TargetSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One target. ``labels``: values of ``_TARGET``. ``desired``: of the last decision. ``pending``: replicas that
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
    """In a manager's registry. Series of targets and bindings come from what ``follow`` was given at the scrape, so
    they end with their object.
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
            "attache_scaling_reconciles_total",
            "Looks at bindings: decided, waiting (not all is known yet), invalid,"
            " paused, again (a target had changed meanwhile), gone, error",
            ("outcome",),
            registry=registry,
        )
        self._of_outcome: dict[str, Counter] = {}
        self._writes = Counter(
            "attache_scaling_writes_total", "Writes to the API server", ("kind", "verb"), registry=registry
        )
        registry.register(self)

    def set_series_source(self, series: Callable[[], Sequence[BindingSeries]]) -> None:
        """Those of the present term."""
        self._series = series

    def observe_reconcile(self, outcome: str, seconds: float) -> None:
        """A reconciliation has ended."""
        counter = self._of_outcome.get(outcome)
        if counter is None:
            counter = self._of_outcome[outcome] = self._looks.labels(outcome)
        counter.inc()
        self._seconds.observe(seconds)

    def count_write(self, kind: str, verb: str) -> None:
        """One write has been answered."""
        self._writes.labels(kind, verb).inc()

    def collect(self) -> Iterator[Metric]:
        """Called in the thread of a scrape."""
        bindings = self._series()
        yield from _of_targets(bindings)
        yield from _of_bindings(bindings)

    def describe(self) -> Iterator[Metric]:
        """Nothing: what is collected depends on the bindings."""
        return iter(())


def _of_targets(bindings: Sequence[BindingSeries]) -> Iterator[Metric]:
    targets = [(encode_labels(_TARGET, one.labels), binding, one) for binding in bindings for one in binding.targets]

    def family(name: str, documentation: str, value: Callable[[TargetSeries], float], kind: str = "gauge") -> Metric:
        return MetricFamily(name, documentation, kind, [(labels, value(one)) for labels, _, one in targets])

    yield family("wva_desired_replicas", "Replicas that it should have", lambda one: one.desired)
    yield family("wva_current_replicas", "Replicas that it has", lambda one: one.current)
    yield family(
        "wva_desired_ratio",
        "Desired over current replicas; the desired ones where there are none",
        lambda one: one.desired / one.current if one.current else one.desired,
    )
    yield family("attache_scaling_ready_replicas", "Replicas that serve", lambda one: one.ready)
    yield family("attache_scaling_pending_replicas", "Replicas that start", lambda one: one.pending)
    yield family("attache_scaling_blocked", "1 while no more replicas can be had", lambda one: one.blocked)
    yield family("attache_scaling_held", "1 while what was decided is not written", lambda one: one.held)
    yield family("attache_scaling_cost_rate", "Cost of the current replicas in an hour", lambda one: one.cost)
    yield family("wva_replica_scaling", "Writes of replicas", lambda one: one.scalings, "counter")
    decided = [(labels, binding.at_s) for labels, binding, _ in targets]
    yield MetricFamily("wva_last_scaling_decision_timestamp", "When it was last decided", "gauge", decided)
    saturation = [(labels, one.saturation) for labels, one, _ in targets if one.saturation is not None]
    yield MetricFamily("wva_saturation_level", "Mean saturation of the engines, 0 to 1", "gauge", saturation)


def _of_bindings(bindings: Sequence[BindingSeries]) -> Iterator[Metric]:
    stages = [
        ((one.namespace, one.name, stage.stage), stage, encode_labels(_STAGE, (one.namespace, one.name, stage.stage)))
        for one in bindings
        for stage in one.stages
    ]
    by_strategy = [
        (encode_labels((*_STAGE, "strategy"), (*values, one.strategy)), one.replicas)
        for values, stage, _ in stages
        for one in stage.recommendations
        if one.replicas is not None
    ]
    need = [(labels, stage.combined) for _, stage, labels in stages if stage.combined is not None]
    kept = [
        (encode_labels((*_STAGE, "rule"), (*values, rule)), change)
        for values, stage, _ in stages
        for rule, change in _changes(stage).items()
    ]
    unproven = [(labels, not stage.is_proven) for _, stage, labels in stages]
    age = [(encode_labels(_BINDING, (one.namespace, one.name)), one.age_s) for one in bindings]
    message = "What a strategy asks for, in replicas of the first target"
    yield MetricFamily("attache_scaling_strategy_replicas", message, "gauge", by_strategy)
    yield MetricFamily("attache_scaling_need_replicas", "What the strategies ask for together", "gauge", need)
    message = "By how much a rule has changed what the strategies ask for"
    yield MetricFamily("attache_scaling_kept_replicas", message, "gauge", kept)
    message = "1 while a slightly cheaper set of targets may exist"
    yield MetricFamily("attache_scaling_unproven", message, "gauge", unproven)
    yield MetricFamily("attache_scaling_data_age_seconds", "Age of the oldest data", "gauge", age)


def _changes(stage: StageDecision) -> dict[str, float]:
    """By rule."""
    found: dict[str, float] = {}
    for step in stage.steps:
        found[step.rule] = found.get(step.rule, 0.0) + step.after - step.before
    return found


def binding_series(state: BindingState, model_of: Callable[[str], str]) -> BindingSeries | None:
    """Of a binding, from its last result; None before the first. ``model_of``: the model that a ModelServer, by key,
    serves.
    """
    view, result = state.view, state.result
    if view is None or result is None:
        return None
    situated = {one.spec.name: one for each in result.situations for one in each.targets}
    steps = {one.target.spec.name: one for one in result.steps}
    written = {one.name: one.after for one in result.scaled}

    def target(one: ResolvedTarget) -> TargetSeries:
        name = one.spec.name
        known, step = situated.get(name), steps.get(name)
        current = written.get(name, one.found.replicas if one.found is not None else 0)
        desired = state.desired.get(name, current)
        return TargetSeries(
            labels=(one.place[3], one.place[0], one.spec.accelerator or "", model_of(one.server), one.place[2]),
            current=current,
            desired=desired,
            ready=_count(known, EngineState.READY),
            pending=_count(known, EngineState.STARTING) + _count(known, EngineState.UNSCHEDULABLE),
            blocked=name in state.blocked,
            held=step is not None and bool(step.held) and desired != current,
            cost=one.spec.cost * current,
            scalings=state.writes.get(name, 0),
        )

    return BindingSeries(
        namespace=view.namespace,
        name=view.key.partition("/")[2],
        at_s=result.now_s,
        age_s=max((one.freshness.age_s for one in result.situations), default=0.0),
        saturation=mean_saturation(result.situations),
        targets=tuple(target(one) for one in result.resolved if one.found is not None),
        stages=state.stages,
    )


def _count(target: TargetSituation | None, state: EngineState) -> int:
    return 0 if target is None else len(target.engines_in_state(state))


def mean_saturation(situations: Sequence[Situation]) -> float | None:
    """The mean over engines with a report of the larger of cache and queue usage; None if there is none."""
    found = [
        max(one.report.kv_usage or 0.0, min((one.report.waiting or 0.0) / _FULL_QUEUE, 1.0))
        for each in situations
        for one in each.ready_engines
        if one.report is not None and (one.report.kv_usage is not None or one.report.waiting is not None)
    ]
    return sum(found) / len(found) if found else None
