# SPDX-License-Identifier: Apache-2.0
"""A testbed: gateways, manager and nodes around a control plane; models, their clients, and their desired replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec

from bench.cluster.kubernetes_binaries import ROOT
from bench.cluster.local_control_plane import apply_crds
from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_state_machine import NodeTiming
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    GATEWAY_CONFIGS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    NAMESPACES,
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
)
from controller.kube.client import Client, connect
from controller.kube.errors import NotFound
from extproc.api.status_page_contents import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import ApiResource, Object

_LONGEST_S = 300.0
ENTRY_LABELS: Final = ("attache.dev/model-infer", "attache.dev/entry")
PATIENCE_S: Final = 240.0
_QUICK: Final = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.1, pull_max_s=0.4, heartbeat_s=2.0)
_MANAGER: Final = "manager"
_LEASE_S: Final = 5
_SETTLE: Final = "1s"


class ReplicaChange(msgspec.Struct, frozen=True):
    """``at_s``: when its event arrived, by the event loop's clock. ``replicas``: in the spec since then."""

    at_s: float
    replicas: int


class Replicas:
    """``changes``: all so far, the replicas at the beginning first."""

    def __init__(self, replicas: int) -> None:
        self.changes = [ReplicaChange(now_s(), replicas)]
        self._news = asyncio.Event()

    @property
    def now(self) -> int:
        """Replicas currently in the spec."""
        return self.changes[-1].replicas

    def on_event(self, replicas: int) -> None:
        """An event came."""
        if replicas != self.now:
            self.changes.append(ReplicaChange(now_s(), replicas))
            self._news.set()

    async def until(self, holds: Callable[[int], bool], *, timeout_s: float) -> ReplicaChange:
        """The change by which it holds, or the last one if it holds already. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not holds(self.now):
                self._news.clear()
                await self._news.wait()
        return self.changes[-1]

    def since(self, at_s: float) -> list[int]:
        """The replicas in the spec at an instant, and each change after it."""
        before = [one.replicas for one in self.changes if one.at_s <= at_s][-1:]
        return before + [one.replicas for one in self.changes if one.at_s > at_s]

    def falls(self, since_s: float) -> int:
        """How often there were fewer than before."""
        found = self.since(since_s)
        return sum(after < before for before, after in itertools.pairwise(found))


@contextlib.asynccontextmanager
async def replicas_of(client: Client, resource: ApiResource, name: str, namespace: str) -> AsyncIterator[Replicas]:
    """Every event of the object is seen: the watch goes on from the version that was read."""
    thing = await client.get(resource, name, namespace)
    seen = Replicas(_replicas(thing))

    async def watch() -> None:
        since = thing["metadata"]["resourceVersion"]
        while True:
            async for event in client.watch(resource, namespace, since=since, fields=f"metadata.name={name}"):
                since = event.object["metadata"]["resourceVersion"]
                if event.type in ("ADDED", "MODIFIED"):
                    seen.on_event(_replicas(event.object))

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise error


def now_s() -> float:
    """The event loop's clock."""
    return asyncio.get_running_loop().time()


def _replicas(thing: Object) -> int:
    return int(thing["spec"].get("replicas", 1))


