# SPDX-License-Identifier: Apache-2.0
"""The informers of one process, or of one term of leadership: nothing seen while another led counts."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.kube.errors import ClusterError, Forbidden, NotFound
from controller.kube.informer import Informer, InformerTiming, Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.kube.client import Client
    from controller.kube.informer import Transform
    from controller.kube.resources import Object, Resource

log = logging.getLogger(__name__)

_PROBE_S: Final = 30.0


class InformerSet:
    """``run`` runs all informers; they may be added before and while it runs, and removed.

    ``namespace``: the one whose objects are read; None: all. ``probe_s``: seconds between two requests for an optional
    kind that the server lacks.
    """

    def __init__(
        self,
        client: Client,
        namespace: str | None = None,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        probe_s: float = _PROBE_S,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._timing = timing
        self._probe_s = probe_s
        self._informers: list[Informer] = []
        self._shared: dict[Resource, list[Informer]] = {}
        # of optional kinds: set once the server has answered that it lacks the kind
        self._missing: dict[Informer, asyncio.Event] = {}
        self._listeners: list[Callable[[Resource, str], None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Informer, asyncio.Task[None]] = {}

    def add(
        self,
        resource: Resource,
        *,
        labels: str = "",
        fields: str = "",
        namespace: str | None = None,
        all_namespaces: bool = False,
        transform: Transform | None = None,
        optional: bool = False,
        private: bool = False,
    ) -> Informer:
        """A new informer of a kind, in ``namespace``, in all of them, or by default in that of the cache.

        ``labels`` and ``fields``: selectors. ``optional``: the cluster may lack the kind. ``private``: ``get`` and the
        listeners of the cache do not see its objects.
        """
        chosen = None if all_namespaces or not resource.namespaced else namespace or self._namespace
        informer = Informer(
            self._client, resource, Selection(chosen, labels, fields), timing=self._timing, transform=transform
        )
        self._informers.append(informer)
        if optional:
            self._missing[informer] = asyncio.Event()
        if not private:
            self._shared.setdefault(resource, []).append(informer)
            informer.subscribe(lambda key: self._notify(resource, key))
        if self._group is not None:
            self._start(informer, self._group)
        return informer

    def remove(self, informer: Informer) -> None:
        """End a private informer."""
        self._informers.remove(informer)
        self._missing.pop(informer, None)
        task = self._tasks.pop(informer, None)
        if task is not None:
            task.cancel()

    def subscribe(self, listener: Callable[[Resource, str], None]) -> None:
        """Call ``listener`` with the kind and key of each object that changes."""
        self._listeners.append(listener)

    def get(self, resource: Resource, key: str) -> Object | None:
        """An object as any informer of its kind has it; None if none does."""
        return next((one for each in self._shared.get(resource, ()) if (one := each.get(key)) is not None), None)

    def serves(self, informer: Informer) -> bool:
        """Whether the cluster serves an optional kind, by the last probe."""
        return informer.synced.is_set()

    async def run(self) -> None:
        """Run all informers until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for informer in self._informers:
                    self._start(informer, group)
                await asyncio.Event().wait()
            finally:
                self._group = None

    async def list_once(self) -> None:
        """List each kind, and watch none. Optional kinds that the cluster lacks or refuses have no objects; raises
        ClusterError for others.
        """
        for informer in self._informers:
            try:
                await informer.list_once()
            except (Forbidden, NotFound):
                if informer not in self._missing:
                    raise

    async def wait_until_synced(self) -> None:
        """Returns once all informers have listed their kind, but for optional kinds that the cluster lacks."""
        for informer in list(self._informers):
            missing = self._missing.get(informer)
            if missing is None:
                await informer.synced.wait()
            else:
                await _either(informer.answered, missing)

    def _notify(self, resource: Resource, key: str) -> None:
        for listener in self._listeners:
            listener(resource, key)

    def _start(self, informer: Informer, group: asyncio.TaskGroup) -> None:
        name = f"informer of {informer.resource.plural}"
        self._tasks[informer] = group.create_task(self._run_one(informer), name=name)

    async def _run_one(self, informer: Informer) -> None:
        missing = self._missing.get(informer)
        if missing is not None:
            await self._until_served(informer.resource, missing)
        await informer.run()

    async def _until_served(self, resource: Resource, missing: asyncio.Event) -> None:
        """Wait until the server has the kind; set ``missing`` once it has answered that it does not."""
        while True:
            try:
                if await self._client.serves(resource):
                    return
                missing.set()
            except ClusterError as error:
                log.info("%s cannot be looked for: %s", resource.kind, error)
            await asyncio.sleep(self._probe_s)


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Returns once one of the two is set."""
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(event.wait()) for event in (one, other)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
