# SPDX-License-Identifier: Apache-2.0
"""What clients of two gateways lose when one of them, or their Redis, ends: ``python -m bench.cluster.failover``.

``manifests/local-ha`` runs on a real API server, in a network of its own. Clients send a steady load through the
Service, half of it streams. Half of the clients keep their connections, the others open one for each request. None of
them repeats a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster.kubernetes_binaries import ROOT, find_assets
from bench.cluster.local_control_plane import ControlPlaneOptions, apply_crds, apply_folder, running_control_plane
from bench.cluster.netns import host_address, pod_range, run_in_namespace
from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_spec import IMAGES
from bench.cluster.service_proxy import running_service_proxy
from bench.stack.loopback_stack import envoy_binary
from controller.kube.api_resources import DEPLOYMENTS, MODEL_ROUTES, PODS, SERVICES
from controller.kube.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from bench.cluster.node.in_process_node import Node
    from controller.kube.api_resources import Object

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
_SYSTEM: Final = "attache-system"
_GATEWAY, _REDIS = "attache-gateway", "attache-redis"
_APP: Final = "app.kubernetes.io/name"
_CLIENTS: Final = 10
_PATIENCE_S: Final = 180.0
_BEFORE_S, _AFTER_S = 5.0, 10.0
_TIMEOUT_S: Final = 90.0
# A limit of both gateways together, and how long it is tried.
_LIMITED: Final = "limited"
_LIMIT_PER_S: Final = 5
_LIMIT_TRIED_S: Final = 20.0
_EXTPROC: Final = "SIGKILL of extproc in one"
_REDIS_STATES: Final = {"with Redis": 1, "without Redis": 0, "Redis is back": 1}


class RequestOutcome(msgspec.Struct, frozen=True):
    """A request: when it was sent, how long it took, and why it failed, which is empty if it did not."""

    sent_s: float
    took_s: float
    failure: str = ""


class SteadyLoad:
    """Requests at a steady rate from ``_CLIENTS`` clients, each with connections of its own, inside the block."""

    def __init__(self, url: str, model: str, rate_per_s: float) -> None:
        self.outcomes: list[RequestOutcome] = []
        self._url, self._model, self._pause_s = f"{url}/v1/chat/completions", model, 1 / rate_per_s
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._clients = [
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=number % 2 == 1))
            for number in range(_CLIENTS)
        ]
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, *self._running, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _send(self) -> None:
        began_s = _CLOCK()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, began_s + number * self._pause_s - _CLOCK()))
            task = asyncio.create_task(self._ask(self._clients[number % _CLIENTS], number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _ask(self, client: aiohttp.ClientSession, number: int) -> None:
        streams = number // _CLIENTS % 2 == 0
        messages = [{"role": "user", "content": f"Question {number}: who are you?"}]
        question = {"model": self._model, "messages": messages, "max_tokens": 96, "stream": streams}
        sent_s = _CLOCK()
        failure = ""
        try:
            async with client.post(self._url, json=question) as answer:
                text = await answer.text()
                if answer.status != 200:
                    failure = f"{answer.status} {text[:120]}"
                elif ("[DONE]" if streams else '"usage"') not in text:
                    failure = "cut"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = f"{type(error).__name__} {error}"
        self.outcomes.append(RequestOutcome(sent_s, _CLOCK() - sent_s, failure))


class FailoverCluster:
    """The cluster of a trial. ``url``: of the gateways' Service."""

    def __init__(self, client: Client, nodes: Mapping[str, Node], url: str) -> None:
        self.client, self.nodes, self.url = client, nodes, url
        self.faults: Mapping[str, Callable[[], Awaitable[None]]] = {
            "a gateway's pod is deleted": lambda: self.delete_oldest_pod(_GATEWAY),
            "SIGKILL of Envoy in one": lambda: self.kill_container(_GATEWAY, "envoy"),
            _EXTPROC: lambda: self.kill_container(_GATEWAY, "extproc"),
            "Redis' pod is deleted": lambda: self.delete_oldest_pod(_REDIS),
            "SIGKILL of Redis": lambda: self.kill_container(_REDIS, "redis"),
        }

    async def pods(self, name: str) -> list[Object]:
        """Those of a Deployment, the oldest first: clients have kept connections to it the longest."""
        found = (await self.client.list(PODS, _SYSTEM, labels=f"{_APP}={name}")).items
        return sorted(found, key=lambda one: one["metadata"]["creationTimestamp"])

    async def delete_oldest_pod(self, name: str) -> None:
        """Its oldest pod, as `kubectl delete pod` does."""
        pod = (await self.pods(name))[0]
        await self.client.delete(PODS, pod["metadata"]["name"], _SYSTEM)

    async def kill_container(self, name: str, container: str) -> None:
        """The process of a container in its oldest pod."""
        pod = (await self.pods(name))[0]
        self.nodes[pod["spec"]["nodeName"]].kill(f"{_SYSTEM}/{pod['metadata']['name']}", container)

    async def scale(self, name: str, replicas: int) -> None:
        """Have so many pods, and wait for them."""
        await self.client.merge_patch(DEPLOYMENTS, name, _SYSTEM, {"spec": {"replicas": replicas}})
        await self.wait_until_ready(name, replicas)

    async def wait_until_ready(self, name: str, count: int) -> None:
        """Wait until a Deployment has so many pods, all ready."""
        async with asyncio.timeout(_PATIENCE_S):
            while not _all_ready(await self.pods(name), count):  # noqa: ASYNC110 - only the objects show it
                await asyncio.sleep(0.2)

    async def measure(self, load: SteadyLoad, fault: Callable[[], Awaitable[None]]) -> FaultMeasurement:
        """A fault under load, until all pods are ready again and for a while after."""
        await asyncio.sleep(_BEFORE_S)
        began_s = _CLOCK()
        await fault()
        # the status of what has ended comes first
        await asyncio.sleep(2.0)
        await self.wait_until_ready(_GATEWAY, 2)
        await self.wait_until_ready(_REDIS, 1)
        ready_s = _CLOCK() - began_s
        await asyncio.sleep(_AFTER_S)
        # what runs at the fault counts, and what was sent until now
        found = [one for one in load.outcomes if one.sent_s + one.took_s >= began_s]
        return FaultMeasurement(ready_s, began_s, tuple(found))

    async def add_rate_limit(self) -> None:
        """A limit of both gateways together. With it, only extproc may decide: `failureMode` becomes `Close`."""
        limit = {"per": "Route", "unit": "second", "requests": _LIMIT_PER_S, "scope": "Global"}
        rules = [{"targetModels": [{"modelServerName": "llama"}]}]
        route: Object = {
            "apiVersion": MODEL_ROUTES.api_version,
            "kind": MODEL_ROUTES.kind,
            "metadata": {"name": _LIMITED, "namespace": "default"},
            "spec": {"modelName": _LIMITED, "rules": rules, "rateLimits": [limit]},
        }
        await self.client.create(MODEL_ROUTES, route)
        # both gateways have it
        await asyncio.sleep(_AFTER_S)

    async def measure_rate_limit(self) -> tuple[int, int]:
        """How many of the requests for the limited model were granted, and how many should be at most."""
        # the bucket is full again
        await asyncio.sleep(3.0)
        async with SteadyLoad(self.url, _LIMITED, 4 * _LIMIT_PER_S) as load:
            await asyncio.sleep(_LIMIT_TRIED_S)
        others = [one.failure for one in load.outcomes if one.failure and not one.failure.startswith("429")]
        assert not others, others[:3]
        return sum(not one.failure for one in load.outcomes), int(_LIMIT_PER_S * (_LIMIT_TRIED_S + 1))


