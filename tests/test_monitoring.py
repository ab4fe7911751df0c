# SPDX-License-Identifier: Apache-2.0
"""What manifests/monitoring asks Prometheus for is exported by our processes, under these names and with these
labels.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from controller.autoscaler.reconciler.metrics import ScalingMetrics
from controller.bundle.acknowledgements import AcknowledgementPoller
from controller.bundle.metrics import BundleMetrics
from controller.bundle.sync import BundleSync
from controller.gateway.metrics import GatewayMetrics, PickerMetrics
from controller.kube.manager_metrics import ManagerMetrics, observe_api_calls
from controller.models.model_status_metrics import ModelMetrics
from controller.usage.ingest import IngestCounters
from controller.usage.ingest_metrics import UsageIngestMetrics
from extproc.api.config_loader import ConfigDirectory
from extproc.metrics.request_metrics import Metrics, TlsMetrics
from extproc.runtime.api_translator_metrics import TranslatorMetrics
from extproc.translate.directive import TranslationDirective
from tests.docs_examples import EXAMPLES
from tests.programs import program
from tests.test_metric_families import BINDING
from tools.dashboard import FILE, dashboard

MANIFESTS = Path(__file__).parent.parent / "manifests"
ALERTS = MANIFESTS / "monitoring" / "common" / "alerts.yaml"
# Prometheus' own, of whatever it scrapes in a pod
_OF_TARGETS = {"pod", "namespace", "instance", "job", "container"}
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported(folder: Path) -> dict[str, set[str]]:
    """Labels by the name of each series, of all our processes."""
    extproc, follower, gateway = Metrics(list, lambda: 0.0, lambda: 0.0).registry, CollectorRegistry(), GatewayMetrics()
    TlsMetrics(extproc)
    PickerMetrics(gateway.registry, "default/llama")
    acknowledgements = AcknowledgementPoller(lambda _: None, "bootstrap.json")
    follower.register(BundleMetrics(BundleSync(ConfigDirectory(folder), folder, "path", acknowledgements)))
    follower.register(UsageIngestMetrics(IngestCounters(), lambda: 0.0))
    manager = ManagerMetrics().registry
    ScalingMetrics(manager).set_series_source(lambda: [BINDING])
    one = {"metadata": {"namespace": "default", "name": "llama"}, "spec": {}, "status": {"phase": "Loaded"}}
    ModelMetrics(manager).set_objects_source(lambda: ([one], []))
    observe_api_calls(manager)
    found: dict[str, set[str]] = {}
    translator = TranslatorMetrics()
    translator.on_request_ended(TranslationDirective("messages", "chat"), "answered")
    for registry in (extproc, follower, gateway.registry, manager, translator.registry):
        for collector in list(registry._collector_to_names):
            families: list[Any] = list(collector.collect())
            for family in families:
                labels = set(getattr(family, "_labelnames", ())) | set(getattr(collector, "_labelnames", ()))
                for sample in family.samples:
                    labels |= set(sample.labels)
                for suffix in _SUFFIXES[family.type]:
                    found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> dict[str, set[str]]:
    """Labels by the name of each series that rules record."""
    return {
        rule["record"]: {label.strip() for label in re.findall(r"\bby \(([^)]*)\)", rule["expr"])[0].split(",")}
        for rule in rules()
        if "record" in rule
    }


def expressions() -> dict[str, str]:
    """By what they are for."""
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def used_labels(expression: str) -> set[str]:
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    matched = re.findall(r"\{([^}]*)\}", expression)
    found = {label.strip() for group in grouped for label in group.split(",")}
    return found | {re.split("[=!]", pair)[0].strip() for group in matched for pair in group.split(",")}


@pytest.mark.parametrize(("what", "expression"), sorted(expressions().items()))
def test_an_expression_uses_series_and_labels_that_there_are(what: str, expression: str, tmp_path: Path) -> None:
    known = exported(tmp_path) | recorded()
    series = re.findall(r"\battache[_:][a-z0-9_:]+", expression)
    assert series, what
    assert set(series) <= known.keys()
    there = set.union(*(known[one] for one in series)) | _OF_TARGETS
    assert used_labels(expression) <= there
    assert expression.count("(") == expression.count(")")


def test_what_alerts_say_uses_labels_that_their_expressions_keep() -> None:
    for rule in alerts():
        said = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        labels = [labels for name, labels in recorded().items() if name in rule["expr"]]
        if grouped:
            assert said <= {label.strip() for label in grouped[0].split(",")}, rule["alert"]
        elif labels:
            assert said <= set.intersection(*labels), rule["alert"]
        else:
            assert said <= _OF_TARGETS, rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_names_of_alerts_differ() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 10


def test_the_example_of_receivers_names_alerts_that_there_are() -> None:
    page = (MANIFESTS.parent / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(route:.*?)```", page, re.DOTALL)
    example = yaml.safe_load(text)
    matchers = [
        one for rule in example["inhibit_rules"] for side in ("source", "target") for one in rule[f"{side}_matchers"]
    ]
    named = {name for one in matchers for name in re.findall(r"\w+", one.partition("=")[2])}
    assert len(named) >= 4
    assert named <= {rule["alert"] for rule in alerts()}
    receivers = {example["route"]["receiver"], *(one["receiver"] for one in example["route"]["routes"])}
    assert receivers == {one["name"] for one in example["receivers"]}
    ways = {way for one in example["receivers"] for way in one if way != "name"}
    assert ways == {"pagerduty_configs", "slack_configs", "email_configs"}


def test_every_latency_is_shown_as_p50_p95_and_p99() -> None:
    panels = [
        {
            float(share)
            for one in panel["targets"]
            for share in re.findall(r"histogram_quantile\(([0-9.]+),", one["expr"])
        }
        for panel in json.loads(FILE.read_text())["panels"]
        if panel["type"] == "timeseries"
    ]
    shown = [shares for shares in panels if shares]
    assert len(shown) >= 10
    assert all(shares == {0.5, 0.95, 0.99} for shares in shown)


def test_panels_do_not_lie_on_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard())["panels"]:
        place = panel["gridPos"]
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & mine, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= mine


def test_every_port_with_metrics_is_scraped() -> None:
    """The names of ports in our Deployments are those that monitors ask."""
    named: set[str] = set()
    deployed: set[str] = set()
    for file in MANIFESTS.rglob("deployment.yaml"):
        (document,) = yaml.safe_load_all(file.read_text())
        deployed.add(document["metadata"]["labels"]["app.kubernetes.io/name"])
        spec = document["spec"]["template"]["spec"]
        for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
            # Envoy's own statistics are not ours, and these ports are for requests and probes
            named |= {port["name"] for port in container["ports"]} - {"http", "grpc", "health", "webhooks", "steps"}
    for file in MANIFESTS.glob("gateway-components/*/kustomization.yaml"):
        named |= set(re.findall(r"\{name: (\w+), containerPort: ", file.read_text()))
    of_gateways, of_manager = monitors("pod-monitor", "pod-monitor.yaml")
    assert {one["port"] for one in of_gateways["spec"]["podMetricsEndpoints"]} == named
    assert [one["port"] for one in of_manager["spec"]["podMetricsEndpoints"]] == ["metrics"]
    (selected,) = of_gateways["spec"]["selector"]["matchExpressions"]
    also = of_manager["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
    assert {*selected["values"], also} == deployed


def test_the_agents_of_models_are_scraped_under_the_label_and_the_port_that_their_pods_have() -> None:
    golden = Path(__file__).parent / "controller" / "models" / "model" / "golden"
    pods = [
        template
        for document in yaml.safe_load_all((golden / "multi-node.children.yaml").read_text())
        if document["kind"] == "ModelInfer"
        for role in document["spec"]["template"]["roles"]
        for template in [role["entryTemplate"]]
    ]
    (monitor,) = monitors("pod-monitor", "agents.yaml")
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    (asked,) = monitor["spec"]["podMetricsEndpoints"]
    assert pods
    for pod in pods:
        assert (selected["operator"], selected["key"] in pod["metadata"]["labels"]) == ("Exists", True)
        containers = [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]
        assert asked["port"] in {port["name"] for one in containers for port in one.get("ports") or ()}


def monitors(folder: str, file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / "monitoring" / folder / file).read_text()))


def test_services_with_metrics_are_scraped_by_one_monitor_each() -> None:
    services = monitors("service-monitor", "service.yaml")
    for service, monitor in zip(services, monitors("service-monitor", "service-monitor.yaml"), strict=True):
        assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
        assert {one["port"] for one in monitor["spec"]["endpoints"]} == {
            one["name"] for one in service["spec"]["ports"]
        }


def test_prometheus_takes_the_configuration_of_the_page_with_its_rules(tmp_path: Path) -> None:
    examples = [one.text for one in EXAMPLES if one.page == "operations.md"]
    for name, first in (("prometheus.yml", "rule_files:"), ("attache.yaml", "groups:")):
        (text,) = [one for one in examples if one.startswith(first)]
        (tmp_path / name).write_text(text)
    words = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout
