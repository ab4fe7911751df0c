# SPDX-License-Identifier: Apache-2.0
"""Events that processes exchange, so that each picks as if it had seen every request.

Every process repeats the bookkeeping of the others: a request that one of them dispatches counts for its endpoint in
all of them until it ends, its prefix is in the index of all of them, and all of them learn from its outcome. No process
waits for another: an event that is late or lost makes picks a little worse. Sharing load matters more than sharing
prefixes, which alone can be worse than sharing nothing.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.admission.flow_queues import FlowKey
from extproc.admission.token_buckets import BucketLevel, Limit
from extproc.api.config_errors import one_line
from extproc.core.request_record import Outcome, SentRequest
from extproc.endpoints.adapter_slots import Change
from extproc.endpoints.breaker import Breaker
from extproc.engines.metrics import CacheConfig, EngineReport
from extproc.scheduling.pool import Assignment, DecodeTarget

if TYPE_CHECKING:
    from collections.abc import Collection

# A process that has sent nothing for this long is gone, and its requests with it.
SILENCE_S: Final = 3.0
HEARTBEAT_S: Final = 1.0
# Starts that a process is asked for at once: each has the hashes of a prompt.
_MOST_ASKED: Final = 500
# Longer answers stay with the process that has them: a process that hangs has thousands of messages waiting.
MOST_SHARED_BYTES: Final = 256 << 10
_encoder: Final = msgspec.msgpack.Encoder()


class RequestStarted(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A request was sent to an engine. ``flow``: the flow charged, None without flow control. ``service``: the charge
    in weighted tokens.
    """

    ticket: str
    server: str
    assignment: Assignment
    sent: SentRequest
    flow: FlowKey | None = None
    priority: int = 0
    service: float = 0.0


