# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.cluster.scaling``: the autoscaler in a real cluster of one machine."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console

from bench.cluster.assets import AssetsMissing, find_assets
from bench.cluster.control_plane import ControlPlaneOptions, running_control_plane
from bench.cluster.scaling.testbed import running_testbed
from bench.cluster.scaling.trials import overloads, run_cycles, run_faults, scaled_in, wakings
from bench.reporting.results import distribution
from bench.stack.processes import StartFailed
from bench.stack.stack import EnvoyMissing
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from bench.cluster.scaling.testbed import Testbed
    from bench.cluster.scaling.trials import Reaction


async def _overload(testbed: Testbed, options: argparse.Namespace, console: Console) -> None:
    found = await overloads(testbed, options.trials, tell=console.print)
    console.print(_times("overload to write", found))


async def _overload_without_queue(testbed: Testbed, options: argparse.Namespace, console: Console) -> None:
    found = await overloads(testbed, options.trials, has_queue=False, tell=console.print)
    console.print(_times("overload to write, without flowControl", found))


async def _waking(testbed: Testbed, options: argparse.Namespace, console: Console) -> None:
    found = await wakings(testbed, options.trials, tell=console.print)
    console.print(_times("request at zero to write", found))


async def _cycles(testbed: Testbed, options: argparse.Namespace, console: Console) -> None:
    kinds = ("Deployment", "ModelInfer") * options.side_by_side
    each = math.ceil(options.cycles / len(kinds))
    cycling = (
        run_cycles(testbed, kind, each, longest_s=options.longest, number=number, tell=console.print)
        for number, kind in enumerate(kinds)
    )
    for kind, one in zip(kinds, await asyncio.gather(*cycling), strict=True):
        waits = distribution(one.waits_s)
        message = f"0, 1, 0 of a {kind}: {one.cycles} cycles, {one.asked} requests, {len(one.lost)} lost"
        console.print(f"{message}; first byte after p50 {waits.p50:.1f} s, p99 {waits.p99:.1f} s")
        for lost in one.lost:
            console.print(f"  {lost}", markup=False)


async def _leaving(testbed: Testbed, _: argparse.Namespace, console: Console) -> None:
    for kind in ("Deployment", "ModelInfer"):
        one = await scaled_in(testbed, kind)
        message = f"scale-in of a {kind}: replicas {one.replicas} in {one.took_s:.0f} s, {one.whole} whole streams"
        console.print(f"{message}, {len(one.cut)} cut; under way at each write: {one.open}")
        for cut in one.cut:
            console.print(f"  {cut}", markup=False)


async def _faults(testbed: Testbed, _: argparse.Namespace, console: Console) -> None:
    found = await run_faults(testbed, tell=console.print)
    console.print(f"replicas fell in {sum(one.falls > 0 for one in found)} of {len(found)} faults")


_PARTS: Final[Mapping[str, Callable[[Testbed, argparse.Namespace, Console], Awaitable[None]]]] = {
    "overload": _overload,
    "overload-plain": _overload_without_queue,
    "waking": _waking,
    "cycles": _cycles,
    "leaving": _leaving,
    "faults": _faults,
}


def _times(name: str, found: Sequence[Reaction]) -> str:
    one = distribution(each.write_s for each in found)
    most = max(each.write_s for each in found)
    return (
        f"{name}: {len(found)} trials, p50 {one.p50:.3f} s, p90 {one.p90:.3f} s, p99 {one.p99:.3f} s, most {most:.3f} s"
    )


async def _run(options: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="attache-scaling-") as directory:
        folder = Path(directory) if options.logs is None else options.logs
        folder.mkdir(parents=True, exist_ok=True)
        async with (
            running_control_plane(folder, find_assets(), ControlPlaneOptions()) as plane,
            running_testbed(plane, folder, namespace="scaling", gateways=2) as testbed,
        ):
            for part in options.parts or _PARTS:
                await _PARTS[part](testbed, options, console)


def main() -> int:
    """Exit status: 0, or 2 if something did not start."""
    made = argparse.ArgumentParser(prog="bench.cluster.scaling", description=__doc__)
    add = made.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; default: all")
    add("--trials", type=int, default=50, metavar="N", help="of each reaction (default: %(default)s)")
    add(
        "--cycles",
        type=int,
        default=1000,
        metavar="N",
        help="from none to one and back, of all models (default: %(default)s)",
    )
    add(
        "--side-by-side", type=int, default=2, metavar="N", help="models of each kind that cycle (default: %(default)s)"
    )
    add("--longest", type=float, default=900.0, metavar="S", help="of the cycles (default: %(default)s)")
    add("--logs", type=Path, metavar="DIR", help="keep the processes' logs there")
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
