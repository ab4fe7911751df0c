# SPDX-License-Identifier: Apache-2.0
"""An informer keeps a copy of all objects of a kind up to date: by a list, then by a watch.

Where the watch cannot go on, there is a new list. A deletion that happens while there is no watch is found by the next
list, because a list replaces the whole copy. What the server answers to a write of ours is taken in like an event: the
event may come later, and nobody should decide from a copy without it. Events and lists from before it change nothing.
Transforms make objects smaller before they are kept; an ``Index`` finds them by a property, such as their owner, so
that a reconcile costs what one owner has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.api_resources import Object, is_older, key_of, partial_metadata
from controller.kube.client import BOOKMARK, DELETED
from controller.kube.errors import Backoff, ClusterError, Forbidden, NotFound, ResourceVersionExpired

if TYPE_CHECKING:
    from controller.kube.api_resources import ApiResource
    from controller.kube.client import Client, WatchEvent

log = logging.getLogger(__name__)

_SHORT_WATCH_S: Final = 1.0

Transform = Callable[[Object], Object]
"""Makes an object smaller before it is kept; it must keep ``metadata.name``, ``namespace``, ``uid`` and
``resourceVersion``.
"""
Listener = Callable[[str], None]
"""Gets the key of an object that changed; must not block and must not raise. What the object is now: see the informer.
"""
Says = Callable[[Object], str]
"""What an object is found by; empty: not at all."""


class Store:
    """Objects by key. Readers must not change them.

    An object that cannot be transformed, with any content, keeps its previous copy, or is left out without one; the
    others are not affected.
    """

    def __init__(self, transform: Transform | None = None) -> None:
        self._transform = transform or _as_it_is
        self._objects: dict[str, Object] = {}
        self.objects: Mapping[str, Object] = MappingProxyType(self._objects)

    def replace(self, items: Iterable[Object]) -> list[str]:
        """Replace all objects; returns the keys of those added, changed or deleted."""
        new: dict[str, Object] = {}
        for item in items:
            key = key_of(item)
            known = self._objects.get(key)
            kept = known if _is_outdated(item, known) else self._transformed(key, item)
            if kept is not None:
                new[key] = kept
        gone = self._objects.keys() - new.keys()
        changed = [key for key, item in new.items() if _differs(self._objects.get(key), item)]
        self._objects.clear()
        self._objects.update(new)
        return [*changed, *sorted(gone)]

    def apply_event(self, event: WatchEvent) -> list[str]:
        """Take in one event; the key of what changed, if anything did."""
        if event.type == BOOKMARK:
            return []
        key = key_of(event.object)
        if event.type == DELETED:
            return [key] if self._objects.pop(key, None) is not None else []
        return self._put(key, event.object)

    def apply_write_answer(self, thing: Object) -> list[str]:
        """What the server has answered to our write of an object; the key if that is news. One that is not here is left
        to the watch: it may be gone since, or was never selected.
        """
        key = key_of(thing)
        known = self._objects.get(key)
        return self._put(key, thing) if known is not None and _is_outdated(known, thing) else []

    def _put(self, key: str, thing: Object) -> list[str]:
        known = self._objects.get(key)
        if not _differs(known, thing) or _is_outdated(thing, known):
            return []
        kept = self._transformed(key, thing)
        if kept is None or kept is known:
            return []
        self._objects[key] = kept
        return [key]

    def _transformed(self, key: str, thing: Object) -> Object | None:
        try:
            return self._transform(thing)
        except Exception:  # a fault of one object must not affect the others
            log.exception("%s %s cannot be read, and is as it was", thing.get("kind", "an object"), key)
            return self._objects.get(key)


def _is_outdated(thing: Object, by: Object | None) -> bool:
    """Whether ``by`` is a later state of the same object."""
    if by is None:
        return False
    old, new = thing["metadata"], by["metadata"]
    return old.get("uid") == new.get("uid") and is_older(old.get("resourceVersion", ""), new.get("resourceVersion", ""))


def _differs(known: Object | None, item: Object) -> bool:
    """A new uid is another object of the same name."""
    if known is None:
        return True
    old, new = known["metadata"], item["metadata"]
    return any(old.get(name) != new.get(name) for name in ("resourceVersion", "uid"))


def _as_it_is(thing: Object) -> Object:
    return thing


class Selection(msgspec.Struct, frozen=True):
    """Which objects: of one namespace or all, by label and field selectors as the API writes them."""

    namespace: str | None = None
    labels: str = ""
    fields: str = ""


class InformerTiming(msgspec.Struct, frozen=True):
    """Timeouts and intervals of an informer.

    ``silence_s``: a watch without any event or bookmark for so long is reopened. ``watch_s``: the server ends a watch
    after it. A watch that has lasted for ``backoff_max_s`` resets the back-off of lists. ``resync_s``: interval at
    which listeners get all keys, in case they missed one; 0: never.
    """

    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    silence_s: float = 90.0
    watch_s: int = 290
    resync_s: float = 600.0


class Informer:
    """``run`` lists and watches; ``objects`` is the copy; ``synced`` is set after the first list. ``answered`` is set
    then, too, or once the server has refused the kind or does not serve it.
    """

    def __init__(
        self,
        client: Client,
        resource: ApiResource,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        *,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        transform: Transform | None = None,
        rng: Random | None = None,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self.answered = asyncio.Event()
        self.lists = 0
        self._client = client
        self._selection = selection
        self._timing = timing
        self._store = Store(transform)
        self._rng = rng or Random()
        self._backoff = Backoff(timing.backoff_s, timing.backoff_max_s, self._rng)
        # a list is the most expensive call: events in between do not reset its back-off
        self._relisting = Backoff(timing.backoff_s, timing.backoff_max_s, self._rng)
        self._listeners: list[Listener] = []
        self._seen_at_s: float | None = None
        self._cut_off_at_s: float | None = None

    @property
    def objects(self) -> Mapping[str, Object]:
        """All objects by key, as last delivered. They must not be changed."""
        return self._store.objects

    def since_last_event_s(self) -> float | None:
        """Seconds since the last answer of the server, a bookmark included; None if there was none.

        Up to the timing's ``silence_s`` is normal where little changes; beyond it the copy may be stale.
        """
        return None if self._seen_at_s is None else asyncio.get_running_loop().time() - self._seen_at_s

    def disconnected_for_s(self) -> float | None:
        """Seconds since the server refused or a watch broke; None once data has arrived again, or none ever has."""
        if self._cut_off_at_s is None or self._seen_at_s is None:
            return None
        return asyncio.get_running_loop().time() - self._cut_off_at_s

    def get(self, key: str) -> Object | None:
        """One object, None if there is none."""
        return self._store.objects.get(key)

    def apply_write_answer(self, thing: Object) -> None:
        """An object of the kind as the server has answered to our write of it."""
        self._notify(self._store.apply_write_answer(thing))

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with each key that changes from now on, and at each resync."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call ``listener`` no more."""
        self._listeners.remove(listener)

    async def run(self) -> None:
        """List and watch until cancelled. No failure of the server or the network ends it."""
        async with asyncio.TaskGroup() as tasks:
            if self._timing.resync_s > 0:
                tasks.create_task(self._resync(), name=f"resync {self.resource.plural}")
            await self._follow()

    async def list_once(self) -> str:
        """Replace the copy by a list; its version. Raises ClusterError."""
        chosen = self._selection
        listed = await self._client.list(self.resource, chosen.namespace, labels=chosen.labels, fields=chosen.fields)
        self.lists += 1
        self._contacted()
        self._notify(self._store.replace(listed.items))
        self.synced.set()
        self.answered.set()
        return listed.resource_version

    async def _follow(self) -> None:
        version: str | None = None
        while True:
            try:
                if version is None:
                    version = await self.list_once()
                version = await self._watch(version)
            except ResourceVersionExpired as expired:
                # after a restart of the server this happens to all clients at once: a pause spreads their lists
                version = None
                await self._pause(expired, self._relisting)
            except _Interrupted as interrupted:
                version = interrupted.version
                await self._pause(interrupted.why)
            except ClusterError as error:
                await self._pause(error)

    async def _watch(self, version: str) -> str:
        """Follow one watch to its end; the version reached. Raises Expired, and _Interrupted with the version
        reached.
        """
        chosen, timing = self._selection, self._timing
        clock = asyncio.get_running_loop().time
        began_s = clock()
        reached = version
        events = self._client.watch(
            self.resource,
            chosen.namespace,
            since=version,
            labels=chosen.labels,
            fields=chosen.fields,
            timeout_s=timing.watch_s,
            silence_s=timing.silence_s,
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    reached = event.resource_version
                    self._backoff.reset()
                    if clock() - began_s >= timing.backoff_max_s:
                        self._relisting.reset()
                    self._contacted()
                    self._notify(self._store.apply_event(event))
        except ResourceVersionExpired:
            raise
        except ClusterError as error:
            raise _Interrupted(reached, error) from error
        if clock() - began_s < _SHORT_WATCH_S:
            # a server that disconnects at once, or after each event, would be called without pause
            raise _Interrupted(reached, None)
        self._backoff.reset()
        self._cut_off_at_s = None
        return reached

    def _contacted(self) -> None:
        self._seen_at_s = asyncio.get_running_loop().time()
        self._cut_off_at_s = None

    async def _pause(self, error: ClusterError | None, backoff: Backoff | None = None) -> None:
        if isinstance(error, Forbidden | NotFound):
            self.answered.set()
        if error is not None and self._cut_off_at_s is None:
            self._cut_off_at_s = asyncio.get_running_loop().time()
        wait_s = (backoff or self._backoff).record_failure(error)
        log.warning("%s: %s; again in %.1f s", self.resource.plural, error or "the watch ended at once", wait_s)
        await asyncio.sleep(wait_s)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._timing.resync_s * self._rng.uniform(0.9, 1.1))
            self._notify(list(self.objects))

    def _notify(self, keys: Iterable[str]) -> None:
        for key in keys:
            for listener in self._listeners:
                listener(key)