class RequestPrefilled(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A request's prefill engine has answered. ``outcome``: what is learned of that engine, None if nothing.
    ``is_done``: the prompt is computed. ``is_leased``: for one decode engine. ``waited_s``: until that got the request.
    ``decode``: that one. ``next``: the address of the prefill engine that is asked now, and ``decode`` is nowhere yet;
    empty: the decode engine gets the request. ``is_beside``: it has had it all the time. ``next_servers``: see
    SentRequest.
    """

    ticket: str
    outcome: Outcome | None
    is_done: bool
    is_leased: bool
    waited_s: float
    decode: DecodeTarget
    next: str = ""
    is_beside: bool = False
    next_servers: tuple[str, ...] = ()


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The stream of a request is closed. ``is_moved``: it goes on at another ModelServer; its start there follows."""

    ticket: str
    is_moved: bool = False


class OutcomeKnown(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """The outcome of a request is known."""

    outcome: Outcome


class EngineReported(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """An engine's report. One process of a machine scrapes the engines and sends the reports to the others.

    ``models``: all that it lists, adapters too; None in a report of its metrics. ``base_models``: without adapters.
    ``context_tokens``: the most that a prompt of those may have, 0 if unknown.
    """

    server: str
    address: str
    state: EngineReport
    cache: CacheConfig | None = None
    has_restarted: bool = False
    models: frozenset[str] | None = None
    base_models: frozenset[str] = frozenset()
    context_tokens: int = 0


class BreakerSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A breaker that has ever changed, with instants relative to the sender's now. ``address``: of the endpoint; empty:
    it is that of the ModelServer.
    """

    server: str
    address: str
    breaker: Breaker


class ProcessAlive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """All requests that a process runs. Any other known here as its own has ended, and that event was lost. Of those
    that are not known here the start was lost: the process is asked for it.

    ``breakers``: as it knows them. It sends this once a second, and whenever one has changed.
    """

    running: list[str]
    breakers: list[BreakerSnapshot] = []


class AskRequestsStarted(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """``process`` is asked to send the start of these requests once more, if they still run."""

    process: str
    tickets: list[str]


class LimitSpent(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """``amount`` was taken from a local limit's bucket; negative: refunded. ``machine``: whose limit it is.
    ``reserved``: of a budget, by how much what the sender's running requests have reserved has changed. ``grant``: the
    number of the sender's grant, from 1; 0: it is none.
    """

    machine: str
    key: str
    limit: Limit
    amount: float
    reserved: float = 0.0
    grant: int = 0


class AskLimitLevels(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """A process that has just started on ``machine`` requests the levels of the local limits' buckets."""

    machine: str


class LimitLevels(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """Of all buckets that are not full, for the process ``asker`` that has asked. Of budgets nothing is subtracted that
    is only reserved; ``reserved`` is the sender's. ``has_more``: another such event follows.
    """

    asker: str
    levels: list[BucketLevel]
    has_more: bool = False


class AdapterChanged(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A process loads, closes or unloads an adapter at an engine."""

    server: str
    address: str
    adapter: str
    change: Change


class BudgetsRecovered(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """A process has lowered its budgets, and those in Redis, to what usage rows leave. ``read_s``: when, seconds since
    1970.
    """

    read_s: float


class AnswerArrived(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The answer to a request whose process waits for it, for the response cache. ``kind``: whether it is a stream."""

    ticket: str
    kind: Literal["json", "stream"]
    body: bytes


class AnswerStored(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """A process keeps an answer in its response cache: the others do, too. ``scope``, ``key``: whose it is, and all of
    its key.
    """

    scope: str
    key: str
    kind: Literal["json", "stream"]
    body: bytes
    ttl_s: float


PeerEvent = (
    RequestStarted
    | RequestPrefilled
    | RequestEnded
    | OutcomeKnown
    | EngineReported
    | ProcessAlive
    | AskRequestsStarted
    | LimitSpent
    | AskLimitLevels
    | LimitLevels
    | AdapterChanged
    | BudgetsRecovered
    | AnswerArrived
    | AnswerStored
)


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one process (``origin``) in their order. ``number``: counts its batches from 1; 0: unknown."""

    origin: str
    events: list[PeerEvent]
    number: int = 0


class UnreadableBatch(Exception):
    """The payload is no batch of this version."""


_decoder: Final = msgspec.msgpack.Decoder(EventBatch)


def encode_events(batch: EventBatch) -> bytes:
    """For the wire."""
    return _encoder.encode(batch)


def decode_events(payload: bytes) -> EventBatch:
    """From the wire; raises UnreadableBatch."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBatch(one_line(str(error))) from None


class PeerRequests:
    """Records which process runs which requests; the core ends them. Bounded by the requests of the others."""

    def __init__(self) -> None:
        # whose start has come, by process and ticket: whether they are counted here, too
        self._requests: dict[str, dict[str, bool]] = {}
        self._seen_at_s: dict[str, float] = {}

    @property
    def peer_count(self) -> int:
        """How many other processes have sent an event within the last ``SILENCE_S``."""
        return len(self._seen_at_s)

    @property
    def peer_names(self) -> Collection[str]:
        """Of these."""
        return self._seen_at_s.keys()

    def record_event(self, origin: str, now: float) -> None:
        """An event of the process ``origin`` has come."""
        self._seen_at_s[origin] = now
        self._requests.setdefault(origin, {})

    def add_request(self, origin: str, ticket: str, *, is_counted: bool) -> None:
        """The process ``origin`` runs this request. ``is_counted``: here, too."""
        known = self._requests[origin]
        known[ticket] = is_counted or known.get(ticket, False)

    def remove_request(self, origin: str, ticket: str) -> bool:
        """The request has ended; returns whether it was counted here."""
        return self._requests[origin].pop(ticket, False)

    def remove_lost_requests(self, origin: str, running: Collection[str]) -> list[str]:
        """Remove its requests that are not in ``running``, the list that it sent: their ends were lost. Returns those
        that were counted here.
        """
        known = self._requests[origin]
        gone = known.keys() - running
        return sorted([ticket for ticket in gone if known.pop(ticket)])

    def unknown_requests(self, origin: str, running: Collection[str]) -> list[str]:
        """Some of ``running``, the list that the process sent, whose start was lost: by the next list, it is asked for
        the rest.
        """
        known = self._requests[origin]
        return list(islice((ticket for ticket in running if ticket not in known), _MOST_ASKED))

    def is_alive(self, origin: str) -> bool:
        """Whether the process has sent an event within the last ``SILENCE_S``."""
        return origin in self._seen_at_s

    def remove_silent(self, now: float) -> dict[str, list[str]]:
        """Remove the processes that have gone silent; returns their requests, by process."""
        silent = [one for one, at_s in self._seen_at_s.items() if now - at_s > SILENCE_S]
        for origin in silent:
            del self._seen_at_s[origin]
        gone = {origin: self._requests.pop(origin) for origin in silent}
        return {origin: sorted([ticket for ticket, counted in one.items() if counted]) for origin, one in gone.items()}
