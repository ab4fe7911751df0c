# SPDX-License-Identifier: Apache-2.0
"""A node in this process: its Node object and lease, the pods bound to it, their logs, injected faults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from aiohttp import web

from bench.cluster.certificates import Authority, write_private
from bench.cluster.node.pod_files import PersistentPaths, PodFiles
from bench.cluster.node.pod_network import BridgedNetwork, LoopbackNetwork
from bench.cluster.node.pod_scheduler import PodScheduler
from bench.cluster.node.pod_spec import IMAGES, ImageMissing, ReferenceMissing, image_repository, pod_spec
from bench.cluster.node.pod_state_machine import NodeTiming
from bench.cluster.node.pod_worker import PodWorker, WorkerDependencies
from bench.stack.orphan_reaper import ProcessGuard
from controller.kube.api_resources import LEASES, NODES, PODS
from controller.kube.errors import AlreadyExists, ClusterError, NotFound
from controller.kube.informer import Informer, InformerTiming, Selection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from bench.cluster.node.pod_network import PodNetwork, PodSandbox
    from controller.kube.api_resources import Object
    from controller.kube.client import Client

_log = logging.getLogger(__name__)
log = logging.getLogger(__name__)
_PAUSE_S: Final = 0.2
_CHUNK_BYTES: Final = 65_536
_LEASES: Final = "kube-node-lease"
_MANAGER: Final = "node"
# the scheduler ignores conditions
_UNREACHABLE: Final = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}
_STATES: Final = ("node.kubernetes.io/not-", _UNREACHABLE["key"])
# the API requires all of them
_INFO: Final = {
    "machineID": "",
    "systemUUID": "",
    "bootID": "",
    "kernelVersion": "",
    "osImage": "processes of this machine",
    "containerRuntimeVersion": "process://1",
    "kubeletVersion": "v0.0.0-process",
    "kubeProxyVersion": "",
    "operatingSystem": "linux",
    "architecture": "amd64",
}
_REFRESH_S: Final = 5.0


class NodeFaults:
    """Faults that new starts of containers meet. Killing processes and losing the node: see ``Node``."""

    def __init__(self) -> None:
        self._missing_images: set[str] = set()
        self._crashing: set[str] = set()

    def break_image_pulls(self, image: str) -> None:
        """Containers with this image (without tag) wait with ErrImagePull, then ImagePullBackOff."""
        self._missing_images.add(image_repository(image))

    def crash_at_start(self, key: str) -> None:
        """The containers of the pod ``namespace/name`` end with status 1 as soon as they start: CrashLoopBackOff."""
        self._crashing.add(key)

    def clear(self) -> None:
        """Nothing goes wrong with starts any more."""
        self._missing_images.clear()
        self._crashing.clear()

    def check_image(self, image: str) -> None:
        """Raises ImageMissing."""
        if image_repository(image) in self._missing_images:
            raise ImageMissing(f'failed to pull image "{image}": it was made to be missing')

    def should_crash_at_start(self, key: str) -> bool:
        """Whether this pod's containers crash at once."""
        return key in self._crashing


