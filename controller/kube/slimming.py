# SPDX-License-Identifier: Apache-2.0
"""Objects without what no reconciler reads: most of a pod's bytes are its spec and who wrote which field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.kube.resources import Object

_POD_SPEC: Final = ("nodeName", "schedulerName", "hostname", "subdomain", "priority", "terminationGracePeriodSeconds")
_POD_STATUS: Final = (
    "phase",
    "reason",
    "message",
    "podIP",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
    "startTime",
)
_CONTAINER: Final = ("name", "ready", "restartCount", "started", "state", "lastState")
_NODE_CONDITIONS: Final = ("Ready",)


def slim(thing: Object) -> Object:
    """All but the record of who wrote which field."""
    return {**thing, "metadata": _without(thing["metadata"], ("managedFields",))}


def slim_pod(pod: Object) -> Object:
    """Labels, annotations, owner, node, and what its containers do."""
    status = _only(pod.get("status") or {}, _POD_STATUS)
    for name in ("containerStatuses", "initContainerStatuses"):
        if name in status:
            status[name] = [_only(one, _CONTAINER) for one in status[name]]
    return {
        "apiVersion": pod["apiVersion"],
        "kind": pod["kind"],
        "metadata": _without(pod["metadata"], ("managedFields",)),
        "spec": _only(pod.get("spec") or {}, _POD_SPEC),
        "status": status,
    }


def slim_node(node: Object) -> Object:
    """Labels, taints, what can be allocated, and whether it is ready."""
    status = node.get("status") or {}
    conditions = [one for one in status.get("conditions") or () if one.get("type") in _NODE_CONDITIONS]
    # written every few minutes by the kubelet, and read by nobody
    conditions = [_without(one, ("lastHeartbeatTime",)) for one in conditions]
    return {
        "apiVersion": node["apiVersion"],
        "kind": node["kind"],
        "metadata": _without(node["metadata"], ("managedFields", "annotations")),
        "spec": _only(node.get("spec") or {}, ("taints", "unschedulable")),
        "status": {"allocatable": status.get("allocatable") or {}, "conditions": conditions},
    }


def _only(thing: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: thing[name] for name in names if name in thing}


def _without(thing: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    left = set(names)
    return {name: value for name, value in thing.items() if name not in left}
