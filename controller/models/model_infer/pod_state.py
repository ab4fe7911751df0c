# SPDX-License-Identifier: Apache-2.0
"""The state of a pod: its place, its revision, whether it serves or terminates, and its failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.drain_mark import DELETION_COST, DRAINING
from controller.kube.api_resources import Object, key_of, parse_timestamp
from controller.models.model_infer import names
from controller.models.model_infer.names import PodPosition, position_from_labels
from extproc.api.config_errors import replace_unprintable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from controller.models.model_infer.model_infer_state import ModelInferState

_ENDED: Final = ("Failed", "Succeeded")
# A node that misses a few heartbeats often recovers.
LOST_AFTER_S: Final = 30.0
_STUCK: Final = {
    "ImagePullBackOff": "ImagePullFailed",
    "ErrImagePull": "ImagePullFailed",
    "InvalidImageName": "ImagePullFailed",
    "CreateContainerConfigError": "ContainerConfigFailed",
    "CreateContainerError": "ContainerConfigFailed",
    "RunContainerError": "ContainerConfigFailed",
}


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """``thing``: the object. ``revision`` and ``role_revision``: hashes of what it was made of. ``is_ready``: its Ready
    condition holds, and it is not being deleted. ``is_going``: it is being deleted. ``draining_at_s``: since when it
    gets no new requests, None if it does. ``is_waiting``: no node has been found for it. ``deletion_cost``: its
    annotation ``controller.kubernetes.io/pod-deletion-cost``; 0 without one.
    """

    thing: Object
    key: str
    uid: str
    place: PodPosition
    revision: str
    role_revision: str
    is_ready: bool
    is_going: bool
    is_ended: bool
    is_waiting: bool
    is_scale_unit: bool
    draining_at_s: float | None
    created_at_s: float
    node: str
    deletion_cost: int

    @property
    def labels(self) -> Mapping[str, str]:
        """All of them."""
        return self.thing["metadata"].get("labels") or {}

    @property
    def status(self) -> Mapping[str, Any]:
        """As the kubelet wrote it."""
        return self.thing.get("status") or {}

    def condition(self, type_: str) -> Mapping[str, Any]:
        """The condition of this type; an empty one if there is none."""
        return next((one for one in self.status.get("conditions") or () if one.get("type") == type_), {})

    def container_statuses(self) -> Iterator[Mapping[str, Any]]:
        """Statuses of containers, without the init containers."""
        yield from self.status.get("containerStatuses") or ()


def parse_owned_pods(things: Sequence[Object], owner_uid: str, lost_nodes: Collection[str] = ()) -> tuple[Pod, ...]:
    """In order of their places. Pods of an earlier owner of the same name, and pods without our labels, are left out.
    No pod on ``lost_nodes`` is ready, whatever its condition.
    """
    found = (_read(one, lost_nodes) for one in things if is_owned(one, owner_uid))
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.place))


def is_owned(thing: Object, owner_uid: str) -> bool:
    """Whether the object with ``owner_uid`` is the controller of ``thing``."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return any(one.get("controller") and one.get("uid") == owner_uid for one in owners)


def _read(thing: Object, lost_nodes: Collection[str]) -> Pod | None:
    metadata, status = thing["metadata"], thing.get("status") or {}
    given, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    place = position_from_labels(given)
    if place is None:
        return None
    going = bool(metadata.get("deletionTimestamp"))
    node = (thing.get("spec") or {}).get("nodeName") or ""
    conditions = {one.get("type"): one.get("status") for one in status.get("conditions") or ()}
    ended = status.get("phase") in _ENDED
    return Pod(
        thing=thing,
        key=key_of(thing),
        uid=metadata.get("uid", ""),
        place=place,
        revision=given.get(names.REVISION, ""),
        role_revision=given.get(names.ROLE_REVISION, ""),
        is_ready=conditions.get("Ready") == "True" and not going and not ended and node not in lost_nodes,
        is_going=going,
        is_ended=ended,
        is_waiting=not node and not going and not ended,
        is_scale_unit=given.get(names.SCALE_UNIT) == "true",
        draining_at_s=parse_timestamp(annotations.get(DRAINING)),
        created_at_s=parse_timestamp(metadata.get("creationTimestamp")) or 0.0,
        node=node,
        deletion_cost=_cost(annotations.get(DELETION_COST)),
    )


def _cost(text: object) -> int:
    try:
        return int(str(text)) if text is not None else 0
    except ValueError:
        return 0


class PodFailure(msgspec.Struct, frozen=True, kw_only=True):
    """``at_s``: when it began. ``due_s``: after how many seconds recovery may act, in addition to the user's grace.
    ``is_restarted``: the kubelet restarts the container. ``is_final``: it cannot recover by itself.
    """

    pod: Pod
    at_s: float
    reason: str
    message: str
    due_s: float = 0.0
    is_restarted: bool = False
    is_final: bool = False