@contextlib.asynccontextmanager
async def serving_logs(address: str, find: Callable[[str, str], Path | None]) -> AsyncIterator[int]:
    """Serve logs at a free port of ``address``, which is given.

    ``find(pod, container)``: the log file of a container of the pod ``namespace/name``, if there is one.
    """
    app = web.Application()
    app.add_routes([web.get("/containerLogs/{namespace}/{pod}/{container}", _Logs(find).get)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, 0, ssl_context=await asyncio.to_thread(_context, address))
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


class _Logs:
    """Answers with a log as it stands, its last lines (``tailLines``), and what comes after (``follow``).

    Lines have no times in our logs, so ``sinceTime`` and ``sinceSeconds`` are ignored: the response has more lines than
    requested.
    """

    def __init__(self, find: Callable[[str, str], Path | None]) -> None:
        self._find = find

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One container's log."""
        named = request.match_info
        pod, container = f"{named['namespace']}/{named['pod']}", named["container"]
        path = self._find(pod, container)
        if path is None or not path.is_file():
            return web.Response(status=404, text=f"no log of container {container} in pod {pod}\n")
        answer = web.StreamResponse(headers={"content-type": "text/plain"})
        await answer.prepare(request)
        with path.open("rb") as log:
            if "tailLines" in request.query:
                log.seek(_tail_start(log.read(), int(request.query["tailLines"])))
            while True:
                if chunk := log.read(_CHUNK_BYTES):
                    await answer.write(chunk)
                elif request.query.get("follow") == "true" and self._find(pod, container) is not None:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    break
        await answer.write_eof()
        return answer


def _tail_start(content: bytes, lines: int) -> int:
    """Where the last ``lines`` lines begin."""
    kept = content.splitlines(keepends=True)
    return len(content) - sum(map(len, kept[max(0, len(kept) - lines) :]))


def _context(address: str) -> ssl.SSLContext:
    """A certificate of a throwaway authority: the API server accepts it unless it is configured to verify kubelets."""
    certificate, key = Authority(datetime.now(UTC)).issue("kubelet", [address])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as directory:
        paths = [write_private(Path(directory) / name, text) for name, text in (("cert", certificate), ("key", key))]
        context.load_cert_chain(*map(os.fspath, paths))
    return context


class NodeSpec(msgspec.Struct, frozen=True):
    """A node as the scheduler sees it. ``capacity``: quantities by resource."""

    name: str
    capacity: dict[str, str]
    labels: dict[str, str] = {}
    taints: tuple[dict[str, str], ...] = ()


def node_object(spec: NodeSpec) -> Object:
    """The Node to apply."""
    labels = {"kubernetes.io/hostname": spec.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    node: Object = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": spec.name, "labels": {**labels, **spec.labels}},
        "spec": {"taints": list(spec.taints)} if spec.taints else {},
    }
    return node


def node_status(
    spec: NodeSpec, wall: datetime, *, ready: str = "True", host_ip: str = "127.0.0.1", port: int = 0
) -> dict[str, Any]:
    """Its status. ``ready``: True, False or Unknown; ``port``: where its logs are served."""
    now = wall.strftime("%Y-%m-%dT%H:%M:%SZ")
    reason = "KubeletReady" if ready == "True" else "NodeStatusUnknown"
    message = "processes are run" if ready == "True" else "Kubelet stopped posting node status."
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    return {
        "capacity": spec.capacity,
        "allocatable": spec.capacity,
        "addresses": [{"type": "InternalIP", "address": host_ip}, {"type": "Hostname", "address": spec.name}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "nodeInfo": _INFO,
        "conditions": [{**condition, "lastHeartbeatTime": now, "lastTransitionTime": now}],
    }


class Heartbeat:
    """Registers a node and renews its Lease every ``period_s``, unless it is ``silent``."""

    def __init__(self, client: Client, spec: NodeSpec, period_s: float, host_ip: str) -> None:
        self.silent = False
        self.port = 0
        self.registered = asyncio.Event()
        self._client = client
        self._spec = spec
        self._period_s = period_s
        self._host_ip = host_ip

    async def run(self) -> None:
        """Run the node until cancelled."""
        while True:
            try:
                if not self.silent:
                    await (self._renew() if self.registered.is_set() else self.register_node())
            except ClusterError as error:
                _log.warning("node %s: %s", self._spec.name, error)
            await asyncio.sleep(self._period_s if self.registered.is_set() else 0.5)

    async def register_node(self) -> None:
        """Write the Node and its status; raises ClusterError."""
        await self._client.apply(NODES, node_object(self._spec), manager=_MANAGER, force=True)
        await self._write("True")
        await self._untaint()
        await self._renew()
        self.registered.set()

    async def declare_lost(self, pods: Sequence[Object]) -> None:
        """Do what the node lifecycle controller does for a silent node: set it to Unknown, taint it, set its pods not
        ready.
        """
        await self._write("Unknown")
        await self._client.merge_patch(
            NODES, self._spec.name, None, {"spec": {"taints": [*self._spec.taints, _UNREACHABLE]}}
        )
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in pods:
            conditions = (pod.get("status") or {}).get("conditions") or []
            changed = [
                {**one, "status": "False", "lastTransitionTime": now} if one["type"] == "Ready" else one
                for one in conditions
            ]
            metadata = pod["metadata"]
            try:
                await self._client.merge_patch(
                    PODS,
                    metadata["name"],
                    metadata["namespace"],
                    {"status": {"conditions": changed}},
                    subresource="status",
                )
            except NotFound:
                _log.debug("pod %s went with its node", metadata["name"])

    async def _write(self, ready: str) -> None:
        thing: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._spec.name},
            "status": node_status(self._spec, datetime.now(UTC), ready=ready, host_ip=self._host_ip, port=self.port),
        }
        await self._client.apply(NODES, thing, subresource="status", manager=_MANAGER, force=True)

    async def _untaint(self) -> None:
        """The API server taints new nodes as not ready; without the node lifecycle controller this must remove the
        taint.
        """
        node = await self._client.get(NODES, self._spec.name)
        taints = [one for one in node["spec"].get("taints") or () if not one["key"].startswith(_STATES)]
        if taints != (node["spec"].get("taints") or []):
            await self._client.merge_patch(NODES, self._spec.name, None, {"spec": {"taints": taints or None}})

    async def _renew(self) -> None:
        """The lease by which the node lifecycle controller sees that the node lives."""
        lease: Object = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._spec.name, "namespace": _LEASES},
            "spec": {
                "holderIdentity": self._spec.name,
                "leaseDurationSeconds": 40,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        try:
            await self._client.apply(LEASES, lease, manager=_MANAGER, force=True)
        except (NotFound, AlreadyExists) as error:  # a server without that namespace has no node lifecycle either
            _log.debug("node %s has no lease: %s", self._spec.name, error)


class Node:
    """One node. ``run`` does the work until cancelled; its pods' processes end with it."""

    def __init__(
        self,
        client: Client,
        spec: NodeSpec,
        directory: Path,
        guard: ProcessGuard,
        network: PodNetwork,
        *,
        images: Mapping[str, Sequence[str]] = IMAGES,
        timing: NodeTiming = NodeTiming(),  # noqa: B008 - frozen
    ) -> None:
        self.spec = spec
        self.faults = NodeFaults()
        self.workers: dict[str, PodWorker] = {}
        self._client = client
        self.directory = directory
        self._guard = guard
        self._network = network
        self._images = images
        self._timing = timing
        self._heartbeat = Heartbeat(client, spec, timing.heartbeat_s, network.host_ip)
        chosen = Selection(fields=f"spec.nodeName={spec.name}")
        self.pods = Informer(client, PODS, chosen, timing=InformerTiming(resync_s=30.0), rng=Random(spec.name))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed: asyncio.Queue[str] = asyncio.Queue()
        self._is_lost = False

    async def run(self) -> None:
        """Register, follow the pods of this node, renew the lease."""
        self.pods.subscribe(self._changed.put_nowait)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
            tools = WorkerDependencies(
                client=self._client,
                http=http,
                guard=self._guard,
                wall=lambda: datetime.now(UTC).timestamp(),
                timing=self._timing,
            )
            async with (
                self._all_ended(),
                serving_logs(self._network.host_ip, self.log_of) as self._heartbeat.port,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(self._heartbeat.run())
                tasks.create_task(self.pods.run())
                tasks.create_task(self._refresh())
                while True:
                    self._sync(await self._changed.get(), tools)

    async def wait_until_registered(self) -> None:
        """Wait until the node is in the cluster and follows its pods."""
        await self._heartbeat.registered.wait()
        await self.pods.synced.wait()

    async def fail(self, *, declared: bool = True) -> None:
        """The machine is lost: its processes are killed, and the statuses of its node and its pods are no longer
        written.

        ``declared``: write at once the status that the node lifecycle controller, if there is one, writes after a
        while.
        """
        self._is_lost = True
        self._heartbeat.silent = True
        running = list(self._tasks.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self._tasks.clear()
        self.workers.clear()
        if declared:
            await self._heartbeat.declare_lost(list(self.pods.objects.values()))

    async def recover(self) -> None:
        """The machine is back, without its former processes: its pods are restarted."""
        self._is_lost = False
        self._heartbeat.silent = False
        await self._heartbeat.register_node()
        for key in self.pods.objects:
            self._changed.put_nowait(key)

    def kill(self, key: str, container: str | None = None) -> None:
        """Kill the process of a container of the pod ``namespace/name``, or of all its containers."""
        self.workers[key].kill(container)

    def log_of(self, key: str, container: str) -> Path | None:
        """The log file of a container of the pod ``namespace/name``, if the pod is here."""
        worker = self.workers.get(key)
        return None if worker is None else worker.log_of(container)

    def _sync(self, key: str, tools: WorkerDependencies) -> None:
        if self._is_lost:
            return
        pod, worker = self.pods.get(key), self.workers.get(key)
        if worker is not None and (pod is None or pod["metadata"]["uid"] != worker.pod["metadata"]["uid"]):
            # its successor of the same name is started when it has ended
            worker.on_deleted()
        elif worker is not None and pod is not None:
            worker.update(pod)
        elif (pod is not None and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")) or (
            pod is not None and "deletionTimestamp" in pod["metadata"]
        ):
            self._begin(key, pod, tools)

    def _begin(self, key: str, pod: Object, tools: WorkerDependencies) -> None:
        spec = pod_spec(pod)
        place = self._network.create_sandbox(host_network=spec.host_network)
        directory = self.directory / key.replace("/", "_") / spec.uid
        directory.mkdir(parents=True, exist_ok=True)
        files = PodFiles(
            directory,
            self._client,
            place=place,
            host_ip=self._network.host_ip,
            kept=PersistentPaths(host=self.directory / "host", claims=self.directory.parent / "claims"),
            images=self._images,
            check_image=self.faults.check_image,
            crashes=lambda: self.faults.should_crash_at_start(key),
        )
        worker = PodWorker(pod, spec, files, tools, host_ip=self._network.host_ip)
        worker.update(pod)
        self.workers[key] = worker
        task = asyncio.create_task(self._run(key, worker, place), name=f"pod {key}")
        self._tasks[key] = task

    async def _run(self, key: str, worker: PodWorker, place: PodSandbox) -> None:
        try:
            await worker.run()
        except Exception:
            log.exception("the pod %s is run no more", key)
        finally:
            place.close()
            if self.workers.get(key) is worker:
                del self.workers[key]
                self._tasks.pop(key, None)
                # perhaps another pod of the same name waits
                self._changed.put_nowait(key)

    async def _refresh(self) -> None:
        """Keep the files of ConfigMaps and Secrets up to date, as the kubelet does."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            for worker in list(self.workers.values()):
                try:
                    await worker.refresh()
                except (ClusterError, ReferenceMissing) as error:
                    log.warning("the files of %s: %s", worker.machine.spec.key, error)

    @contextlib.asynccontextmanager
    async def _all_ended(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


def gpu_node(name: str, gpus: int = 8, labels: Mapping[str, str] | None = None, **more: Any) -> NodeSpec:  # noqa: ANN401
    """A node of a common size."""
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    return msgspec.structs.replace(NodeSpec(name=name, capacity=capacity, labels=dict(labels or {})), **more)


@contextlib.asynccontextmanager
async def running_nodes(
    client: Client,
    specs: Sequence[NodeSpec],
    directory: Path,
    *,
    images: Mapping[str, Sequence[str]] = IMAGES,
    timing: NodeTiming = NodeTiming(),  # noqa: B008 - frozen
    schedules: bool = False,
    pod_range: str | None = None,
) -> AsyncIterator[dict[str, Node]]:
    """Nodes by name, ready for pods. On the way out their pods' processes end; the objects stay.

    ``schedules``: bind pods too, because no kube-scheduler runs.
    ``pod_range``: the range of ``bench.cluster.netns``, if this process is in its network; else pods have addresses of
    127/8.
    """
    with ProcessGuard() as guard:
        network = BridgedNetwork(pod_range, guard) if pod_range else LoopbackNetwork()
        nodes = {
            spec.name: Node(client, spec, directory / spec.name, guard, network, images=images, timing=timing)
            for spec in specs
        }
        running = [asyncio.create_task(node.run(), name=f"node {name}") for name, node in nodes.items()]
        if schedules:
            running.append(asyncio.create_task(PodScheduler(client).run(), name="scheduler"))
        try:
            await _all_registered(nodes, running)
            yield nodes
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            network.close()
            for task in running:
                if not task.cancelled() and (error := task.exception()):
                    raise error


async def _all_registered(nodes: Mapping[str, Node], running: Sequence[asyncio.Task[None]]) -> None:
    """Until all nodes are in the cluster, or one of the tasks has ended, whose error is then raised on the way out."""
    for node in nodes.values():
        registered = asyncio.create_task(node.wait_until_registered())
        await asyncio.wait([registered, *running], return_when=asyncio.FIRST_COMPLETED)
        if not registered.done():
            registered.cancel()
            raise RuntimeError("a node has ended before it was in the cluster")
