# SPDX-License-Identifier: Apache-2.0
"""What the manager costs with many objects: ``python -m bench.cluster.manager_cost SCENARIO``.

A real API server holds the objects of a scenario; no node runs their pods. For each start of the manager: how long it
takes until the manager has settled (it reconciles evenly and writes next to nothing) and what that costs, then its
processor time, memory, writes and metrics page while nothing changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster.fake_demand_feed import address_of
from bench.cluster.kubernetes_binaries import ROOT, AssetsMissing, find_assets
from bench.cluster.local_control_plane import ControlPlaneOptions, apply_crds, running_control_plane
from bench.stack.processes import Processes, StartFailed, cpu_seconds, free_ports, peak_rss_bytes, rss_bytes
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_INFERS,
    MODEL_SERVERS,
    PODS,
)
from controller.kube.client import Client, connect
from controller.kube.errors import ClusterError, NotFound
from controller.kube.informer import Informer, Selection
from extproc.api.status_page_contents import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import ApiResource, Object

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
_NAMESPACE: Final = "default"
_WORKERS: Final = 16
_POD: Final = {"containers": [{"name": "engine", "image": "attache/engine-sim"}]}
_SLICE_S: Final = 10.0
_SCRAPES: Final = 3
# Settled: reconciles come evenly, and objects are hardly written.
_RATE_TOLERANCE: Final = 0.1
_WRITTEN: Final = 0.02
_WRITES: Final = ("attache_manager_writes_total", "attache_scaling_writes_total")


class ScenarioOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``count``: objects. ``targets``, ``period_s``, ``requests_per_s`` and ``busy`` (the share of ModelServers that
    get requests): of bindings. ``measure_s``: the steady state, after at most ``settle_s``.
    """

    count: int
    targets: int
    period_s: float
    requests_per_s: float
    busy: float
    measure_s: float
    settle_s: float


