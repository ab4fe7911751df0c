# SPDX-License-Identifier: Apache-2.0
"""Secrets and ConfigMaps that objects point to: each is watched by its name, and no others are read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from controller.kube.informer import Informer, Selection
from controller.kube.resources import CONFIG_MAPS, CRDS, SECRETS, split_key

if TYPE_CHECKING:
    from collections.abc import Collection

    from controller.gateway.compile.secrets import Pointer
    from controller.kube.client import Client
    from controller.kube.informer import InformerTiming
    from controller.kube.resources import Object

_RESOURCES: Final = {one.kind: one for one in (SECRETS, CONFIG_MAPS, CRDS)}
POINTED_KINDS: Final = ("Secret", "PointedConfigMap", CRDS.kind)

Changed = Callable[[str, str], None]
"""Gets kind and key of what changed."""


class PointedObjects:
    """``run`` owns the tasks of all informers; ``follow`` says which there are."""

    def __init__(self, client: Client, timing: InformerTiming, changed: Changed) -> None:
        self._client = client
        self._timing = timing
        self._changed = changed
        self._informers: dict[Pointer, Informer] = {}
        self._tasks: dict[Pointer, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for pointer, informer in self._informers.items():
                    if pointer not in self._tasks:
                        task = tasks.create_task(informer.run(), name=f"informer of {pointer.kind} {pointer.key}")
                        self._tasks[pointer] = task
                self._wake.clear()
                await self._wake.wait()

    async def follow(self, pointers: Collection[Pointer], within_s: float) -> bool:
        """Follow these alone. Whether any was new; all of those are known then, or ``within_s`` is over."""
        for pointer in self._informers.keys() - set(pointers):
            del self._informers[pointer]
            task = self._tasks.pop(pointer, None)
            if task is not None:
                task.cancel()
            self._changed(pointer.watched_as, pointer.key)
        fresh = [pointer for pointer in sorted(pointers) if pointer not in self._informers]
        for pointer in fresh:
            self._informers[pointer] = self._informer(pointer)
        self._wake.set()
        if fresh:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    for pointer in fresh:
                        await self._informers[pointer].answered.wait()
        return bool(fresh)

    def get(self, kind: str, key: str) -> Object | None:
        """An object as last heard; None if there is none, or nothing points to it."""
        for pointer, informer in self._informers.items():
            if (pointer.watched_as, pointer.key) == (kind, key):
                return informer.get(key)
        return None

    def _informer(self, pointer: Pointer) -> Informer:
        namespace, name = split_key(pointer.key)
        selection = Selection(namespace, fields=f"metadata.name={name}")
        slim = _metadata_alone if pointer.kind == CRDS.kind else None
        made = Informer(self._client, _RESOURCES[pointer.kind], selection, timing=self._timing, slim=slim)
        made.subscribe(lambda key: self._changed(pointer.watched_as, key))
        return made


def _metadata_alone(thing: Object) -> Object:
    """Definitions are large."""
    return {name: thing[name] for name in ("apiVersion", "kind", "metadata") if name in thing}
