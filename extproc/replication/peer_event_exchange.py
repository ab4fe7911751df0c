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

from extproc.core.peer_events import HEARTBEAT_S, EventBatch, PeerEvent, UnreadableBatch, decode_events, encode_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.metrics.request_metrics import Metrics

log = logging.getLogger(__name__)

_FLUSH_S: Final = 0.005
# A process that starts sends heartbeats faster for two seconds: the others are still connecting to it, and it requests
# their levels.
_FIRST_BEATS: Final = 20
_FIRST_BEATS_S: Final = 0.1
# Events that wait while the bus is stuck; beyond that, the heartbeat has to do.
_MOST_WAITING: Final = 20_000
# Most processes whose last batch is recorded, those that have gone included.
_MOST_ORIGINS: Final = 1_000


class Bus(Protocol):
    """Sends every payload to all other processes; may lose some."""

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Exchange batches until cancelled. It may be run again."""
        ...

    async def send(self, payload: bytes) -> None:
        """To all others. May raise OSError."""
        ...


class PeerEventExchange:
    """Sends this process's events and receives those of the others. Without a bus it does nothing."""

    def __init__(self, buses: list[Bus], metrics: Metrics, *, origin: str) -> None:
        """``origin``: the name of this process among the others."""
        self._buses = buses
        self._metrics = metrics
        self._origin = origin
        self._waiting: list[PeerEvent] = []
        self._sent = 0
        # the number of the last batch, by origin
        self._last_number: dict[str, int] = {}
        self._has_news = asyncio.Event()
        self._has_warned = False

    def publish(self, event: PeerEvent) -> None:
        """Send it to the others with the next batch."""
        if self._buses and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(event)
            self._has_news.set()

    async def run(self, *, on_batch: Callable[[EventBatch], None], heartbeat: Callable[[], None]) -> None:
        """Exchange events until cancelled. ``on_batch``: takes the events of another process. ``heartbeat``: called
        once a second, and more often at the start.
        """
        if not self._buses:
            return
        async with asyncio.TaskGroup() as tasks:
            for bus in self._buses:
                tasks.create_task(bus.run(partial(self._receive, on_batch)))
            tasks.create_task(_keep_beating(heartbeat))
            while True:
                await self._has_news.wait()
                # more events may come meanwhile, and go in the same batch
                await asyncio.sleep(_FLUSH_S)
                self._has_news.clear()
                events, self._waiting = self._waiting, []
                self._sent += 1
                await self._send(encode_events(EventBatch(self._origin, events, self._sent)))

    async def _send(self, payload: bytes) -> None:
        for bus in self._buses:
            try:
                await bus.send(payload)
            except OSError as error:
                self._metrics.count_peer_message("failed")
                log.debug("a batch for other processes is lost: %s", error)

    def _receive(self, on_batch: Callable[[EventBatch], None], payload: bytes) -> None:
        try:
            batch = decode_events(payload)
        except UnreadableBatch as error:
            self._metrics.count_peer_message("unreadable")
            if not self._has_warned:
                log.warning("a message of another process cannot be read; do all run the same version? %s", error)
            self._has_warned = True
            return
        if batch.origin == self._origin or not self._is_new(batch):
            return
        self._metrics.count_peer_message("received")
        try:
            on_batch(batch)
        except Exception:
            # a message of one process must not end another
            self._metrics.count_peer_message("failed")
            log.exception("a batch of the process %s could not be repeated", batch.origin)

    def _is_new(self, batch: EventBatch) -> bool:
        if batch.number and batch.number <= self._last_number.get(batch.origin, 0):
            return False
        # the most recent are last
        self._last_number.pop(batch.origin, None)
        self._last_number[batch.origin] = batch.number
        if len(self._last_number) > _MOST_ORIGINS:
            del self._last_number[next(iter(self._last_number))]
        return True


async def _keep_beating(heartbeat: Callable[[], None]) -> None:
    for number in count():
        heartbeat()
        await asyncio.sleep(_FIRST_BEATS_S if number < _FIRST_BEATS else HEARTBEAT_S)