class ManagerStartOptions(msgspec.Struct, frozen=True):
    """One start of the manager with ``options``. ``reconciles``: false if these make it ignore the objects."""

    title: str
    options: tuple[str, ...] = ()
    reconciles: bool = True


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """``count``: of objects, unless another is given. ``world``: makes the objects, and runs what answers the manager.
    ``starts``: of the manager, one after the other. ``reconciles``: the metric that counts them. ``least_rate``: of
    reconciles a second in the steady state. ``quiet_s``: how long it must be steady, sampled every ``sample_s`` (a
    scrape of a large page costs the manager processor time). ``is_done``: must hold besides.
    """

    about: str
    count: int
    world: Callable[[Client, Processes, ScenarioOptions], AbstractAsyncContextManager[None]]
    starts: tuple[ManagerStartOptions, ...]
    reconciles: str
    least_rate: Callable[[ScenarioOptions], float]
    sample_s: float
    quiet_s: float
    is_done: Callable[[Client], Awaitable[bool]]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one start. ``settled_s``: from the start until it has settled. ``settling_cpu_s`` and ``settling_writes``:
    until then. nan: it never has, and the other figures are of a busy start. ``cores``: in each slice of the steady
    state; ``rss_mib``: at its end; ``peak_rss_mib``: since the start. ``decided``: the share of a binding's reconciles
    that decide anew. ``scrape_s``: of a metrics page of ``page_mib``. ``load``: the machine's load average of a minute.
    """

    settled_s: float
    settling_cpu_s: float
    settling_writes: float
    cores: Sequence[float]
    rss_mib: float
    peak_rss_mib: float
    reconciles_per_s: float
    decided: float
    writes: float
    scrape_s: float
    page_mib: float
    load: float


class _Sample(msgspec.Struct, frozen=True):
    """Counters of the manager at an instant."""

    at_s: float
    reconciles: float
    writes: float
    cpu_s: float


async def measure(scenario: Scenario, options: ScenarioOptions, directory: Path) -> Sequence[Cost]:
    """One cost for each start. Raises StartFailed, AssetsMissing, ClusterError."""
    plain = ControlPlaneOptions(controllers=False, scheduler=False)
    async with (
        running_control_plane(directory, find_assets(), plain) as plane,
        connect(plane.admin, manager="bench") as client,
        Processes(directory) as processes,
    ):
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        async with scenario.world(client, processes, options):
            return [
                await _cost_of_start(scenario, start, options, (plane, client, processes)) for start in scenario.starts
            ]


async def _cost_of_start(
    scenario: Scenario,
    start: ManagerStartOptions,
    options: ScenarioOptions,
    cluster: tuple[ControlPlane, Client, Processes],
) -> Cost:
    plane, client, processes = cluster
    (port,) = free_ports(1)
    name = f"manager-{start.title.replace(' ', '-')}"
    words = ["--no-webhooks", "--lease-namespace", _NAMESPACE, "--lease", name, "--image", "attache"]
    words += ["--gateway-namespace", _NAMESPACE, "--metrics", f"127.0.0.1:{port}", *start.options]
    command = ["env", f"KUBECONFIG={plane.kubeconfig}", sys.executable, "-m", "attache", "manager", *words]
    await processes.start(name, command)
    expected = (options.count, scenario.least_rate(options)) if start.reconciles else (0, 0.0)
    async with aiohttp.ClientSession() as http:
        manager = _Manager(http, processes.pid(name), port, scenario)
        settled = await manager.settled(client, expected, options.settle_s)
        cost = await manager.cost(settled, options.measure_s)
    await processes.end(name)
    return cost


class _Manager:
    """A manager that runs: the session's only process, since the shell that sets the environment became it."""

    def __init__(self, http: aiohttp.ClientSession, pid: int, port: int, scenario: Scenario) -> None:
        self._http = http
        self._pid = pid
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._scenario = scenario
        self._began_s = _CLOCK()

    async def settled(self, client: Client, expected: tuple[int, float], timeout_s: float) -> _Sample | None:
        """The first sample of the steady state. ``expected``: reconciles in all, and a second, at least."""
        quiet_s, each_s = self._scenario.quiet_s, self._scenario.sample_s
        seen: list[_Sample] = []
        while _CLOCK() - self._began_s < timeout_s:
            page = await self._page()
            if "attache_manager_leader 1.0" not in page:
                await asyncio.sleep(1.0)
                continue
            now = _Sample(_CLOCK(), _sum(page, self._scenario.reconciles), _writes(page), cpu_seconds(self._pid))
            seen = [*(one for one in seen if now.at_s - one.at_s <= quiet_s + each_s / 2), now]
            is_long = now.at_s - seen[0].at_s >= quiet_s - each_s / 2
            if is_long and _is_steady(seen, *expected) and await self._scenario.is_done(client):
                return seen[0]
            await asyncio.sleep(each_s)
        return None

    async def cost(self, settled: _Sample | None, measure_s: float) -> Cost:
        """Of the start so far, and of the steady state from now on."""
        before = await self._page()
        cores = [await self._cores() for _ in range(max(1, round(measure_s / _SLICE_S)))]
        load, rss, peak_rss = os.getloadavg()[0], rss_bytes(self._pid), peak_rss_bytes(self._pid)
        after = await self._page()
        took_s = [await self._scrape_s() for _ in range(_SCRAPES)]

        def growth(metric: str, having: str = "") -> float:
            return _sum(after, metric, having) - _sum(before, metric, having)

        reconciles = growth(self._scenario.reconciles)
        return Cost(
            settled_s=math.nan if settled is None else settled.at_s - self._began_s,
            settling_cpu_s=math.nan if settled is None else settled.cpu_s,
            settling_writes=math.nan if settled is None else settled.writes,
            cores=cores,
            rss_mib=rss / 2**20,
            peak_rss_mib=peak_rss / 2**20,
            reconciles_per_s=reconciles / (len(cores) * _SLICE_S),
            decided=growth(self._scenario.reconciles, 'outcome="decided"') / reconciles if reconciles else 0.0,
            writes=_writes(after) - _writes(before),
            scrape_s=statistics.median(took_s),
            page_mib=len(after) / 2**20,
            load=load,
        )

    async def _cores(self) -> float:
        began_s, used_s = _CLOCK(), cpu_seconds(self._pid)
        await asyncio.sleep(_SLICE_S)
        return (cpu_seconds(self._pid) - used_s) / (_CLOCK() - began_s)

    async def _scrape_s(self) -> float:
        asked_s = _CLOCK()
        await self._page()
        return _CLOCK() - asked_s

    async def _page(self) -> str:
        """The metrics page; empty while it is not served yet."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.get(self._url) as answer:
                return await answer.text()
        return ""


def _is_steady(seen: Sequence[_Sample], count: int, least_rate: float) -> bool:
    """Whether every object was reconciled and the samples show an even rate of reconciles and hardly a write."""
    first, last = seen[0], seen[-1]
    mean = (last.reconciles - first.reconciles) / (last.at_s - first.at_s)
    rates = [(new.reconciles - old.reconciles) / (new.at_s - old.at_s) for old, new in itertools.pairwise(seen)]
    return (
        last.reconciles >= count
        and last.writes - first.writes <= _WRITTEN * count
        and mean >= (1 - _RATE_TOLERANCE) * least_rate
        and all(abs(one - mean) <= _RATE_TOLERANCE * mean + 1.0 for one in rates)
    )


def _writes(page: str) -> float:
    return sum(_sum(page, name) for name in _WRITES)


def _sum(page: str, name: str, having: str = "") -> float:
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and having in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextlib.asynccontextmanager
async def _bindings(client: Client, processes: Processes, options: ScenarioOptions) -> AsyncIterator[None]:
    """Bindings of Deployments with a ready pod each, their ModelServers, and a gateway that reports demand."""
    policy = _object(AUTOSCALING_POLICIES, "p", {"period": f"{options.period_s:g}s"})
    await client.create(AUTOSCALING_POLICIES, policy)
    await _run_all(_create_binding(client, number, options.targets) for number in range(options.count))
    (port,) = free_ports(1)
    busy = round(options.busy * options.count)
    words = [f"{options.count}", f"{options.targets}", f"{options.requests_per_s:g}", f"{busy}", f"{port}"]
    await processes.start("gateway", [sys.executable, "-m", "bench.cluster.fake_demand_feed", *words])
    await _create_pod(client, "gateway", "127.0.0.1", {LOADS_LABEL: str(port)})
    yield


async def _create_binding(client: Client, number: int, targets: int) -> None:
    name = f"b{number}"
    for each in range(targets):
        target, labels = f"{name}-{each}", {"app": f"{name}-{each}", "model": name}
        template = {"metadata": {"labels": labels}, "spec": _POD}
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": target}}, "template": template}
        await client.create(DEPLOYMENTS, _object(DEPLOYMENTS, target, spec))
        await _create_pod(client, f"{target}-x", address_of(number * targets + each), labels)
    selector = {"workloadSelector": {"matchLabels": {"model": name}}, "workloadPort": {"port": 8000}}
    await client.create(MODEL_SERVERS, _object(MODEL_SERVERS, name, {"model": "m", "engine": "vLLM", **selector}))
    refs = [{"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-{each}"} for each in range(targets)]
    listed = [{"name": f"t{each}", "ref": ref, "maxReplicas": 10} for each, ref in enumerate(refs)]
    binding = _object(AUTOSCALING_POLICY_BINDINGS, name, {"policyRef": "p", "targets": listed})
    await client.create(AUTOSCALING_POLICY_BINDINGS, binding)


async def _create_pod(client: Client, name: str, ip: str, labels: dict[str, str]) -> None:
    """One that is ready."""
    made = _object(PODS, name, _POD)
    made["metadata"]["labels"] = labels
    await client.create(PODS, made)
    await client.merge_patch(PODS, name, _NAMESPACE, {"status": _ready_status(ip)}, subresource="status")


@contextlib.asynccontextmanager
async def _model_infers(client: Client, _: Processes, options: ScenarioOptions) -> AsyncIterator[None]:
    """ModelInfers of 8 pods and 2 Services, and a kubelet that marks each pod ready as it appears."""
    await _run_all(client.create(MODEL_INFERS, _model_infer(number)) for number in range(options.count))
    kubelet = asyncio.create_task(_mark_pods_ready(client))
    try:
        yield
    finally:
        kubelet.cancel()
        await asyncio.wait([kubelet])


def _model_infer(number: int) -> Object:
    """Two groups of a prefill pod, a decode pod and its two workers each."""
    containers = [{"name": "engine", "image": "attache/engine-sim", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    pod = {"spec": {"containers": containers}}
    decode = {"name": "decode", "entryTemplate": pod, "workerTemplate": pod, "workerReplicas": 2}
    roles = [{"name": "prefill", "entryTemplate": pod}, decode]
    return _object(MODEL_INFERS, f"m{number}", {"replicas": 2, "template": {"roles": roles}})


async def _mark_pods_ready(client: Client) -> None:
    """Report every new pod as ready, until cancelled."""
    pods = Informer(client, PODS, Selection(_NAMESPACE))
    queue: asyncio.Queue[str] = asyncio.Queue()
    pods.subscribe(queue.put_nowait)
    numbers = itertools.count()

    async def mark() -> None:
        while True:
            key = await queue.get()
            pod = pods.get(key)
            if pod is None or (pod.get("status") or {}).get("podIP"):
                continue
            status = {"status": _ready_status(address_of(next(numbers)))}
            with contextlib.suppress(NotFound):
                await client.merge_patch(PODS, key.partition("/")[2], _NAMESPACE, status, subresource="status")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pods.run())
        for _ in range(_WORKERS):
            tasks.create_task(mark())


async def _are_available(client: Client) -> bool:
    def is_available(thing: Object) -> bool:
        conditions = (thing.get("status") or {}).get("conditions") or ()
        return any(one["type"] == "Available" and one["status"] == "True" for one in conditions)

    return all(map(is_available, (await client.list(MODEL_INFERS, _NAMESPACE)).items))


async def _at_once(_: Client) -> bool:
    return True


def _object(kind: ApiResource, name: str, spec: dict[str, Any]) -> Object:
    metadata = {"name": name, "namespace": _NAMESPACE}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}


def _ready_status(ip: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True"}
    return {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [ready]}


async def _run_all(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """All of them, a few at a time."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in itertools.repeat(None, _WORKERS):
            tasks.create_task(work())


