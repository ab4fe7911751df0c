# SPDX-License-Identifier: Apache-2.0
"""What scaling costs the manager: processor and memory with many bindings, beside a manager that does not scale."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
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
from bench.cluster.demand_teller import address_of
from bench.processes import Processes, StartFailed, free_ports
from bench.usage import cpu_seconds
from controller.cluster.client import Client, connect
from controller.cluster.errors import ClusterError
from controller.cluster.resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_SERVERS,
    PODS,
)
from extproc.config.loads import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from bench.cluster.control_plane import ControlPlane
    from controller.cluster.resources import Object

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
_NAMESPACE: Final = "default"
_AT_ONCE: Final = 16
_LATEST_S: Final = 600.0
# While it settles, scrapes must not be what it is busy with.
_LOOK_EACH_S: Final = 5.0
_POD: Final = {"containers": [{"name": "engine", "image": "attache/engine-sim"}]}


class Cost(msgspec.Struct, frozen=True):
    """A manager that has settled. ``cores``: over the measured time. ``rss_mib``: at its end. ``looks_per_s``: of
    bindings. ``scrape_s``: one page of metrics. ``writes``: during the measured time.
    """

    cores: float
    rss_mib: float
    looks_per_s: float
    scrape_s: float
    writes: float


class Load(msgspec.Struct, frozen=True):
    """``busy``: the share of ModelServers that get requests. ``requests_per_s``: at each of those, as a gateway tells it
    each second.
    """

    requests_per_s: float
    busy: float


async def measure(
    count: int, targets: int, *, period_s: float, for_s: float, load: Load, directory: Path
) -> Sequence[Cost]:
    """Without scaling, and with it.

    Raises StartFailed, AssetsMissing, TimeoutError.
    """
    options = ControlPlaneOptions(controllers=False, scheduler=False)
    async with (
        running_control_plane(directory, find_assets(), options) as plane,
        connect(plane.admin, manager="bench") as client,
        Processes(directory) as processes,
    ):
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        policy = _object(AUTOSCALING_POLICIES.api_version, "AutoscalingPolicy", "p", {"period": f"{period_s:g}s"})
        await client.create(AUTOSCALING_POLICIES, policy)
        await _all(_make(client, number, targets) for number in range(count))
        (port,) = free_ports(1)
        words = [f"{count}", f"{targets}", f"{load.requests_per_s:g}", f"{round(load.busy * count)}", f"{port}"]
        await processes.start("gateway", [sys.executable, "-m", "bench.cluster.demand_teller", *words])
        await _make_pod(client, "gateway", "127.0.0.1", {LOADS_LABEL: str(port)})
        bare = await _run(processes, plane, for_s, 0, "--no-scaling")
        return [bare, await _run(processes, plane, for_s, count)]


async def _make(client: Client, number: int, targets: int) -> None:
    """A binding with its targets, a pod of each that serves, and their ModelServer."""
    name = f"b{number}"
    for each in range(targets):
        await _make_target(client, f"{name}-{each}", name, number * targets + each)
    server = {
        "model": "m",
        "engine": "vLLM",
        "workloadSelector": {"matchLabels": {"model": name}},
        "workloadPort": {"port": 8000},
    }
    await client.create(MODEL_SERVERS, _object(MODEL_SERVERS.api_version, "ModelServer", name, server))
    refs = [{"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-{each}"} for each in range(targets)]
    listed = [{"name": f"t{each}", "ref": ref, "maxReplicas": 10} for each, ref in enumerate(refs)]
    spec = {"policyRef": "p", "targets": listed}
    made = _object(AUTOSCALING_POLICY_BINDINGS.api_version, "AutoscalingPolicyBinding", name, spec)
    await client.create(AUTOSCALING_POLICY_BINDINGS, made)


async def _make_target(client: Client, name: str, model: str, number: int) -> None:
    labels = {"app": name, "model": model}
    template = {"metadata": {"labels": labels}, "spec": _POD}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    await client.create(DEPLOYMENTS, _object("apps/v1", "Deployment", name, spec))
    await _make_pod(client, f"{name}-x", address_of(number), labels)


async def _make_pod(client: Client, name: str, ip: str, labels: dict[str, str]) -> None:
    """One that is ready."""
    made = _object("v1", "Pod", name, _POD)
    made["metadata"]["labels"] = labels
    await client.create(PODS, made)
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
    await client.merge_patch(PODS, name, _NAMESPACE, {"status": status}, subresource="status")


def _object(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> Object:
    metadata = {"name": name, "namespace": _NAMESPACE}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


async def _run(processes: Processes, plane: ControlPlane, for_s: float, count: int, *more: str) -> Cost:
    """One manager: until it has settled, and then for the measured time. ``count``: bindings that it scales."""
    (port,) = free_ports(1)
    words = ["--no-webhooks", "--lease-namespace", _NAMESPACE, "--lease", f"m{count}", "--image", "attache", *more]
    words += ["--gateway-namespace", _NAMESPACE]
    command = ["env", f"KUBECONFIG={plane.kubeconfig}", sys.executable, "-m", "attache", "manager", *words]
    name = f"manager-{count}"
    await processes.start(name, [*command, "--metrics", f"127.0.0.1:{port}"])
    pid = processes.pid(name)
    async with asyncio.timeout(_LATEST_S), aiohttp.ClientSession() as http:
        await _settled(http, port, count)
        before, page = cpu_seconds(pid), await _page(http, port)
        began_s = _CLOCK()
        await asyncio.sleep(for_s)
        took_s, used_s = _CLOCK() - began_s, cpu_seconds(pid) - before
        asked_s = _CLOCK()
        after = await _page(http, port)
        scrape_s = _CLOCK() - asked_s

    def grew(metric: str) -> float:
        return _sum(after, metric) - _sum(page, metric)

    rss_mib = _rss_mib(pid)
    await processes.end(name)
    looks = grew("attache_scaling_looks_total") / took_s
    return Cost(used_s / took_s, rss_mib, looks, scrape_s, grew("attache_scaling_writes_total"))


async def _settled(http: aiohttp.ClientSession, port: int, count: int) -> None:
    """All was looked at, and nothing was written for at least ten seconds."""
    writes, since_s = -1.0, _CLOCK()
    while _CLOCK() - since_s < 10.0:
        await asyncio.sleep(_LOOK_EACH_S)
        page = await _page(http, port)
        now = _sum(page, "attache_scaling_writes_total")
        is_begun = "attache_manager_leader 1.0" in page and _sum(page, "attache_scaling_looks_total") >= 3 * count
        if now != writes or not is_begun:
            writes, since_s = now, _CLOCK()


async def _page(http: aiohttp.ClientSession, port: int) -> str:
    """The metrics; empty while the page is not there yet."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
            return await answer.text()
    return ""


