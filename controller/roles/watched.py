# SPDX-License-Identifier: Apache-2.0
"""The objects that a gateway serves, followed by informers; what changed is collected until somebody takes it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.cluster.errors import ClusterError
from controller.cluster.informer import Informer, Listener, Selection
from controller.cluster.resources import (
    CONFIG_MAPS,
    GATEWAY_CONFIGS,
    INFERENCE_OBJECTIVES,
    MODEL_ROUTES,
    MODEL_SERVERS,
    PODS,
)
from controller.gateway.compile.pickers import LABEL
from controller.gateway.compile.pods import slim_pod

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.cluster.client import Client
    from controller.cluster.informer import InformerTiming
    from controller.cluster.resources import Object

log = logging.getLogger(__name__)

# A cluster may lack these kinds: they are looked for again and again, and nothing waits for them.
_OPTIONAL: Final = frozenset({INFERENCE_OBJECTIVES.kind})
_LOOK_AGAIN_S: Final = 30.0


class Watched:
    """``run`` follows all of ``informers``, which are by kind."""

    @staticmethod
    def by_a_gateway(client: Client, namespace: str | None, timing: InformerTiming) -> dict[str, Informer]:
        """What the gateway role follows in ``namespace`` (None: in all namespaces)."""
        picker_configs = Selection(namespace, labels=LABEL)
        everything = Selection(namespace)
        informers = [
            Informer(client, GATEWAY_CONFIGS, everything, timing=timing),
            Informer(client, MODEL_SERVERS, everything, timing=timing),
            Informer(client, MODEL_ROUTES, everything, timing=timing),
            Informer(client, INFERENCE_OBJECTIVES, everything, timing=timing),
            Informer(client, CONFIG_MAPS, picker_configs, timing=timing),
            Informer(client, PODS, everything, timing=timing, slim=slim_pod),
        ]
        return {one.resource.kind: one for one in informers}

    def __init__(self, client: Client, informers: Mapping[str, Informer]) -> None:
        self._client = client
        self._informers = informers
        self._changed: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()
        for kind, informer in informers.items():
            informer.subscribe(self._note(kind))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for kind, informer in self._informers.items():
                tasks.create_task(self._run_one(informer), name=f"informer of {kind}")

    async def synced(self) -> None:
        """Returns once all that must be there has been listed."""
        for informer in self._informers.values():
            if informer.resource.kind not in _OPTIONAL:
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

    async def _run_one(self, informer: Informer) -> None:
        if informer.resource.kind in _OPTIONAL:
            await self._until_served(informer)
        await informer.run()

    async def _until_served(self, informer: Informer) -> None:
        while True:
            try:
                if await self._client.serves(informer.resource):
                    return
            except ClusterError as error:
                log.info("%s cannot be looked for: %s", informer.resource.kind, error)
            await asyncio.sleep(_LOOK_AGAIN_S)
