# SPDX-License-Identifier: Apache-2.0
"""What gateways say of the engines' loads, asked only for pods of which a plan wants to know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from controller.cluster.loads import loads_by_pod
from controller.reconcile.model_infer.observed import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from controller.cluster.informer import Informer
    from controller.cluster.resources import Object


class Asked(msgspec.Struct, frozen=True):
    """``pods``: whose loads were asked for. ``loads``: what is known of them, by key."""

    pods: frozenset[str] = frozenset()
    loads: Mapping[str, Load] = {}


class Loads(Protocol):
    """Who knows loads."""

    async def ask(self, pods: Collection[str]) -> Mapping[str, Load]:
        """Loads by pod's key; a pod of which nobody knows is left out. Answers within a few seconds, and never raises."""


class GatewayLoads:
    """The gateways' pages. ``gateways``: follows the pods with the label ``attache.dev/tells-loads``."""

    def __init__(self, http: aiohttp.ClientSession, gateways: Informer, pod: Callable[[str], Object | None]) -> None:
        self._http = http
        self._gateways = gateways
        self._pod = pod

    async def ask(self, pods: Collection[str]) -> Mapping[str, Load]:
        """See ``Loads``."""
        known = {key: one for key in pods if (one := self._pod(key)) is not None}
        if not known or not self._gateways.synced.is_set():
            return {}
        found = await loads_by_pod(self._http, list(self._gateways.objects.values()), known)
        return {key: Load(one.busy_with, one.cached_tokens) for key, one in found.items()}
