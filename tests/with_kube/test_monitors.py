# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus takes what our monitors ask for, scrapes all pages of our processes with it, and takes our
rules.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
import yaml
from prometheus_client import CollectorRegistry

from bench.stack.processes import Processes, free_ports
from controller.autoscaler.reconciler.metrics import ScalingMetrics
from controller.gateway.metrics import GatewayMetrics
from controller.kube.manager_metrics import ManagerMetrics
from controller.kube.metrics_and_health import serve_pages
from controller.usage.ingest import IngestCounters
from controller.usage.ingest_metrics import UsageIngestMetrics
from extproc.runtime.api_translator_metrics import TranslatorMetrics
from tests.waiting import eventually
from tests.with_kube.monitors import checked, configuration, endpoints_of, job_name, scrape_configs
from tests.with_kube.prometheus import scraping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.api_resources import Object

MONITORING = Path(__file__).parent.parent.parent / "manifests" / "monitoring"
ENGINE = "10.0.0.1:8000"
CONFIGURATION = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: m
  endpoints: [{{address: '{ENGINE}'}}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: chat}}
spec:
  modelName: m
  rules: [{{targetModels: [{{modelServerName: llama}}]}}]
"""


@contextlib.asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Addresses of pages, by the name of the port in our Deployments; ``manager``: that of the manager. Two are of
    components.
    """
    config = folder / "config"
    config.mkdir()
    (config / "attache.yaml").write_text(CONFIGURATION)
    listen, *ports = free_ports(7)
    names = ("metrics", "bundle", "gateway", "manager", "translate", "usage")
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
    python = [sys.executable, "-m"]
    commands = {
        "metrics": ["extproc", "--listen", f"127.0.0.1:{listen}"],
        "bundle": ["controller", "bundle", "--out", str(folder / "envoy"), "--watch", "--admin", "off"],
    }

    async def answers(name: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"http://{addresses[name]}/metrics") as answer:
                return answer.status == 200
        return False

    gateway, manager, translator, usage = GatewayMetrics(), ManagerMetrics(), TranslatorMetrics(), CollectorRegistry()
    usage.register(UsageIngestMetrics(IngestCounters(), lambda: 0.0))
    ScalingMetrics(manager.registry)
    async with (
        Processes(folder) as started,
        serve_pages(addresses["gateway"], gateway.registry, lambda: True),
        serve_pages(addresses["manager"], manager.registry, lambda: True),
        serve_pages(addresses["translate"], translator.registry, lambda: True),
        serve_pages(addresses["usage"], usage, lambda: True),
    ):
        for name, words in commands.items():
            await started.start(name, [*python, *words, "--config", str(config), "--metrics", addresses[name]])
            await started.wait_ready(name, lambda name=name: answers(name))
        yield addresses


def monitors(kind: str) -> list[Object]:
    folder, file = {
        "PodMonitor": ("pod-monitor", "pod-monitor.yaml"),
        "ServiceMonitor": ("service-monitor", "service-monitor.yaml"),
    }[kind]
    return list(yaml.safe_load_all((MONITORING / folder / file).read_text()))


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
async def test_a_real_prometheus_scrapes_what_our_monitors_name(kind: str, tmp_path: Path) -> None:
    of_gateways, of_manager = monitors(kind)
    async with processes(tmp_path) as addresses:
        jobs = [
            *scrape_configs(of_gateways, addresses),
            *scrape_configs(of_manager, {"metrics": addresses["manager"]}),
        ]
        file = checked(tmp_path, "config", configuration(jobs))
        (tmp_path / "prometheus").mkdir()
        async with scraping(tmp_path / "prometheus", file) as prometheus:

            async def are_up() -> bool:
                return len(await prometheus.query("up == 1")) == len(jobs)

            await eventually(are_up)
            assert await prometheus.problems() == []
            up = {one["metric"]["job"] for one in await prometheus.query("up == 1")}
            of_each = [(of_gateways, number) for number in range(len(endpoints_of(of_gateways)))] + [(of_manager, 0)]
            assert up == {job_name(*one) for one in of_each}
            # the label is that of our series, which is why monitors say honorLabels
            (engine,) = await prometheus.query("attache_in_flight")
            assert (engine["metric"]["endpoint"], engine["metric"]["pod"]) == (ENGINE, "pod-0")
            for series in (
                "attache_gateway_files",
                "attache_manager_leader",
                "attache_config_valid",
                "attache_translations_in_flight",
                "attache_usage_lag_seconds",
            ):

                async def is_there(series: str = series) -> bool:
                    return bool(await prometheus.query(series))

                await eventually(is_there)


async def test_promtool_takes_our_alerts(tmp_path: Path) -> None:
    rules = yaml.safe_load((MONITORING / "common" / "alerts.yaml").read_text())
    assert rules["kind"] == "PrometheusRule"
    checked(tmp_path, "rules", {"groups": rules["spec"]["groups"]})


async def test_a_configuration_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    (first, _) = monitors("PodMonitor")
    jobs = scrape_configs(first, dict.fromkeys(("metrics", "gateway", "bundle", "translate", "usage"), "127.0.0.1:1"))
    with pytest.raises(AssertionError, match="not a valid duration"):
        checked(tmp_path, "config", configuration([{**jobs[0], "scrape_interval": "soon"}]))
