# SPDX-License-Identifier: Apache-2.0
"""The interface of a reconciled kind for the controller, and the engines' loads, which gateways report on request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from controller.kube.api_resources import ApiResource, Object, split_key
from controller.kube.gateway_reports import is_gateway_running, loads_by_pod
from controller.models.model.model_state import ReportedModel
from controller.models.model_infer.model_infer_state import PodLoad

if TYPE_CHECKING:
    import aiohttp

    from controller.kube.informer import Informer
    from controller.kube.reconcile_plan import Plan

# Untrusted gateways of a namespace: each answer is held in memory.
_MOST_OWN: Final = 32
Owned = Mapping[ApiResource, Sequence[Object]]
"""The objects that an object owns, and others that are listed with them, by kind."""


class WorkKey(NamedTuple):
    """An object to reconcile. ``key``: ``namespace/name``."""

    kind: str
    key: str


Enqueue = Callable[[WorkKey], None]


class PodLoads(msgspec.Struct, frozen=True):
    """``pods``: those whose loads were requested. ``loads``: the known ones, by key. ``models``: of Models, in their
    place, what their agents list.
    """

    pods: frozenset[str] = frozenset()
    loads: Mapping[str, PodLoad] = {}
    models: Mapping[str, Sequence[ReportedModel]] = {}


class KindReconciler(Protocol):
    """One kind: its informers, what its objects own, and the plan for each of them."""

    informer: Informer

    @property
    def resource(self) -> ApiResource:
        """The kind."""

    def status_of_failure(
        self, planned: Mapping[str, Any] | None, before: Mapping[str, Any], *, reason: str, message: str
    ) -> Mapping[str, Any]:
        """How its objects report what the API server refuses, or what cannot be decided: ``planned``, or without it
        the status ``before``, with the failure.
        """

    def keys_to_reconcile(self, kind: str, key: str) -> Sequence[WorkKey]:
        """Which of its objects to reconcile when an object of any kind has changed."""

    def cached_children(self, thing: Object) -> Owned:
        """What it owns, as informers have it."""

    async def list_children(self, thing: Object) -> Owned:
        """The same, read from the API server now."""

    def plan(self, thing: Object, owned: Owned, pod_loads: PodLoads, now_s: float) -> Plan:
        """What to do. ``now_s``: seconds since the epoch."""


class LoadSource(Protocol):
    """A source of loads."""

    async def fetch(self, pods: Collection[str]) -> Mapping[str, PodLoad]:
        """Loads by the keys of pods, without those of unknown load. Returns within a few seconds, and never raises."""


class GatewayLoadSource:
    """Loads from gateways' pages. ``gateways``: the informer of pods with the label ``attache.dev/tells-loads``.

    Any pod can carry this label, so gateways outside of the ``trusted`` namespaces are read only for engines of their
    own namespace.
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

    async def fetch(self, pods: Collection[str]) -> Mapping[str, PodLoad]:
        """Ask the gateways for the loads of these pods, by key."""
        known = {key: one for key in pods if (one := self._pod(key)) is not None}
        if not known or not self._gateways.synced.is_set():
            return {}
        found: dict[str, PodLoad] = {}
        for namespace in {split_key(key)[0] for key in known}:
            pods = {key: one for key, one in known.items() if split_key(key)[0] == namespace}
            gateways = self._gateways_for(namespace)
            loads = {} if gateways is None else await loads_by_pod(self._http, gateways, pods)
            found |= {key: PodLoad(one.requests_at_engine, one.cached_tokens) for key, one in loads.items()}
        return found

    def _gateways_for(self, namespace: str | None) -> list[Object] | None:
        """The gateways to query about pods of a namespace; None if none is trusted, or too many claim to be its own."""
        everywhere, own = [], []
        for one in self._gateways.objects.values():
            its = one["metadata"].get("namespace", "")
            if its in self._trusted:
                everywhere.append(one)
            elif its == namespace:
                own.append(one)
        found = [*everywhere, *own]
        # gateways that are not trusted may still have requests under way, if they run at all
        is_unknown = not found and any(map(is_gateway_running, self._gateways.objects.values()))
        return None if is_unknown or len(own) > _MOST_OWN else found
