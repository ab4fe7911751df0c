# SPDX-License-Identifier: Apache-2.0
"""A copy of the objects of one kind, and which of them a list or an event changed. No network, no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from controller.kube.resources import Object, key_of
from controller.kube.watching import BOOKMARK, DELETED

if TYPE_CHECKING:
    from controller.kube.watching import WatchEvent

log = logging.getLogger(__name__)

Slim = Callable[[Object], Object]
"""Makes an object smaller before it is kept; it must keep ``metadata.name``, ``namespace``, ``uid`` and
``resourceVersion``.
"""


class Store:
    """Objects by key. Readers must not change them.

    An object that cannot be made smaller, whatever its owner wrote into it, stays as it was known before, and is left
    out if it was not: others are kept all the same.
    """

    def __init__(self, slim: Slim | None = None) -> None:
        self._slim = slim or _as_it_is
        self._objects: dict[str, Object] = {}
        self.objects: Mapping[str, Object] = MappingProxyType(self._objects)

    def replace(self, items: Iterable[Object]) -> list[str]:
        """All objects are these from now on; the keys of those that came, changed or went."""
        new = {key: slim for item in items if (slim := self._slimmed(key := key_of(item), item)) is not None}
        gone = self._objects.keys() - new.keys()
        changed = [key for key, item in new.items() if _differs(self._objects.get(key), item)]
        self._objects.clear()
        self._objects.update(new)
        return [*changed, *sorted(gone)]

    def take(self, event: WatchEvent) -> list[str]:
        """Take in one event; the key of what changed, if anything did."""
        if event.type == BOOKMARK:
            return []
        key = key_of(event.object)
        if event.type == DELETED:
            return [key] if self._objects.pop(key, None) is not None else []
        if not _differs(self._objects.get(key), event.object):
            return []
        slim = self._slimmed(key, event.object)
        if slim is None or slim is self._objects.get(key):
            return []
        self._objects[key] = slim
        return [key]

    def _slimmed(self, key: str, thing: Object) -> Object | None:
        try:
            return self._slim(thing)
        except Exception:  # whatever is wrong with one object, the others are looked after
            log.exception("%s %s cannot be read, and is as it was", thing.get("kind", "an object"), key)
            return self._objects.get(key)


def _differs(known: Object | None, item: Object) -> bool:
    """Versions are opaque: they are compared for equality only. A new uid is another object of the same name."""
    if known is None:
        return True
    old, new = known["metadata"], item["metadata"]
    return any(old.get(name) != new.get(name) for name in ("resourceVersion", "uid"))


def _as_it_is(thing: Object) -> Object:
    return thing
