# SPDX-License-Identifier: Apache-2.0
"""What the work knows of a kind of objects that it looks after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from controller.kube.resources import Object, Resource

if TYPE_CHECKING:
    from controller.kube.plan import Plan
    from controller.models.loads import Asked


class WorkKey(NamedTuple):
    """An object to look at. ``key``: ``namespace/name``."""

    kind: str
    key: str


Owned = Mapping[Resource, Sequence[Object]]
"""What an object owns, and what else is read anew with it, by kind."""

Changed = Callable[[WorkKey], None]
"""Something about an object has changed, though not the object itself."""


class Trouble(NamedTuple):
    """The condition that says that the API server refuses what should be made: its type, and its status then."""

    type: str
    status: str


class Keeper(Protocol):
    """One kind: its informers, what is looked at, and the decision."""

    @property
    def resource(self) -> Resource:
        """The kind."""

    @property
    def trouble(self) -> Trouble:
        """How its objects say that something is refused."""

    def get(self, key: str) -> Object | None:
        """An object as last heard."""

    def concerned(self, kind: str, key: str) -> Sequence[WorkKey]:
        """Which of its objects to look at when an object of any kind has changed."""

    def owned(self, thing: Object) -> Owned:
        """As last heard."""

    async def listed(self, thing: Object) -> Owned:
        """The same, asked of the API server now."""

    def decide(self, thing: Object, owned: Owned, asked: Asked, now_s: float) -> Plan:
        """What to do. ``now_s``: seconds since the epoch."""
