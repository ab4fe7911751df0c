# SPDX-License-Identifier: Apache-2.0
"""Follows the pods of namespaces that have bindings: one informer each, or one for all where they are many."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from controller.autoscaler.reconciler.pod_index import PodIndex
from controller.autoscaler.reconciler.pods import slim_pod
from controller.kube.informer import Informer, InformerTiming, Selection
from controller.kube.resources import PODS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from controller.kube.client import Client

# a watch is a connection and a task
_MOST: Final = 16


class NamespacedPods:
    """``index``: all pods that are followed. ``run`` does the work; ``want`` says of which namespaces."""

    def __init__(self, client: Client, timing: InformerTiming, synced: Callable[[], None]) -> None:
        self._client = client
        self._timing = timing
        self._synced = synced
        self._informers: dict[str | None, Informer] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}
        self._wanted: frozenset[str | None] = frozenset()
        self._wake = asyncio.Event()
        self.index = PodIndex()

    def want(self, namespaces: Collection[str]) -> None:
        """From now on those of these namespaces are followed."""
        wanted: frozenset[str | None] = frozenset(namespaces) if len(namespaces) <= _MOST else frozenset({None})
        if wanted != self._wanted:
            self._wanted = wanted
            self._wake.set()

    def knows(self, namespace: str) -> bool:
        """Whether all pods of a namespace have been heard of."""
        found = self._informers.get(namespace) or self._informers.get(None)
        return found is not None and found.synced.is_set()

    def cut_off_s(self, namespace: str) -> float | None:
        """How long nothing can have been heard of the pods of a namespace; None if it can."""
        found = self._informers.get(namespace) or self._informers.get(None)
        return None if found is None else found.cut_off_for_s()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                for one in self._wanted - self._informers.keys():
                    self._informers[one] = self._made(one)
                    self._tasks[one] = tasks.create_task(self._follow(one), name=f"informer of pods in {one or 'all'}")
                # what is not wanted any more goes once all that is wanted is known: no pod is missed in between
                if all(self._informers[one].synced.is_set() for one in self._wanted):
                    self._drop(self._informers.keys() - self._wanted)
                await self._wake.wait()

    def _made(self, namespace: str | None) -> Informer:
        informer = Informer(self._client, PODS, Selection(namespace), timing=self._timing, slim=slim_pod)

        def changed(key: str) -> None:
            found = informer.get(key)
            self.index.put(key, None if found is None else found["view"])

        informer.subscribe(changed)
        return informer

    async def _follow(self, namespace: str | None) -> None:
        informer = self._informers[namespace]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(informer.run())
            await informer.synced.wait()
            self._wake.set()
            self._synced()

    def _drop(self, namespaces: Collection[str | None]) -> None:
        kept = [one for name, one in self._informers.items() if name not in namespaces]
        for name in list(namespaces):
            self._tasks.pop(name).cancel()
            for key in self._informers.pop(name).objects:
                if not any(key in one.objects for one in kept):
                    self.index.put(key, None)
