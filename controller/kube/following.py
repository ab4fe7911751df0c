# SPDX-License-Identifier: Apache-2.0
"""The informers of one term of leadership, begun with it: nothing that was heard before another led counts."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.kube.informer import Informer, InformerTiming, Selection
from controller.kube.optional import first_of, until_served

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.kube.client import Client
    from controller.kube.informer import Slim
    from controller.kube.resources import Object, Resource

log = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 30.0


class Following:
    """``add`` before ``run``. ``namespace``: whose objects are followed; None: all."""

    def __init__(
        self,
        client: Client,
        namespace: str | None = None,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        look_again_s: float = _LOOK_AGAIN_S,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._timing = timing
        self._look_again_s = look_again_s
        self._informers: dict[Resource, list[Informer]] = {}
        # of kinds that the cluster may lack: set once it is known that it does
        self._missing: dict[Informer, asyncio.Event] = {}
        self._late: asyncio.Queue[Informer] = asyncio.Queue()
        self._listeners: list[Callable[[Resource, str], None]] = []

    def add(
        self,
        resource: Resource,
        *,
        labels: str = "",
        slim: Slim | None = None,
        optional: bool = False,
        everywhere: bool = False,
    ) -> Informer:
        """Follow a kind. ``optional``: the cluster may lack it. ``everywhere``: in all namespaces whatever ours is."""
        informer = self._made(resource, labels, slim, everywhere=everywhere)
        self._informers.setdefault(resource, []).append(informer)
        if optional:
            self._missing[informer] = asyncio.Event()
        return informer

    def add_late(self, resource: Resource, *, slim: Slim | None = None) -> Informer:
        """Follow a kind in all namespaces from now on, while ``run`` runs; ``synced`` does not wait for it."""
        informer = self._made(resource, "", slim, everywhere=True)
        self._late.put_nowait(informer)
        return informer

    def subscribe(self, listener: Callable[[Resource, str], None]) -> None:
        """Call ``listener`` with the kind and key of each object that changes."""
        self._listeners.append(listener)

    def get(self, resource: Resource, key: str) -> Object | None:
        """An object as last heard by any informer of its kind."""
        return next((one for each in self._informers.get(resource, ()) if (one := each.get(key)) is not None), None)

    def serves(self, informer: Informer) -> bool:
        """Whether the cluster has an optional kind, as far as is known."""
        return informer.synced.is_set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informers in self._informers.values():
                for one in informers:
                    tasks.create_task(self._run_one(one), name=f"informer of {one.resource.plural}")
            while True:
                late = await self._late.get()
                tasks.create_task(late.run(), name=f"informer of {late.resource.plural}")

    async def synced(self) -> None:
        """Returns once all has been listed, but for kinds that the cluster lacks."""
        for informers in self._informers.values():
            for one in informers:
                if one in self._missing:
                    await first_of(one.answered, self._missing[one])
                else:
                    await one.synced.wait()

    def _made(self, resource: Resource, labels: str, slim: Slim | None, *, everywhere: bool) -> Informer:
        namespace = self._namespace if resource.namespaced and not everywhere else None
        made = Informer(self._client, resource, Selection(namespace, labels), timing=self._timing, slim=slim)
        made.subscribe(lambda key: self._tell(resource, key))
        return made

    def _tell(self, resource: Resource, key: str) -> None:
        for listener in self._listeners:
            listener(resource, key)

    async def _run_one(self, informer: Informer) -> None:
        if informer in self._missing:
            await until_served(self._client, informer.resource, self._missing[informer], self._look_again_s)
        await informer.run()