SCENARIOS: Final = {
    "bindings": Scenario(
        about="AutoscalingPolicyBindings of several targets, beside a manager that does not scale",
        count=500,
        world=_bindings,
        starts=(
            ManagerStartOptions("without scaling", ("--no-scaling",), reconciles=False),
            ManagerStartOptions("with scaling"),
        ),
        reconciles="attache_scaling_reconciles_total",
        least_rate=lambda options: options.count / options.period_s,
        sample_s=10.0,
        quiet_s=60.0,
        is_done=_at_once,
    ),
    "model-infers": Scenario(
        about="ModelInfers of 8 pods, at the manager's first start and at one where all is settled",
        count=500,
        world=_model_infers,
        starts=(ManagerStartOptions("first start"), ManagerStartOptions("second start")),
        reconciles="attache_manager_reconciles_total",
        least_rate=lambda _: 0.0,
        sample_s=0.5,
        quiet_s=5.0,
        is_done=_are_available,
    ),
}


def _table(title: str, starts: Sequence[str], costs: Sequence[Cost]) -> Table:
    table = Table("", *starts, "difference", title=title)

    def row(name: str, text: str, value: Callable[[Cost], float]) -> None:
        values = [value(one) for one in costs]
        table.add_row(name, *(text % one for one in values), text % (values[-1] - values[0]))

    row("settled after, s (nan: never)", "%.1f", lambda one: one.settled_s)
    row("processor time until then, s", "%.1f", lambda one: one.settling_cpu_s)
    row("writes until then", "%.0f", lambda one: one.settling_writes)
    row("cores, mean", "%.3f", lambda one: statistics.mean(one.cores))
    row("cores, median of 10 s", "%.3f", lambda one: statistics.median(one.cores))
    row("cores, most in 10 s", "%.3f", lambda one: max(one.cores))
    row("memory (RSS), MiB", "%.0f", lambda one: one.rss_mib)
    row("most memory so far, MiB", "%.0f", lambda one: one.peak_rss_mib)
    row("reconciles a second", "%.1f", lambda one: one.reconciles_per_s)
    row("share of bindings' reconciles that decide", "%.2f", lambda one: one.decided)
    row("writes", "%.0f", lambda one: one.writes)
    row("scrape, s", "%.2f", lambda one: one.scrape_s)
    row("page, MiB", "%.1f", lambda one: one.page_mib)
    row("load average of the machine", "%.1f", lambda one: one.load)
    return table


