"""Tells the other processes what this one does, and hears what they do: batches every few milliseconds, over a bus.

The bus is ZeroMQ between workers on one machine and Redis between machines; both may lose messages, and a heartbeat with all
running requests mends what was lost.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.replication.messages import (
    HEARTBEAT_S,
    Alive,
    Ended,
    Event,
    EventBatch,
    Learned,
    Mirror,
    Spent,
    decode,
    encode,
    sending_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.admission.limits import Charge
    from extproc.core.feedback import Outcome
    from extproc.core.pipeline import Pipeline
    from extproc.core.types import Decision
    from extproc.metrics.registry import Metrics

log = logging.getLogger(__name__)

_FLUSH_S: Final = 0.005
# What waits to be told while the bus is stuck; beyond it, the heartbeat has to do.
_MOST_WAITING: Final = 20_000


class Bus(Protocol):
    """Brings every payload to all other processes, as well as it can."""

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Until cancelled."""
        ...

    async def send(self, payload: bytes) -> None:
        """To all others. May raise OSError."""
        ...


class Peers:
    """This process's voice and ear. Without a bus it is alone and says nothing."""

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: Metrics,
        buses: list[Bus],
        *,
        origin: str,
        clock: Callable[[], float],
        machine: str = "",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``machine``: whose processes share local limits. ``changed``: called when others' requests have come or gone."""
        self._pipeline = pipeline
        self._metrics = metrics
        self._buses = buses
        self._origin = origin
        self._clock = clock
        self._machine = machine
        self._changed = changed
        self._mirror = Mirror(pipeline, machine)
        self._waiting: list[Event] = []
        self._running: dict[str, None] = {}
        self._has_news = asyncio.Event()

    def sent(self, decision: Decision) -> None:
        """A request was decided here."""
        if not self._buses:
            return
        event = sending_of(decision, self._pipeline)
        if event is not None:
            self._running[decision.ticket] = None
            self.tell(event)

    def ended(self, ticket: str) -> None:
        """Its stream is over."""
        if self._buses and self._running.pop(ticket, self) is not self:
            self.tell(Ended(ticket))

    def learned(self, outcome: Outcome) -> None:
        """An access log entry came here, whoever sent the request."""
        if self._buses:
            self.tell(Learned(outcome))

    def spent(self, charge: Charge, amount: float) -> None:
        """So much of a local limit is gone, or back."""
        if self._buses and amount:
            self.tell(Spent(self._machine, charge.key, charge.limit, amount))

    def tell(self, event: Event) -> None:
        """Anything."""
        if self._buses and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(event)
            self._has_news.set()

    async def run(self) -> None:
        """Until cancelled."""
        if not self._buses:
            return
        async with asyncio.TaskGroup() as tasks:
            for bus in self._buses:
                tasks.create_task(bus.run(self._receive))
            tasks.create_task(self._beat())
            while True:
                await self._has_news.wait()
                # a few more may come meanwhile, and go together
                await asyncio.sleep(_FLUSH_S)
                self._has_news.clear()
                events, self._waiting = self._waiting, []
                payload = encode(EventBatch(self._origin, events))
                for bus in self._buses:
                    try:
                        await bus.send(payload)
                    except OSError as error:
                        self._metrics.shared("failed")
                        log.debug("what was to be shared is lost: %s", error)

    async def _beat(self) -> None:
        while True:
            self.tell(Alive(list(self._running)))
            await asyncio.sleep(HEARTBEAT_S)
            self._mirror.forget_the_silent(self._clock())
            self._metrics.peers(self._mirror.peers)

    def _receive(self, payload: bytes) -> None:
        try:
            batch = decode(payload)
        except msgspec.DecodeError as error:
            self._metrics.shared("unreadable")
            log.warning("a message of another process cannot be read; do all run the same version? %s", error)
            return
        if batch.origin == self._origin:
            return
        self._metrics.shared("received")
        now = self._clock()
        for outcome in self._mirror.receive(batch, now):
            settled = self._pipeline.settle(outcome, now)
            if settled is not None and settled.is_ours:
                self._metrics.settled_here(settled)
        self._changed()
