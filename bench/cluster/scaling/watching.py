# SPDX-License-Identifier: Apache-2.0
"""Follows the replicas that an object asks for, through every event of a watch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from controller.kube.client import Client
    from controller.kube.resources import Object, Resource


class Change(msgspec.Struct, frozen=True):
    """``at_s``: when its event came, by the event loop's clock. ``replicas``: asked for since then."""

    at_s: float
    replicas: int


class Replicas:
    """``changes``: all so far, the replicas at the beginning first."""

    def __init__(self, replicas: int) -> None:
        self.changes = [Change(now_s(), replicas)]
        self._news = asyncio.Event()

    @property
    def now(self) -> int:
        """Asked for by now."""
        return self.changes[-1].replicas

    def hear(self, replicas: int) -> None:
        """An event came."""
        if replicas != self.now:
            self.changes.append(Change(now_s(), replicas))
            self._news.set()

    async def until(self, holds: Callable[[int], bool], *, timeout_s: float) -> Change:
        """The change by which it holds, or the last one if it holds already. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not holds(self.now):
                self._news.clear()
                await self._news.wait()
        return self.changes[-1]

    def since(self, at_s: float) -> list[int]:
        """What was asked for at an instant, and each change after it."""
        before = [one.replicas for one in self.changes if one.at_s <= at_s][-1:]
        return before + [one.replicas for one in self.changes if one.at_s > at_s]

    def falls(self, since_s: float) -> int:
        """How often there were fewer than before."""
        found = self.since(since_s)
        return sum(after < before for before, after in itertools.pairwise(found))


@contextlib.asynccontextmanager
async def replicas_of(client: Client, resource: Resource, name: str, namespace: str) -> AsyncIterator[Replicas]:
    """Every event of the object is seen: the watch goes on from the version that was read."""
    thing = await client.get(resource, name, namespace)
    seen = Replicas(_replicas(thing))

    async def watch() -> None:
        since = thing["metadata"]["resourceVersion"]
        while True:
            async for event in client.watch(resource, namespace, since=since, fields=f"metadata.name={name}"):
                since = event.object["metadata"]["resourceVersion"]
                if event.type in ("ADDED", "MODIFIED"):
                    seen.hear(_replicas(event.object))

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise error


def now_s() -> float:
    """The event loop's clock."""
    return asyncio.get_running_loop().time()


def _replicas(thing: Object) -> int:
    return int(thing["spec"].get("replicas", 1))