def main() -> int:
    """Exit status: 0, or 2 if something did not start."""
    lines = "; ".join(f"{name}: {one.about}" for name, one in SCENARIOS.items())
    made = argparse.ArgumentParser(prog="bench.cluster.manager_cost", description=lines)
    add = made.add_argument
    add("scenario", choices=SCENARIOS)
    add("--count", type=int, metavar="N", help="objects (default: 500)")
    add("--targets", type=int, default=10, metavar="N", help="of each binding (default: %(default)s)")
    add("--period", type=float, default=5.0, metavar="S", help="between two decisions (default: %(default)s)")
    add("--requests", type=float, default=5.0, metavar="N", help="a second, of each ModelServer (default: %(default)s)")
    add("--busy", type=float, default=1.0, metavar="SHARE", help="of ModelServers with requests (default: %(default)s)")
    add("--for", dest="for_s", type=float, default=60.0, metavar="S", help="how long (default: %(default)s)")
    add("--settle", type=float, default=600.0, metavar="S", help="wait at most so long first (default: %(default)s)")
    given = made.parse_args()
    scenario = SCENARIOS[given.scenario]
    options = ScenarioOptions(
        count=given.count or scenario.count,
        targets=given.targets,
        period_s=given.period,
        requests_per_s=given.requests,
        busy=given.busy,
        measure_s=given.for_s,
        settle_s=given.settle,
    )
    console = Console(width=120)
    try:
        with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
            costs = uvloop.run(measure(scenario, options, Path(directory)))
    except (AssetsMissing, StartFailed, ClusterError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    title = f"{options.count} {given.scenario}"
    if given.scenario == "bindings":
        title += f" of {options.targets} targets, every {options.period_s:g} s, {options.busy:.0%} busy"
    console.print(_table(title, [one.title for one in scenario.starts], costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
