# SPDX-License-Identifier: Apache-2.0
"""From what a gateway tells to the replicas, with the real decision; and the pages that say why."""

from __future__ import annotations

import asyncio
import contextlib
import io
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry

from bench.stack.processes import free_ports
from controller.autoscaler.reconciler.controller import ScalingSettings, make_scaling_runner
from controller.autoscaler.reconciler.decision_records import DecisionRecords, decision_page_routes
from controller.autoscaler.reconciler.metrics import ScalingMetrics
from controller.commands import explain_scaling as explain_scaling_command
from controller.kube.api_resources import (
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    PODS,
)
from controller.kube.client import connect
from controller.kube.metrics_and_health import serve_pages
from controller.kube.shared_informers import SharedInformers
from extproc.api.spec import API_VERSION
from extproc.api.status_page_contents import DEMAND_PATH, LOADS_LABEL, ProcessDemand, ServerDemand
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import IMPATIENT, QUICK_QUEUE, define_kinds
from tests.with_kube.pods import make_pod
from tests.with_kube.scaling import bind, deployment, make_policy, make_server, replicas_of, says, target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess
    from tests.with_kube.kubes import Kube


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client) -> None:
    """Our kinds are served."""
    await define_kinds(client)


class Gateway:
    """A gateway's page. ``say``: the next message, at once; without any it repeats the last one."""

    def __init__(self) -> None:
        self._said = ServerDemand(model="org/llama")
        self._news = asyncio.Event()
        self._sequence = 0
        self.is_silent = False

    def say(self, said: ServerDemand) -> None:
        self._said = said
        self._news.set()

    async def page(self, request: web.Request, server: str) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while not self.is_silent:
            self._sequence += 1
            message = ProcessDemand("gateway-1", self._sequence, float(self._sequence), {server: self._said})
            await answer.write(msgspec.json.encode(message) + b"\n")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 0.3)
        return answer


@contextlib.asynccontextmanager
async def gateway(client: Client, namespace: str) -> AsyncIterator[Gateway]:
    """A pod of a gateway, and its page."""
    one, (port,) = Gateway(), free_ports(1)
    app = web.Application()

    async def demand(request: web.Request) -> web.StreamResponse:
        return await one.page(request, f"{namespace}/llama")

    app.add_routes([web.get(DEMAND_PATH, demand)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await make_pod(client, namespace, "gateway", "127.0.0.1", app="gateway")
    labels = {"metadata": {"labels": {LOADS_LABEL: str(port)}}}
    await client.merge_patch(PODS, "gateway", namespace, labels)
    try:
        yield one
    finally:
        one.is_silent = True
        await runner.cleanup()


@contextlib.asynccontextmanager
async def scaled(access: ClusterAccess, namespace: str) -> AsyncIterator[DecisionRecords]:
    """The real scaling of a namespace."""
    records = DecisionRecords()
    settings = ScalingSettings(namespace=namespace, informers=IMPATIENT, queue=QUICK_QUEUE)
    async with connect(access, manager="attache-manager") as client:
        run = make_scaling_runner(settings, ScalingMetrics(CollectorRegistry()), records)
        shared = SharedInformers(client, IMPATIENT)
        tasks = [asyncio.create_task(one) for one in (shared.run(), run(client, shared))]
        try:
            yield records
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def until_replicas(client: Client, namespace: str, number: int) -> None:
    async def are_there() -> bool:
        return await replicas_of(client, namespace) == number

    await eventually(are_there)


@FAKE
async def test_a_request_at_zero_starts_an_engine_long_before_the_period_ends(
    client: Client, kube: Kube, namespace: str
) -> None:
    await make_policy(client, namespace, period="10m", scaleToZero={})
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=0))
    await bind(client, namespace, target())
    async with gateway(client, namespace) as told, scaled(kube.admin, namespace) as records:
        await eventually(lambda: bool(records.records_by_binding()))
        # a second look, for the first one found that the ModelServer is to be followed
        await asyncio.sleep(1.5)
        assert await replicas_of(client, namespace) == 0
        told.say(ServerDemand(model="org/llama", queued=1, queued_tokens=100.0, at_zero=1))
        await until_replicas(client, namespace, 1)


