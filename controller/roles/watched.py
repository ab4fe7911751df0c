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
    ENDPOINT_SLICES,
    GATEWAY_CLASSES,
    GATEWAY_CONFIGS,
    GATEWAYS,
    HTTP_ROUTES,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    NAMESPACES,
    PODS,
    REFERENCE_GRANTS,
    SERVICES,
)
from controller.gateway.compile.gateway_api.services import slim_slice
from controller.gateway.compile.pickers import LABEL
from controller.gateway.compile.pods import slim_pod
from controller.roles.pointed import PointedObjects

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from controller.cluster.client import Client
    from controller.cluster.informer import InformerTiming
    from controller.cluster.resources import Object
    from controller.gateway.compile.secrets import Pointer

log = logging.getLogger(__name__)

# A cluster may lack these kinds: they are looked for again and again, and nothing waits for them then.
_OPTIONAL: Final = (
    GATEWAY_CLASSES,
    GATEWAYS,
    HTTP_ROUTES,
    REFERENCE_GRANTS,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
)


class Watched:
    """``run`` follows all kinds in ``namespace`` (None: in all namespaces), and what ``point_at`` names.

    ``look_again_s``: how often kinds are looked for that the cluster lacks.
    """

    def __init__(
        self, client: Client, namespace: str | None, timing: InformerTiming, *, look_again_s: float = 30.0
    ) -> None:
        self._client = client
        self._look_again_s = look_again_s
        everything = Selection(namespace)
        slim = {PODS.kind: slim_pod, ENDPOINT_SLICES.kind: slim_slice}
        plain = (GATEWAY_CONFIGS, MODEL_SERVERS, MODEL_ROUTES, SERVICES, ENDPOINT_SLICES, PODS, *_OPTIONAL)
        informers = [
            Informer(
                client,
                resource,
                everything if resource.namespaced else Selection(),
                timing=timing,
                slim=slim.get(resource.kind),
            )
            for resource in (*plain, NAMESPACES)
        ]
        informers.append(Informer(client, CONFIG_MAPS, Selection(namespace, labels=LABEL), timing=timing))
        self._informers: Mapping[str, Informer] = {one.resource.kind: one for one in informers}
        self._missing = {one.kind: asyncio.Event() for one in _OPTIONAL}
        self._changed: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()
        self._pointed = PointedObjects(client, timing, self._take)
        for one in informers:
            one.subscribe(self._note(one.resource.kind))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for kind, informer in self._informers.items():
                tasks.create_task(self._run_one(kind, informer), name=f"informer of {kind}")
            tasks.create_task(self._pointed.run(), name="informers of what is pointed to")

    async def synced(self) -> None:
        """Returns once all that must be there has been listed, and so has what may be there if it is."""
        for kind, informer in self._informers.items():
            if kind in self._missing:
                await _first(informer.answered, self._missing[kind])
            elif kind == NAMESPACES.kind:
                await informer.answered.wait()
            else:
                await informer.synced.wait()
        # even where there is nothing, that is something to write
        self._wake.set()

    async def point_at(self, pointers: Collection[Pointer], within_s: float) -> bool:
        """Follow these Secrets and ConfigMaps alone. Whether any was new; all are known then, or ``within_s`` is over."""
        return await self._pointed.follow(pointers, within_s)

    def get(self, kind: str, key: str) -> Object | None:
        """An object as last heard; None if there is none."""
        informer = self._informers.get(kind)
        return self._pointed.get(kind, key) if informer is None else informer.get(key)

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

    def _take(self, kind: str, key: str) -> None:
        self._changed.add((kind, key))
        self._wake.set()

    def _note(self, kind: str) -> Listener:
        return lambda key: self._take(kind, key)

    async def _run_one(self, kind: str, informer: Informer) -> None:
        if kind in self._missing:
            await self._until_served(informer)
        await informer.run()

    async def _until_served(self, informer: Informer) -> None:
        while True:
            try:
                if await self._client.serves(informer.resource):
                    return
                self._missing[informer.resource.kind].set()
            except ClusterError as error:
                log.info("%s cannot be looked for: %s", informer.resource.kind, error)
            await asyncio.sleep(self._look_again_s)


async def _first(one: asyncio.Event, other: asyncio.Event) -> None:
    """Returns once either is set."""
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(event.wait()) for event in (one, other)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
