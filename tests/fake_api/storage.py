# SPDX-License-Identifier: Apache-2.0
"""Objects, versions and the recent changes of the fake server. No network; the clock is given.

What a write means (generations, finalizers, graceful deletion of pods, owners) is decided here.
"""

from __future__ import annotations

import copy
import uuid
from collections import deque
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import NAMESPACES, PODS, Object
from tests.fake_api.answers import ApiError, conflict, exists, not_found, version_expired

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fake_api.kinds import ServedKind

_REMEMBERED: Final = 10_000
# no write changes these
_FIXED: Final = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "name",
    "namespace",
)
Place = tuple[str, str]
"""Group and plural: the versions of a kind share their objects."""


class ObjectChange(msgspec.Struct, frozen=True):
    """A change of one object. ``before``: None for a new one; ``after``: None for one that is gone."""

    version: int
    place: Place
    before: Object | None
    after: Object | None


class Storage:
    """All objects. What it hands out must not be changed."""

    def __init__(
        self, wall: Callable[[], datetime], remembered: int = _REMEMBERED, new_uid: Callable[[], str] | None = None
    ) -> None:
        self.version = 1
        self.floor = 1
        self.changes: deque[ObjectChange] = deque(maxlen=remembered)
        self._wall = wall
        self._new_uid = new_uid or (lambda: str(uuid.uuid4()))
        self._objects: dict[Place, dict[str, Object]] = {}
        self._kinds: dict[Place, ServedKind] = {}
        self._listeners: list[Callable[[ObjectChange], None]] = []

    def subscribe(self, listener: Callable[[ObjectChange], None]) -> Callable[[], None]:
        """Call ``listener`` with each change; what comes back ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def since(self, version: int) -> list[ObjectChange]:
        """The changes after ``version``; raises Refused (410) if it was compacted."""
        if version < self.floor:
            raise version_expired(version, self.floor)
        return [change for change in self.changes if change.version > version]

    def compact(self) -> None:
        """Drop all changes."""
        self.changes.clear()
        self.version += 1
        self.floor = self.version

    def all(self, kind: ServedKind, namespace: str | None = None) -> list[Object]:
        """All objects of a kind, by name."""
        found = self._of(kind)
        return [found[key] for key in sorted(found) if namespace is None or key.startswith(f"{namespace}/")]

    def find(self, kind: ServedKind, namespace: str | None, name: str) -> Object | None:
        """One object."""
        return self._of(kind).get(_key(namespace, name))

    def get(self, kind: ServedKind, namespace: str | None, name: str) -> Object:
        """One object; raises Refused (404)."""
        found = self.find(kind, namespace, name)
        if found is None:
            raise not_found(kind.resource.plural, name)
        return found

    def create(self, kind: ServedKind, thing: Object) -> Object:
        """Store a new object; raises Refused."""
        new = copy.deepcopy(thing)
        metadata = new["metadata"]
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise ApiError(422, "Invalid", "metadata.name: Required value: name or generateName is required")
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        namespace = metadata.get("namespace")
        if namespace and namespace not in self._objects.get((NAMESPACES.group, NAMESPACES.plural), {}):
            raise not_found("namespaces", namespace)
        if self.find(kind, namespace, metadata["name"]) is not None:
            raise exists(kind.resource.plural, metadata["name"])
        metadata.update(uid=self._new_uid(), creationTimestamp=_time(self._wall()))
        metadata.pop("deletionTimestamp", None)
        if kind.counts_generations:
            metadata["generation"] = 1
        if kind.has_status:
            new.pop("status", None)
        if kind.resource == PODS:
            new["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
            new["spec"].setdefault("restartPolicy", "Always")
            new["spec"].setdefault("terminationGracePeriodSeconds", 30)
        if kind.resource == NAMESPACES:
            new["status"] = {"phase": "Active"}
        return self._store(kind, None, new)

    def update(self, kind: ServedKind, old: Object, new: Object, subresource: str = "") -> Object:
        """Store ``new`` in place of ``old``, as far as this (sub)resource may; raises Refused (409) for an old version.

        The main resource cannot write the status, and ``status`` nothing else.
        """
        wanted = new["metadata"].get("resourceVersion")
        name = old["metadata"]["name"]
        if wanted and wanted != old["metadata"]["resourceVersion"]:
            raise conflict(kind.resource.plural, name)
        if new["metadata"].get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise conflict(kind.resource.plural, name, "the UID in the precondition does not match")
        result = _status_written(old, new) if subresource == "status" else _main_written(kind, old, new)
        if _without_version(result) == _without_version(old):
            return old
        if kind.counts_generations and subresource in ("", "scale") and _intent(result) != _intent(old):
            result["metadata"]["generation"] = int(old["metadata"].get("generation", 1)) + 1
        return self._store_or_remove(kind, old, result)

    def delete(
        self, kind: ServedKind, thing: Object, *, grace_s: int | None = None, uid: str = "", orphan: bool = False
    ) -> Object:
        """Delete as the API server does: at once, or with finalizers or a grace period by setting
        ``deletionTimestamp``.
        """
        metadata = thing["metadata"]
        if uid and uid != metadata["uid"]:
            raise conflict(kind.resource.plural, metadata["name"], "the UID in the precondition does not match")
        if orphan:
            self._orphan(metadata["uid"])
        grace = self._grace(kind, thing, grace_s)
        if not metadata.get("finalizers") and not grace:
            return self._remove(kind, thing)
        known = metadata.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" in metadata and (known is None or known <= grace):
            return thing
        marked = copy.deepcopy(thing)
        at = self._wall() + timedelta(seconds=grace)
        marked["metadata"].update(deletionTimestamp=_time(at), deletionGracePeriodSeconds=grace)
        if kind.counts_generations and "deletionTimestamp" not in metadata:
            marked["metadata"]["generation"] = int(metadata.get("generation", 1)) + 1
        return self._store_or_remove(kind, thing, marked)

    def _grace(self, kind: ServedKind, thing: Object, grace_s: int | None) -> int:
        """Only pods that are bound to a node end gracefully."""
        if kind.resource != PODS or not thing["spec"].get("nodeName"):
            return 0
        if (thing.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return 0
        return int(thing["spec"]["terminationGracePeriodSeconds"]) if grace_s is None else grace_s

    def _store_or_remove(self, kind: ServedKind, old: Object, new: Object) -> Object:
        metadata = new["metadata"]
        ends = "deletionTimestamp" in metadata and not metadata.get("deletionGracePeriodSeconds")
        return self._remove(kind, old) if ends and not metadata.get("finalizers") else self._store(kind, old, new)

    def _store(self, kind: ServedKind, old: Object | None, new: Object) -> Object:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        new["apiVersion"], new["kind"] = kind.resource.api_version, kind.resource.kind
        metadata = new["metadata"]
        self._of(kind)[_key(metadata.get("namespace"), metadata["name"])] = new
        self._changed(kind, old, new)
        return new

    def _remove(self, kind: ServedKind, thing: Object) -> Object:
        metadata = thing["metadata"]
        gone = self._of(kind).pop(_key(metadata.get("namespace"), metadata["name"]), None)
        if gone is None:
            return thing
        self.version += 1
        last = copy.deepcopy(gone)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._changed(kind, last, None)
        self._collect(kind, gone)
        return last

    def _changed(self, kind: ServedKind, before: Object | None, after: Object | None) -> None:
        change = ObjectChange(self.version, place_of(kind), before, after)
        if len(self.changes) == self.changes.maxlen:
            self.floor = self.changes[0].version
        self.changes.append(change)
        for listener in tuple(self._listeners):
            listener(change)

    def _collect(self, kind: ServedKind, owner: Object) -> None:
        """Delete what had no other owner left, and all that was in a namespace."""
        uid = owner["metadata"]["uid"]
        for place, thing in self._everything():
            references = thing["metadata"].get("ownerReferences") or []
            inside = kind.resource == NAMESPACES and thing["metadata"].get("namespace") == owner["metadata"]["name"]
            owned = any(one.get("uid") == uid for one in references)
            if inside or (owned and not any(self._lives(one.get("uid")) for one in references)):
                self.delete(self._kinds[place], thing)

    def _orphan(self, uid: str) -> None:
        for place, thing in self._everything():
            references = thing["metadata"].get("ownerReferences") or []
            left = [one for one in references if one.get("uid") != uid]
            if len(left) < len(references):
                new = copy.deepcopy(thing)
                new["metadata"]["ownerReferences"] = left
                self._store(self._kinds[place], thing, new)

    def _everything(self) -> list[tuple[Place, Object]]:
        return [(place, thing) for place, things in self._objects.items() for thing in tuple(things.values())]

    def _lives(self, uid: object) -> bool:
        return any(thing["metadata"]["uid"] == uid for _, thing in self._everything())

    def _of(self, kind: ServedKind) -> dict[str, Object]:
        place = place_of(kind)
        self._kinds[place] = kind
        return self._objects.setdefault(place, {})


def place_of(kind: ServedKind) -> Place:
    """Where objects of a kind are kept: all versions of it together."""
    return kind.resource.group, kind.resource.plural


def _key(namespace: str | None, name: str) -> str:
    return f"{namespace}/{name}" if namespace else name


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _status_written(old: Object, new: Object) -> Object:
    result = copy.deepcopy(old)
    if "status" in new:
        result["status"] = copy.deepcopy(new["status"])
    else:
        result.pop("status", None)
    return result


def _main_written(kind: ServedKind, old: Object, new: Object) -> Object:
    result = copy.deepcopy(new)
    for name in _FIXED:
        result["metadata"].pop(name, None)
        if name in old["metadata"]:
            result["metadata"][name] = old["metadata"][name]
    if kind.has_status:
        result.pop("status", None)
        if "status" in old:
            result["status"] = old["status"]
    return result


def _without_version(thing: Object) -> Object:
    metadata = {name: value for name, value in thing["metadata"].items() if name != "resourceVersion"}
    return {**thing, "metadata": metadata}


def _intent(thing: Object) -> dict[str, Any]:
    return {name: value for name, value in thing.items() if name not in ("metadata", "status", "apiVersion", "kind")}
