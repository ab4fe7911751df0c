# SPDX-License-Identifier: Apache-2.0
"""Our own writes that our copies of objects do not show yet. No network, no clock.

A decision from a copy that lacks our last write would do it again, or count wrongly. So nothing is decided for an
object until the informers have told of all that was written for it; after a while (an event may have been lost) a fresh
list decides instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from controller.kube.resources import Object, Resource, key_of

if TYPE_CHECKING:
    from collections.abc import Hashable

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

    def heard(self, resource: Resource, key: str) -> None:
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
