# SPDX-License-Identifier: Apache-2.0
"""Pods as informers keep them: of pods that we make, all that is read of them; of all others, a view.

Who makes a pod reads what each of its containers does, and says so. Who scales or counts pods reads a dozen facts of
each, of every pod of a namespace or of the cluster, so the view is a quarter of the size. All who need it share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from controller.api.drain_mark import DELETION_COST, DRAIN, DRAINING
from controller.api.pod_spec_checks import parse_quantity, resource_requests
from controller.kube.api_resources import key_of, parse_timestamp
from controller.kube.informer import only_fields, view_transform, without_fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.kube.api_resources import Object

_SPEC: Final = ("nodeName", "schedulerName", "hostname", "subdomain", "priority", "terminationGracePeriodSeconds")
_STATUS: Final = (
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
# Templates whose pods share their labels and requests.
_MOST_SHARED: Final = 1024
Value = TypeVar("Value")
_NO_NODE: Final = frozenset({"Unschedulable", "SchedulingGated"})


def trimmed_pod(pod: Object) -> Object:
    """Labels, annotations, owner, node, and what its containers do."""
    status = only_fields(pod.get("status") or {}, _STATUS)
    for name in ("containerStatuses", "initContainerStatuses"):
        if name in status:
            status[name] = [only_fields(one, _CONTAINER) for one in status[name]]
    return {
        "apiVersion": pod["apiVersion"],
        "kind": pod["kind"],
        "metadata": without_fields(pod["metadata"], ("managedFields",)),
        "spec": only_fields(pod.get("spec") or {}, _SPEC),
        "status": status,
    }


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """``key``: ``namespace/name``. ``ip`` and ``node``: empty until it has one. ``created_at_s`` and ``ready_at_s``:
    since the epoch. ``draining_at_s``: since when it has our drain mark; None without. ``deletion_cost``: of its
    annotation; None without one. ``is_going``: it is being deleted; ``is_leaving``: it is, or is to drain.
    ``is_failing``: a container will not start by itself. ``requests``: what it takes on its node. ``cpu`` and
    ``memory``: requests of its containers, in cores and bytes; 0 if any of them requests none.
    """

    key: str
    name: str
    uid: str
    labels: Mapping[str, str]
    ip: str
    created_at_s: float
    node: str = ""
    ready_at_s: float | None = None
    draining_at_s: float | None = None
    deletion_cost: str | None = None
    is_ended: bool = False
    is_going: bool = False
    is_leaving: bool = False
    is_ready: bool = False
    is_failing: bool = False
    is_unschedulable: bool = False
    requests: Mapping[str, float] = {}
    cpu: float = 0.0
    memory: float = 0.0


def view_of(pod: Object) -> PodView:
    """A pod as the API server has it."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    conditions = {one.get("type"): one for one in status.get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    is_ended = status.get("phase") in _ENDED
    is_going = "deletionTimestamp" in metadata
    is_ready = ready.get("status") == "True" and not is_ended and not is_going
    draining_at_s = parse_timestamp(annotations.get(DRAINING))
    return PodView(
        key=key_of(pod),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        labels=_shared(tuple((metadata.get("labels") or {}).items())),
        ip=status.get("podIP") or "",
        node=spec.get("nodeName") or "",
        created_at_s=parse_timestamp(metadata.get("creationTimestamp")) or 0.0,
        ready_at_s=parse_timestamp(ready.get("lastTransitionTime")) if is_ready else None,
        draining_at_s=draining_at_s,
        deletion_cost=annotations.get(DELETION_COST),
        is_ended=is_ended,
        is_going=is_going,
        is_leaving=is_going or draining_at_s is not None or annotations.get(DRAIN) == "true",
        is_ready=is_ready,
        is_failing=not is_ready and any(map(_fails, _containers(status))),
        is_unschedulable=(conditions.get("PodScheduled") or {}).get("reason") in _NO_NODE,
        requests=_shared((*resource_requests(spec).items(), ("pods", 1.0))),
        cpu=_requested(spec, "cpu"),
        memory=_requested(spec, "memory"),
    )


# An informer's transform: one, so that all who watch the same pods share a watch.
POD_VIEW: Final = view_transform(view_of)


@lru_cache(_MOST_SHARED)
def _shared(items: tuple[tuple[str, Value], ...]) -> Mapping[str, Value]:
    """One mapping for all pods of a template: of a view, this is the larger half."""
    return dict(items)


def _requested(spec: Mapping[str, Any], name: str) -> float:
    containers = spec.get("containers") or ()
    amounts = [parse_quantity(((one.get("resources") or {}).get("requests") or {}).get(name, 0)) for one in containers]
    return sum(amounts) if all(amounts) else 0.0


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _fails(container: Mapping[str, Any]) -> bool:
    state = container.get("state") or {}
    return (state.get("waiting") or {}).get("reason") in _FAILING
