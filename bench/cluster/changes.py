# SPDX-License-Identifier: Apache-2.0
"""How long a change of a pod takes until a pick uses it, and what it costs: python -m bench.cluster.changes.

A real API server holds pods that no node runs. The gateway role, the bundle's writer and extproc follow them as they do
in a pod of the gateway. A change gives one pod another address; it has arrived once extproc picks that address for a
request that may go nowhere else. Processor time is measured in a second round, in which nobody asks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster.assets import ROOT, AssetsMissing, find_assets
from bench.cluster.control_plane import ControlPlaneOptions, running_control_plane
from bench.cluster.crds import apply_crds
from bench.processes import Processes, StartFailed, free_ports
from bench.usage import cpu_seconds
from controller.kube.client import Client, connect
from controller.kube.resources import GATEWAY_CONFIGS, MODEL_ROUTES, MODEL_SERVERS, PODS
from extproc.protocol import CHAT_PATH, SUBSET, SUBSET_NAMESPACE
from extproc.streams.messages import ProcessingRequest, ProcessingResponse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.cluster.control_plane import ControlPlane
    from controller.kube.resources import Object

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
_SERVERS: Final = 50
_PORT: Final = 8000
_NAMESPACE: Final = "default"
_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
# Between two questions for one change: often enough for the figure, seldom enough not to be the load itself.
_ASK_S: Final = 0.02
_LATEST_S: Final = 30.0
_AT_ONCE: Final = 32
_ROLES: Final = ("gateway", "bundle", "extproc")


class Arrival(msgspec.Struct, frozen=True):
    """What one size came to. ``delays_s``: from the call that changes a pod to the first pick that uses the change.
    ``cpu_s``: processor time of a change, by process. ``late``: changes that no pick used within half a minute.
    """

    pods: int
    delays_s: Sequence[float]
    late: int
    cpu_s: dict[str, float]


class Plan(msgspec.Struct, frozen=True):
    """``rate``: changes a second, for ``seconds`` in each of the two rounds."""

    rate: float
    seconds: float

    @property
    def changes(self) -> int:
        """Of one round."""
        return int(self.rate * self.seconds)


async def measure(pods: int, plan: Plan, directory: Path) -> Arrival:
    """Start a control plane with so many pods in 50 ModelServers, and change them. Raises StartFailed,
    AssetsMissing.
    """
    options = ControlPlaneOptions(controllers=False, scheduler=False)
    async with (
        running_control_plane(directory, find_assets(), options) as plane,
        connect(plane.admin, manager="bench") as client,
        Processes(directory) as processes,
    ):
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        grpc_address = f"127.0.0.1:{free_ports(1)[0]}"
        fresh = _addresses()
        await _create(client, pods, grpc_address, fresh)
        await _start(processes, plane, directory, grpc_address)
        async with grpc.aio.insecure_channel(grpc_address) as channel:
            await _until_picked(channel, _server_of(pods - 1), _first_address(pods - 1), time_s=_CLOCK())
            delays = await _change(client, plan, pods, fresh, channel)
            before = {name: cpu_seconds(processes.pid(name)) for name in _ROLES}
            began_s = _CLOCK()
            await _change(client, plan, pods, fresh, None)
            await asyncio.sleep(2)
            used = {name: cpu_seconds(processes.pid(name)) - before[name] for name in _ROLES}
            spent_s = _CLOCK() - began_s
            idle = await _idle(processes)
    cpu = {name: (used[name] - idle[name] * spent_s) / plan.changes for name in _ROLES}
    known = [one for one in delays if one is not None]
    return Arrival(pods, known, len(delays) - len(known), cpu)


async def _idle(processes: Processes) -> dict[str, float]:
    """Processor seconds a second while nothing changes."""
    before = {name: cpu_seconds(processes.pid(name)) for name in _ROLES}
    await asyncio.sleep(10)
    return {name: (cpu_seconds(processes.pid(name)) - before[name]) / 10 for name in _ROLES}


def _addresses() -> Iterator[str]:
    """Addresses that nobody has had before, and that lead nowhere."""
    for number in itertools.count():
        yield f"10.{64 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"


def _first_address(pod: int) -> str:
    """The address that a pod is created with."""
    return next(itertools.islice(_addresses(), pod, None))


def _server_of(pod: int) -> str:
    return f"server-{pod % _SERVERS}"


async def _create(client: Client, pods: int, grpc_address: str, fresh: Iterator[str]) -> None:
    await client.create(GATEWAY_CONFIGS, _ours("GatewayConfig", "main", {"extproc": grpc_address}))
    for number in range(_SERVERS):
        name = f"server-{number}"
        selecting = {"workloadSelector": {"matchLabels": {"server": name}}, "workloadPort": {"port": _PORT}}
        spec = {"model": name, "scrapeInterval": "0s", **selecting}
        await client.create(MODEL_SERVERS, _ours("ModelServer", name, spec))
        rules = [{"targetModels": [{"modelServerName": name}]}]
        await client.create(MODEL_ROUTES, _ours("ModelRoute", name, {"modelName": name, "rules": rules}))
    gate = asyncio.Semaphore(_AT_ONCE)

    async def create(number: int, ip: str) -> None:
        async with gate:
            await client.create(PODS, _pod(number))
            await client.merge_patch(PODS, f"pod-{number}", _NAMESPACE, {"status": _running(ip)}, subresource="status")

    async with asyncio.TaskGroup() as tasks:
        for number in range(pods):
            tasks.create_task(create(number, next(fresh)))


def _ours(kind: str, name: str, spec: dict[str, Any]) -> Object:
    metadata = {"name": name, "namespace": _NAMESPACE}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def _pod(number: int) -> Object:
    metadata = {"name": f"pod-{number}", "namespace": _NAMESPACE, "labels": {"server": _server_of(number)}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "engine", "image": "engine"}]},
    }


def _running(ip: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [ready]}


async def _start(processes: Processes, plane: ControlPlane, directory: Path, grpc_address: str) -> None:
    config, bundle = str(directory / "config"), str(directory / "bundle")
    python = [sys.executable, "-m", "attache"]
    at_cluster = ["env", f"KUBECONFIG={plane.kubeconfig}"]
    own = ["--gateway-config", f"{_NAMESPACE}/main", "--lease-namespace", _NAMESPACE, "--metrics", _free()]
    await processes.start("gateway", [*at_cluster, *python, "gateway", "--config", config, *own])
    await processes.wait_ready("gateway", _Exists(directory / "config" / "gateway.json"))
    await processes.start(
        "bundle", [*python, "bundle", "--config", config, "--out", bundle, "--watch", "--admin", "off"]
    )
    words = ["--config", config, "--listen", grpc_address, "--metrics", _free()]
    await processes.start("extproc", [*python, "extproc", *words])


def _free() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


class _Exists:
    """Whether a file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def __call__(self) -> bool:
        return self._file.exists()


