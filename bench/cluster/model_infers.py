# SPDX-License-Identifier: Apache-2.0
"""What many ModelInfers cost the manager: python -m bench.cluster.model_infers.

A real API server holds ModelInfers whose pods no node runs: one bulk writer marks each pod Running and Ready as it
appears. Measured are the time from the manager's start until all say that they are available, its memory, processor
time and writes; then the same for a manager that starts where all is settled already.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
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
from controller.kube.errors import ClusterError, NotFound
from controller.kube.informer import Informer, Selection
from controller.kube.resources import MODEL_INFERS, PODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.cluster.control_plane import ControlPlane
    from controller.kube.resources import Object

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
_NAMESPACE: Final = "default"
_MANAGER: Final = "manager"
_LATEST_S: Final = 600.0
_AT_ONCE: Final = 16
_ADDRESSES: Final = 250
_LINE: Final = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>[0-9.e+]+)$", re.MULTILINE)


class Cost(msgspec.Struct, frozen=True):
    """What one start of the manager came to. ``settled_s``: from its start until all is settled. ``rss_mib``: the most
    memory it had. ``cpu_s``: its processor time until then. ``writes``: by kind and verb.
    """

    settled_s: float
    rss_mib: float
    cpu_s: float
    writes: dict[str, float]


def model_infer(number: int) -> Object:
    """Two groups of a prefill pod, a decode pod and its two workers each: 8 pods and 2 Services."""
    containers = [{"name": "engine", "image": "attache/engine-sim", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    pod = {"spec": {"containers": containers}}
    decode = {"name": "decode", "entryTemplate": pod, "workerTemplate": pod, "workerReplicas": 2}
    return {
        "apiVersion": MODEL_INFERS.api_version,
        "kind": MODEL_INFERS.kind,
        "metadata": {"name": f"m{number}", "namespace": _NAMESPACE},
        "spec": {"replicas": 2, "template": {"roles": [{"name": "prefill", "entryTemplate": pod}, decode]}},
    }


async def measure(count: int, directory: Path) -> Sequence[Cost]:
    """A first start, and one where all is settled. Raises StartFailed, AssetsMissing, TimeoutError."""
    options = ControlPlaneOptions(controllers=False, scheduler=False)
    async with (
        running_control_plane(directory, find_assets(), options) as plane,
        connect(plane.admin, manager="bench") as client,
        Processes(directory) as processes,
        asyncio.TaskGroup() as tasks,
    ):
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        await _all(client.create(MODEL_INFERS, model_infer(number)) for number in range(count))
        infers = Informer(client, MODEL_INFERS, Selection(_NAMESPACE))
        running = [tasks.create_task(infers.run()), tasks.create_task(_Kubelet(client).run())]
        try:
            await infers.synced.wait()
            costs = [await _started(processes, plane, infers, number) for number in (1, 2)]
        finally:
            for task in running:
                task.cancel()
    return costs


async def _started(processes: Processes, plane: ControlPlane, infers: Informer, number: int) -> Cost:
    """One life of the manager. All is settled once it has no more to do, and then nothing for two seconds."""
    (port,) = free_ports(1)
    words = ["--no-webhooks", "--lease-namespace", _NAMESPACE, "--metrics", f"127.0.0.1:{port}"]
    command = ["env", f"KUBECONFIG={plane.kubeconfig}", sys.executable, "-m", "attache", "manager", *words]
    name = f"{_MANAGER}-{number}"
    began_s = _CLOCK()
    await processes.start(name, command)
    settled_s, cpu_s, quiet_since_s = 0.0, 0.0, None
    looks, rss_mib = -1.0, 0.0
    page: list[tuple[str, str, float]] = []
    async with asyncio.timeout(_LATEST_S), aiohttp.ClientSession() as http:
        while quiet_since_s is None or _CLOCK() - quiet_since_s < 2.0:
            await asyncio.sleep(0.1)
            rss_mib = max(rss_mib, _rss_mib(processes.pid(name)))
            page = await _page(http, port)
            done = _sum(page, "attache_manager_reconciles_total")
            if done != looks or done < len(infers.objects) or not all(map(_is_available, infers.objects.values())):
                looks, quiet_since_s = done, None
            elif quiet_since_s is None:
                quiet_since_s = _CLOCK()
                settled_s, cpu_s = quiet_since_s - began_s, cpu_seconds(processes.pid(name))
    writes = {labels: value for found, labels, value in page if found == "attache_manager_writes_total"}
    await processes.end(name)
    return Cost(settled_s, rss_mib, cpu_s, writes)


class _Kubelet:
    """Marks every pod Running and Ready as soon as it is there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pods = Informer(client, PODS, Selection(_NAMESPACE))
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self._number = 0

    async def run(self) -> None:
        self._pods.subscribe(self._new.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            for _ in range(_AT_ONCE):
                tasks.create_task(self._mark())

    async def _mark(self) -> None:
        while True:
            key = await self._new.get()
            pod = self._pods.get(key)
            if pod is None or (pod.get("status") or {}).get("podIP"):
                continue
            self._number += 1
            ip = f"10.64.{self._number // _ADDRESSES}.{self._number % _ADDRESSES + 1}"
            ready = {"type": "Ready", "status": "True"}
            status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [ready]}
            name = key.partition("/")[2]
            with contextlib.suppress(NotFound):
                await self._client.merge_patch(PODS, name, _NAMESPACE, {"status": status}, subresource="status")


async def _all(calls: Any) -> None:  # noqa: ANN401 - an iterable of coroutines
    """All of them, a few at a time."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Any) -> None:  # noqa: ANN401 - a coroutine
        async with room:
            await call

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(one(call))


def _is_available(thing: Object) -> bool:
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Available" and one["status"] == "True" for one in conditions)


async def _page(http: aiohttp.ClientSession, port: int) -> list[tuple[str, str, float]]:
    """Metrics by name and labels; none while the page is not there yet."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
            text = await answer.text()
            return [(one["name"], one["labels"] or "", float(one["value"])) for one in _LINE.finditer(text)]
    return []


def _sum(page: Sequence[tuple[str, str, float]], name: str) -> float:
    return sum(value for found, _, value in page if found == name)


def _rss_mib(pid: int) -> float:
    """Of the only process whose session this is: the shell that sets the environment became it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> int:
    """Exit status: 0, or 2 if something did not start."""
    made = argparse.ArgumentParser(prog="bench.cluster.model_infers", description=__doc__)
    made.add_argument(
        "--count", type=int, default=500, metavar="N", help="ModelInfers of 8 pods (default: %(default)s)"
    )
    options = made.parse_args()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
            costs = uvloop.run(measure(options.count, Path(directory)))
    except (AssetsMissing, StartFailed, ClusterError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    table = Table(title=f"{options.count} ModelInfers of 8 pods")
    for column in ("start", "settled after", "memory", "processor", "writes", "writes an object"):
        table.add_column(column, justify="right")
    for name, cost in zip(("first", "where all is settled"), costs, strict=True):
        writes = sum(cost.writes.values())
        row = (f"{cost.settled_s:.1f} s", f"{cost.rss_mib:.0f} MiB", f"{cost.cpu_s:.1f} s")
        table.add_row(name, *row, f"{writes:.0f}", f"{writes / options.count:.1f}")
    console.print(table)
    for labels, value in sorted(costs[0].writes.items()):
        console.print(f"{labels}: {value:.0f}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
