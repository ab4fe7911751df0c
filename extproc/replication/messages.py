"""What processes tell each other so that each picks as if it had seen every request: plain data, and what it does to a pipeline.

Every process repeats the others' bookkeeping: a request that one sends counts for its endpoint everywhere, and its prefix is
known everywhere, until it ends; an outcome teaches everybody. Nothing waits for anybody: what is late or lost costs a
little of a pick's quality. Counting load together matters more than sharing prefixes alone, which can be worse than sharing nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.buckets import Limit
from extproc.core.feedback import Outcome
from extproc.endpoints.engine_reports import CacheConfig, EngineReport, apply_report
from extproc.scheduling.request_started import RequestStarted

if TYPE_CHECKING:
    from extproc.core.pipeline import Pipeline
    from extproc.core.types import Decision

# A process that has said nothing for so long is gone, and its requests with it.
SILENCE_S: Final = 3.0
HEARTBEAT_S: Final = 1.0


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Its stream is over."""

    ticket: str


class Learned(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Its outcome is known."""

    outcome: Outcome


class EngineSaid(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """An engine was asked how it is: one process asks for all on its machine."""

    server: str
    address: str
    state: EngineReport
    cache: CacheConfig | None = None
    has_restarted: bool = False
    models: frozenset[str] | None = None


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """All requests of a process that run: whatever else was heard of it has ended unheard."""

    running: list[str]


class Spent(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """So much of a local limit's bucket is gone, or, below 0, back. ``machine``: whose limit it is."""

    machine: str
    key: str
    limit: Limit
    amount: float


Event = RequestStarted | Ended | Learned | EngineSaid | Alive | Spent


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one process in their order."""

    origin: str
    events: list[Event]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    """For the wire."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """From the wire; raises msgspec.DecodeError."""
    return _decoder.decode(payload)


def sending_of(decision: Decision, pipeline: Pipeline) -> RequestStarted | None:
    """What to tell of a request that was just decided here; None if it is over already."""
    sent = pipeline.sent(decision.ticket)
    if sent is None:
        return None
    assignment = sent.assignment
    return RequestStarted(
        ticket=decision.ticket,
        server=decision.server,
        address=assignment.endpoint.address,
        prefill=None if assignment.prefill is None else assignment.prefill.address,
        chain=list(sent.chain),
        tail=sent.tail,
        prompt_bytes=sent.prompt_bytes,
        is_streamed=sent.is_streamed,
        input_tokens=assignment.input_tokens,
        cached_tokens=assignment.cached_tokens,
        indexed_tokens=assignment.indexed_tokens,
        tokens_ahead=assignment.tokens_ahead,
        work=assignment.work,
        tokens=assignment.tokens,
        flow=None if sent.queued is None else sent.queued.flow,
        priority=0 if sent.queued is None else sent.queued.priority,
        service=sent.charged,
    )


def engine_said(pipeline: Pipeline, event: EngineSaid, now: float) -> None:
    """Take over an engine's word, whoever asked for it."""
    pool = pipeline.pools.get(event.server)
    row = pool.table.row_of(event.address) if pool is not None else None
    if pool is None or row is None:
        return
    if event.models is not None:
        pool.table.set_loras(row, msgspec.structs.replace(pool.table.loras[row], served=event.models))
        return
    apply_report(pool.table, row, event.state, now)
    if event.has_restarted:
        pool.caches.cache_lost(row)
    if event.cache is not None:
        pool.caches.set_cache_config(row, event.cache)
        pool.table.kv_capacity_tokens[row] = event.cache.total_tokens


class Mirror:
    """The others' requests in our books."""

    def __init__(self, pipeline: Pipeline, machine: str = "") -> None:
        """``machine``: whose processes share their local limits."""
        self._pipeline = pipeline
        self._machine = machine
        self._running: dict[str, set[str]] = {}
        self._heard_at: dict[str, float] = {}

    @property
    def peers(self) -> int:
        """Processes that were heard of lately."""
        return len(self._heard_at)

    def receive(self, batch: EventBatch, now: float) -> list[Outcome]:
        """Repeat what another process did; returns outcomes that it learned of first, of our requests or another's."""
        running = self._running.setdefault(batch.origin, set())
        self._heard_at[batch.origin] = now
        outcomes = []
        for event in batch.events:
            match event:
                case RequestStarted():
                    if self._pipeline.repeat(event, now):
                        running.add(event.ticket)
                case Ended():
                    running.discard(event.ticket)
                    self._pipeline.finish(event.ticket, now)
                case Spent():
                    if event.machine == self._machine:
                        limits = self._pipeline.admission.limits
                        limits.spent_elsewhere(event.key, event.limit, event.amount, now)
                case Learned():
                    outcomes.append(event.outcome)
                case EngineSaid():
                    engine_said(self._pipeline, event, now)
                case Alive():
                    self._end(running, running.difference(event.running), now)
        return outcomes

    def forget_the_silent(self, now: float) -> None:
        """A process that is gone has no requests."""
        for origin in [one for one, heard_at in self._heard_at.items() if now - heard_at > SILENCE_S]:
            del self._heard_at[origin]
            running = self._running.pop(origin, set())
            self._end(running, set(running), now)

    def _end(self, running: set[str], ended: set[str], now: float) -> None:
        for ticket in ended:
            running.discard(ticket)
            self._pipeline.finish(ticket, now)
