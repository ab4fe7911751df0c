# SPDX-License-Identifier: Apache-2.0
"""The objects that a gateway serves, followed by informers; what changed is collected until somebody takes it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, ClassVar, Final

from controller.gateway.compile.gateway_api.services import slim_slice
from controller.gateway.compile.pickers import LABEL
from controller.gateway.compile.pods import slim_pod
from controller.kube.informer import Informer, Listener, Selection
from controller.kube.optional import first_of, until_served
from controller.kube.resources import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    GATEWAY_CLASSES,
    GATEWAY_CONFIGS,
    GATEWAYS,
    HTTP_ROUTES,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    MODEL_ACCESS_POLICIES,
    MODEL_ROUTES,
    MODEL_SERVERS,
    NAMESPACES,
    PODS,
    REFERENCE_GRANTS,
    SERVICES,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from controller.kube.client import Client
    from controller.kube.informer import InformerTiming
    from controller.kube.resources import Object

log = logging.getLogger(__name__)

_OBJECTIVES: Final = frozenset({INFERENCE_OBJECTIVES.kind})
_GATEWAY_API: Final = (GATEWAY_CLASSES, GATEWAYS, HTTP_ROUTES, REFERENCE_GRANTS, INFERENCE_POOLS)
_OURS: Final = (GATEWAY_CONFIGS, MODEL_SERVERS, MODEL_ROUTES, MODEL_ACCESS_POLICIES)
_PLAIN: Final = (*_OURS, INFERENCE_OBJECTIVES, SERVICES, *_GATEWAY_API)


class Watched:
    """``run`` follows all of ``informers``, which are by kind.

    ``optional``: kinds that a cluster may lack, or not show: they are looked for again every ``look_again_s``, and
    nothing waits for them then.
    """

    OPTIONAL: ClassVar[Collection[str]] = _OBJECTIVES.union(
        {one.kind for one in _GATEWAY_API}, {NAMESPACES.kind, SERVICES.kind, ENDPOINT_SLICES.kind}
    )

    @staticmethod
    def by_a_gateway(client: Client, namespace: str | None, timing: InformerTiming) -> dict[str, Informer]:
        """What the gateway role follows in ``namespace`` (None: in all namespaces)."""
        everything = Selection(namespace)
        informers = [
            Informer(client, one, everything if one.namespaced else Selection(), timing=timing)
            for one in (*_PLAIN, NAMESPACES)
        ]
        informers += [
            Informer(client, CONFIG_MAPS, Selection(namespace, labels=LABEL), timing=timing),
            Informer(client, PODS, everything, timing=timing, slim=slim_pod),
            Informer(client, ENDPOINT_SLICES, everything, timing=timing, slim=slim_slice),
        ]
        return {one.resource.kind: one for one in informers}

    def __init__(
        self,
        client: Client,
        informers: Mapping[str, Informer],
        *,
        optional: Collection[str] = _OBJECTIVES,
        look_again_s: float = 30.0,
    ) -> None:
        self._client = client
        self._informers = informers
        self._look_again_s = look_again_s
        # set once the cluster is known to lack the kind
        self._missing = {kind: asyncio.Event() for kind, one in informers.items() if one.resource.kind in optional}
        self._changed: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()
        for kind, informer in informers.items():
            informer.subscribe(self._note(kind))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for kind, informer in self._informers.items():
                tasks.create_task(self._run_one(kind, informer), name=f"informer of {kind}")

    async def synced(self) -> None:
        """Returns once all that must be there has been listed, and so has what may be there if it is."""
        for kind, informer in self._informers.items():
            if kind in self._missing:
                await first_of(informer.answered, self._missing[kind])
            else:
                await informer.synced.wait()
        # even where there is nothing, that is something to write
        self._wake.set()

    def get(self, kind: str, key: str) -> Object | None:
        """An object as last heard; None if there is none."""
        return self._informers[kind].get(key)

    async def changes(self, within_s: float) -> list[tuple[str, str]]:
        """Kinds and keys of what changed, once something has; what comes within ``within_s`` is taken with it."""
        await self._wake.wait()
        await asyncio.sleep(within_s)
        return self.take_changes()

    def take_changes(self) -> list[tuple[str, str]]:
        """What has changed until now, without waiting."""
        self._wake.clear()
        found, self._changed = self._changed, set()
        return sorted(found)

    def note(self, kind: str, key: str) -> None:
        """Something else has changed that ``changes`` should tell."""
        self._note(kind)(key)

    def _note(self, kind: str) -> Listener:
        def changed(key: str) -> None:
            self._changed.add((kind, key))
            self._wake.set()

        return changed

    async def _run_one(self, kind: str, informer: Informer) -> None:
        if kind in self._missing:
            await until_served(self._client, informer.resource, self._missing[kind], self._look_again_s)
        await informer.run()