class LoadClient:
    """``url``: of Envoy. ``asked``: the errors of ended requests, empty if the answer was whole, without those that
    ``hang_up`` ended.
    """

    def __init__(self, url: str, model: str) -> None:
        self.asked: list[str] = []
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._numbers: Iterator[int] = itertools.count()
        self._tasks: set[asyncio.Task[str]] = set()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_LONGEST_S)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()
        await self._http.close()

    @property
    def failures(self) -> list[str]:
        """Of all that have ended."""
        return [one for one in self.asked if one]

    def ask(self, *, tokens: int = 4, words: int = 10) -> asyncio.Task[str]:
        """Begin one stream. ``words``: of the prompt, about a token each."""
        task = asyncio.create_task(self.stream(tokens=tokens, words=words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def all_ended(self) -> None:
        """Until all streams so far have ended by themselves."""
        await asyncio.gather(*self._tasks)

    async def hang_up(self) -> None:
        """End all streams."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def steadily(self, per_s: float, *, tokens: int = 4, words: int = 10) -> None:
        """Begin streams at even distances, until cancelled."""
        next_s = now_s()
        while True:
            _ = self.ask(tokens=tokens, words=words)
            next_s += 1 / per_s
            await asyncio.sleep(next_s - now_s())

    async def stream(self, *, tokens: int, words: int) -> str:
        """One stream, to its end; its error, if there is one."""
        began_s, tail, status = now_s(), b"", "no answer"
        try:
            async with self._http.post(self._url, json=self._question(tokens, words)) as answer:
                status = str(answer.status)
                async for chunk in answer.content.iter_any():
                    tail = (tail + chunk)[-400:]
        except (aiohttp.ClientError, TimeoutError) as caught:
            status = f"{status}, {caught!r}"
        is_whole = status == "200" and tail.endswith(b"data: [DONE]\n\n")
        after_s = now_s() - began_s
        error = "" if is_whole else f"{status} after {after_s:.1f} s: {tail[-300:].decode(errors='replace')}"
        self.asked.append(error)
        return error

    def _question(self, tokens: int, words: int) -> Object:
        text = f"{next(self._numbers)} of {id(self)} " + "long " * words
        message = {"role": "user", "content": text}
        return {"model": self._model, "messages": [message], "max_tokens": tokens, "stream": True}


class ScaledModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is scaled. ``kind``: Deployment or ModelInfer. ``engine``: words of the simulated engine. ``start_s``: that
    an engine waits before it begins to start. ``policy``: spec of its policy. ``server``: more of its ModelServer.
    ``target``: more of the binding's target.
    """

    name: str
    kind: str = "Deployment"
    replicas: int = 1
    most: int = 4
    engine: tuple[str, ...] = ()
    start_s: float = 0.0
    drain_s: int = 60
    policy: Mapping[str, Any] = {}
    server: Mapping[str, Any] = {}
    target: Mapping[str, Any] = {}

    @property
    def resource(self) -> ApiResource:
        """Of what is scaled."""
        return MODEL_INFERS if self.kind == "ModelInfer" else DEPLOYMENTS

    def objects(self, namespace: str) -> Iterator[tuple[ApiResource, Object]]:
        """All of them, in the order in which they are made."""
        selected = {ENTRY_LABELS[0]: self.name, ENTRY_LABELS[1]: "true"}
        labels = selected if self.kind == "ModelInfer" else {"app": self.name}
        selecting = {"workloadSelector": {"matchLabels": labels}, "workloadPort": {"port": 8000}}
        rules = [{"targetModels": [{"modelServerName": self.name}]}]
        reference = {"apiVersion": self.resource.api_version, "kind": self.kind, "name": self.name}
        target = {"name": "main", "ref": reference, "minReplicas": 0, "maxReplicas": self.most, **self.target}
        specs = (
            (self.resource, self._model_infer() if self.kind == "ModelInfer" else self._deployment(labels)),
            (MODEL_SERVERS, {"model": "org/llama", **selecting, **self.server}),
            (MODEL_ROUTES, {"modelName": self.name, "rules": rules}),
            (AUTOSCALING_POLICIES, dict(self.policy)),
            (AUTOSCALING_POLICY_BINDINGS, {"policyRef": self.name, "targets": [target]}),
        )
        metadata = {"name": self.name, "namespace": namespace}
        for resource, spec in specs:
            yield (
                resource,
                {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec},
            )

    def _deployment(self, labels: Mapping[str, str]) -> Object:
        template = {"metadata": {"labels": labels}, "spec": self._pod()}
        return {"replicas": self.replicas, "selector": {"matchLabels": labels}, "template": template}

    def _model_infer(self) -> Object:
        role = {"name": "all", "replicas": 1, "entryTemplate": {"spec": self._pod()}}
        return {"replicas": self.replicas, "template": {"drainTimeout": f"{self.drain_s}s", "roles": [role]}}

    def _pod(self) -> Object:
        words = ["--model", "org/llama", "--port", "8000", *self.engine]
        container: Object = {
            "name": "engine",
            "image": "attache/engine-sim",
            "args": words,
            "ports": [{"name": "http", "containerPort": 8000}],
            # a machine with other work on it is slow, and so are its engines: that is no reason to take them out
            "readinessProbe": {
                "httpGet": {"path": "/health", "port": "http"},
                "periodSeconds": 1,
                "timeoutSeconds": 10,
                "failureThreshold": 30,
            },
            # no request arrives after the engine gets SIGTERM
            "lifecycle": {"preStop": {"sleep": {"seconds": 3}}},
        }
        if self.start_s:
            engine = shlex.join([sys.executable, "-m", "bench.engine", "--host", "0.0.0.0", *words])  # noqa: S104 - becomes the pod's address
            container |= {
                "image": "attache/host",
                "command": ["sh", "-c", f"sleep {self.start_s:g}; exec {engine}"],
                "args": [],
            }
        return {"containers": [container], "terminationGracePeriodSeconds": 60}


class TestbedGateway(msgspec.Struct, frozen=True):
    """``url``: of Envoy. ``extproc``: the name of its process. ``pages``: of extproc."""

    name: str
    url: str
    pages: str

    @property
    def extproc(self) -> str:
        """The name of its process."""
        return f"extproc-{self.name}"


class Testbed(msgspec.Struct, frozen=True):
    """A namespace whose gateways, manager and engines run. ``manager``: address of its pages. ``folder``: for files.
    ``prometheus``: address at which the manager queries one, if a test starts it.
    """

    client: Client
    namespace: str
    gateways: Sequence[TestbedGateway]
    processes: Processes
    manager: str
    folder: Path
    prometheus: str

    @contextlib.asynccontextmanager
    async def serving(self, model: ScaledModel) -> AsyncIterator[Replicas]:
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
        """The last one of a binding in which something was new; empty while there is none."""
        url = f"http://{self.manager}/decisions/{self.namespace}/{name}?last=1"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http, http.get(url) as answer:
                if answer.status == 200:
                    return next((one["decision"] for one in (await answer.json())["decisions"]), {})
        return {}

    async def until_decided(self, name: str) -> None:
        """Until the manager has reconciled a binding."""

        async def is_decided() -> bool:
            return bool(await self.decision(name))

        await until(is_decided, f"no decision about {name}")

    async def until_ready(self, model: ScaledModel, count: int) -> None:
        """Exactly so many pods, all ready."""

        async def are_ready() -> bool:
            found = await self.pods(model)
            return len(found) == count and all(map(_is_ready, found))

        await until(are_ready, f"{model.name} has not {count} ready engines")

    async def pods(self, model: ScaledModel) -> list[dict[str, Any]]:
        """Engines of a model, those that end included."""
        label = "attache.dev/model-infer" if model.kind == "ModelInfer" else "app"
        return (await self.client.list(PODS, self.namespace, labels=f"{label}={model.name}")).items

    async def set_replicas(self, model: ScaledModel, count: int) -> None:
        """As ``kubectl scale`` does."""
        patch = {"spec": {"replicas": count}}
        await self.client.merge_patch(model.resource, model.name, self.namespace, patch, subresource="scale")

    async def obey(self, model: ScaledModel) -> None:
        """From now on decisions are carried out."""
        patch = {"spec": {"mode": "Auto"}}
        await self.client.merge_patch(AUTOSCALING_POLICIES, model.name, self.namespace, patch)

    def freeze(self, process: str) -> None:
        """It stops answering, and its connections stay open."""
        os.kill(self.processes.pid(process), signal.SIGSTOP)

    def thaw(self, process: str) -> None:
        """It goes on."""
        os.kill(self.processes.pid(process), signal.SIGCONT)

    async def kill_manager(self) -> None:
        """It is killed and started again."""
        await self.processes.restart(_MANAGER, signal.SIGKILL)

    async def _until_listed(self, gateway: TestbedGateway, model: str) -> None:
        """Until a gateway lists the model, with or without engines."""

        async def is_listed() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
                    http.get(f"{gateway.url}/v1/models") as answer,
                ):
                    return answer.status == 200 and any(one["id"] == model for one in (await answer.json())["data"])
            return False

        await until(is_listed, f"{gateway.url} does not know {model}")

    async def _until_answered(self, gateway: TestbedGateway, name: str) -> None:
        async with LoadClient(gateway.url, name) as asking:

            async def is_answered() -> bool:
                return not await asking.stream(tokens=1, words=1)

            await until(is_answered, f"{name} does not answer")

    async def _clean(self, model: ScaledModel) -> None:
        for resource, thing in reversed(list(model.objects(self.namespace))):
            await self.client.delete(resource, thing["metadata"]["name"], self.namespace, propagation="Background")
        for pod in await self.pods(model):
            with contextlib.suppress(NotFound):
                await self.client.delete(PODS, pod["metadata"]["name"], self.namespace, grace_s=0)

        async def are_gone() -> bool:
            return not await self.pods(model)

        await until(are_gone, f"pods of {model.name} stay")


@contextlib.asynccontextmanager
async def running_testbed(
    plane: ControlPlane, folder: Path, *, namespace: str, gateways: int = 1
) -> AsyncIterator[Testbed]:
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
                yield Testbed(client, namespace, started, processes, manager, folder, prometheus)
            finally:
                for one in started:
                    await client.delete(PODS, f"gateway-{one.name}", namespace, grace_s=0)
                await client.delete(NODES, node.name)


async def _make_namespace(client: Client, name: str) -> None:
    if await client.get_or_none(NAMESPACES, name) is None:
        await client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def has_account() -> bool:
        return await client.get_or_none(SERVICE_ACCOUNTS, "default", name) is not None

    await until(has_account, "no service account")


async def _gateway(
    client: Client, processes: Processes, plane: ControlPlane, folder: Path, namespace: str, name: str
) -> TestbedGateway:
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
    return TestbedGateway(name, f"http://{listen}", pages)


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
    """Poll until it holds. Raises TimeoutError, with ``said``."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(said) from None