async def _change(
    client: Client, plan: Plan, pods: int, fresh: Iterator[str], channel: grpc.aio.Channel | None
) -> list[float | None]:
    """Change pods one after the other at the plan's rate; with ``channel``, ask for each until a pick uses it."""
    began_s = _CLOCK()
    async with asyncio.TaskGroup() as tasks:
        asked = []
        for number in range(plan.changes):
            await asyncio.sleep(max(0.0, began_s + number / plan.rate - _CLOCK()))
            # a prime step, so that changes that follow each other concern different servers
            asked.append(tasks.create_task(_move(client, number * 7 % pods, next(fresh), channel)))
    return [one.result() for one in asked]


async def _move(client: Client, pod: int, ip: str, channel: grpc.aio.Channel | None) -> float | None:
    sent_s = _CLOCK()
    await client.merge_patch(PODS, f"pod-{pod}", _NAMESPACE, {"status": _running(ip)}, subresource="status")
    if channel is None:
        return None
    return await _until_picked(channel, _server_of(pod), ip, time_s=sent_s)


async def _until_picked(channel: grpc.aio.Channel, model: str, ip: str, *, time_s: float) -> float | None:
    """Seconds from ``time_s`` to the first pick of ``ip``; None if there is none for half a minute."""
    while _CLOCK() - time_s < _LATEST_S:
        if await _is_picked(channel, model, f"{ip}:{_PORT}"):
            return _CLOCK() - time_s
        await asyncio.sleep(_ASK_S)
    return None


async def _is_picked(channel: grpc.aio.Channel, model: str, address: str) -> bool:
    """Whether a request that may go to ``address`` alone gets it."""
    call = channel.stream_stream(
        _METHOD,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )(wait_for_ready=True)
    head = ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", CHAT_PATH)):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    head.metadata_context.filter_metadata[SUBSET_NAMESPACE].fields[SUBSET].string_value = address
    await call.write(head)
    await call.read()
    body = ProcessingRequest()
    body.request_body.body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    body.request_body.end_of_stream = True
    await call.write(body)
    answer = await call.read()
    await call.done_writing()
    assert isinstance(answer, ProcessingResponse), answer
    return answer.WhichOneof("response") == "request_body"


def table(found: Sequence[Arrival], plan: Plan) -> Table:
    """For people."""
    title = f"{plan.rate:g} changes a second of pods in {_SERVERS} ModelServers, {plan.changes} changes"
    made = Table(title=title, caption="ms from the call to the pick; CPU ms of a change")
    for name in ("pods", "p50", "p99", "max", "late", *_ROLES):
        made.add_column(name, justify="right")
    for one in found:
        cuts = statistics.quantiles(one.delays_s, n=100)
        delays = [cuts[49], cuts[98], max(one.delays_s)]
        made.add_row(
            str(one.pods),
            *(f"{1000 * value:.0f}" for value in delays),
            str(one.late),
            *(f"{1000 * one.cpu_s[name]:.2f}" for name in _ROLES),
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 if something did not start."""
    made = argparse.ArgumentParser(prog="python -m bench.cluster.changes", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--pods", type=int, nargs="+", default=[200, 2000], help="sizes (default: 200 2000)")
    made.add_argument("--rate", type=float, default=20.0, help="changes a second (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=30.0, help="of each round (default: %(default)s)")
    options = made.parse_args(arguments)
    plan = Plan(options.rate, options.seconds)
    found = []
    try:
        for pods in options.pods:
            with tempfile.TemporaryDirectory(prefix="attache-changes-") as directory:
                found.append(uvloop.run(measure(pods, plan, Path(directory))))
    except (AssetsMissing, StartFailed) as error:
        print(error, file=sys.stderr)
        return 2
    Console(width=110).print(table(found, plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
