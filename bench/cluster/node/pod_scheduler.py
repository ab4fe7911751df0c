# SPDX-License-Identifier: Apache-2.0
"""Binds pending pods to nodes by node selector, taints and resources, where no kube-scheduler runs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api import pod_spec_checks
from controller.kube.api_resources import NODES, PODS
from controller.kube.errors import ClusterError, Conflict, NotFound
from controller.kube.informer import Informer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.kube.api_resources import Object
    from controller.kube.client import Client

log = logging.getLogger(__name__)
_NAMES: Final = ("default-scheduler", None)
_RETRY_S: Final = 0.5


class PodUnschedulable(Exception):
    """No node takes the pod; the message is kube-scheduler's: how many nodes, and why not."""


class NodeCapacity(msgspec.Struct, frozen=True):
    """A node and what its pods leave of it."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    free: Mapping[str, float]
    pods: int


def pod_resource_requests(pod: Mapping[str, Any]) -> dict[str, float]:
    """What a pod takes of a node, itself included."""
    return {**pod_spec_checks.resource_requests(pod["spec"]), "pods": 1.0}


def node_capacities(nodes: Iterable[Object], pods: Iterable[Object]) -> list[NodeCapacity]:
    """The ready nodes that may be scheduled to."""
    used: dict[str, dict[str, float]] = {}
    counts: Counter[str] = Counter()
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        counts[node] += 1
        total = used.setdefault(node, {})
        for name, amount in pod_resource_requests(pod).items():
            total[name] = total.get(name, 0.0) + amount
    found: list[NodeCapacity] = []
    for node in nodes:
        name, status = node["metadata"]["name"], node.get("status") or {}
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
        if not ready or node["spec"].get("unschedulable"):
            continue
        taken = used.get(name, {})
        capacity = status.get("allocatable") or status.get("capacity") or {}
        free = {
            resource: pod_spec_checks.parse_quantity(amount) - taken.get(resource, 0.0)
            for resource, amount in capacity.items()
        }
        labels = node["metadata"].get("labels") or {}
        found.append(NodeCapacity(name, labels, node["spec"].get("taints") or (), free, counts[name]))
    return found


def choose_node(pod: Mapping[str, Any], among: Sequence[NodeCapacity], total: int) -> str:
    """The node with the fewest pods of those that take it; raises NowhereToGo. ``total``: how many nodes there are."""
    reasons: Counter[str] = Counter()
    fit: list[NodeCapacity] = []
    for node in among:
        why = _why_not(pod, node)
        if why:
            reasons[why] += 1
        else:
            fit.append(node)
    if total > len(among):
        reasons["node(s) were not ready"] = total - len(among)
    if not fit:
        message = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise PodUnschedulable(f"0/{total} nodes are available: {message or 'no nodes'}.")
    return min(fit, key=lambda node: (node.pods, node.name)).name


def _why_not(pod: Mapping[str, Any], node: NodeCapacity) -> str:
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(node.labels.get(name) != value for name, value in wanted.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in node.taints:
        if taint.get("effect") != "PreferNoSchedule" and not any(_tolerates(one, taint) for one in tolerations):
            return "node(s) had untolerated taint(s)"
    for name, amount in pod_resource_requests(pod).items():
        if amount > node.free.get(name, 0.0):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return ""


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("operator") == "Exists":
        return not toleration.get("key") or toleration["key"] == taint["key"]
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


class PodScheduler:
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
        """Schedule all pending pods whenever a pod or a node changes."""
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
            node = choose_node(pod, node_capacities(nodes, pods.values()), len(nodes))
        except PodUnschedulable as error:
            await self._report_unschedulable(pod, str(error))
            return None
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
        try:
            await self._client.post(PODS, metadata["name"], metadata["namespace"], "binding", binding)
        except (Conflict, NotFound):
            return None  # bound by another, or gone
        self._bound[key] = node
        return node

    async def _report_unschedulable(self, pod: Object, why: str) -> None:
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
