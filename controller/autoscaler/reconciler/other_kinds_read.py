# SPDX-License-Identifier: Apache-2.0
"""What a read of a target of somebody else's kind says: its scale and labels, or what it lacks; pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controller.autoscaler.reconciler.scalables import Scalable, ScalableKind, scalable_of
from controller.kube.resources import required_labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.autoscaler.reconciler.owning import Place
    from controller.kube.resources import Object

_VERSION: Final = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[a-z]([-a-z0-9]*[a-z0-9])?")


class Lacks(NamedTuple):
    """Why a target cannot be scaled. ``reason``: of a condition. ``message``: for people."""

    reason: str
    message: str


class Read(msgspec.Struct, frozen=True):
    """A target as read last. ``found``: None if ``lacks`` says why."""

    kind: ScalableKind | None = None
    found: Scalable | None = None
    lacks: Lacks | None = None


def read_of(kind: ScalableKind, place: Place, thing: Object, scale: Mapping[str, Any]) -> Read:
    """``thing``: the object. ``scale``: its scale."""
    text = str((scale.get("status") or {}).get("selector") or "")
    try:
        required = required_labels(text)
    except ValueError as error:
        return Read(kind, lacks=Lacks("SelectorUnknown", f"the pods of {place_name(place)} are not known: {error}"))
    if not required:
        said = (
            "its scale's status.selector names no label with one value" if text else "its scale has no status.selector"
        )
        return Read(kind, lacks=Lacks("SelectorUnknown", f"the pods of {place_name(place)} are not known: {said}"))
    spec = thing.get("spec")
    plain = scalable_of(kind, {**thing, "spec": {**spec, "replicas": None} if isinstance(spec, dict) else {}})
    replicas = int((scale.get("spec") or {}).get("replicas") or 0)
    made = msgspec.structs.replace(
        plain, replicas=replicas, selector=required, selects=text, template={**required, **plain.template}
    )
    return Read(kind, made)


def misnamed(place: Place, version: str) -> Lacks | None:
    """What would lead to another path of the API server: servers resolve dots, and some read an escaped slash as
    one.
    """
    if _VERSION.fullmatch(version) is None:
        said = f"{version} {place[2]} cannot be scaled here: {version!r} is no apiVersion, such as apps/v1"
        return Lacks("UnknownKind", said)
    if place[3] in {".", ".."} or set("/%") & set(place[3]):
        return Lacks("TargetNotFound", f"{place[3]!r} is no name of an object")
    return None


def place_name(place: Place) -> str:
    """For people."""
    return f"{place[2]} {place[0]}/{place[3]}"
