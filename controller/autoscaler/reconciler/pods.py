# SPDX-License-Identifier: Apache-2.0
"""Pods of targets, as far as scaling looks at them: where they are, whether they serve, and why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.autoscaler.decision.situation import EngineState
from controller.autoscaler.reconciler.names import DELETION_COST, DRAIN, DRAINING
from controller.kube.resources import Object, key_of
from controller.models.model_infer.times import seconds_of
from controller.models.node_room import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDED: Final = ("Failed", "Succeeded")
# Why a container waits that will not start by itself, or not soon.
_FAILING: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
_NO_NODE: Final = frozenset({"Unschedulable", "SchedulingGated"})


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """``key``: ``namespace/name``. ``ip``: empty until it has one. ``state``: of the engine in it. ``created_at_s`` and
    ``ready_at_s``: since the epoch. ``draining_at_s``: since when our mark is on it; None without. ``deletion_cost``:
    as its annotation says; None without one. ``cpu`` and ``memory``: that its containers request, in cores and bytes; 0
    if any of them requests none.
    """

    key: str
    uid: str
    labels: Mapping[str, str]
    ip: str
    state: EngineState
    created_at_s: float
    ready_at_s: float | None = None
    draining_at_s: float | None = None
    deletion_cost: str | None = None
    is_ended: bool = False
    is_going: bool = False
    is_ready: bool = False
    cpu: float = 0.0
    memory: float = 0.0

    @property
    def name(self) -> str:
        """Without its namespace."""
        return self.key.rpartition("/")[2]


def slim_pod(pod: Object) -> Object:
    """A pod as an informer keeps it: ``view`` is all that is left of it."""
    metadata = pod["metadata"]
    kept = {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion") if name in metadata}
    return {"metadata": kept, "view": view_of(pod)}


def view_of(pod: Object) -> PodView:
    """A pod as the API server has it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    conditions = {one.get("type"): one for one in status.get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    is_ended = status.get("phase") in _ENDED
    is_going = "deletionTimestamp" in metadata
    is_ready = ready.get("status") == "True" and not is_ended and not is_going
    draining_at_s = seconds_of(annotations.get(DRAINING))
    return PodView(
        key=key_of(pod),
        uid=metadata.get("uid", ""),
        labels=metadata.get("labels") or {},
        ip=status.get("podIP") or "",
        state=_state(
            pod,
            conditions.get("PodScheduled") or {},
            is_ready=is_ready,
            leaves=is_going or draining_at_s is not None or annotations.get(DRAIN) == "true",
        ),
        created_at_s=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        ready_at_s=seconds_of(ready.get("lastTransitionTime")) if is_ready else None,
        draining_at_s=draining_at_s,
        deletion_cost=annotations.get(DELETION_COST),
        is_ended=is_ended,
        is_going=is_going,
        is_ready=is_ready,
        cpu=_requested(pod, "cpu"),
        memory=_requested(pod, "memory"),
    )


def _requested(pod: Object, name: str) -> float:
    containers = (pod.get("spec") or {}).get("containers") or ()
    amounts = [quantity(((one.get("resources") or {}).get("requests") or {}).get(name, 0)) for one in containers]
    return sum(amounts) if all(amounts) else 0.0


def _state(pod: Object, scheduled: Mapping[str, Any], *, is_ready: bool, leaves: bool) -> EngineState:
    if leaves:
        return EngineState.DRAINING
    if is_ready:
        return EngineState.READY
    if not (pod.get("spec") or {}).get("nodeName"):
        return EngineState.UNSCHEDULABLE if scheduled.get("reason") in _NO_NODE else EngineState.STARTING
    return EngineState.FAILING if any(_fails(one) for one in _containers(pod)) else EngineState.STARTING


def _containers(pod: Object) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status") or {}
    found: Sequence[Mapping[str, Any]] = status.get("initContainerStatuses") or ()
    yield from found
    yield from status.get("containerStatuses") or ()


def _fails(container: Mapping[str, Any]) -> bool:
    state = container.get("state") or {}
    return (state.get("waiting") or {}).get("reason") in _FAILING
