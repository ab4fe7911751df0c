# SPDX-License-Identifier: Apache-2.0
"""Writes what kubectl prints into the pages: ``python -m tools.kubectl_pages``; needs an API server.

A block of text whose first line is ``$ kubectl ...`` is run against a real API server with some objects of ours, in the
namespace ``demo``, whose statuses the gateway role has written. A test runs the same and compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.cluster.kubernetes_binaries import find_assets
from bench.cluster.local_control_plane import apply_crds, running_control_plane
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    GATEWAY_CONFIGS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    NAMESPACES,
    PODS,
    SERVICE_ACCOUNTS,
)
from controller.kube.client import connect
from controller.kube.leader_election import LeaderElection

if TYPE_CHECKING:
    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import ApiResource, Object
    from controller.kube.client import Client

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (ROOT / "docs" / "kubernetes.md",)
NAMESPACE: Final = "demo"
_BLOCK: Final = re.compile(r"```text\n\$ kubectl ([^\n]+)\n(.*?)```", re.DOTALL)
_AGE: Final = re.compile(r"\S+$")
_PATIENCE_S: Final = 30.0


def commands(page: str) -> list[str]:
    """What stands behind ``kubectl`` in each block."""
    return [match[1] for match in _BLOCK.finditer(page)]


def with_output(page: str, outputs: dict[str, str]) -> str:
    """The page with these outputs, by command."""
    return _BLOCK.sub(lambda match: f"```text\n$ kubectl {match[1]}\n{outputs[match[1]]}\n```", page)


async def collect(plane: ControlPlane, assets: ClusterBinaries, client: Client, folder: Path) -> dict[str, str]:
    """The output of every command on the pages. ``folder``: for the role's directory."""
    await _make_objects(client)
    async with connect(client.access, manager=CONTROLLER) as own:
        election = LeaderElection(own, namespace=NAMESPACE, name="gateway", identity="pages")
        settings = GatewaySettings(config=folder, namespace=NAMESPACE, gateway_config=f"{NAMESPACE}/gateway")
        role = GatewayRunner(own, settings, GatewayMetrics(), election=election)
        running = asyncio.create_task(role.run())
        try:
            await _until_reported(client)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    wanted = {one for page in PAGES for one in commands(await asyncio.to_thread(page.read_text))}
    return {one: await _kubectl(plane, assets, one) for one in sorted(wanted)}


async def _make_objects(client: Client) -> None:
    """Two engines, a route that works, and one with a misspelt server."""
    selecting = {"workloadSelector": {"matchLabels": {"app": "llama"}}, "workloadPort": {"port": 8000}}
    things: list[tuple[ApiResource, str, Any]] = [
        (GATEWAY_CONFIGS, "gateway", {"listen": "0.0.0.0:8080"}),
        (MODEL_SERVERS, "llama", {"model": "meta-llama/Llama-3.1-8B-Instruct", **selecting}),
        (MODEL_ROUTES, "llama", {"modelName": "llama", "rules": [{"targetModels": [{"modelServerName": "llama"}]}]}),
        (MODEL_ROUTES, "qwen", {"modelName": "qwen", "rules": [{"targetModels": [{"modelServerName": "qwem"}]}]}),
    ]
    await client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for resource, name, spec in things:
        metadata = {"name": name, "namespace": NAMESPACE}
        thing = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec}
        await client.create(resource, thing)
    async with asyncio.timeout(30):
        # pods are refused until the controllers have made it
        while await client.get_or_none(SERVICE_ACCOUNTS, "default", NAMESPACE) is None:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.05)
    for number in (1, 2):
        await _make_pod(client, f"llama-{number}", f"10.0.0.{number}")


async def _make_pod(client: Client, name: str, ip: str) -> None:
    """Ready, as a kubelet would say."""
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": "llama"}},
        "spec": {"containers": [{"name": "engine", "image": "attache/engine-sim"}]},
    }
    await client.create(PODS, pod)
    status = {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    await client.merge_patch(PODS, name, NAMESPACE, {"status": status}, subresource="status")


async def _until_reported(client: Client) -> None:
    """Until the role has written every status; raises TimeoutError."""
    async with asyncio.timeout(_PATIENCE_S):
        for resource in (GATEWAY_CONFIGS, MODEL_SERVERS, MODEL_ROUTES):
            while not all(one.get("status") for one in (await client.list(resource, NAMESPACE)).items):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def _kubectl(plane: ControlPlane, assets: ClusterBinaries, command: str) -> str:
    """What it prints, ages as ``1m``; raises RuntimeError if it fails."""
    words = [str(assets.binary("kubectl")), "--kubeconfig", str(plane.kubeconfig), *shlex.split(command)]
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"kubectl {command}: {said.decode()}")
    return "\n".join(_without_ages(said.decode().strip("\n").splitlines()))


def _without_ages(lines: list[str]) -> list[str]:
    found, has_age = [], False
    for line in lines:
        if line.startswith("NAME "):
            has_age = line.endswith("AGE")
            found.append(line)
        else:
            found.append(_AGE.sub("1m", line) if has_age and line.strip() else line.rstrip())
    return found


async def _write() -> None:
    assets = find_assets()
    with tempfile.TemporaryDirectory(prefix="attache-kubectl-") as directory:
        where = Path(directory)
        async with running_control_plane(where, assets) as plane, connect(plane.admin, manager="pages") as client:
            await apply_crds(client, [ROOT / "manifests" / "crds"])
            outputs = await collect(plane, assets, client, where / "config")
    for page in PAGES:
        page.write_text(with_output(page.read_text(), outputs))


if __name__ == "__main__":
    asyncio.run(_write())
