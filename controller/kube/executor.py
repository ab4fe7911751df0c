# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan, one action after the other, and awaits that informers show what was written.

A decision from a copy that lacks our last write would do it again, or count wrongly. So nothing is decided for an
object until the informers show all that was written for it; after a while (an event may have been lost) a fresh list
decides instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from controller.kube.errors import AlreadyExists, BadRequest, ClusterError, Conflict, Forbidden, Invalid, NotFound
from controller.kube.informer import owner_uid
from controller.kube.plan import Action, Annotate, Apply, Create, Delete, SetStatus, without
from controller.kube.resources import Object, Resource, key_of, split_key

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.recorder import Counted

Copy = Callable[[Resource, str], Object | None]
"""An object as last heard, by kind and key."""


class _Write(msgspec.Struct, frozen=True):
    """``version``: what the object is at since; empty: it is deleted."""

    resource: Resource
    key: str
    uid: str
    version: str
    until_s: float


class Expectations:
    """Writes by the key of the work that made them. ``copy`` is what they are awaited in, for ``patience_s``."""

    def __init__(self, copy: Copy, patience_s: float = 5.0) -> None:
        self._copy = copy
        self._patience_s = patience_s
        self._writes: dict[Hashable, list[_Write]] = {}
        # whose work waits to see an object
        self._about: dict[tuple[Resource, str], set[Hashable]] = {}

    def observed(self, resource: Resource, key: str) -> None:
        """An object has changed in our copies. What is seen once is seen, even if it is gone by the next look."""
        for work in list(self._about.get((resource, key), ())):
            self._check(work)

    def wrote(self, work: Hashable, resource: Resource, thing: Object, now_s: float) -> None:
        """``thing`` is what the server answered to a write."""
        metadata = thing["metadata"]
        self._add(work, resource, key_of(thing), metadata["uid"], metadata["resourceVersion"], now_s)

    def deleted(self, work: Hashable, resource: Resource, key: str, uid: str, now_s: float) -> None:
        """The deletion of an object was asked for."""
        self._add(work, resource, key, uid, "", now_s)

    def left_s(self, work: Hashable, now_s: float) -> float | None:
        """How long to wait for what is not seen yet; None: all is seen. 0: it took too long."""
        self._check(work)
        waiting = self._writes.get(work)
        return None if waiting is None else max(0.0, min(one.until_s for one in waiting) - now_s)

    def forget(self, work: Hashable) -> None:
        """Nothing is awaited for it any more."""
        self._keep(work, [])

    def _check(self, work: Hashable) -> None:
        self._keep(work, [one for one in self._writes.get(work, ()) if not self._is_seen(one)])

    def _keep(self, work: Hashable, waiting: list[_Write]) -> None:
        for one in self._writes.pop(work, ()):
            works = self._about.get((one.resource, one.key), set())
            works.discard(work)
            if not works:
                self._about.pop((one.resource, one.key), None)
        for one in waiting:
            self._about.setdefault((one.resource, one.key), set()).add(work)
        if waiting:
            self._writes[work] = waiting

    def _add(self, work: Hashable, resource: Resource, key: str, uid: str, version: str, now_s: float) -> None:
        write = _Write(resource, key, uid, version, now_s + self._patience_s)
        self._keep(work, [*self._writes.get(work, ()), write])

    def _is_seen(self, write: _Write) -> bool:
        known = self._copy(write.resource, write.key)
        if write.version:
            return known is not None and known["metadata"]["uid"] == write.uid and _has_reached(known, write.version)
        if known is None or known["metadata"]["uid"] != write.uid:
            return True
        return "deletionTimestamp" in known["metadata"]


def _has_reached(known: Object, version: str) -> bool:
    """Kubernetes compares versions of a kind as numbers since 1.35; a server whose versions are none is compared
    exactly.
    """
    seen = str(known["metadata"]["resourceVersion"])
    if seen.isdecimal() and version.isdecimal():
        return int(seen) >= int(version)
    return seen == version


