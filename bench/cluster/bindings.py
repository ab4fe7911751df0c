# SPDX-License-Identifier: Apache-2.0
"""What scaling costs the manager: processor and memory with many bindings, beside a manager that does not scale."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster.assets import ROOT, AssetsMissing, find_assets
from bench.cluster.control_plane import ControlPlaneOptions, running_control_plane
from bench.cluster.crds import apply_crds
from bench.cluster.demand_teller import address_of
from bench.cluster.manager_cost import Cost, cost_of
from bench.processes import Processes, StartFailed, free_ports
from controller.kube.client import Client, connect
from controller.kube.errors import ClusterError
from controller.kube.resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_SERVERS,
    PODS,
)
from extproc.api.loads import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from bench.cluster.control_plane import ControlPlane
    from controller.kube.resources import Object

_NAMESPACE: Final = "default"
_AT_ONCE: Final = 16
_POD: Final = {"containers": [{"name": "engine", "image": "attache/engine-sim"}]}


class Load(msgspec.Struct, frozen=True):
    """``busy``: the share of ModelServers that get requests. ``requests_per_s``: at each of those, as a gateway tells
    it each second.
    """

    requests_per_s: float
    busy: float


class Measured(msgspec.Struct, frozen=True):
    """``period_s``: of decisions. ``for_s``: how long, after at most ``settle_s``."""

    period_s: float
    for_s: float
    settle_s: float


async def measure(count: int, targets: int, *, options: Measured, load: Load, directory: Path) -> Sequence[Cost]:
    """Without scaling, and with it.

    Raises StartFailed, AssetsMissing.
    """
    plain = ControlPlaneOptions(controllers=False, scheduler=False)
    async with (
        running_control_plane(directory, find_assets(), plain) as plane,
        connect(plane.admin, manager="bench") as client,
        Processes(directory) as processes,
    ):
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        policy = _object(
            AUTOSCALING_POLICIES.api_version, "AutoscalingPolicy", "p", {"period": f"{options.period_s:g}s"}
        )
        await client.create(AUTOSCALING_POLICIES, policy)
        await _all(_make(client, number, targets) for number in range(count))
        (port,) = free_ports(1)
        words = [f"{count}", f"{targets}", f"{load.requests_per_s:g}", f"{round(load.busy * count)}", f"{port}"]
        await processes.start("gateway", [sys.executable, "-m", "bench.cluster.demand_teller", *words])
        await _make_pod(client, "gateway", "127.0.0.1", {LOADS_LABEL: str(port)})
        bare = await _run(processes, plane, 0, options, "--no-scaling")
        return [bare, await _run(processes, plane, count, options)]


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


async def _run(processes: Processes, plane: ControlPlane, count: int, options: Measured, *more: str) -> Cost:
    """One manager: until it has settled, and then for the measured time. ``count``: bindings that it scales."""
    (port,) = free_ports(1)
    words = ["--no-webhooks", "--lease-namespace", _NAMESPACE, "--lease", f"m{count}", "--image", "attache", *more]
    words += ["--gateway-namespace", _NAMESPACE]
    command = ["env", f"KUBECONFIG={plane.kubeconfig}", sys.executable, "-m", "attache", "manager", *words]
    name = f"manager-{count}"
    await processes.start(name, [*command, "--metrics", f"127.0.0.1:{port}"])
    cost = await cost_of(
        processes.pid(name),
        port,
        bindings=count,
        period_s=options.period_s,
        for_s=options.for_s,
        settle_s=options.settle_s,
    )
    await processes.end(name)
    return cost


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them, a few at a time."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in itertools.repeat(None, _AT_ONCE):
            tasks.create_task(work())


def _table(said: str, costs: Sequence[Cost]) -> Table:
    table = Table("", "without scaling", "with scaling", "difference", title=said)

    def row(name: str, text: str, value: Callable[[Cost], float], *, has_difference: bool = True) -> None:
        bare, scaling = (value(one) for one in costs)
        table.add_row(name, text % bare, text % scaling, text % (scaling - bare) if has_difference else "")

    row("cores, mean", "%.3f", lambda one: statistics.mean(one.cores))
    row("cores, median of 10 s", "%.3f", lambda one: statistics.median(one.cores))
    row("cores, most in 10 s", "%.3f", lambda one: max(one.cores))
    row("memory (RSS), MiB", "%.0f", lambda one: one.rss_mib)
    row("most memory so far, MiB", "%.0f", lambda one: one.peak_rss_mib)
    row("looks a second", "%.1f", lambda one: one.looks_per_s)
    row("share of looks that decide anew", "%.2f", lambda one: one.decided)
    row("scrape, s", "%.2f", lambda one: one.scrape_s)
    row("page, MiB", "%.1f", lambda one: one.page_mib)
    row("writes", "%.0f", lambda one: one.writes)
    row("settled after, s (nan: never)", "%.0f", lambda one: math.nan if one.settled_s is None else one.settled_s)
    row("load average of the machine", "%.1f", lambda one: one.load, has_difference=False)
    return table


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
    add("--settle", type=float, default=600.0, metavar="S", help="wait at most so long first (default: %(default)s)")
    options = made.parse_args()
    console = Console(width=120)
    try:
        with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
            measuring = measure(
                options.count,
                options.targets,
                options=Measured(options.period, options.for_s, options.settle),
                load=Load(options.requests, options.busy),
                directory=Path(directory),
            )
            costs = uvloop.run(measuring)
    except (AssetsMissing, StartFailed, ClusterError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    said = f"{options.count} bindings of {options.targets} targets, every {options.period:g} s, {options.busy:.0%} busy"
    console.print(_table(said, costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
