# SPDX-License-Identifier: Apache-2.0
"""``make up-kube``: a Kubernetes control plane and nodes on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console

from bench.cluster.kubernetes_binaries import ROOT, AssetsMissing, ClusterBinaries, find_assets
from bench.cluster.local_control_plane import (
    ControlPlane,
    ControlPlaneOptions,
    apply_crds,
    apply_folder,
    running_control_plane,
)
from bench.cluster.netns import NoNamespace, host_address, pod_range, run_in_namespace
from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_spec import IMAGES
from bench.cluster.service_proxy import running_service_proxy
from bench.stack.loopback_stack import EnvoyMissing, envoy_binary
from bench.stack.processes import StartFailed
from controller.kube.api_resources import SERVICES
from controller.kube.client import connect
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MANIFESTS: Final = ROOT / "manifests"
_URL: Final = "http://127.0.0.1:8080"
# What a cluster's load balancer would write: the address at which the gateway is reached, so that Models have a URL.
_GATEWAY: Final = ("attache-gateway", "attache-system")
_BALANCED: Final = {"status": {"loadBalancer": {"ingress": [{"ip": "127.0.0.1"}]}}}
# What the engines of manifests/samples call their model; a pool rewrites nothing.
_MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
_INSIDE: Final = """
All of it is in a network of its own. In another terminal enter that first:

  nsenter --user --net --preserve-credentials -t {pid} -- bash"""


def parser(prog: str = "bench.cluster") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Start a Kubernetes API server, its controllers and scheduler, and nodes whose pods are processes of "
            "this machine. Ctrl-C ends all."
        ),
        epilog="Exit status: 0 after Ctrl-C or SIGTERM, 2 if something did not start.",
    )
    add = made.add_argument
    add("--nodes", type=int, default=2, metavar="N", help="how many nodes (default: %(default)s)")
    add("--gpus", type=int, default=8, metavar="N", help="GPUs of each node (default: %(default)s)")
    add("--bare", action="store_true", help="a cluster alone, without our gateway, manager and samples")
    add("--crds", type=Path, default=ROOT / "manifests" / "crds", metavar="DIR", help="CRDs to apply, if DIR exists")
    add(
        "--own-network",
        action="store_true",
        help="in a network namespace, where Services can be reached; with two gateways and Redis",
    )
    return made


def main(arguments: list[str] | None = None, prog: str = "bench.cluster") -> int:
    """Exit status: 0 after Ctrl-C or SIGTERM, 2 if something did not start."""
    made = parser(prog)
    given = sys.argv[1:] if arguments is None else arguments
    options = made.parse_args(given)
    console = Console(highlight=False)
    try:
        if options.own_network and pod_range() is None:
            run_in_namespace([sys.executable, "-m", "bench.cluster", *given])
        uvloop.run(_stay(find_assets(), options, console))
    except (AssetsMissing, EnvoyMissing, StartFailed, ClusterError, NoNamespace) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _stay(assets: ClusterBinaries, options: argparse.Namespace, console: Console) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    labels = {"attache.dev/gpu": "h100"}
    range_ = pod_range() if options.own_network else None
    specs = [gpu_node(f"node-{number}", options.gpus, labels) for number in range(options.nodes)]
    images = IMAGES if options.bare else {**IMAGES, "envoyproxy/envoy": (str(envoy_binary()),)}
    with tempfile.TemporaryDirectory(prefix="attache-kube-") as directory, contextlib.suppress(asyncio.CancelledError):
        where = Path(directory)
        async with (
            running_control_plane(where, assets, ControlPlaneOptions(address=_address(range_))) as plane,
            connect(plane.admin, manager="bench") as client,
            running_nodes(client, specs, where / "pods", images=images, pod_range=range_),
            running_service_proxy(client) if range_ else contextlib.nullcontext(),
        ):
            await apply_crds(client, [assets.crd_directory, options.crds])
            has_gateways, url = assets.has_gateway_api and range_ is None, _URL
            if not options.bare:
                variant = "local-ha" if range_ else "local-gateway-api" if has_gateways else "local"
                await apply_folder(plane, assets, _MANIFESTS / variant)
                if range_:
                    url = f"http://{(await client.get(SERVICES, *_GATEWAY))['spec']['clusterIP']}"
                else:
                    await client.merge_patch(SERVICES, *_GATEWAY, _BALANCED, subresource="status")
                await apply_folder(plane, assets, _MANIFESTS / "local-manager")
            console.print(_welcome(plane, assets, [one.name for one in specs]), markup=False, soft_wrap=True)
            if options.own_network:
                console.print(_INSIDE.format(pid=os.getpid()), markup=False, soft_wrap=True)
            if not options.bare:
                console.print(_try(url, has_gateways=has_gateways), markup=False, soft_wrap=True)
            await asyncio.Event().wait()
    console.print("all processes are ended")


def _address(range_: str | None) -> str:
    """Where the API server listens, so that pods reach it."""
    return "127.0.0.1" if range_ is None else host_address(range_)


def _welcome(plane: ControlPlane, assets: ClusterBinaries, nodes: Sequence[str]) -> str:
    path = f"\n  export PATH={assets.binary('kubectl').parent}:$PATH" if assets.has_binary("kubectl") else ""
    return f"""\
Kubernetes is up at {plane.admin.server}, with {", ".join(nodes)}. In another terminal:

  export KUBECONFIG={plane.kubeconfig}{path}
  kubectl get pods -A -o wide
  kubectl get attache -A

logs of pods   {plane.directory / "pods"}, or kubectl logs
logs of others {plane.directory}

Ctrl-C ends it all."""


def _try(url: str, *, has_gateways: bool) -> str:
    question = '{"model": "llama", "messages": [{"role": "user", "content": "Who are you?"}]}'
    # without a delay of its own curl doubles it: minutes, where the first tries come too early
    retrying = "curl --retry 60 --retry-delay 1 --retry-all-errors"
    curl = f"{retrying} {url}/v1/chat/completions -H 'content-type: application/json'"
    tried = f"""\

The gateway and two simulated engines are starting. Try

  {curl} -d '{question}'"""
    if not has_gateways:
        return tried
    return f"""\
{tried}

which the Gateway default/web answers by the ModelRoute default/llama.
By the HTTPRoute default/pool, from an InferencePool:

  {curl} -H 'host: pool.example.com' -d '{question.replace('"llama"', f'"{_MODEL}"')}'"""


if __name__ == "__main__":
    sys.exit(main())
