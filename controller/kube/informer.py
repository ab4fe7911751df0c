# SPDX-License-Identifier: Apache-2.0
"""Keeps a copy of all objects of a kind up to date: by a list, then by a watch.

Where the watch cannot go on, there is a new list.

A deletion that happens while there is no watch is found by the next list, because a list replaces the whole copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.backoff import Backoff
from controller.kube.errors import ClusterError, Expired, Forbidden, NotFound
from controller.kube.store import Slim, Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.kube.client import Client
    from controller.kube.resources import Object, Resource

log = logging.getLogger(__name__)

_SHORT_WATCH_S: Final = 1.0

Listener = Callable[[str], None]
"""Gets the key of an object that changed; must not block and must not raise. What the object is now: see the informer.
"""


class Selection(msgspec.Struct, frozen=True):
    """Which objects: of one namespace or all, by label and field selectors as the API writes them."""

    namespace: str | None = None
    labels: str = ""
    fields: str = ""


class InformerTiming(msgspec.Struct, frozen=True):
    """How patient an informer is.

    ``silence_s``: a watch on which not even a bookmark comes for so long is opened anew. ``watch_s``: the server ends a
    watch after it. A watch that has lasted for ``backoff_max_s`` shows that lists are not asked for in vain.
    ``resync_s``: listeners get all keys that often, a safety net for what they missed; 0: never.
    """

    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    silence_s: float = 90.0
    watch_s: int = 290
    resync_s: float = 600.0


class Informer:
    """``run`` does the work; ``objects`` is the copy; ``synced`` is set once the first list is in. ``answered`` is set
    then, too, or once the server has said that it does not serve this kind, or not to us.
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        *,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        slim: Slim | None = None,
        rng: Random | None = None,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self.answered = asyncio.Event()
        self.lists = 0
        self._client = client
        self._selection = selection
        self._timing = timing
        self._store = Store(slim)
        self._rng = rng or Random()
        self._backoff = Backoff(timing.backoff_s, timing.backoff_max_s, self._rng)
        # a list is the dearest of all calls: events in between do not show that the next one may come at once
        self._relisting = Backoff(timing.backoff_s, timing.backoff_max_s, self._rng)
        self._listeners: list[Listener] = []
        self._heard_at_s: float | None = None
        self._cut_off_at_s: float | None = None

    @property
    def objects(self) -> Mapping[str, Object]:
        """All objects by key, as last heard. They must not be changed."""
        return self._store.objects

    def unheard_for_s(self) -> float | None:
        """Seconds since the server last said anything, a bookmark included; None if it never did.

        Up to the timing's ``silence_s`` is normal where little changes; more says that the copy grows old.
        """
        return None if self._heard_at_s is None else asyncio.get_running_loop().time() - self._heard_at_s

    def cut_off_for_s(self) -> float | None:
        """Seconds since the server refused or a watch broke; None once something has been heard again, or never was."""
        if self._cut_off_at_s is None or self._heard_at_s is None:
            return None
        return asyncio.get_running_loop().time() - self._cut_off_at_s

    def get(self, key: str) -> Object | None:
        """One object, None if there is none."""
        return self._store.objects.get(key)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with each key that changes from now on, and at each resync."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """List and watch until cancelled. No failure of the server or the network ends it."""
        async with asyncio.TaskGroup() as tasks:
            if self._timing.resync_s > 0:
                tasks.create_task(self._resync(), name=f"resync {self.resource.plural}")
            await self._follow()

    async def _follow(self) -> None:
        version: str | None = None
        while True:
            try:
                if version is None:
                    version = await self._list()
                version = await self._watch(version)
            except Expired as expired:
                # after a restart of the server this happens to all clients at once: a pause spreads their lists
                version = None
                await self._pause(expired, self._relisting)
            except _Interrupted as interrupted:
                version = interrupted.version
                await self._pause(interrupted.why)
            except ClusterError as error:
                await self._pause(error)

    async def _list(self) -> str:
        chosen = self._selection
        listed = await self._client.list(self.resource, chosen.namespace, labels=chosen.labels, fields=chosen.fields)
        self.lists += 1
        self._heard()
        self._tell(self._store.replace(listed.items))
        self.synced.set()
        self.answered.set()
        return listed.resource_version

    async def _watch(self, version: str) -> str:
        """Follow one watch to its end; the version reached. Raises Expired, and _Interrupted with the version
        reached.
        """
        chosen, timing = self._selection, self._timing
        clock = asyncio.get_running_loop().time
        began_s = clock()
        reached = version
        events = self._client.watch(
            self.resource,
            chosen.namespace,
            since=version,
            labels=chosen.labels,
            fields=chosen.fields,
            timeout_s=timing.watch_s,
            silence_s=timing.silence_s,
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    reached = event.resource_version
                    self._backoff.succeeded()
                    if clock() - began_s >= timing.backoff_max_s:
                        self._relisting.succeeded()
                    self._heard()
                    self._tell(self._store.take(event))
        except Expired:
            raise
        except ClusterError as error:
            raise _Interrupted(reached, error) from error
        if clock() - began_s < _SHORT_WATCH_S:
            # a server that hangs up at once, or after each event, would be asked without pause
            raise _Interrupted(reached, None)
        self._backoff.succeeded()
        self._cut_off_at_s = None
        return reached

    def _heard(self) -> None:
        self._heard_at_s = asyncio.get_running_loop().time()
        self._cut_off_at_s = None

    async def _pause(self, error: ClusterError | None, backoff: Backoff | None = None) -> None:
        if isinstance(error, Forbidden | NotFound):
            self.answered.set()
        if error is not None and self._cut_off_at_s is None:
            self._cut_off_at_s = asyncio.get_running_loop().time()
        wait_s = (backoff or self._backoff).failed(error)
        log.warning("%s: %s; again in %.1f s", self.resource.plural, error or "the watch ended at once", wait_s)
        await asyncio.sleep(wait_s)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._timing.resync_s * self._rng.uniform(0.9, 1.1))
            self._tell(list(self.objects))

    def _tell(self, keys: Iterable[str]) -> None:
        for key in keys:
            for listener in self._listeners:
                listener(key)


class _Interrupted(Exception):
    """A watch ended by a failure after it had come to ``version``."""

    def __init__(self, version: str, why: ClusterError | None) -> None:
        super().__init__(version)
        self.version = version
        self.why = why
