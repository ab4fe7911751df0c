# SPDX-License-Identifier: Apache-2.0
"""Gateways and the manager as processes, and nodes that run engines, around a control plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.cluster.assets import ROOT
from bench.cluster.crds import apply_crds
from bench.cluster.node.container_machine import NodeTiming
from bench.cluster.node.node import gpu_node
from bench.cluster.node.running import running_nodes
from bench.cluster.scaling.asking import Asking
from bench.cluster.scaling.watching import replicas_of
from bench.processes import Processes, free_ports
from bench.stack import envoy_command
from controller.kube.client import Client, connect
from controller.kube.errors import NotFound
from controller.kube.resources import (
    AUTOSCALING_POLICIES,
    GATEWAY_CONFIGS,
    NAMESPACES,
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
)
from extproc.api.status_pages import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.cluster.control_plane import ControlPlane
    from bench.cluster.scaling.objects import Model
    from bench.cluster.scaling.watching import Replicas

PATIENCE_S: Final = 240.0
_QUICK: Final = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.1, pull_max_s=0.4, heartbeat_s=2.0)
_MANAGER: Final = "manager"
_LEASE_S: Final = 5
_SETTLE: Final = "1s"


class Gateway(msgspec.Struct, frozen=True):
    """``url``: of Envoy. ``extproc``: the name of its process. ``pages``: of extproc."""

    name: str
    url: str
    pages: str

    @property
    def extproc(self) -> str:
        """The name of its process."""
        return f"extproc-{self.name}"


class Site(msgspec.Struct, frozen=True):
    """A namespace whose gateways, manager and engines run. ``manager``: address of its pages. ``folder``: for files.
    ``prometheus``: where the manager may ask one, if somebody starts it.
    """

    client: Client
    namespace: str
    gateways: Sequence[Gateway]
    processes: Processes
    manager: str
    folder: Path
    prometheus: str

    @contextlib.asynccontextmanager
    async def serving(self, model: Model) -> AsyncIterator[Replicas]:
        """A model that answers, or that waits at zero; its replicas."""
        for resource, thing in model.objects(self.namespace):
            await self.client.create(resource, thing)
        try:
            async with replicas_of(self.client, model.resource, model.name, self.namespace) as replicas:
                await self.until_decided(model.name)
                await asyncio.gather(*(self._until_listed(one, model.name) for one in self.gateways))
                if model.replicas:
                    await self.until_ready(model, model.replicas)
                    await asyncio.gather(*(self._until_answered(one, model.name) for one in self.gateways))
                yield replicas
        finally:
            await self._clean(model)

    async def decision(self, name: str) -> dict[str, Any]:
        """The last one of a binding; empty while there is none."""
        found = await self.decisions(name, 1)
        return found[0] if found else {}

    async def decisions(self, name: str, last: int) -> list[dict[str, Any]]:
        """The last ones of a binding in which something was new, the newest first."""
        url = f"http://{self.manager}/decisions/{self.namespace}/{name}?last={last}"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http, http.get(url) as answer:
                if answer.status == 200:
                    return [one["decision"] for one in (await answer.json())["decisions"]]
        return []

    async def until_decided(self, name: str) -> None:
        """Until the manager has looked at a binding."""

        async def is_decided() -> bool:
            return bool(await self.decision(name))

        await until(is_decided, f"no decision about {name}")

    async def until_ready(self, model: Model, count: int) -> None:
        """Exactly so many pods, all ready."""

        async def are_ready() -> bool:
            found = await self.pods(model)
            return len(found) == count and all(map(_is_ready, found))

        await until(are_ready, f"{model.name} has not {count} ready engines")

    async def pods(self, model: Model) -> list[dict[str, Any]]:
        """Engines of a model, those that end included."""
        label = "attache.dev/model-infer" if model.kind == "ModelInfer" else "app"
        return (await self.client.list(PODS, self.namespace, labels=f"{label}={model.name}")).items

    async def set_replicas(self, model: Model, count: int) -> None:
        """As ``kubectl scale`` does."""
        patch = {"spec": {"replicas": count}}
        await self.client.merge_patch(model.resource, model.name, self.namespace, patch, subresource="scale")

    async def obey(self, model: Model) -> None:
        """From now on decisions are carried out."""
        patch = {"spec": {"mode": "Auto"}}
        await self.client.merge_patch(AUTOSCALING_POLICIES, model.name, self.namespace, patch)

    def freeze(self, process: str) -> None:
        """It answers nobody, and its connections stay open."""
        os.kill(self.processes.pid(process), signal.SIGSTOP)

    def thaw(self, process: str) -> None:
        """It goes on."""
        os.kill(self.processes.pid(process), signal.SIGCONT)

    async def kill_manager(self) -> None:
        """It is killed and started again."""
        await self.processes.restart(_MANAGER, signal.SIGKILL)

    async def _until_listed(self, gateway: Gateway, model: str) -> None:
        """Until a gateway knows the model, whether or not there is an engine."""

        async def is_listed() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
                    http.get(f"{gateway.url}/v1/models") as answer,
                ):
                    return answer.status == 200 and any(one["id"] == model for one in (await answer.json())["data"])
            return False

        await until(is_listed, f"{gateway.url} does not know {model}")

    async def _until_answered(self, gateway: Gateway, name: str) -> None:
        async with Asking(gateway.url, name) as asking:

            async def is_answered() -> bool:
                return not (await asking.stream(tokens=1, words=1)).error

            await until(is_answered, f"{name} does not answer")

    async def _clean(self, model: Model) -> None:
        for resource, thing in reversed(list(model.objects(self.namespace))):
            await self.client.delete(resource, thing["metadata"]["name"], self.namespace, propagation="Background")
        for pod in await self.pods(model):
            with contextlib.suppress(NotFound):
                await self.client.delete(PODS, pod["metadata"]["name"], self.namespace, grace_s=0)

        async def are_gone() -> bool:
            return not await self.pods(model)

        await until(are_gone, f"pods of {model.name} stay")


@contextlib.asynccontextmanager
async def running_site(plane: ControlPlane, folder: Path, *, namespace: str, gateways: int = 1) -> AsyncIterator[Site]:
    """Everything around the control plane. Raises StartFailed, TimeoutError, EnvoyMissing."""
    async with connect(plane.admin, manager="bench") as client, Processes(folder) as processes:
        await _make_namespace(client, namespace)
        await apply_crds(client, [ROOT / "manifests" / "crds"])
        node = gpu_node(f"node-{namespace}", 64)
        async with running_nodes(client, [node], folder / "pods", timing=_QUICK):
            names = [chr(ord("a") + number) for number in range(gateways)]
            started = [await _gateway(client, processes, plane, folder, namespace, name) for name in names]
            manager, prometheus = (f"127.0.0.1:{port}" for port in free_ports(2))
            words = ["--no-webhooks", "--watch-namespace", namespace, "--lease-namespace", namespace]
            words += ["--prometheus-allow", f"http://{prometheus}"]
            words += ["--gateway-namespace", namespace, "--lease-duration", str(_LEASE_S), "--metrics", manager]
            await processes.start(_MANAGER, [*_attache(plane), "manager", *words, "--image", "attache"])
            try:
                yield Site(client, namespace, started, processes, manager, folder, prometheus)
            finally:
                for one in started:
                    await client.delete(PODS, f"gateway-{one.name}", namespace, grace_s=0)
                await client.delete(NODES, node.name)


async def _make_namespace(client: Client, name: str) -> None:
    if await client.find(NAMESPACES, name) is None:
        await client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def has_account() -> bool:
        return await client.find(SERVICE_ACCOUNTS, "default", name) is not None

    await until(has_account, "no service account")


async def _gateway(
    client: Client, processes: Processes, plane: ControlPlane, folder: Path, namespace: str, name: str
) -> Gateway:
    """The gateway role, extproc, the bundle and Envoy, and a pod that stands for them."""
    listen, admin, grpc, pages, reports, role = (f"127.0.0.1:{port}" for port in free_ports(6))
    metadata = {"name": name, "namespace": namespace}
    spec = {"listen": listen, "admin": admin, "extproc": grpc}
    kind = GATEWAY_CONFIGS
    await client.create(kind, {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec})
    config, bundle, attache = folder / f"config-{name}", folder / f"bundle-{name}", _attache(plane)
    words = ["--config", str(config), "--namespace", namespace, "--gateway-config", f"{namespace}/{name}"]
    words += ["--lease-namespace", namespace, "--lease-name", f"gateway-{name}", "--metrics", role]
    await processes.start(f"gateway-{name}", [*attache, "gateway", *words, "--extproc", pages, "--bundle", reports])
    await until(lambda: config.is_dir() and any(config.iterdir()), "the gateway role writes nothing")
    words = ["--config", str(config), "--listen", grpc, "--metrics", pages, "--settle", _SETTLE]
    await processes.start(f"extproc-{name}", [*attache, "extproc", *words])
    words = ["--config", str(config), "--out", str(bundle), "--watch", "--metrics", reports]
    await processes.start(f"bundle-{name}", [*attache, "bundle", *words])
    await until((bundle / "bootstrap.json").exists, "no bundle")
    await processes.start(f"envoy-{name}", envoy_command(bundle))
    await _stand_in(client, namespace, f"gateway-{name}", pages)
    return Gateway(name, f"http://{listen}", pages)


async def _stand_in(client: Client, namespace: str, name: str, address: str) -> None:
    """A pod that no node runs, by which the manager finds extproc's pages."""
    host, _, port = address.partition(":")
    metadata = {"name": name, "namespace": namespace, "labels": {LOADS_LABEL: port}}
    spec = {"containers": [{"name": "extproc", "image": "attache/extproc"}], "nodeSelector": {"test": "none"}}
    await client.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}
    await client.merge_patch(PODS, name, namespace, {"status": status}, subresource="status")


def _attache(plane: ControlPlane) -> list[str]:
    return ["env", f"KUBECONFIG={plane.kubeconfig}", sys.executable, "-m", "attache"]


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and "deletionTimestamp" not in pod["metadata"]


async def until(holds: Callable[[], bool | Awaitable[bool]], said: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Ask again and again until it holds. Raises TimeoutError, with ``said``."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(said) from None
