# SPDX-License-Identifier: Apache-2.0
"""What gateways say of the engines' loads, asked only for pods of which a plan wants to know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from controller.kube.gateway_reports import loads_by_pod, may_have_requests
from controller.kube.resources import split_key
from controller.models.model_infer.observed import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from controller.kube.informer import Informer
    from controller.kube.resources import Object

# Gateways of a namespace that nobody vouches for: each answer is held in memory.
_MOST_OWN: Final = 32


class Asked(msgspec.Struct, frozen=True):
    """``pods``: whose loads were asked for. ``loads``: what is known of them, by key."""

    pods: frozenset[str] = frozenset()
    loads: Mapping[str, Load] = {}


class Loads(Protocol):
    """Who knows loads."""

    async def ask(self, pods: Collection[str]) -> Mapping[str, Load]:
        """Loads by pod's key; a pod of which nobody knows is left out. Answers within a few seconds, and never
        raises.
        """


class GatewayLoads:
    """The gateways' pages. ``gateways``: follows the pods with the label ``attache.dev/tells-loads``.

    Anybody may put this label on a pod, so gateways outside of ``trusted`` namespaces speak for their own one alone.
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
            tellers = self._tellers(namespace)
            told = {} if tellers is None else await loads_by_pod(self._http, tellers, pods)
            found |= {key: Load(one.busy_with, one.cached_tokens) for key, one in told.items()}
        return found

    def _tellers(self, namespace: str | None) -> list[Object] | None:
        """Who is asked about pods of a namespace; None if nobody is believed, or too many say that they are to be."""
        everywhere, own = [], []
        for one in self._gateways.objects.values():
            its = one["metadata"].get("namespace", "")
            if its in self._trusted:
                everywhere.append(one)
            elif its == namespace:
                own.append(one)
        found = [*everywhere, *own]
        # gateways that are not believed may still have requests under way, if they run at all
        is_unknown = not found and any(map(may_have_requests, self._gateways.objects.values()))
        return None if is_unknown or len(own) > _MOST_OWN else found
