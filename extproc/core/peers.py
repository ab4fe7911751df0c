# SPDX-License-Identifier: Apache-2.0
"""What processes tell each other, so that each picks as if it had seen every request.

Every process repeats the bookkeeping of the others: a request that one of them dispatches counts for its endpoint in
all of them until it ends, its prefix is known to all of them, and its outcome teaches all of them. No process waits
for another: an event that is late or lost makes picks a little worse. Sharing load matters more than sharing prefixes,
which alone can be worse than sharing nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.buckets import Limit
from extproc.admission.limits import BucketLevel
from extproc.core.record import Outcome
from extproc.endpoints.adapter_slots import Change
from extproc.engines.metrics import CacheConfig, EngineReport
from extproc.scheduling.pool import RequestStarted

if TYPE_CHECKING:
    from collections.abc import Collection

# A process that has said nothing for this long is gone, and its requests with it.
SILENCE_S: Final = 3.0
HEARTBEAT_S: Final = 1.0


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The stream of a request is closed."""

    ticket: str


class Learned(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """The outcome of a request is known."""

    outcome: Outcome


class EngineSaid(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """An engine's report. One process of a machine asks the engines and tells the others."""

    server: str
    address: str
    state: EngineReport
    cache: CacheConfig | None = None
    has_restarted: bool = False
    models: frozenset[str] | None = None


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """All requests that a process runs. Any other known here as its own has ended, and that event was lost."""

    running: list[str]


class Spent(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """``amount`` was taken from a local limit's bucket; negative: refunded. ``machine``: whose limit it is."""

    machine: str
    key: str
    limit: Limit
    amount: float


class AskLevels(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """A process that has just started on ``machine`` asks how full the buckets of local limits are."""

    machine: str


class Levels(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """Of all buckets that are not full, for the process ``asker`` that has asked."""

    asker: str
    levels: list[BucketLevel]


class AdapterChanged(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A process loads, closes or unloads an adapter at an engine."""

    server: str
    address: str
    adapter: str
    change: Change


PeerEvent = RequestStarted | Ended | Learned | EngineSaid | Alive | Spent | AskLevels | Levels | AdapterChanged


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one process (``origin``) in their order. ``number``: counts its batches from 1; 0: unknown."""

    origin: str
    events: list[PeerEvent]
    number: int = 0


class UnreadableBatch(Exception):
    """What came is no batch of this version."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    """For the wire."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """From the wire; raises UnreadableBatch."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBatch(str(error)) from None


class Mirror:
    """Bookkeeping alone: the core ends the requests. Bounded by what the others run."""

    def __init__(self) -> None:
        self._running: dict[str, set[str]] = {}
        self._heard_at_s: dict[str, float] = {}

    @property
    def peers(self) -> int:
        """How many other processes were heard of within the last seconds."""
        return len(self._heard_at_s)

    def heard_of(self, origin: str, now: float) -> None:
        """The process ``origin`` has said something."""
        self._heard_at_s[origin] = now
        self._running.setdefault(origin, set())

    def started(self, origin: str, ticket: str) -> None:
        """It runs this request."""
        self._running[origin].add(ticket)

    def ended(self, origin: str, ticket: str) -> bool:
        """The request has ended; returns whether ``origin`` ran it."""
        running = self._running.get(origin)
        if running is None or ticket not in running:
            return False
        running.remove(ticket)
        return True

    def lost(self, origin: str, running: Collection[str]) -> list[str]:
        """Remove and return its requests that are not in ``running``, the list that it sent: their ends were lost."""
        gone = sorted(self._running[origin].difference(running))
        self._running[origin].difference_update(gone)
        return gone

    def silent(self, now: float) -> list[str]:
        """Remove the processes that have gone silent; returns their requests."""
        gone: list[str] = []
        for origin in [one for one, at_s in self._heard_at_s.items() if now - at_s > SILENCE_S]:
            del self._heard_at_s[origin]
            gone += sorted(self._running.pop(origin))
        return gone
