# SPDX-License-Identifier: Apache-2.0
"""What a pod says of itself: its place, its revision, whether it serves or goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import Object, key_of
from controller.models.model_infer import labels
from controller.models.model_infer.names import Place, place_of
from controller.models.model_infer.times import seconds_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
_ENDED: Final = ("Failed", "Succeeded")


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """``thing``: the object. ``revision`` and ``role_revision``: hashes of what it was made of. ``is_ready``: its Ready
    condition holds, and it is not going. ``is_going``: it is being deleted. ``draining_at_s``: since when it gets no
    new requests, None if it does. ``is_waiting``: no node has been found for it. ``deletion_cost``: as the annotation
    ``controller.kubernetes.io/pod-deletion-cost`` says; 0 without one.
    """

    thing: Object
    key: str
    uid: str
    place: Place
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
    def status(self) -> Mapping[str, Any]:
        """As the kubelet wrote it."""
        return self.thing.get("status") or {}

    def condition(self, type_: str) -> Mapping[str, Any]:
        """The condition of this type; an empty one if there is none."""
        return next((one for one in self.status.get("conditions") or () if one.get("type") == type_), {})

    def containers(self) -> Iterator[Mapping[str, Any]]:
        """Statuses of containers, without the init containers."""
        yield from self.status.get("containerStatuses") or ()


def pods_of(things: Sequence[Object], owner_uid: str, lost_nodes: Collection[str] = ()) -> tuple[Pod, ...]:
    """In order of their places. Pods of an owner that had the same name before, and pods without our labels, are not
    among them. Nothing on ``lost_nodes`` is ready, whatever it said before.
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
    place = place_of(given)
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
        revision=given.get(labels.REVISION, ""),
        role_revision=given.get(labels.ROLE_REVISION, ""),
        is_ready=conditions.get("Ready") == "True" and not going and not ended and node not in lost_nodes,
        is_going=going,
        is_ended=ended,
        is_waiting=not node and not going and not ended,
        is_scale_unit=given.get(labels.SCALE_UNIT) == "true",
        draining_at_s=seconds_of(annotations.get(labels.DRAINING)),
        created_at_s=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        node=node,
        deletion_cost=_cost(annotations.get(_DELETION_COST)),
    )


def _cost(text: object) -> int:
    try:
        return int(str(text)) if text is not None else 0
    except ValueError:
        return 0
