# SPDX-License-Identifier: Apache-2.0
"""Our own writes that our copies of objects do not show yet. No network, no clock.

A decision from a copy that lacks our last write would do it again, or count wrongly. So nothing is decided for an object
until the informers have told of all that was written for it; after a while (an event may have been lost) a fresh list
decides instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from controller.cluster.resources import Object, Resource, key_of

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

    def wrote(self, work: Hashable, resource: Resource, thing: Object, now_s: float) -> None:
        """``thing`` is what the server answered to a write."""
        metadata = thing["metadata"]
        self._add(work, resource, key_of(thing), metadata["uid"], metadata["resourceVersion"], now_s)

    def deleted(self, work: Hashable, resource: Resource, key: str, uid: str, now_s: float) -> None:
        """The deletion of an object was asked for."""
        self._add(work, resource, key, uid, "", now_s)

    def left_s(self, work: Hashable, now_s: float) -> float | None:
        """How long to wait for what is not seen yet; None: all is seen. 0: it took too long."""
        waiting = [one for one in self._writes.get(work, ()) if not self._is_seen(one)]
        if not waiting:
            self._writes.pop(work, None)
            return None
        self._writes[work] = waiting
        return max(0.0, min(one.until_s for one in waiting) - now_s)

    def forget(self, work: Hashable) -> None:
        """Nothing is awaited for it any more."""
        self._writes.pop(work, None)

    def _add(self, work: Hashable, resource: Resource, key: str, uid: str, version: str, now_s: float) -> None:
        write = _Write(resource, key, uid, version, now_s + self._patience_s)
        self._writes.setdefault(work, []).append(write)

    def _is_seen(self, write: _Write) -> bool:
        known = self._copy(write.resource, write.key)
        if write.version:
            return known is not None and known["metadata"]["uid"] == write.uid and _has_reached(known, write.version)
        if known is None or known["metadata"]["uid"] != write.uid:
            return True
        return "deletionTimestamp" in known["metadata"]


def _has_reached(known: Object, version: str) -> bool:
    """Kubernetes compares versions of a kind as numbers since 1.35; a server whose versions are none is compared exactly."""
    seen = str(known["metadata"]["resourceVersion"])
    if seen.isdecimal() and version.isdecimal():
        return int(seen) >= int(version)
    return seen == version