@FAKE
async def test_a_request_at_zero_starts_prefill_and_decode(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace, period="10m", scaleToZero={})
    await make_server(client, namespace)
    template = {"metadata": {"labels": {"app": "llama"}}, "spec": {"containers": [{"name": "engine", "image": "i"}]}}
    roles = [{"name": one, "entryTemplate": template, "scalable": True} for one in ("prefill", "decode")]
    head = {"apiVersion": API_VERSION, "metadata": {"name": "llama", "namespace": namespace}}
    await client.create(MODEL_INFERS, {**head, "kind": "ModelInfer", "spec": {"template": {"roles": roles}}})
    for one in roles:
        metadata = {"name": f"llama-{one['name']}", "namespace": namespace}
        spec = {"modelInfer": "llama", "role": one["name"], "replicas": 0}
        await client.create(MODEL_INFER_ROLES, {**head, "kind": "ModelInferRole", "metadata": metadata, "spec": spec})
    stages = [
        {**target("ModelInfer", role=stage.lower(), stage=stage, server="llama"), "name": stage.lower()}
        for stage in ("Prefill", "Decode")
    ]
    await bind(client, namespace, *stages)
    async with gateway(client, namespace) as told, scaled(kube.admin, namespace) as records:
        await eventually(lambda: bool(records.records_by_binding()))
        # a second look, for the first one found that the ModelServer is to be followed
        await asyncio.sleep(1.5)
        told.say(ServerDemand(model="org/llama", queued=1, queued_tokens=100.0, at_zero=1))

        async def are_started() -> bool:
            found = await client.list(MODEL_INFER_ROLES, namespace)
            return [one["spec"]["replicas"] for one in found.items] == [1, 1]

        await eventually(are_started)


@FAKE
async def test_a_restart_and_silent_gateways_scale_nothing_in(client: Client, kube: Kube, namespace: str) -> None:
    window = {"scaleDown": {"stabilizationWindowSeconds": 30}}
    await make_policy(client, namespace, behavior=window, drain="0s")
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=3))
    await bind(client, namespace, target(minReplicas=1))
    async with gateway(client, namespace) as told:
        for _ in range(2):
            # nothing is asked for, but whoever comes anew has not seen that for long enough
            async with scaled(kube.admin, namespace) as records:
                await eventually(lambda: bool(records.records_by_binding()))
                await asyncio.sleep(1.0)
                assert await replicas_of(client, namespace) == 3
        told.is_silent = True
        async with scaled(kube.admin, namespace) as records:
            await eventually(lambda: bool(records.records_by_binding()))
            await asyncio.sleep(1.0)
            assert await replicas_of(client, namespace) == 3
            assert (await says(client, namespace, "ScalingActive")) == ("True", "Scaling")


@FAKE
async def test_the_pages_and_the_command_say_why(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with scaled(kube.admin, namespace) as records:
        leads = [True]
        listening = serve_pages(
            f"127.0.0.1:{port}", CollectorRegistry(), lambda: True, more=decision_page_routes(records, lambda: leads[0])
        )
        async with listening, aiohttp.ClientSession() as http:
            await eventually(lambda: bool(records.records_by_binding()))
            async with http.get(f"{url}/decisions") as answer:
                listed = await answer.json()
            assert [one["binding"] for one in listed["bindings"]] == [f"{namespace}/one"]
            async with http.get(f"{url}/decisions/{namespace}/none") as answer:
                assert answer.status == 404
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                words = [f"{namespace}/one", "--manager", url]
                status = await asyncio.to_thread(explain_scaling_command.main, words, "explain-scaling")
            assert status == 0
            assert f"{namespace}/one at " in said.getvalue()
            assert "Work" in said.getvalue()
            leads[0] = False
            async with http.get(f"{url}/decisions") as answer:
                assert answer.status == 503
    binding = await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace)
    assert binding["status"]["targets"][0]["current"] == 2