def pod_failure(pod: Pod, observed: ModelInferState, unresponsive_s: float) -> PodFailure | None:
    """None for a pod that runs, starts or terminates. ``unresponsive_s``: how long an engine that was ready may be
    unready; 0: for ever.
    """
    if pod.is_going:
        return None
    if pod.node in observed.lost_nodes:
        since_s = observed.lost_nodes[pod.node]
        return PodFailure(
            pod=pod, at_s=since_s, reason="NodeLost", message=f"its node {pod.node} is lost", due_s=LOST_AFTER_S
        )
    if pod.is_ended:
        return _ended(pod, observed)
    if pod.is_ready:
        return None
    return _crashed(pod, observed) or _hung(pod, unresponsive_s)


def _ended(pod: Pod, observed: ModelInferState) -> PodFailure:
    status = pod.status
    said = status.get("message") or f"it has ended ({status.get('reason') or status.get('phase')})"
    last = _last_terminated(pod)
    if last:
        said = _how(last)
    times = [parse_timestamp(last.get("finishedAt")), parse_timestamp(pod.condition("Ready").get("lastTransitionTime"))]
    at_s = next((one for one in times if one is not None), pod.created_at_s)
    return PodFailure(pod=pod, at_s=at_s, reason="PodFailed", message=said + _tail(pod, observed))


def _crashed(pod: Pod, observed: ModelInferState) -> PodFailure | None:
    """A container has ended, and the pod has not been ready since."""
    last = _last_terminated(pod)
    at_s = parse_timestamp(last.get("finishedAt"))
    if not last or at_s is None:
        return None
    message = f"{_how(last)}, {last['restarts']} restarts" + _tail(pod, observed)
    return PodFailure(pod=pod, at_s=at_s, reason="RuntimeUnhealthy", message=message, is_restarted=True)


def _hung(pod: Pod, unresponsive_s: float) -> PodFailure | None:
    """It was ready after its containers started, and is not any more."""
    changed_s = parse_timestamp(pod.condition("Ready").get("lastTransitionTime"))
    started = [parse_timestamp(_running(one).get("startedAt")) for one in pod.container_statuses()]
    known = [one for one in started if one is not None]
    if not unresponsive_s or changed_s is None or not known or len(known) < len(started) or changed_s <= max(known):
        return None
    message = "it runs, was ready, and does not answer any more"
    return PodFailure(pod=pod, at_s=changed_s, reason="NotAnswering", message=message, due_s=unresponsive_s)


def _running(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return (container.get("state") or {}).get("running") or {}


def _last_terminated(pod: Pod) -> Mapping[str, Any]:
    """The latest end of a container, with its name and how often it was started again."""
    found = [
        {**ended, "container": one.get("name", ""), "restarts": one.get("restartCount", 0)}
        for one in pod.container_statuses()
        for state in (one.get("state") or {}, one.get("lastState") or {})
        if (ended := state.get("terminated"))
    ]
    return max(found, key=lambda one: parse_timestamp(one.get("finishedAt")) or 0.0, default={})


def _how(last: Mapping[str, Any]) -> str:
    reason = last.get("reason")
    message = f"container {last['container']} ended with code {last.get('exitCode')}"
    return f"{message} ({reason})" if reason and reason != "Error" else message


def _tail(pod: Pod, observed: ModelInferState) -> str:
    """The last line first: it mostly is the reason, and one line is all that tables of kubectl show.

    Without the control characters by which a log could control the terminal of a reader.
    """
    text = replace_unprintable(observed.log_tails.get(pod.key, ""), keep="\n\t")
    before, _, last = text.strip().rpartition("\n")
    if not last:
        return ""
    return f": {last.strip()}" + (f"\nbefore that it wrote:\n{before}" if before else "")


def stuck_reason(pod: Pod, observed: ModelInferState) -> PodFailure | None:
    """What keeps a pod from starting and needs a user's change; None of a pod that goes, whose containers are ended."""
    if pod.is_going:
        return None
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") == "False":
        said = str(scheduled.get("message") or "no node was found for it")
        return _failure(pod, str(scheduled.get("reason") or "Unschedulable"), said)
    for one in _all_containers(pod):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _STUCK:
            said = f"container {one.get('name')}: {waiting.get('message') or waiting['reason']}"
            return _failure(pod, _STUCK[waiting["reason"]], said)
    for one in pod.status.get("initContainerStatuses") or ():
        ended = (one.get("state") or {}).get("terminated") or (one.get("lastState") or {}).get("terminated") or {}
        if ended.get("exitCode") and not one.get("ready"):
            said = _how({**ended, "container": one.get("name")}) + _tail(pod, observed)
            return _failure(pod, "ModelLoadFailed", said)
    return None


def _failure(pod: Pod, reason: str, message: str) -> PodFailure:
    return PodFailure(pod=pod, at_s=pod.created_at_s, reason=reason, message=message)


def _all_containers(pod: Pod) -> Sequence[Mapping[str, Any]]:
    return [*(pod.status.get("initContainerStatuses") or ()), *pod.container_statuses()]
