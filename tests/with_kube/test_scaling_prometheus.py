# SPDX-License-Identifier: Apache-2.0
"""Scaling by a real Prometheus with TLS and client certificates; while it is away nothing is scaled in."""

from __future__ import annotations

import asyncio
import base64
import signal
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.autoscaler.reconciler.metric_sources import SourceSettings
from controller.kube.api_resources import DEPLOYMENTS, SECRETS
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds
from tests.with_kube.prometheus import NAME, running_prometheus
from tests.with_kube.scaling import Demand, Wanted, bind, deployment, make_policy, make_server, scaling, target

if TYPE_CHECKING:
    from pathlib import Path

    from controller.autoscaler.decision.situation import MetricReading
    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

pytestmark = FAKE


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client) -> None:
    """Our kinds are served."""
    await define_kinds(client)


def secret(namespace: str, **texts: str) -> dict[str, Any]:
    data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": namespace}, "data": data}


async def until(wanted: Wanted, says: str | float) -> None:
    """Until decisions are made from this number, or for lack of one from this problem."""

    def is_so() -> bool:
        found = metric(wanted)
        return found is not None and (found.total == says if isinstance(says, float) else says in found.problem)

    await eventually(is_so)


def metric(wanted: Wanted) -> MetricReading | None:
    return next((one.metrics["queue"] for one in wanted.situations if "queue" in one.metrics), None)


async def test_prometheus_is_asked_with_certificates_and_its_absence_is_no_zero(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    async with running_prometheus(tmp_path) as prometheus:
        source = {"address": prometheus.url, "query": "queue_length", "secretRef": "keys"}
        metrics = [{"name": "queue", "value": 10, "source": "Prometheus", "prometheus": source}]
        await make_policy(client, namespace, strategies=[{"name": "Target"}], metrics=metrics)
        await make_server(client, namespace)
        await client.create(DEPLOYMENTS, deployment(namespace, replicas=3))
        await bind(client, namespace, target())
        wanted = Wanted(main=3)
        settings = SourceSettings(prometheus_allow=(prometheus.url,), secrets_s=0.1, timeout_s=20.0)
        prometheus.exporter.value = 30.0
        async with scaling(kube.admin, namespace, wanted, Demand(), sources=settings):
            await until(wanted, "there is no Secret")
            certificate, key = prometheus.client
            thing = secret(namespace, **{"ca.crt": prometheus.authority})
            await client.create(SECRETS, thing)
            await until(wanted, "cannot be asked")
            # read anew when it changes
            full = secret(namespace, **{"ca.crt": prometheus.authority, "tls.crt": certificate, "tls.key": key})
            await client.merge_patch(SECRETS, "keys", namespace, {"data": full["data"]})
            await until(wanted, 30.0)
            prometheus.exporter.value = 12.0
            await until(wanted, 12.0)
            # Prometheus marks what it cannot scrape as gone at once: nothing is found, which is not 0
            prometheus.exporter.value = None
            await until(wanted, "finds nothing")
            prometheus.exporter.value = 20.0
            await until(wanted, 20.0)
            await prometheus.processes.end(NAME, signal.SIGKILL)
            await until(wanted, "cannot be asked")
            await prometheus.processes.start_again(NAME)
            await until(wanted, 20.0)


async def test_while_prometheus_is_away_the_real_decision_scales_nothing_in(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    async with running_prometheus(tmp_path) as prometheus:
        certificate, key = prometheus.client
        texts = {"ca.crt": prometheus.authority, "tls.crt": certificate, "tls.key": key}
        await client.create(SECRETS, secret(namespace, **texts))
        source = {"address": prometheus.url, "query": "sum(queue_length)", "secretRef": "keys"}
        metrics = [{"name": "queue", "value": 10, "source": "Prometheus", "prometheus": source}]
        behavior = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        await make_policy(client, namespace, strategies=[{"name": "Target"}], metrics=metrics, behavior=behavior)
        await make_server(client, namespace)
        await client.create(DEPLOYMENTS, deployment(namespace, replicas=1))
        await bind(client, namespace, target())
        wanted = Wanted()
        settings = SourceSettings(prometheus_allow=(prometheus.url,), secrets_s=0.1, timeout_s=20.0)
        prometheus.exporter.value = 40.0
        async with scaling(kube.admin, namespace, wanted, Demand(), sources=settings, is_real=True) as running:

            async def replicas() -> int:
                return int((await client.get(DEPLOYMENTS, "llama", namespace))["spec"]["replicas"])

            async def are_four() -> bool:
                return await replicas() == 4

            await eventually(are_four)
            await prometheus.processes.end(NAME, signal.SIGKILL)
            prometheus.exporter.value = 0.0

            def is_unknown() -> bool:
                found = [one.decision for one in running.records.records_by_binding().values()]
                return any("cannot be asked" in str(one.stages) for one in found)

            await eventually(is_unknown)
            before = len(list(running.records.records_of_binding(f"{namespace}/one")))
            await asyncio.sleep(1.0)
            assert before >= 1
            assert await replicas() == 4
