# SPDX-License-Identifier: Apache-2.0
"""Free capacity of nodes, and which nodes are lost, out of nodes and pods as informers have them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from controller.api.pod_spec_checks import parse_quantity
from controller.kube.informer import only_fields, without_fields
from controller.models.model_infer.model_infer_state import NodeCapacity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from controller.kube.api_resources import Object
    from controller.kube.pod_views import PodView

_REMEMBERED: Final = 10_000
_NODE_CONDITIONS: Final = ("Ready",)


def trimmed_node(node: Object) -> Object:
    """Labels, taints, what can be allocated, and whether it is ready."""
    status = node.get("status") or {}
    conditions = [one for one in status.get("conditions") or () if one.get("type") in _NODE_CONDITIONS]
    # written every few minutes by the kubelet, and never read
    conditions = [without_fields(one, ("lastHeartbeatTime",)) for one in conditions]
    return {
        "apiVersion": node["apiVersion"],
        "kind": node["kind"],
        "metadata": without_fields(node["metadata"], ("managedFields", "annotations")),
        "spec": only_fields(node.get("spec") or {}, ("taints", "unschedulable")),
        "status": {"allocatable": status.get("allocatable") or {}, "conditions": conditions},
    }


def node_capacities(nodes: Iterable[Object], pods: Iterable[PodView]) -> list[NodeCapacity]:
    """Nodes that take pods, ready and not cordoned. ``pods``: all of the cluster."""
    taken: dict[str, dict[str, float]] = {}
    for pod in pods:
        if pod.node and not pod.is_ended:
            node = taken.setdefault(pod.node, {})
            for name, asked in pod.requests.items():
                node[name] = node.get(name, 0.0) + asked
    return [_capacity_of(one, taken.get(one["metadata"]["name"], {})) for one in nodes if _takes_pods(one)]


def not_ready_since_s(node: Object) -> float | None:
    """Since when a node has not been ready, in seconds since the epoch; None if it is ready."""
    for one in (node.get("status") or {}).get("conditions") or ():
        if one.get("type") == "Ready":
            if one.get("status") == "True":
                return None
            return datetime.fromisoformat(one["lastTransitionTime"]).timestamp()
    # a kubelet without a first report
    return datetime.fromisoformat(node["metadata"]["creationTimestamp"]).timestamp()


class LostNodes:
    """Lost nodes and since when. ``node``: one as last delivered.

    No object has the time at which a node vanished, so it counts from when it was noticed; a restart begins the wait
    again.
    """

    def __init__(self, node: Callable[[str], Object | None]) -> None:
        self._node = node
        self._gone_since_s: dict[str, float] = {}

    def lost_since(self, names: Iterable[str], now_s: float) -> dict[str, float]:
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


def _takes_pods(node: Object) -> bool:
    return not_ready_since_s(node) is None and not (node.get("spec") or {}).get("unschedulable")


def _capacity_of(node: Object, taken: Mapping[str, float]) -> NodeCapacity:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    free = {name: parse_quantity(amount) - taken.get(name, 0.0) for name, amount in allocatable.items()}
    return NodeCapacity(
        name=node["metadata"]["name"],
        free=free,
        labels=node["metadata"].get("labels") or {},
        taints=(node.get("spec") or {}).get("taints") or (),
    )