class FaultMeasurement(msgspec.Struct, frozen=True):
    """A fault under load. ``ready_s``: until all pods were ready again."""

    ready_s: float
    began_s: float
    outcomes: tuple[RequestOutcome, ...]

    @property
    def lost_request_texts(self) -> list[str]:
        """What clients saw of lost requests, with the second of their end after the fault."""
        return [f"{one.sent_s + one.took_s - self.began_s:.2f}s {one.failure}" for one in self.outcomes if one.failure]

    @property
    def slowest_s(self) -> float:
        """The longest answer."""
        return max(one.took_s for one in self.outcomes)


def _all_ready(pods: list[Object], count: int) -> bool:
    return len(pods) == count and all(
        one["type"] != "Ready" or one["status"] == "True"
        for pod in pods
        for one in (pod.get("status") or {}).get("conditions") or [{"type": "Ready", "status": "False"}]
    )


@contextlib.asynccontextmanager
async def running_failover_cluster(directory: Path, range_: str) -> AsyncIterator[FailoverCluster]:
    """The cluster with two gateways, Redis and engines, all ready."""
    assets = find_assets()
    specs = [gpu_node(f"node-{number}") for number in range(2)]
    images = {**IMAGES, "envoyproxy/envoy": (str(envoy_binary()),)}
    async with (
        running_control_plane(directory, assets, ControlPlaneOptions(address=host_address(range_))) as plane,
        connect(plane.admin, manager="bench") as client,
        running_nodes(client, specs, directory / "pods", images=images, pod_range=range_) as nodes,
        running_service_proxy(client),
    ):
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        await apply_folder(plane, assets, ROOT / "manifests" / "local-ha")
        service = await client.get(SERVICES, _GATEWAY, _SYSTEM)
        trial = FailoverCluster(client, nodes, f"http://{service['spec']['clusterIP']}")
        await trial.wait_until_ready(_GATEWAY, 2)
        await trial.wait_until_ready(_REDIS, 1)
        yield trial


