# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan, one action after the other, and awaits that informers show what was written.

A decision from a copy that lacks our last write would do it again, or count wrongly. Informers that have an object take
in what the server answers to a write of it. What they cannot know from that, such as whether an object that was made
is gone again, is awaited: until they show it nothing is decided for the work that wrote it; after a while (an event may
have been lost) a fresh list decides instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from controller.kube.api_resources import ApiResource, Object, is_older, key_of, split_key
from controller.kube.errors import AlreadyExists, BadRequest, ClusterError, Conflict, Forbidden, Invalid, NotFound
from controller.kube.informer import owner_uid
from controller.kube.reconcile_plan import Action, Annotate, Apply, Create, Delete, SetStatus, without_paths

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.event_recorder import Counted

Copy = Callable[[ApiResource, str], Object | None]
"""The informer's copy of an object, by kind and key."""
_VERBS: Mapping[type, str] = {
    Create: "create",
    Apply: "apply",
    Annotate: "patch",
    SetStatus: "status",
    Delete: "delete",
}


class _Write(msgspec.Struct, frozen=True):
    """``version``: what the object is at since; empty: it is deleted."""

    resource: ApiResource
    key: str
    uid: str
    version: str
    until_s: float


class InformerCache(Protocol):
    """Informers."""

    def get(self, resource: ApiResource, key: str) -> Object | None:
        """Their copy of an object."""

    def apply_write_answer(self, resource: ApiResource, thing: Object) -> None:
        """What the server has answered to a write."""


class Expectations:
    """Writes by the key of the work that made them. ``copies`` are what they are awaited in, for ``patience_s``."""

    def __init__(self, copies: InformerCache, patience_s: float = 5.0) -> None:
        self._copies = copies
        self._patience_s = patience_s
        self._writes: dict[Hashable, list[_Write]] = {}
        # work that waits for an object's event
        self._about: dict[tuple[ApiResource, str], set[Hashable]] = {}

    def on_object_observed(self, resource: ApiResource, key: str) -> None:
        """An object has changed in the cache. A write seen once counts as seen, even if the object is gone by the next
        reconcile.
        """
        for work in list(self._about.get((resource, key), ())):
            self._check(work)

    def expect_write(self, work: Hashable, resource: ApiResource, thing: Object, now_s: float) -> None:
        """``thing`` is what the server answered to a write."""
        metadata = thing["metadata"]
        self._copies.apply_write_answer(resource, thing)
        self._add(work, resource, key_of(thing), metadata["uid"], metadata["resourceVersion"], now_s)

    def expect_deletion(self, work: Hashable, resource: ApiResource, key: str, uid: str, now_s: float) -> None:
        """Record a requested deletion of an object."""
        self._add(work, resource, key, uid, "", now_s)

    def remaining_wait_s(self, work: Hashable, now_s: float) -> float | None:
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

    def _add(self, work: Hashable, resource: ApiResource, key: str, uid: str, version: str, now_s: float) -> None:
        write = _Write(resource, key, uid, version, now_s + self._patience_s)
        if not self._is_seen(write):
            self._keep(work, [*self._writes.get(work, ()), write])

    def _is_seen(self, write: _Write) -> bool:
        known = self._copies.get(write.resource, write.key)
        if write.version:
            if known is None or known["metadata"]["uid"] != write.uid:
                return False
            seen = str(known["metadata"]["resourceVersion"])
            return seen == write.version or is_older(write.version, seen)
        if known is None or known["metadata"]["uid"] != write.uid:
            return True
        return "deletionTimestamp" in known["metadata"]


class ObjectRefused(ClusterError):
    """The API server refuses an object, and a retry alone will not help: a user must change something.

    ``reason``: one word, as in conditions.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class NameStillTaken(ClusterError):
    """An object of another owner has the name, and is being deleted: what is to be made waits until it is gone."""


class Executor:
    """``known``: objects as the informers have them."""

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
                raise ObjectRefused("InvalidObject", f"{_name(action)} is refused: {error.message}") from error
            except Forbidden as error:
                # a quota that is used up, an admission policy, or a right that we lack
                raise ObjectRefused("Forbidden", f"{_name(action)} is refused: {error.message}") from error
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
            found = await self._client.get_or_none(action.resource, *_place(action.thing))
            if found is None:
                # gone in this moment: the next reconcile creates it
                raise
            return await self._ours(action.resource, action.thing, found)

    async def _ours(self, resource: ApiResource, wanted: Object, found: Object) -> Object:
        """An object that exists already, if it is ours. Without our labels our informers would never deliver it."""
        if owner_uid(found) != owner_uid(wanted):
            if "deletionTimestamp" in found["metadata"]:
                raise NameStillTaken(f"waits for the {resource.kind} {key_of(found)} of an earlier owner to be gone")
            raise ObjectRefused(
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
        found = self._known(resource, key_of(thing)) or await self._client.get_or_none(resource, *_place(thing))
        if found is not None and owner_uid(thing) and owner_uid(found) != owner_uid(thing):
            await self._ours(resource, thing, found)
        if not action.yields:
            return await self._client.apply(resource, thing, force=True)
        try:
            return await self._client.apply(resource, thing)
        except Conflict as conflict:
            return await self._client.apply(
                resource, without_paths(thing, yielded_fields(conflict, action.yields)), force=True
            )

    async def _patch(
        self,
        work: Hashable,
        resource: ApiResource,
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
            self._expectations.expect_deletion(work, resource, key, uid, self._clock())
            return
        except Invalid as error:
            if "uid" not in error.message:
                raise
            # another object of that name
            self._expectations.expect_deletion(work, resource, key, uid, self._clock())
            return
        self._wrote(work, resource, written)

    async def _delete(self, work: Hashable, action: Delete) -> None:
        namespace, name = split_key(action.key)
        # a Conflict means that this one is gone already
        try:
            await self._client.delete(action.resource, name, namespace, grace_s=action.grace_s, uid=action.uid)
        except Conflict as conflict:
            if "recondition" not in conflict.message:
                raise
        self._expectations.expect_deletion(work, action.resource, action.key, action.uid, self._clock())

    def _wrote(self, work: Hashable, resource: ApiResource, thing: Object) -> None:
        self._expectations.expect_write(work, resource, thing, self._clock())


def yielded_fields(conflict: Conflict, yields: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
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
