# SPDX-License-Identifier: Apache-2.0
"""Metrics from the engines' own pages and from Kubernetes' resource metrics; who says nothing is missing, not idle."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from bench.stack.processes import free_ports
from controller.autoscaler.reconciler.metric_source_http import FetchFailed, fetch_page
from controller.autoscaler.reconciler.metric_sources import SourceSettings
from controller.kube.api_resources import DEPLOYMENTS
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds
from tests.with_kube.pods import make_pod
from tests.with_kube.scaling import Demand, Wanted, bind, deployment, make_policy, make_server, scaling, target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.autoscaler.decision.situation import MetricReading
    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube


@pytest_asyncio.fixture(loop_scope="session")
async def kinds(client: Client) -> None:
    """Our kinds are served."""
    await define_kinds(client)


@contextlib.asynccontextmanager
async def engine(port: int, said: dict[str, str]) -> AsyncIterator[list[str]]:
    """An engine's page: ``said`` by path. Yields the paths that were asked for."""
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text=said[request.path])

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield asked
    finally:
        await runner.cleanup()


@FAKE
@pytest.mark.usefixtures("kinds")
async def test_engines_pages_are_read_and_silent_engines_are_missing(
    client: Client, kube: Kube, namespace: str
) -> None:
    (port,) = free_ports(1)
    waiting = "vllm:num_requests_waiting"
    source = {"port": port, "path": "/own/metrics"}
    metrics = [
        {"name": waiting, "value": 5, "source": "Engine", "engine": source},
        {"name": "cpu", "value": 0.7, "source": "Resource"},
    ]
    await make_policy(client, namespace, metrics=metrics, strategies=[{"name": "Target"}])
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    # nobody listens at the second one's address
    await make_pod(client, namespace, "first", "127.0.0.1", app="llama")
    await make_pod(client, namespace, "second", "127.0.0.2", app="llama")
    await bind(client, namespace, target())
    wanted = Wanted(main=2)
    said = {"/own/metrics": f'{waiting}{{engine="0"}} 7\n'}

    def metric(name: str) -> MetricReading | None:
        return next((one.metrics[name] for one in wanted.situations if name in one.metrics), None)

    def values() -> object:
        found = metric(waiting)
        return None if found is None else found.by_engine

    async with engine(port, said) as asked, scaling(kube.admin, namespace, wanted, Demand()):
        await eventually(lambda: values() == {"first": 7.0})
        said["/own/metrics"] = "vllm:num_requests_running 3\n"
        await eventually(lambda: values() is None)
        found = metric(waiting)
        assert found is not None
        assert found.problem == f"no engine's page has a recent {waiting}"
        assert set(asked) == {"/own/metrics"}
        usage = metric("cpu")
        assert usage is not None
        assert (usage.by_engine, usage.problem) == (
            None,
            "the cluster does not serve metrics.k8s.io; it needs a metrics server",
        )


@FAKE
@pytest.mark.usefixtures("kinds")
async def test_bindings_of_one_policy_share_their_queries(client: Client, kube: Kube, namespace: str) -> None:
    (port,) = free_ports(1)
    source = {"address": f"http://127.0.0.1:{port}", "query": "sum(queue)"}
    metrics = [{"name": "queue", "value": 5, "source": "Prometheus", "prometheus": source}]
    await make_policy(client, namespace, metrics=metrics, strategies=[{"name": "Target"}], period="300ms")
    await make_server(client, namespace)
    for number in range(5):
        await client.create(DEPLOYMENTS, deployment(namespace, name=f"llama-{number}", replicas=2))
        await bind(client, namespace, target(name=f"llama-{number}"), name=f"binding-{number}")
    wanted = Wanted(main=2)
    said = {"/api/v1/query": '{"status":"success","data":{"resultType":"scalar","result":[1,"4"]}}'}
    allowed = SourceSettings(prometheus_allow=(source["address"],))
    running = scaling(kube.admin, namespace, wanted, Demand(), sources=allowed)
    async with engine(port, said) as asked, running:
        await eventually(lambda: wanted.decisions > 60)
        assert wanted.situations[0].metrics["queue"].total == 4.0
        assert len(asked) <= wanted.decisions / 2
    # this machine itself is asked only if that is allowed
    refused = Wanted(main=2)
    asked.clear()
    async with engine(port, said) as asked, scaling(kube.admin, namespace, refused, Demand()):
        await eventually(lambda: refused.decisions > 10)
        assert "--prometheus-allow" in refused.situations[0].metrics["queue"].problem
        assert asked == []


async def test_redirects_are_not_followed_and_pages_are_bounded() -> None:
    (port,) = free_ports(1)
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/moved":
            return web.Response(status=302, headers={"location": "/secret"})
        return web.Response(text="x" * 2000)

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http:
        with pytest.raises(FetchFailed, match="answers 302"):
            await fetch_page(http, f"{url}/moved", most_bytes=100_000, timeout_s=5.0)
        with pytest.raises(FetchFailed, match="longer than 1999 bytes"):
            await fetch_page(http, f"{url}/long", most_bytes=1999, timeout_s=5.0)
        assert len(await fetch_page(http, f"{url}/long", most_bytes=2000, timeout_s=5.0)) == 2000
    await runner.cleanup()
    assert "/secret" not in asked