class _Interrupted(Exception):
    """A watch failed after ``version``."""

    def __init__(self, version: str, why: ClusterError | None) -> None:
        super().__init__(version)
        self.version = version
        self.why = why


def without_managed_fields(thing: Object) -> Object:
    """The object without ``managedFields``."""
    return {**thing, "metadata": without_fields(thing["metadata"], ("managedFields",))}


def view_transform(read: Callable[[Object], object]) -> Transform:
    """Of an object, what ``read`` makes of it is kept as ``view``, and its identity."""
    return lambda thing: {"metadata": partial_metadata(thing), "view": read(thing)}


def only_fields(thing: Object, names: Iterable[str]) -> Object:
    """These fields of it."""
    return {name: thing[name] for name in names if name in thing}


def without_fields(thing: Object, names: Iterable[str]) -> Object:
    """All but these fields of it."""
    left = set(names)
    return {name: value for name, value in thing.items() if name not in left}


class Index:
    """Indexes the objects of ``informer``. ``told``: called with each previous or current index value of a changed
    object, and its key.
    """

    def __init__(self, informer: Informer, says: Says, told: Callable[[str, str], None] | None = None) -> None:
        self._informer = informer
        self._says = says
        self._told = told
        self._said: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}
        informer.subscribe(self._changed)

    def objects_with(self, what: str) -> list[Object]:
        """The objects with the index value ``what``, sorted by key."""
        found = (self._informer.get(key) for key in sorted(self._keys.get(what, ())))
        return [one for one in found if one is not None]

    def _changed(self, key: str) -> None:
        thing = self._informer.get(key)
        before, now = self._said.get(key, ""), "" if thing is None else self._says(thing)
        if before != now:
            self._move(key, before, now)
        if self._told is not None:
            for one in {before, now} - {""}:
                self._told(one, key)

    def _move(self, key: str, before: str, now: str) -> None:
        if before:
            self._keys[before].discard(key)
            if not self._keys[before]:
                del self._keys[before]
        if now:
            self._keys.setdefault(now, set()).add(key)
            self._said[key] = now
        else:
            del self._said[key]


def owner_uid(thing: Object) -> str:
    """The uid of the controller that owns an object; empty if none does."""
    return str(_controller(thing).get("uid", ""))


def owner_key(thing: Object) -> str:
    """``Kind/namespace/name`` of the controller that owns an object; empty if none does."""
    owner = _controller(thing)
    return f"{owner['kind']}/{thing['metadata'].get('namespace', '')}/{owner['name']}" if owner else ""


def _controller(thing: Object) -> Object:
    references = thing["metadata"].get("ownerReferences") or ()
    return next((one for one in references if one.get("controller")), {})
