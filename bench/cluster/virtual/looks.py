# SPDX-License-Identifier: Apache-2.0
"""What a virtual manager shows a ModelInfer's reconciler, from its caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from bench.cluster.node.scheduler import rooms
from bench.cluster.virtual.clock import seconds
from controller.kube.resources import (
    CONTROLLER_REVISIONS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    NODES,
    PODS,
    SCHEDULER_POD_GROUPS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    Object,
    Resource,
    key_of,
)
from controller.models.model_infer.observed import Load, NodeRoom, Observed, PodGroups

if TYPE_CHECKING:
    from bench.cluster.virtual.caches import Caches

_POD_GROUPS: Final = (VOLCANO_POD_GROUPS, SCHEDULER_POD_GROUPS)
OWNED: Final = (PODS, SERVICES, CONTROLLER_REVISIONS, MODEL_INFER_ROLES, *_POD_GROUPS)
WATCHED: Final = (MODEL_INFERS, NODES, *OWNED)


class Around(msgspec.Struct, frozen=True):
    """What is no object: loads and which were asked for, what the cluster schedules together, whether nodes are looked
    at.
    """

    loads: Mapping[str, Load]
    asked: frozenset[str]
    gang: PodGroups
    has_room: bool


def observed(thing: Object, caches: Caches, around: Around, now_s: float) -> Observed:
    """One ModelInfer and all that it owns."""
    uid = thing["metadata"]["uid"]

    def owned(resource: Resource) -> list[Object]:
        return [one for one in caches.all(resource) if owner_of(one) == uid]

    pods = owned(PODS)
    return Observed(
        thing=thing,
        pods=pods,
        services=owned(SERVICES),
        revisions=owned(CONTROLLER_REVISIONS),
        pod_groups=[one for resource in _POD_GROUPS for one in owned(resource)],
        role_scales=owned(MODEL_INFER_ROLES),
        lost_nodes=_lost(pods, caches.all(NODES), now_s),
        room=_room(caches) if around.has_room else None,
        loads=around.loads,
        loads_asked_of=around.asked,
        log_tails={key_of(one): "CUDA error: out of memory" for one in pods if _has_crashed(one)},
        gang=around.gang,
    )


def owner_of(thing: Object) -> str:
    """The uid of the controller that owns it."""
    references = thing["metadata"].get("ownerReferences") or ()
    return next((str(one["uid"]) for one in references if one.get("controller")), "")


def _lost(pods: list[Object], nodes: list[Object], now_s: float) -> dict[str, float]:
    known = {one["metadata"]["name"]: one for one in nodes}
    lost: dict[str, float] = {}
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if not name:
            continue
        if name not in known:
            # the pods say since when they are alone
            lost[name] = min(lost.get(name, now_s), _unready_since(pod, now_s))
            continue
        conditions = (known[name].get("status") or {}).get("conditions") or ()
        ready = next((one for one in conditions if one["type"] == "Ready"), None)
        if ready is not None and ready["status"] != "True":
            lost[name] = seconds(ready["lastTransitionTime"])
    return lost


def _unready_since(pod: Object, now_s: float) -> float:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    found = [one for one in conditions if one["type"] == "Ready" and one["status"] != "True"]
    return seconds(found[0]["lastTransitionTime"]) if found else now_s


def _room(caches: Caches) -> list[NodeRoom]:
    return [
        NodeRoom(name=one.name, free=one.free, labels=one.labels, taints=[dict(taint) for taint in one.taints])
        for one in rooms(caches.all(NODES), caches.all(PODS))
    ]


def _has_crashed(pod: Object) -> bool:
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(one.get("restartCount") for one in containers)