def _sum(page: str, name: str) -> float:
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _rss_mib(pid: int) -> float:
    """Of the only process whose session this is: the shell that sets the environment became it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them, a few at a time."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in itertools.repeat(None, _AT_ONCE):
            tasks.create_task(work())


def main() -> int:
    """Exit status: 0, or 2 if something did not start."""
    made = argparse.ArgumentParser(prog="bench.cluster.bindings", description=__doc__)
    add = made.add_argument
    add("--count", type=int, default=500, metavar="N", help="bindings (default: %(default)s)")
    add("--targets", type=int, default=10, metavar="N", help="of each binding (default: %(default)s)")
    add("--period", type=float, default=5.0, metavar="S", help="between two decisions (default: %(default)s)")
    add("--requests", type=float, default=5.0, metavar="N", help="a second, of each ModelServer (default: %(default)s)")
    add("--busy", type=float, default=1.0, metavar="SHARE", help="of ModelServers with requests (default: %(default)s)")
    add("--for", dest="for_s", type=float, default=60.0, metavar="S", help="how long (default: %(default)s)")
    options = made.parse_args()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
            measuring = measure(
                options.count,
                options.targets,
                period_s=options.period,
                for_s=options.for_s,
                load=Load(options.requests, options.busy),
                directory=Path(directory),
            )
            costs = uvloop.run(measuring)
    except (AssetsMissing, StartFailed, ClusterError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    table = Table(
        title=f"{options.count} bindings of {options.targets} targets, every {options.period:g} s, {options.busy:.0%} busy"
    )
    for column in ("manager", "cores", "memory", "looks a second", "scrape", "writes"):
        table.add_column(column, justify="right")
    for name, cost in zip(("without scaling", "with scaling"), costs, strict=True):
        row = (f"{cost.cores:.3f}", f"{cost.rss_mib:.0f} MiB", f"{cost.looks_per_s:.0f}", f"{cost.scrape_s:.2f} s")
        table.add_row(name, *row, f"{cost.writes:.0f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
