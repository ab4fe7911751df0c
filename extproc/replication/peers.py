# SPDX-License-Identifier: Apache-2.0
"""Batches of events to and from the other processes, over buses.

The buses are ZeroMQ between the workers of one machine, Redis between machines. Both may lose messages; a heartbeat
with all running requests makes up for what was lost. With both, workers get each batch twice, and repeat it once.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from extproc.core.peers import HEARTBEAT_S, EventBatch, PeerEvent, UnreadableBatch, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.metrics.registry import Metrics

log = logging.getLogger(__name__)

_FLUSH_S: Final = 0.005
# A process that starts beats faster for two seconds: the others are still connecting to it, and it has to ask them.
_FIRST_BEATS: Final = 20
_FIRST_BEATS_S: Final = 0.1
# Events that wait while the bus is stuck; beyond that, the heartbeat has to do.
_MOST_WAITING: Final = 20_000
# Processes whose last batch is remembered, those that have gone included.
_MOST_ORIGINS: Final = 1_000


class Bus(Protocol):
    """Sends every payload to all other processes; may lose some."""

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Until cancelled. It may be run again."""
        ...

    async def send(self, payload: bytes) -> None:
        """To all others. May raise OSError."""
        ...


class Peers:
    """Sends this process's events and receives those of the others. Without a bus it does nothing."""

    def __init__(self, buses: list[Bus], metrics: Metrics, *, origin: str) -> None:
        """``origin``: the name of this process among the others."""
        self._buses = buses
        self._metrics = metrics
        self._origin = origin
        self._waiting: list[PeerEvent] = []
        self._sent = 0
        # the number of the last batch, by origin
        self._heard: dict[str, int] = {}
        self._has_news = asyncio.Event()
        self._has_warned = False

    def tell(self, event: PeerEvent) -> None:
        """Send it to the others with the next batch."""
        if self._buses and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(event)
            self._has_news.set()

    async def run(self, *, hear: Callable[[EventBatch], None], beat: Callable[[], None]) -> None:
        """Until cancelled. ``hear``: takes what another process did. ``beat``: called once a second, at the start more
        often.
        """
        if not self._buses:
            return
        async with asyncio.TaskGroup() as tasks:
            for bus in self._buses:
                tasks.create_task(bus.run(partial(self._receive, hear)))
            tasks.create_task(_keep_beating(beat))
            while True:
                await self._has_news.wait()
                # more events may come meanwhile, and go in the same batch
                await asyncio.sleep(_FLUSH_S)
                self._has_news.clear()
                events, self._waiting = self._waiting, []
                self._sent += 1
                await self._send(encode(EventBatch(self._origin, events, self._sent)))

    async def _send(self, payload: bytes) -> None:
        for bus in self._buses:
            try:
                await bus.send(payload)
            except OSError as error:
                self._metrics.shared("failed")
                log.debug("a batch for other processes is lost: %s", error)

    def _receive(self, hear: Callable[[EventBatch], None], payload: bytes) -> None:
        try:
            batch = decode(payload)
        except UnreadableBatch as error:
            self._metrics.shared("unreadable")
            if not self._has_warned:
                log.warning("a message of another process cannot be read; do all run the same version? %s", error)
            self._has_warned = True
            return
        if batch.origin == self._origin or not self._is_new(batch):
            return
        self._metrics.shared("received")
        try:
            hear(batch)
        except Exception:
            # what one process says must not end another
            self._metrics.shared("failed")
            log.exception("a batch of the process %s could not be repeated", batch.origin)

    def _is_new(self, batch: EventBatch) -> bool:
        if batch.number and batch.number <= self._heard.get(batch.origin, 0):
            return False
        # the most recently heard stand last
        self._heard.pop(batch.origin, None)
        self._heard[batch.origin] = batch.number
        if len(self._heard) > _MOST_ORIGINS:
            del self._heard[next(iter(self._heard))]
        return True


async def _keep_beating(beat: Callable[[], None]) -> None:
    for number in count():
        beat()
        await asyncio.sleep(_FIRST_BEATS_S if number < _FIRST_BEATS else HEARTBEAT_S)
