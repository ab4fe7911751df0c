# SPDX-License-Identifier: Apache-2.0
"""Which node a pod goes to, where no kube-scheduler runs: node selector, taints, resources. No network, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bench.cluster.node.quantities import quantity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.kube.resources import Object


class NowhereToGo(Exception):
    """No node takes the pod; the message is kube-scheduler's: how many nodes, and why not."""


class Room(msgspec.Struct, frozen=True):
    """A node and what its pods leave of it."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    free: Mapping[str, float]
    pods: int


def requests_of(pod: Mapping[str, Any]) -> dict[str, float]:
    """What a pod asks for: the sum of its containers, or its largest init container if that is more."""
    spec = pod["spec"]
    total: dict[str, float] = {}
    for container in spec["containers"]:
        for name, amount in _requests(container).items():
            total[name] = total.get(name, 0.0) + amount
    for container in spec.get("initContainers") or ():
        for name, amount in _requests(container).items():
            total[name] = max(total.get(name, 0.0), amount)
    return {**total, "pods": 1.0}


def rooms(nodes: Iterable[Object], pods: Iterable[Object]) -> list[Room]:
    """The ready nodes that may be scheduled to."""
    used: dict[str, dict[str, float]] = {}
    counts: Counter[str] = Counter()
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        counts[node] += 1
        total = used.setdefault(node, {})
        for name, amount in requests_of(pod).items():
            total[name] = total.get(name, 0.0) + amount
    found: list[Room] = []
    for node in nodes:
        name, status = node["metadata"]["name"], node.get("status") or {}
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
        if not ready or node["spec"].get("unschedulable"):
            continue
        taken = used.get(name, {})
        capacity = status.get("allocatable") or status.get("capacity") or {}
        free = {resource: quantity(amount) - taken.get(resource, 0.0) for resource, amount in capacity.items()}
        labels = node["metadata"].get("labels") or {}
        found.append(Room(name, labels, node["spec"].get("taints") or (), free, counts[name]))
    return found


def choose(pod: Mapping[str, Any], among: Sequence[Room], total: int) -> str:
    """The node with the fewest pods of those that take it; raises NowhereToGo. ``total``: how many nodes there are."""
    reasons: Counter[str] = Counter()
    fit: list[Room] = []
    for room in among:
        why = _why_not(pod, room)
        if why:
            reasons[why] += 1
        else:
            fit.append(room)
    if total > len(among):
        reasons["node(s) were not ready"] = total - len(among)
    if not fit:
        said = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise NowhereToGo(f"0/{total} nodes are available: {said or 'no nodes'}.")
    return min(fit, key=lambda room: (room.pods, room.name)).name


def _why_not(pod: Mapping[str, Any], room: Room) -> str:
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(room.labels.get(name) != value for name, value in wanted.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in room.taints:
        if taint.get("effect") != "PreferNoSchedule" and not any(_tolerates(one, taint) for one in tolerations):
            return "node(s) had untolerated taint(s)"
    for name, amount in requests_of(pod).items():
        if amount > room.free.get(name, 0.0):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return ""


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("operator") == "Exists":
        return not toleration.get("key") or toleration["key"] == taint["key"]
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def _requests(container: Mapping[str, Any]) -> dict[str, float]:
    """Limits count as requests where only they are given, as the API server has it."""
    given = container.get("resources") or {}
    both = {**(given.get("limits") or {}), **(given.get("requests") or {})}
    return {name: quantity(amount) for name, amount in both.items()}
