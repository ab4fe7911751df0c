# SPDX-License-Identifier: Apache-2.0
"""A gateway, the manager and a node for ModelInfers under load: streams through Envoy, and who was ready meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec

from bench.cluster.node.in_process_node import Node
from bench.cluster.node.pod_state_machine import NodeTiming
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.api.drain_mark import DRAINING
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    PODS,
)
from controller.kube.client import Client, connect
from controller.kube.informer import Informer, Selection
from controller.kube.leader_election import LeaderElection
from controller.models.model_infer import names
from extproc.api.status_page_contents import LOADS_LABEL, LOADS_PATH
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.kube_objects import resource, route
from tests.waiting import eventually
from tests.with_kube.managing import IMPATIENT, Managing, model_infer, role
from tests.with_kube.test_gateway_role import create

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from controller.kube.api_resources import Object
    from tests.with_kube.kubes import Kube

QUICK: Final = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.2, pull_max_s=0.4, heartbeat_s=1.0)
PATIENCE_S: Final = 120.0
# 14 tokens a second: streams are long, and cost this machine little
SPEED: Final = 0.1
TOKENS_A_SECOND: Final = 14


class Gateway(msgspec.Struct, frozen=True):
    """``url``: of Envoy. ``loads``: address of extproc's pages. ``decisions``: its log of all decisions."""

    url: str
    loads: str
    decisions: Path


@contextlib.asynccontextmanager
async def gateway(client: Client, kube: Kube, namespace: str, folder: Path) -> AsyncIterator[Gateway]:
    """The gateway role, extproc and Envoy for a namespace, with a pod in the cluster that stands for them."""
    listen, admin, grpc, metrics, reports = (f"127.0.0.1:{port}" for port in free_ports(5))
    spec = {"listen": listen, "admin": admin, "extproc": grpc}
    await create(client, resource("GatewayConfig", "main", spec, namespace=namespace))
    config, bundle, decisions = folder / "config", folder / "bundle", folder / "decisions.jsonl"
    settings = GatewaySettings(
        config=config,
        namespace=namespace,
        gateway_config=f"{namespace}/main",
        consumers={"extproc": metrics, "Envoy": reports},
        # a busy machine takes longer than users do to bring back what was deleted
        grace_s=60.0,
    )
    async with connect(kube.admin, manager=CONTROLLER) as own, Processes(folder) as processes:
        election = LeaderElection(own, namespace=namespace, name="gateway", identity="a")
        running = GatewayRunner(
            own, settings, GatewayMetrics(), election=election, timing=IMPATIENT, check_picker=InstalledPluginChecker()
        )
        task = asyncio.create_task(running.run())
        try:
            await asyncio.wait_for(running.ready.wait(), PATIENCE_S)
            python = [sys.executable, "-m", "attache"]
            words = ["extproc", "--config", str(config), "--listen", grpc, "--metrics", metrics]
            logged = ["--decision-log", str(decisions), "--decision-sample", "1"]
            await processes.start("extproc", [*python, *words, *logged])
            words = ["bundle", "--config", str(config), "--out", str(bundle), "--watch", "--metrics", reports]
            await processes.start("bundle", [*python, *words])
            await eventually((bundle / "bootstrap.json").exists)
            await processes.start("envoy", envoy_command(bundle))
            await _stand_in(client, namespace, metrics)
            yield Gateway(f"http://{listen}", metrics, decisions)
            await client.delete(PODS, "gateway", namespace, grace_s=0)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _stand_in(client: Client, namespace: str, address: str) -> None:
    """A pod without a node, by which the manager finds extproc's page."""
    host, _, port = address.partition(":")
    metadata = {"name": "gateway", "namespace": namespace, "labels": {LOADS_LABEL: port}}
    # no node has it, so that nobody runs it
    spec = {"containers": [{"name": "extproc", "image": "attache/extproc"}], "nodeSelector": {"test": "none"}}
    await client.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}
    await client.merge_patch(PODS, "gateway", namespace, {"status": status}, subresource="status")