class Refused(ClusterError):
    """The API server does not take an object, and trying again alone will not help: somebody must change something.

    ``reason``: one word, as conditions have it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Executor:
    """``known``: objects as last heard."""

    def __init__(
        self,
        client: Client,
        expectations: Expectations,
        known: Copy,
        *,
        clock: Callable[[], float],
        counted: Counted,
    ) -> None:
        self._client = client
        self._expectations = expectations
        self._known = known
        self._clock = clock
        self._counted = counted

    async def execute(self, work: Hashable, actions: Iterable[Action]) -> None:
        """In their order, up to the first that fails. Raises ClusterError, or Refused."""
        for action in actions:
            resource = action.resource
            try:
                await self._one(work, action)
            except (Invalid, BadRequest) as error:
                raise Refused("InvalidObject", f"{_name(action)} is refused: {error.message}") from error
            except Forbidden as error:
                # a quota that is used up, an admission policy, or a right that we lack
                raise Refused("Forbidden", f"{_name(action)} is refused: {error.message}") from error
            self._counted(resource.kind, _VERBS[type(action)])

    async def _one(self, work: Hashable, action: Action) -> None:
        match action:
            case Create():
                self._wrote(work, action.resource, await self._create(action))
            case Apply():
                self._wrote(work, action.resource, await self._apply(action))
            case Annotate():
                patch = {"annotations": dict(action.annotations), "labels": dict(action.labels)}
                body = {"metadata": {name: value for name, value in patch.items() if value}}
                await self._patch(work, action.resource, action.key, action.uid, body)
            case SetStatus():
                body = {"status": dict(action.fields)}
                await self._patch(work, action.resource, action.key, action.uid, body, "status")
            case Delete():
                await self._delete(work, action)

    async def _create(self, action: Create) -> Object:
        try:
            return await self._client.create(action.resource, action.thing)
        except AlreadyExists:
            found = await self._client.find(action.resource, *_place(action.thing))
            if found is None:
                # gone in this moment: the next look makes it
                raise
            return await self._ours(action.resource, action.thing, found)

    async def _ours(self, resource: Resource, wanted: Object, found: Object) -> Object:
        """An object that is there already, if it is ours. Without our labels our informers would never hear of it."""
        if owner_uid(found) != owner_uid(wanted):
            raise Refused(
                "NameTaken",
                f"there is a {resource.kind} {key_of(found)} that this object does not own; delete it, or rename"
                " this one",
            )
        labels = wanted["metadata"].get("labels") or {}
        has = found["metadata"].get("labels") or {}
        if "deletionTimestamp" in found["metadata"] or labels.items() <= has.items():
            return found
        patch = {"metadata": {"uid": found["metadata"]["uid"], "labels": labels}}
        namespace, name = split_key(key_of(found))
        return await self._client.merge_patch(resource, name, namespace, patch)

    async def _apply(self, action: Apply) -> Object:
        resource, thing = action.resource, action.thing
        found = self._known(resource, key_of(thing)) or await self._client.find(resource, *_place(thing))
        if found is not None and owner_uid(thing) and owner_uid(found) != owner_uid(thing):
            await self._ours(resource, thing, found)
        if not action.yields:
            return await self._client.apply(resource, thing, force=True)
        try:
            return await self._client.apply(resource, thing)
        except Conflict as conflict:
            return await self._client.apply(resource, without(thing, yielded(conflict, action.yields)), force=True)

    async def _patch(
        self,
        work: Hashable,
        resource: Resource,
        key: str,
        uid: str,
        body: Mapping[str, Any],
        subresource: str | None = None,
    ) -> None:
        namespace, name = split_key(key)
        body = {**body, "metadata": {**body.get("metadata", {}), "uid": uid}}
        try:
            written = await self._client.merge_patch(resource, name, namespace, body, subresource=subresource)
        except (NotFound, Conflict):
            self._expectations.deleted(work, resource, key, uid, self._clock())
            return
        except Invalid as error:
            if "uid" not in error.message:
                raise
            # another object of that name
            self._expectations.deleted(work, resource, key, uid, self._clock())
            return
        self._wrote(work, resource, written)

    async def _delete(self, work: Hashable, action: Delete) -> None:
        namespace, name = split_key(action.key)
        # a Conflict says that this one is gone already
        try:
            await self._client.delete(action.resource, name, namespace, grace_s=action.grace_s, uid=action.uid)
        except Conflict as conflict:
            if "recondition" not in conflict.message:
                raise
        self._expectations.deleted(work, action.resource, action.key, action.uid, self._clock())

    def _wrote(self, work: Hashable, resource: Resource, thing: Object) -> None:
        self._expectations.wrote(work, resource, thing, self._clock())


_VERBS: Mapping[type, str] = {
    Create: "create",
    Apply: "apply",
    Annotate: "patch",
    SetStatus: "status",
    Delete: "delete",
}


def yielded(conflict: Conflict, yields: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of the fields that may be left to others, those that the conflict is about."""
    fields = {str(one.get("field", "")).lstrip(".") for one in conflict.details.get("causes") or ()}
    paths = [tuple(one.split(".")) for one in fields]
    return [one for one in yields if any(path[: len(one)] == one for path in paths)]


def _place(thing: Object) -> tuple[str, str | None]:
    metadata = thing["metadata"]
    return metadata["name"], metadata.get("namespace")


def _name(action: Action) -> str:
    key = key_of(action.thing) if isinstance(action, Create | Apply) else action.key
    return f"{action.resource.kind} {key}"
