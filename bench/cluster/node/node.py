# SPDX-License-Identifier: Apache-2.0
"""A node: registers itself, runs the pods that are bound to it, and can be lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.cluster.node.container_machine import NodeTiming
from bench.cluster.node.environment import Missing
from bench.cluster.node.faults import NodeFaults
from bench.cluster.node.images import IMAGES
from bench.cluster.node.log_server import serving_logs
from bench.cluster.node.node_status import Heartbeat, NodeSpec
from bench.cluster.node.pod_files import PodFiles
from bench.cluster.node.pod_spec import pod_spec
from bench.cluster.node.pod_worker import PodWorker, Tools
from bench.cluster.node.volumes import Kept
from controller.kube.errors import ClusterError
from controller.kube.informer import Informer, InformerTiming, Selection
from controller.kube.resources import PODS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from bench.cluster.node.pod_network import PodNetwork, PodPlace
    from bench.guard import Guard
    from controller.kube.client import Client
    from controller.kube.resources import Object

log = logging.getLogger(__name__)

_REFRESH_S: Final = 5.0


class Node:
    """One node. ``run`` does the work until cancelled; its pods' processes end with it."""

    def __init__(
        self,
        client: Client,
        spec: NodeSpec,
        directory: Path,
        guard: Guard,
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
            tools = Tools(
                client=self._client,
                http=http,
                guard=self._guard,
                wall=lambda: datetime.now(UTC).timestamp(),
                timing=self._timing,
                start_delay_s=self.faults.start_delay_s,
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

    async def registered(self) -> None:
        """Wait until the node is in the cluster and follows its pods."""
        await self._heartbeat.registered.wait()
        await self.pods.synced.wait()

    async def lose(self, *, declared: bool = True) -> None:
        """The machine is gone: its processes are dead, and nobody writes its node or its pods any more.

        ``declared``: say at once what the node lifecycle controller, if there is one, finds out after a while.
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
        """The machine is back, without the processes of before: its pods are started anew."""
        self._is_lost = False
        self._heartbeat.silent = False
        await self._heartbeat.beat()
        for key in self.pods.objects:
            self._changed.put_nowait(key)

    def kill(self, key: str, container: str | None = None) -> None:
        """Kill the process of a container of the pod ``namespace/name``, or of all its containers."""
        self.workers[key].kill(container)

    def log_of(self, key: str, container: str) -> Path | None:
        """The file with what a container of the pod ``namespace/name`` says, if the pod is here."""
        worker = self.workers.get(key)
        return None if worker is None else worker.log_of(container)

    def _sync(self, key: str, tools: Tools) -> None:
        if self._is_lost:
            return
        pod, worker = self.pods.get(key), self.workers.get(key)
        if worker is not None and (pod is None or pod["metadata"]["uid"] != worker.pod["metadata"]["uid"]):
            # its successor of the same name is started when it has ended
            worker.gone()
        elif worker is not None and pod is not None:
            worker.update(pod)
        elif (pod is not None and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")) or (
            pod is not None and "deletionTimestamp" in pod["metadata"]
        ):
            self._begin(key, pod, tools)

    def _begin(self, key: str, pod: Object, tools: Tools) -> None:
        spec = pod_spec(pod)
        place = self._network.place(host_network=spec.host_network)
        directory = self.directory / key.replace("/", "_") / spec.uid
        directory.mkdir(parents=True, exist_ok=True)
        files = PodFiles(
            directory,
            self._client,
            place=place,
            host_ip=self._network.host_ip,
            kept=Kept(host=self.directory / "host", claims=self.directory.parent / "claims"),
            images=self._images,
            check_image=self.faults.check_image,
            crashes=lambda: self.faults.crashes(key),
        )
        worker = PodWorker(pod, spec, files, tools, host_ip=self._network.host_ip)
        worker.update(pod)
        self.workers[key] = worker
        task = asyncio.create_task(self._run(key, worker, place), name=f"pod {key}")
        self._tasks[key] = task

    async def _run(self, key: str, worker: PodWorker, place: PodPlace) -> None:
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
                except (ClusterError, Missing) as error:
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