class Site(msgspec.Struct, frozen=True):
    """Where ModelInfers run behind Envoy. ``nodes``: by name."""

    client: Client
    namespace: str
    gateway: Gateway
    manager: Managing
    nodes: Mapping[str, Node]

    @contextlib.asynccontextmanager
    async def serving(
        self,
        name: str,
        *roles: Object,
        replicas: int,
        drain_s: int = 60,
        server: Mapping[str, Any] | None = None,
        **spec: Any,  # noqa: ANN401 - JSON
    ) -> AsyncIterator[Watch]:
        """A ModelInfer whose groups are all ready and answer as the model ``name``.

        ``server``: more of its ModelServer.
        """
        made = model_infer(self.namespace, name, *(roles or [self.role()]), replicas=replicas)
        made["spec"]["template"]["drainTimeout"] = f"{drain_s}s"
        made["spec"].update(spec)
        await self.make(name, made, server or {})
        size = sum(one["replicas"] for one in made["spec"]["template"]["roles"])
        async with watching(self.client, self.namespace, name, size) as watch:
            try:
                await watch.until(ready=replicas)
                async with Streams(self.gateway.url, name, streams=0, plain=0) as asking:
                    await eventually(asking.is_served, pause_s=0.2)
                yield watch
            finally:
                watch.end()
                await self._clean(name)

    async def make(self, name: str, made: Object, server: Mapping[str, Any]) -> None:
        """A ModelInfer with its ModelServer and ModelRoute. ``server``: more of the ModelServer."""
        labels = {names.MODEL_INFER: name, names.ENTRY: "true"}
        selecting = {"workloadSelector": {"matchLabels": labels}, "workloadPort": {"port": 8000}}
        about = {"model": "org/llama", **selecting, **server}
        await self.client.create(MODEL_INFERS, made)
        await create(self.client, resource("ModelServer", name, about, namespace=self.namespace))
        await create(self.client, route(name, namespace=self.namespace))

    async def delete(self, name: str) -> None:
        """The same three. Their pods go afterwards."""
        for kind in (MODEL_ROUTES, MODEL_SERVERS, MODEL_INFERS):
            await self.client.delete(kind, name, self.namespace)

    async def _clean(self, name: str) -> None:
        await self.delete(name)
        for pod in await self.pods(name):
            with contextlib.suppress(Exception):  # it has gone by itself
                await self.client.delete(PODS, pod["metadata"]["name"], self.namespace, grace_s=0)

    def role(self, name: str = "all", revision: str = "1", **container: Any) -> Object:  # noqa: ANN401 - JSON
        """Engines of one role. ``container``: other fields than the usual ones."""
        engine = {
            "name": "engine",
            "image": "attache/engine-sim",
            "args": ["--model", "org/llama", "--port", "8000", "--speed", str(SPEED)],
            "env": [{"name": "TEMPLATE", "value": revision}],
            "ports": [{"name": "http", "containerPort": 8000}],
            # an engine that is slow, because this machine is, is not taken out of service for it
            "readinessProbe": {
                "httpGet": {"path": "/health", "port": "http"},
                "periodSeconds": 1,
                "timeoutSeconds": 10,
            },
            **container,
        }
        return role(name, containers=[engine], nodeSelector={"test": self.namespace})

    async def update(self, name: str, *roles: Object, **rollout: Any) -> None:  # noqa: ANN401 - JSON
        """Another template. ``rollout``: settings that change with it."""
        patch = {"spec": {"template": {"roles": list(roles)}, "rollout": rollout}}
        await self.client.merge_patch(MODEL_INFERS, name, self.namespace, patch)

    async def select(self, name: str, infer: str) -> None:
        """From now on the ModelServer selects the pods of this ModelInfer."""
        patch = {"spec": {"workloadSelector": {"matchLabels": {names.MODEL_INFER: infer}}}}
        await self.client.merge_patch(MODEL_SERVERS, name, self.namespace, patch)

    async def scale(self, name: str, replicas: int) -> None:
        """As an autoscaler does."""
        patch = {"spec": {"replicas": replicas}}
        await self.client.merge_patch(MODEL_INFERS, name, self.namespace, patch, subresource="scale")

    async def pods(self, name: str) -> list[Object]:
        """All of a ModelInfer."""
        return (await self.client.list(PODS, self.namespace, labels=f"{names.MODEL_INFER}={name}")).items

    async def condition(self, name: str, type_: str) -> tuple[str, str, str]:
        """Status, reason and message."""
        status = (await self.client.get(MODEL_INFERS, name, self.namespace)).get("status") or {}
        found = [one for one in status.get("conditions") or () if one["type"] == type_]
        return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")

    async def until_condition(self, name: str, type_: str, status: str, reason: str, text: str = "") -> None:
        """Until a condition says so."""
        said: list[tuple[str, str, str]] = []

        async def is_so() -> bool:
            said.append(await self.condition(name, type_))
            return said[-1][:2] == (status, reason) and text in said[-1][2]

        try:
            await eventually(is_so, pause_s=0.1)
        except TimeoutError:
            raise AssertionError(said[-1]) from None

    async def annotate(self, pod: str, annotations: Mapping[str, str | None]) -> None:
        """A pod; None removes."""
        await self.client.merge_patch(PODS, pod, self.namespace, {"metadata": {"annotations": dict(annotations)}})

    async def draining(self, name: str, count: int) -> bool:
        """Whether the gateway sends nothing new to so many engines."""
        thing = await self.client.get(MODEL_SERVERS, name, self.namespace)
        return ((thing.get("status") or {}).get("draining") or 0) == count

    def decisions(self, name: str) -> list[dict[str, Any]]:
        """Where extproc sent requests for a ModelServer."""
        lines = [msgspec.json.decode(one) for one in self.gateway.decisions.read_bytes().splitlines()]
        return [one for one in lines if one["kind"] == "decision" and one["server"] == f"{self.namespace}/{name}"]

    async def until_rolled_out(self, name: str, watch: Watch, replicas: int) -> None:
        """Until all groups are of the last template, ready, and none beside."""

        async def is_done() -> bool:
            thing = await self.client.get(MODEL_INFERS, name, self.namespace)
            status = thing.get("status") or {}
            counts = {status.get(one) for one in ("replicas", "readyReplicas", "updatedReplicas")}
            return (
                status.get("observedGeneration") == thing["metadata"]["generation"]
                and counts == {replicas}
                and len(watch.groups()) == replicas
            )

        try:
            await eventually(is_done, pause_s=0.1)
        except TimeoutError:
            thing = await self.client.get(MODEL_INFERS, name, self.namespace)
            raise AssertionError(f"{thing.get('status')}; {watch.groups()}") from None

    async def in_flight(self) -> dict[str, int]:
        """Requests by the engines' addresses, as the manager hears of them."""
        async with aiohttp.ClientSession() as http, http.get(f"http://{self.gateway.loads}{LOADS_PATH}") as answer:
            found: dict[str, dict[str, int]] = await answer.json()
        return {address.partition(":")[0]: one["inFlight"] for address, one in found.items() if one["inFlight"]}


