# SPDX-License-Identifier: Apache-2.0
"""The copies of objects that a manager looks at: behind the server, by another while for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.kube.resources import Object, Resource, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.cluster.fake.storage import Change
    from bench.cluster.virtual.clock import Clock
    from bench.cluster.virtual.server import Server

Place = tuple[str, str]


class Caches:
    """What a manager that starts now has listed, and what its watches tell it. ``lag``: seconds until a change is
    seen.
    """

    def __init__(
        self,
        server: Server,
        clock: Clock,
        resources: Sequence[Resource],
        lag: Callable[[str], float],
        woken: Callable[[Change], None],
    ) -> None:
        self._clock, self._lag, self._woken = clock, lag, woken
        self._objects = {_place(one): {key_of(thing): thing for thing in server.all(one)} for one in resources}
        self._seen = dict.fromkeys(self._objects, server.storage.version)
        self._next_at_s = dict.fromkeys(self._objects, 0.0)
        self._is_open = True
        self._end = server.subscribe(self._changed)

    def close(self) -> None:
        """Take nothing in any more."""
        self._is_open = False
        self._end()

    def all(self, resource: Resource) -> list[Object]:
        """The known objects of a kind, by key."""
        found = self._objects[_place(resource)]
        return [found[key] for key in sorted(found)]

    def find(self, resource: Resource, key: str) -> Object | None:
        """A known object."""
        return self._objects[_place(resource)].get(key)

    def has_seen(self, resource: Resource, version: int) -> bool:
        """Whether the watch of this kind has told of the change with this version, if it was one of this kind."""
        return self._seen[_place(resource)] >= version

    def _changed(self, change: Change) -> None:
        """Watches keep their order."""
        if not self._is_open or change.place not in self._objects:
            return
        at_s = max(self._clock.now_s + self._lag(change.place[1]), self._next_at_s[change.place])
        self._next_at_s[change.place] = at_s
        self._clock.after(at_s - self._clock.now_s, lambda: self._take(change))

    def _take(self, change: Change) -> None:
        if not self._is_open:
            return
        known = self._objects[change.place]
        if change.after is not None:
            known[key_of(change.after)] = change.after
        elif change.before is not None:
            known.pop(key_of(change.before), None)
        self._seen[change.place] = change.version
        self._woken(change)


def _place(resource: Resource) -> Place:
    return resource.group, resource.plural
