# SPDX-License-Identifier: Apache-2.0
"""A step of load on a real cluster of one machine, beside the lab's prediction: python -m bench.autoscale.real_step.

Both have the same requests at the same instants, engines of the same speed, the same objective and policy, and start
with the same fleet; in both nobody scales in the first minute, which does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop
from rich.console import Console

from bench.autoscale.capacity import capacity
from bench.autoscale.cell import WARM_UP_S, Cell, first_replicas, run_load
from bench.autoscale.loads import Half, Lengths, Load
from bench.autoscale.measures import Window, met_by_window
from bench.autoscale.oracle import work_by_second
from bench.autoscale.policies import OURS
from bench.autoscale.scaler import PERCENTILE
from bench.autoscale.shapes import steps
from bench.autoscale.variants import BLOCK_SIZE, Variant
from bench.cluster.assets import AssetsMissing, find_assets
from bench.cluster.control_plane import ControlPlaneOptions, running_control_plane
from bench.cluster.scaling.objects import Model
from bench.cluster.scaling.site import running_site
from bench.load.client import LoadClient
from bench.processes import StartFailed
from bench.reporting.results import RequestResult
from bench.stack import EnvoyMissing
from controller.kube.errors import ClusterError
from controller.kube.resources import AUTOSCALING_POLICIES

if TYPE_CHECKING:
    from bench.cluster.scaling.site import Site
    from bench.workload.sessions import Workload

# From the order to a server that listens, with the two or three seconds that Python takes.
_START_S: Final = 60.0
_PYTHON_S: Final = 3.0
_PERIOD_S: Final = 5.0
_MOST: Final = 12
_NAME: Final = "step"
# The engines' command line names GPU and model in one word; the lab in two.
_HARDWARE: Final = "a100-llama-3.1-8b"
_ENGINE: Final = ("--hardware", _HARDWARE, "--block-size", str(BLOCK_SIZE))
_VARIANT: Final = Variant("a100", "a100", "8b", start_s=_START_S, jitter=0.02, max_replicas=_MOST)
# Long prompts and short answers: the work is the engine's, and this machine has little of it.
_LENGTHS: Final = Lengths(shared=256, prompt=2500, output=12, sigma=0.3, longest=8000)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``windows``: of the run, by time. ``orders``: replicas by second of the run. ``failures``: what was no answer."""

    windows: Sequence[Window]
    orders: Sequence[tuple[float, int]]
    failures: Sequence[str]
    results: Sequence[RequestResult]

    @property
    def attainment(self) -> float:
        """The share of requests that met both targets."""
        return sum(one.met for one in self.windows) / sum(one.due for one in self.windows)


def step_load(before_per_s: float, after_per_s: float, at_s: float, until_s: float) -> Load:
    """A step from one rate to another."""
    load = Load(_NAME, until_s, {}, lengths=_LENGTHS, variants=(_VARIANT,))
    per_engine = capacity(_VARIANT.kind(), load.mean, load.objective.tpot_s).requests_per_s
    shape = steps((0, before_per_s / per_engine), (at_s, after_per_s / per_engine))
    return msgspec.structs.replace(load, shapes={Half.HELD: shape})


def model_of(load: Load, replicas: int) -> Model:
    """The same on the cluster. Until ``Auto`` is written, nobody is obeyed."""
    objective = load.objective
    told = {
        "ttft": f"{objective.ttft_s * 1000:.0f}ms",
        "tpot": f"{objective.tpot_s * 1000:.0f}ms",
        "percentile": PERCENTILE,
    }
    flow_control = {"timeout": "30m", "noEndpointTimeout": "30m"}
    return Model(
        name=_NAME,
        replicas=replicas,
        most=_MOST,
        engine=_ENGINE,
        start_s=_START_S - _PYTHON_S,
        policy={"mode": "Recommend", "period": f"{_PERIOD_S:g}s", "objective": told},
        server={"picker": "PrefixAware", "flowControl": flow_control},
        target={"minReplicas": 1},
    )


async def on_cluster(site: Site, load: Load, workload: Workload, replicas: int) -> Outcome:
    """The run in real time."""
    model = model_of(load, replicas)
    async with site.serving(model) as asked:
        client = LoadClient(site.gateways[0].url, _NAME, speed=1.0, on_result=lambda _: None)
        began_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(_obeyed_after(site, WARM_UP_S))
        results = await client.send(workload)
        await task
    due_at_s = [one.begins_at_s for one in workload.sessions if one.begins_at_s >= WARM_UP_S]
    windows = met_by_window(due_at_s, results, load.objective, since_s=WARM_UP_S, until_s=load.duration_s)
    orders = [(round(one.at_s - began_s, 1), one.replicas) for one in asked.changes]
    return Outcome(
        windows=windows, orders=orders, failures=[one.error for one in results if one.error], results=results
    )


async def _obeyed_after(site: Site, after_s: float) -> None:
    await asyncio.sleep(after_s)
    patch: dict[str, Any] = {"spec": {"mode": "Auto"}}
    await site.client.merge_patch(AUTOSCALING_POLICIES, _NAME, site.namespace, patch)


async def _run(options: argparse.Namespace, console: Console) -> None:
    load = step_load(
        options.before, options.after, WARM_UP_S + options.calm, WARM_UP_S + options.calm + options.after_s
    )
    workload = load.workload(Half.HELD, options.seed, Path())
    replicas = first_replicas(work_by_second(load, workload))
    cell = Cell(load=_NAME, half=Half.HELD, policy=OURS, knob=1.0, seed=options.seed, period_s=_PERIOD_S)
    predicted = run_load(cell, load, Path())
    console.print(
        f"{workload.requests} requests, {replicas} replicas at first; the lab: {predicted.attainment:.1%} in target, "
        f"windows {_shares(predicted.windows)}, TTFT {predicted.ttft_s}"
    )
    if options.lab_only:
        return
    with tempfile.TemporaryDirectory(prefix="attache-step-") as directory:
        folder = options.logs or Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        async with (
            running_control_plane(folder, find_assets(), ControlPlaneOptions()) as plane,
            running_site(plane, folder, namespace="step") as site,
        ):
            found = await on_cluster(site, load, workload, replicas)
    console.print(
        f"the cluster: {found.attainment:.1%} in target, windows {_shares(found.windows)}, replicas {found.orders}, "
        f"{len(found.failures)} failures; {100 * (found.attainment - predicted.attainment):+.1f} points"
    )
    for failure in sorted(set(found.failures)):
        console.print(f"  {failure}", markup=False)


def _shares(windows: Sequence[Window]) -> str:
    return " ".join(f"{one.met / max(1, one.due):.0%}" for one in windows)


def main() -> int:
    """Exit status: 0, or 2 if something did not start."""
    made = argparse.ArgumentParser(prog="bench.autoscale.real_step", description=__doc__)
    add = made.add_argument
    add("--before", type=float, default=4.0, metavar="N", help="requests a second at first (default: %(default)s)")
    add("--after", type=float, default=24.0, metavar="N", help="requests a second then (default: %(default)s)")
    add("--calm", type=float, default=20.0, metavar="S", help="measured before the step (default: %(default)s)")
    add("--after-s", type=float, default=180.0, metavar="S", help="measured after it (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the requests (default: %(default)s)")
    add("--lab-only", action="store_true", help="the prediction alone")
    add("--logs", type=Path, metavar="DIR", help="keep the processes' logs in this empty directory")
    options = made.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    try:
        uvloop.run(_run(options, console))
    except (AssetsMissing, EnvoyMissing, StartFailed, ClusterError, TimeoutError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
