# SPDX-License-Identifier: Apache-2.0
"""``make up-kube``: a Kubernetes control plane and nodes on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console

from bench.cluster.assets import ROOT, Assets, AssetsMissing, find_assets
from bench.cluster.control_plane import ControlPlane, running_control_plane
from bench.cluster.crds import apply_crds
from bench.cluster.node.node import gpu_node
from bench.cluster.node.running import running_nodes
from bench.processes import StartFailed
from controller.cluster.client import connect
from controller.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLE: Final = Path(__file__).with_name("example.yaml")


def parser(prog: str = "bench.cluster") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Start a Kubernetes API server, its controllers and scheduler, and nodes whose pods are processes of "
        "this machine. Ctrl-C ends all.",
        epilog="Exit status: 0 after Ctrl-C or SIGTERM, 2 if something did not start.",
    )
    add = made.add_argument
    add("--nodes", type=int, default=2, metavar="N", help="how many nodes (default: %(default)s)")
    add("--gpus", type=int, default=8, metavar="N", help="GPUs of each node (default: %(default)s)")
    add("--crds", type=Path, default=ROOT / "manifests" / "crds", metavar="DIR", help="CRDs to apply, if DIR exists")
    return made


def main(arguments: list[str] | None = None, prog: str = "bench.cluster") -> int:
    """Exit status: 0 after Ctrl-C or SIGTERM, 2 if something did not start."""
    options = parser(prog).parse_args(arguments)
    console = Console(highlight=False)
    try:
        uvloop.run(_stay(find_assets(), options.nodes, options.gpus, options.crds, console))
    except (AssetsMissing, StartFailed, ClusterError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _stay(assets: Assets, nodes: int, gpus: int, crds: Path, console: Console) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    specs = [gpu_node(f"node-{number}", gpus, {"attache.dev/gpu": "h100"}) for number in range(nodes)]
    with tempfile.TemporaryDirectory(prefix="attache-kube-") as directory, contextlib.suppress(asyncio.CancelledError):
        where = Path(directory)
        async with (
            running_control_plane(where, assets) as plane,
            connect(plane.admin, manager="bench") as client,
            running_nodes(client, specs, where / "pods"),
        ):
            applied = await apply_crds(client, [assets.crds, crds])
            console.print(_welcome(plane, assets, [one.name for one in specs], applied), markup=False, soft_wrap=True)
            await asyncio.Event().wait()
    console.print("all processes are ended")


def _welcome(plane: ControlPlane, assets: Assets, nodes: Sequence[str], applied: int) -> str:
    kubectl = assets.binary("kubectl") if assets.has("kubectl") else "kubectl"
    return f"""\
Kubernetes is up at {plane.admin.server}, with {", ".join(nodes)} and {applied} CustomResourceDefinitions. In another terminal:

  export KUBECONFIG={plane.kubeconfig}
  {kubectl} apply -f {_EXAMPLE}
  {kubectl} get pods -o wide

A pod's address is reached from this machine: curl http://ADDRESS:8000/v1/models

logs of pods   {plane.directory / "pods"}
logs of others {plane.directory}

Ctrl-C ends it all."""


if __name__ == "__main__":
    sys.exit(main())