async def _run(options: argparse.Namespace, range_: str, console: Console) -> None:
    table = Table("event", "run", "requests", "lost", "ready after", "slowest answer", "what clients saw", box=None)
    with tempfile.TemporaryDirectory(prefix="attache-failover-") as directory:
        async with running_failover_cluster(Path(directory), range_) as trial:
            nodes = {one["spec"]["nodeName"] for one in await trial.pods(_GATEWAY)}
            console.print(f"gateways on {sorted(nodes)}")
            async with SteadyLoad(trial.url, "llama", options.rate) as load:

                async def measure(name: str, run: int, fault: Callable[[], Awaitable[None]]) -> None:
                    found = await trial.measure(load, fault)
                    cells = [str(len(found.outcomes)), str(len(found.lost_request_texts)), f"{found.ready_s:.1f} s"]
                    row = [name, str(run), *cells, f"{found.slowest_s:.1f} s", "\n".join(found.lost_request_texts)]
                    console.print(*row, markup=False, soft_wrap=True)
                    table.add_row(*row)

                # the first requests compile what is needed
                await asyncio.sleep(_AFTER_S)
                runs = range(1, options.runs + 1)
                for run, (name, fault) in itertools.product(runs, trial.faults.items()):
                    await measure(name, run, fault)
                await trial.add_rate_limit()
                for run in runs:
                    await measure("SIGKILL of extproc in one, failureMode Close", run, trial.faults[_EXTPROC])
            for run, (what, replicas) in itertools.product(runs, _REDIS_STATES.items()):
                await trial.scale(_REDIS, replicas)
                granted, bound = await trial.measure_rate_limit()
                console.print(f"run {run}, {what}: {granted} granted, bound {bound}")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0."""
    made = argparse.ArgumentParser(prog="bench.cluster.failover", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--runs", type=int, default=3, metavar="N", help="of each event and limit (default: %(default)s)")
    made.add_argument("--rate", type=float, default=20.0, metavar="N", help="requests a second (default: %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    options = made.parse_args(given)
    range_ = pod_range()
    if range_ is None:
        run_in_namespace([sys.executable, "-m", "bench.cluster.failover", *given])
        return 0
    uvloop.run(_run(options, range_, Console(highlight=False, width=160)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
