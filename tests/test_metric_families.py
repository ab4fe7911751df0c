# SPDX-License-Identifier: Apache-2.0
"""A name of a metric means one thing, whichever of our processes says it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from controller.agents.downloader.progress import ProgressMetrics
from controller.agents.runtime.metrics import AgentCounters, EngineMetricsPage, render_agent_metrics
from controller.autoscaler.decision.decision import AppliedRule, Recommendation, StageDecision
from controller.autoscaler.reconciler.metrics import BindingSeries, ScalingMetrics, TargetSeries
from controller.bundle.acknowledgements import AcknowledgementPoller
from controller.bundle.metrics import BundleMetrics
from controller.bundle.sync import BundleSync
from controller.gateway.metrics import GatewayMetrics, PickerMetrics
from controller.kube.manager_metrics import ManagerMetrics, observe_api_calls
from controller.models.model_status_metrics import ModelMetrics
from extproc.api.config_loader import ConfigDirectory
from extproc.engines.dialects import FAMILIES
from extproc.metrics.request_metrics import Metrics, TlsMetrics
from extproc.runtime.api_translator_metrics import TranslatorMetrics
from tests.controller.agents.runtime.test_metrics import STATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent
STAGE = StageDecision("Both", (Recommendation("Work", 1.0, ""),), 1.0, (AppliedRule("Limited", 1.0, 2.0, ""),))
TARGET = TargetSeries(
    labels=("llama", "default", "H100", "m", "Deployment"),
    current=1,
    desired=1,
    ready=1,
    pending=0,
    blocked=False,
    held=False,
    cost=1.0,
    scalings=0,
)
BINDING = BindingSeries(
    namespace="default", name="b", at_s=0.0, age_s=0.0, saturation=0.5, targets=(TARGET,), stages=(STAGE,)
)


class Said(msgspec.Struct, frozen=True):
    """What one process says of a family. ``labels``: its own, those of its samples, and not the bound of a bucket."""

    text: str
    kind: str
    labels: frozenset[str]


def registries(folder: Path) -> Iterator[CollectorRegistry]:
    """Of all our processes."""
    extproc = Metrics(list, lambda: 0.0, lambda: 0.0).registry
    TlsMetrics(extproc)
    yield extproc
    manager, gateway = ManagerMetrics().registry, GatewayMetrics().registry
    ScalingMetrics(manager).set_series_source(lambda: [BINDING])
    ModelMetrics(manager)
    observe_api_calls(manager)
    observe_api_calls(gateway)
    yield manager
    PickerMetrics(gateway, "default/llama")
    yield gateway
    bundle = CollectorRegistry()
    acknowledgements = AcknowledgementPoller(lambda _: None, "bootstrap.json")
    bundle.register(BundleMetrics(BundleSync(ConfigDirectory(folder), folder, "path", acknowledgements)))
    yield bundle
    yield ProgressMetrics().registry
    yield TranslatorMetrics().registry


def of_agents() -> Iterator[tuple[str, Said]]:
    """They write their page themselves."""
    values = {one.name: {"m": 1.0} for one in FAMILIES if one.kind != "histogram"}
    for family in text_string_to_metric_families(
        render_agent_metrics(EngineMetricsPage(values, {}), STATE, AgentCounters())
    ):
        yield said_of(family, ())


def said_of(family: Any, more: Iterable[str]) -> tuple[str, Said]:  # noqa: ANN401 - of several libraries' kinds
    labels = {*more, *getattr(family, "_labelnames", ()), *(name for one in family.samples for name in one.labels)}
    return family.name, Said(family.documentation, family.type, frozenset(labels - {"le"}))


def families(folder: Path) -> Iterator[tuple[str, Said]]:
    for registry in registries(folder):
        for collector in list(registry._collector_to_names):
            for family in collector.collect():
                yield said_of(family, getattr(collector, "_labelnames", ()))
    yield from of_agents()


def test_no_two_families_of_one_name_differ_in_text_kind_or_labels(tmp_path: Path) -> None:
    found: dict[str, set[Said]] = defaultdict(set)
    for name, said in families(tmp_path):
        found[name].add(said)
    assert len(found) > 100
    assert {name: said for name, said in found.items() if len(said) > 1} == {}


def test_no_family_comes_twice_from_one_process(tmp_path: Path) -> None:
    for registry in registries(tmp_path):
        names = [family.name for collector in list(registry._collector_to_names) for family in collector.collect()]
        assert len(names) == len(set(names))
