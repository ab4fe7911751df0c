# SPDX-License-Identifier: Apache-2.0
"""Binds pending pods to nodes where no kube-scheduler runs, and says of the others why they wait."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from bench.cluster.node.scheduling import NowhereToGo, choose, rooms
from controller.kube.errors import ClusterError, Conflict, NotFound
from controller.kube.informer import Informer
from controller.kube.resources import NODES, PODS

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.resources import Object

log = logging.getLogger(__name__)

_NAMES: Final = ("default-scheduler", None)
_RETRY_S: Final = 0.5


class Scheduler:
    """``run`` schedules until cancelled."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pods = Informer(client, PODS)
        self._nodes = Informer(client, NODES)
        self._changed = asyncio.Event()
        # bound by us, not yet seen so by the informer
        self._bound: dict[str, str] = {}
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Look at all pending pods whenever a pod or a node changes."""
        for informer in (self._pods, self._nodes):
            informer.subscribe(lambda _: self._changed.set())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            tasks.create_task(self._nodes.run())
            await self._pods.synced.wait()
            await self._nodes.synced.wait()
            while True:
                self._changed.clear()
                try:
                    await self._round()
                except ClusterError as error:
                    log.warning("scheduling: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    self._changed.set()
                await self._changed.wait()

    async def _round(self) -> None:
        pods, nodes = dict(self._pods.objects), list(self._nodes.objects.values())
        self._bound = {
            key: node for key, node in self._bound.items() if key in pods and not pods[key]["spec"].get("nodeName")
        }
        for key, node in self._bound.items():
            pods[key] = {**pods[key], "spec": {**pods[key]["spec"], "nodeName": node}}
        self._said = {
            uid: why for uid, why in self._said.items() if any(one["metadata"]["uid"] == uid for one in pods.values())
        }
        for key, pod in sorted(pods.items(), key=lambda one: str(one[1]["metadata"].get("creationTimestamp"))):
            if _is_pending(pod):
                chosen = await self._schedule(key, pod, pods, nodes)
                if chosen is not None:
                    pods[key] = {**pod, "spec": {**pod["spec"], "nodeName": chosen}}

    async def _schedule(self, key: str, pod: Object, pods: dict[str, Object], nodes: list[Object]) -> str | None:
        """The node that the pod was bound to."""
        metadata = pod["metadata"]
        try:
            node = choose(pod, rooms(nodes, pods.values()), len(nodes))
        except NowhereToGo as error:
            await self._say(pod, str(error))
            return None
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
        try:
            await self._client.post(PODS, metadata["name"], metadata["namespace"], "binding", binding)
        except (Conflict, NotFound):
            return None  # bound by another, or gone
        self._bound[key] = node
        return node

    async def _say(self, pod: Object, why: str) -> None:
        metadata = pod["metadata"]
        if self._said.get(metadata["uid"]) == why:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        names = {name: metadata[name] for name in ("name", "namespace", "uid")}
        status = {"conditions": [{**condition, "lastTransitionTime": now}]}
        thing: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": names, "status": status}
        try:
            await self._client.apply(PODS, thing, subresource="status", manager="scheduler", force=True)
        except (Conflict, NotFound):
            return  # another of its name, or gone
        self._said[metadata["uid"]] = why


def _is_pending(pod: Object) -> bool:
    spec, metadata = pod["spec"], pod["metadata"]
    if spec.get("nodeName") or "deletionTimestamp" in metadata or spec.get("schedulingGates"):
        return False
    return spec.get("schedulerName") in _NAMES
