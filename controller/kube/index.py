# SPDX-License-Identifier: Apache-2.0
"""Objects of an informer by something that they say, such as their owner, so that a look costs what one owner has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controller.kube.resources import Object

if TYPE_CHECKING:
    from controller.kube.informer import Informer

Says = Callable[[Object], str]
"""What an object is found by; empty: not at all."""


class Index:
    """Follows ``informer``. ``told``: called with what a changed object said before or says now, and with its key."""

    def __init__(self, informer: Informer, says: Says, told: Callable[[str, str], None] | None = None) -> None:
        self._informer = informer
        self._says = says
        self._told = told
        self._said: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}
        informer.subscribe(self._changed)

    def of(self, what: str) -> list[Object]:
        """The objects that say ``what``, by key."""
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
