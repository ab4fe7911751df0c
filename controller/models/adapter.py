# SPDX-License-Identifier: Apache-2.0
"""What the controller needs of a kind that it reconciles, and the engines' loads, which gateways are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from controller.kube.gateway_reports import loads_by_pod, may_have_requests
from controller.kube.resources import Object, Resource, split_key
from controller.models.model_infer.observed import Load

if TYPE_CHECKING:
    import aiohttp

    from controller.kube.informer import Informer
    from controller.kube.plan import Plan

# Gateways of a namespace that nobody vouches for: each answer is held in memory.
_MOST_OWN: Final = 32


class WorkKey(NamedTuple):
    """An object to reconcile. ``key``: ``namespace/name``."""

    kind: str
    key: str


Owned = Mapping[Resource, Sequence[Object]]
"""What an object owns, and what else is read anew with it, by kind."""

Enqueue = Callable[[WorkKey], None]


class Failure(NamedTuple):
    """The condition that reports what the API server refuses: its type, and its status then."""

    type: str
    status: str


class Asked(msgspec.Struct, frozen=True):
    """``pods``: whose loads were asked for. ``loads``: those that are known, by key."""

    pods: frozenset[str] = frozenset()
    loads: Mapping[str, Load] = {}


class Adapter(Protocol):
    """One kind: its informers, what is owned, and the decision."""

    informer: Informer

    @property
    def resource(self) -> Resource:
        """The kind."""

    @property
    def failure(self) -> Failure:
        """How its objects report that something is refused."""

    def concerned(self, kind: str, key: str) -> Sequence[WorkKey]:
        """Which of its objects to reconcile when an object of any kind has changed."""

    def owned(self, thing: Object) -> Owned:
        """As informers have it."""

    async def listed(self, thing: Object) -> Owned:
        """The same, asked of the API server now."""

    def decide(self, thing: Object, owned: Owned, asked: Asked, now_s: float) -> Plan:
        """What to do. ``now_s``: seconds since the epoch."""


class Loads(Protocol):
    """A source of loads."""

    async def ask(self, pods: Collection[str]) -> Mapping[str, Load]:
        """Loads by the keys of pods; a pod of which no load is known is left out. Answers within a few seconds, and
        never raises.
        """


class GatewayLoads:
    """The pages of gateways. ``gateways``: the informer of pods with the label ``attache.dev/tells-loads``.

    Anybody may put this label on a pod, so gateways outside of ``trusted`` namespaces are asked about their own alone.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        gateways: Informer,
        pod: Callable[[str], Object | None],
        trusted: Collection[str] = (),
    ) -> None:
        self._http = http
        self._gateways = gateways
        self._pod = pod
        self._trusted = trusted

    async def ask(self, pods: Collection[str]) -> Mapping[str, Load]:
        """See ``Loads``."""
        known = {key: one for key in pods if (one := self._pod(key)) is not None}
        if not known or not self._gateways.synced.is_set():
            return {}
        found: dict[str, Load] = {}
        for namespace in {split_key(key)[0] for key in known}:
            pods = {key: one for key, one in known.items() if split_key(key)[0] == namespace}
            gateways = self._gateways_for(namespace)
            loads = {} if gateways is None else await loads_by_pod(self._http, gateways, pods)
            found |= {key: Load(one.busy_with, one.cached_tokens) for key, one in loads.items()}
        return found

    def _gateways_for(self, namespace: str | None) -> list[Object] | None:
        """Which are asked about pods of a namespace; None if none is trusted, or too many claim to be its own."""
        everywhere, own = [], []
        for one in self._gateways.objects.values():
            its = one["metadata"].get("namespace", "")
            if its in self._trusted:
                everywhere.append(one)
            elif its == namespace:
                own.append(one)
        found = [*everywhere, *own]
        # gateways that are not trusted may still have requests under way, if they run at all
        is_unknown = not found and any(map(may_have_requests, self._gateways.objects.values()))
        return None if is_unknown or len(own) > _MOST_OWN else found