class Watch:
    """Groups of a ModelInfer as each event has them. ``least_ready`` and ``most``: since the last ``begin``, until
    ``end``.
    """

    def __init__(self, informer: Informer, size: int) -> None:
        self._informer = informer
        self._size = size
        self._is_over = False
        # group and role of every pod that ever was, by address: addresses are not used twice for long
        self.places: dict[str, tuple[str, str]] = {}
        self.begin()
        informer.subscribe(self._changed)

    def end(self) -> None:
        """What happens now counts no more."""
        self._is_over = True

    def begin(self) -> None:
        """Count anew."""
        self.least_ready, self.most = len(self.ready()), len(self.groups())

    def groups(self) -> dict[str, list[Object]]:
        """Pods by group, without those that are being deleted."""
        found: dict[str, list[Object]] = defaultdict(list)
        for pod in self._informer.objects.values():
            if "deletionTimestamp" not in pod["metadata"]:
                found[pod["metadata"]["labels"][names.GROUP]].append(pod)
        return dict(found)

    def ready(self) -> set[str]:
        """Groups of which all pods get requests."""
        return {
            group
            for group, pods in self.groups().items()
            if len(pods) == self._size and all(_serves(one) for one in pods)
        }

    def templates(self) -> set[str]:
        """What ready groups say of their template."""
        ready = self.ready()
        return {
            one["value"]
            for group, pods in self.groups().items()
            if group in ready
            for pod in pods
            for one in pod["spec"]["containers"][0]["env"]
            if one["name"] == "TEMPLATE"
        }

    async def until(self, *, ready: int) -> None:
        """Exactly so many groups, all ready."""

        def are_ready() -> bool:
            return len(self.ready()) == len(self.groups()) == ready

        try:
            await eventually(are_ready)
        except TimeoutError:
            states = {key: one.get("status") for key, one in self._informer.objects.items()}
            raise AssertionError(f"{self.ready()} are ready; {states}") from None

    def _changed(self, _: str) -> None:
        if self._is_over:
            return
        self.least_ready = min(self.least_ready, len(self.ready()))
        self.most = max(self.most, len(self.groups()))
        for pod in self._informer.objects.values():
            if (pod.get("status") or {}).get("podIP"):
                said = pod["metadata"]["labels"]
                self.places[pod["status"]["podIP"]] = said[names.GROUP], said[names.ROLE]


