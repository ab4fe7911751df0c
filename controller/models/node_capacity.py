# SPDX-License-Identifier: Apache-2.0
"""Free capacity of nodes, and which nodes are lost, out of nodes and pods as informers have them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Final

from controller.models.model_infer.observed import NodeRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from controller.kube.resources import Object

_FORM: Final = re.compile(r"^([+-]?[0-9]+\.?[0-9]*)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$")
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_UNITS: Final[Mapping[str, float]] = {
    **{name: 10.0**power for name, power in _DECIMAL.items()},
    **{name: 2.0**power for name, power in _BINARY.items()},
}
_REMEMBERED: Final = 10_000
_OVER: Final = ("Succeeded", "Failed")


def trimmed_to_requests(pod: Object) -> Object:
    """A pod of anybody's, as far as it takes room: its node and what it asks for."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    return {
        "metadata": {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion")},
        "node": spec.get("nodeName", "") if (pod.get("status") or {}).get("phase") not in _OVER else "",
        "requests": requests_of(spec),
    }


def requests_of(spec: Mapping[str, object]) -> dict[str, float]:
    """What a pod asks for, as the scheduler counts: its containers together, or its largest init container."""
    containers, first = _all(spec, "containers"), _all(spec, "initContainers")
    # init containers that stay beside the others
    sidecars = [one for one in first if one.get("restartPolicy") == "Always"]
    total = _sum([*containers, *sidecars])
    for one in first:
        for name, asked in _of(one).items():
            total[name] = max(total.get(name, 0.0), asked)
    overhead = spec.get("overhead")
    for name, asked in (overhead if isinstance(overhead, dict) else {}).items():
        total[name] = total.get(name, 0.0) + quantity(asked)
    total["pods"] = 1.0
    return total


def room(nodes: Iterable[Object], pods: Iterable[Object]) -> list[NodeRoom]:
    """Nodes that take pods, ready and not cordoned. ``pods``: all of the cluster, by ``trimmed_to_requests``."""
    taken: dict[str, dict[str, float]] = {}
    for pod in pods:
        if pod["node"]:
            node = taken.setdefault(pod["node"], {})
            for name, asked in pod["requests"].items():
                node[name] = node.get(name, 0.0) + asked
    return [_room_of(one, taken.get(one["metadata"]["name"], {})) for one in nodes if _takes_pods(one)]


def not_ready_since_s(node: Object) -> float | None:
    """Since when a node has not been ready, in seconds since the epoch; None if it is ready."""
    for one in (node.get("status") or {}).get("conditions") or ():
        if one.get("type") == "Ready":
            if one.get("status") == "True":
                return None
            return datetime.fromisoformat(one["lastTransitionTime"]).timestamp()
    # a kubelet that has not said anything yet
    return datetime.fromisoformat(node["metadata"]["creationTimestamp"]).timestamp()


class LostNodes:
    """Which nodes are lost, and since when. ``node``: one as last heard.

    That a node is gone stands in no object, so it counts from when we noticed; a restart only makes it wait anew.
    """

    def __init__(self, node: Callable[[str], Object | None]) -> None:
        self._node = node
        self._gone_since_s: dict[str, float] = {}

    def among(self, names: Iterable[str], now_s: float) -> dict[str, float]:
        """Of these nodes, those that are not ready or gone."""
        found: dict[str, float] = {}
        for name in names:
            node = self._node(name)
            if node is None:
                found[name] = self._gone_since_s.setdefault(name, now_s)
                while len(self._gone_since_s) > _REMEMBERED:
                    del self._gone_since_s[next(iter(self._gone_since_s))]
                continue
            self._gone_since_s.pop(name, None)
            since_s = not_ready_since_s(node)
            if since_s is not None:
                found[name] = since_s
        return found


def quantity(text: object) -> float:
    """A Kubernetes quantity in base units; 0 for what is none."""
    found = _FORM.match(str(text))
    if found is None:
        return 0.0
    number, unit = found.groups()
    return float(number) * _UNITS[unit] if unit in _UNITS else float(number + (unit or ""))


def _takes_pods(node: Object) -> bool:
    return not_ready_since_s(node) is None and not (node.get("spec") or {}).get("unschedulable")


def _room_of(node: Object, taken: Mapping[str, float]) -> NodeRoom:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    free = {name: quantity(amount) - taken.get(name, 0.0) for name, amount in allocatable.items()}
    return NodeRoom(
        name=node["metadata"]["name"],
        free=free,
        labels=node["metadata"].get("labels") or {},
        taints=(node.get("spec") or {}).get("taints") or (),
    )


def _all(spec: Mapping[str, object], name: str) -> list[Object]:
    found = spec.get(name)
    return found if isinstance(found, list) else []


def _of(container: Object) -> dict[str, float]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(amount) for name, amount in asked.items()}


def _sum(containers: Iterable[Object]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in containers:
        for name, asked in _of(one).items():
            total[name] = total.get(name, 0.0) + asked
    return total