def _serves(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and DRAINING not in (pod["metadata"].get("annotations") or {})


@contextlib.asynccontextmanager
async def watching(client: Client, namespace: str, name: str, size: int) -> AsyncIterator[Watch]:
    """``size``: pods of a group."""
    informer = Informer(client, PODS, Selection(namespace, f"{names.MODEL_INFER}={name}"))
    task = asyncio.create_task(informer.run())
    try:
        await informer.synced.wait()
        yield Watch(informer, size)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Streams:
    """Clients that ask again and again until the end: ``streams`` of ``seconds`` each, and ``plain`` questions that are
    answered in one piece, of ``plain_tokens``.

    ``whole``: streams that ended as they should. ``failures``: everything else, with what it was.
    """

    def __init__(
        self, url: str, model: str, *, streams: int = 6, seconds: float = 4.0, plain: int = 2, plain_tokens: int = 4
    ) -> None:
        self.whole = self.answers = self.open = 0
        self.failures: list[str] = []
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._tokens = int(seconds * TOKENS_A_SECOND)
        self._plain_tokens = plain_tokens
        self._kinds = [True] * streams + [False] * plain
        self._numbers: Iterator[int] = itertools.count()
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=120)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        self._tasks = [asyncio.create_task(self._client(is_streamed)) for is_streamed in self._kinds]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Waits for what is under way."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._http.close()

    def __str__(self) -> str:
        return f"{self.whole} streams, {self.answers} other answers, {len(self.failures)} failures"

    async def is_served(self) -> bool:
        """Whether a short question is answered."""
        try:
            async with self._http.post(self._url, json=self._question(False)) as answer:
                await answer.read()
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def one_more(self) -> None:
        """A single stream."""
        self._tasks.append(asyncio.create_task(self._stream()))

    async def _client(self, is_streamed: bool) -> None:
        while not self._is_over:
            await (self._stream() if is_streamed else self._plain())
            await asyncio.sleep(0.05)

    def _question(self, is_streamed: bool) -> Object:
        number = next(self._numbers)
        asked = {"role": "user", "content": f"{number} of {self._model}: " + "tell me a long story " * 10}
        tokens = self._tokens if is_streamed else self._plain_tokens
        return {"model": self._model, "messages": [asked], "max_tokens": tokens, "stream": is_streamed}

    async def _stream(self) -> None:
        began_s, got = _now_s(), b""
        status: object = "no answer"
        self.open += 1
        try:
            async with self._http.post(self._url, json=self._question(True)) as answer:
                status = answer.status
                async for chunk in answer.content.iter_any():
                    got += chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            status = f"{status}, {error!r}"
        self.open -= 1
        if status == 200 and got.endswith(b"data: [DONE]\n\n"):
            self.whole += 1
        else:
            after = f"after {_now_s() - began_s:.1f} s and {len(got)} bytes"
            self.failures.append(f"stream, {status}, {after}: {got[-200:].decode()}")

    async def _plain(self) -> None:
        try:
            async with self._http.post(self._url, json=self._question(False)) as answer:
                text = await answer.text()
                if answer.status == 200 and '"usage"' in text:
                    self.answers += 1
                else:
                    self.failures.append(f"{answer.status}: {text[:300]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures.append(repr(error))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
