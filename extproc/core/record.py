# SPDX-License-Identifier: Apache-2.0
"""A request as data: its headers, the parsed and routed arrival, its record in the core's table, its outcome."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from extproc.admission.estimates import InputEstimate
from extproc.admission.flows import QueuedRequest
from extproc.admission.identity import ANONYMOUS_CALLER, Caller
from extproc.admission.limits import NO_USAGE, Charge, Grant, Usage
from extproc.admission.queue import Gate
from extproc.core.demand_meter import ModelMeter
from extproc.core.states import Event, IllegalEvent, State, successors
from extproc.engines.answers import LoadProblem
from extproc.prefix.index import Tail
from extproc.request.model import InferenceRequest
from extproc.routing.resolve import Destination
from extproc.scheduling.pool import Assignment, Pool

_NO_CLAIMS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


class Head(msgspec.Struct, frozen=True):
    """A request's headers. Names are lower-case; ``path`` is without its query.

    ``is_trusted``: what the headers say about the caller was written by a gateway, not by the client. ``listener``: the
    name of the listener that was asked, ``http_route``: ``namespace/name`` of the HTTPRoute that took the request;
    empty where the gateway does not say. ``claims``: those of the caller's verified token that policies name, with
    their values.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    has_body: bool
    is_trusted: bool = False
    listener: str = ""
    http_route: str = ""
    claims: Mapping[str, Collection[str]] = _NO_CLAIMS


class Attachment(msgspec.Struct, frozen=True):
    """How the asking gateway is attached.

    ``choices``: the number of endpoints that an answer may name. ``subset``: the addresses that this request may go to,
    None for all. ``passes_usage``: clients get a chunk with usage that they did not ask for; our own bundle keeps it.
    """

    choices: int = 4
    subset: Collection[str] | None = None
    passes_usage: bool = False


BUNDLE: Final = Attachment()


class Arrival(msgspec.Struct, frozen=True):
    """A request that has been parsed and routed.

    ``cache_salt``: what its engine gets; prompts share a cache under the same. ``is_routed``: its ModelServer was
    chosen here, by a ModelRoute; another one of the same rule may take it.
    """

    request: InferenceRequest
    destination: Destination
    pool: Pool
    head: Head
    body: bytes
    caller: Caller = ANONYMOUS_CALLER
    cache_salt: str | None = None
    is_routed: bool = False

    @property
    def wants_tokens(self) -> bool:
        """Whether its pick would be more precise with the prompt's tokens: there is a precise index to ask."""
        caches = self.pool.caches
        return (
            caches.kv_index is not None
            and bool(caches.whole_feeds | caches.partial_feeds)
            and bool(self.request.prompt)
        )

    @property
    def priority(self) -> int:
        """Of its objective, or else of the rule that routed it."""
        return self.destination.priority if self.caller.priority is None else self.caller.priority

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that was asked for, if it was one."""
        model = self.destination.model
        return model if model and model != self.pool.spec.model else None

    @property
    def tenant(self) -> str:
        """The name under which it is counted."""
        return self.caller.flow or self.caller.tenant


class LoadResult(msgspec.Struct, frozen=True):
    """What became of a load that the core asked for.

    ``problem``: None if the engine has the adapter now. ``message``: what it said, for the log. ``was_there``: it had
    it before. ``unloaded``: all that it has no more, the one that was to make room included.
    """

    server: str
    address: str
    adapter: str
    problem: LoadProblem | None = None
    message: str = ""
    was_there: bool = False
    unloaded: tuple[str, ...] = ()
    duration_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request, from one access log entry or from an answer that passed through here.

    What was not seen is None. ``status``: 0 if the client left before there was one. ``served``: the address of the
    engine that answered. ``has_left``: the client hung up. ``was_cut``: the engine did. ``has_timed_out``: a time limit
    of the gateway ended it. ``answer_bytes``: of the body that the client got. Durations count from the request's
    arrival, time in the queue included.
    """

    ticket: str
    status: int
    served: str
    duration_s: float
    ttfb_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    has_left: bool = False
    was_cut: bool = False
    answer_bytes: int | None = None
    has_timed_out: bool = False


# Of one answer. The fastest accelerators write some 3,000 tokens a second; what is measured as no time may be a
# millisecond, or a clock that was set back.
_FASTEST_TOKENS_PER_S: Final = 5_000.0
_AT_ONCE_TOKENS: Final = 1_000.0
OURS: Final = ""


class Run(msgspec.Struct):
    """A dispatched request: what its outcome is compared with.

    ``tail``: the end of the prompt that no whole block covers. ``reserved``: the tokens that were expected of it, and
    ``limited``: those that its limits reserved, None if it has none. ``answers``: how many it asked for, over all its
    prompts; ``most_output``: the tokens that it asked for at most, over all answers. ``prompt_bytes``: 0 if they do not
    say how many tokens its ``prompts`` prompts have. ``declines_usage``: its client wants none to be told.
    ``expects_usage``: a whole answer reports it. ``gate``, ``charged``: whose flow paid how much service for it.
    ``is_on_time``: its silence was not counted as a failure of its endpoint. ``input_estimate``: its tenant's, if its
    limits reserved by it.
    """

    pool: Pool
    assignment: Assignment
    chain: list[int]
    tail: Tail
    prompt_bytes: int
    is_streamed: bool
    sent_at_s: float
    reserved: Usage = NO_USAGE
    limited: Usage | None = None
    answers: int = 1
    most_output: float = math.inf
    prompts: int = 1
    declines_usage: bool = False
    waited_s: float = 0.0
    gate: Gate | None = None
    charged: float = 0.0
    expects_usage: bool = False
    is_on_time: bool = True
    input_estimate: InputEstimate | None = None

    def used(self, outcome: Outcome) -> Usage:
        """The tokens that a request used, as reported; none if no engine answered it.

        If the client hung up, or the gateway's time limit ended the request, output is not reported. It is estimated
        from the time and the engine's time per token, all answers together, at most the requested maximum: nobody gains
        by hanging up just before the end.
        """
        was_given_up = bool(outcome.served) and (outcome.status == 0 or outcome.has_timed_out)
        if outcome.prompt_tokens is None and not 200 <= outcome.status < 300 and not was_given_up:
            return NO_USAGE
        reserved = self._reserved()
        if outcome.completion_tokens is None:
            output_tokens = min(self.most_output, self._may_have_written(outcome))
        else:
            output_tokens = min(self._most_believed(outcome), float(outcome.completion_tokens))
        return Usage(
            input_tokens=reserved.input_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens,
            output_tokens=output_tokens,
        )

    def _reserved(self) -> Usage:
        return self.reserved if self.limited is None else self.limited

    def _most_believed(self, outcome: Outcome) -> float:
        """The most output that an engine may report.

        More than was asked for is believed, as engines may read fields that we do not, and what they wrote was had. But
        no more than can be written in the time, which the gateway has measured: an engine cannot charge a tenant at
        will.
        """
        writing_s = max(0.0, outcome.duration_s - self.waited_s)
        in_time = self.answers * (_FASTEST_TOKENS_PER_S * writing_s + _AT_ONCE_TOKENS)
        return in_time if math.isinf(self.most_output) else max(self.most_output, in_time)

    def _may_have_written(self, outcome: Outcome) -> float:
        """All answers are written side by side, each in the engine's time per token. Who refuses to say pays what is
        reserved; so does a whole plain answer that says nothing, as its tokens may be written afterwards
        (``background``).
        """
        if outcome.ttfb_s is None and self.is_streamed:
            return 0.0
        row = self.pool.table.row_of(outcome.served)
        tpot_s = float(self.pool.table.tpot_s[row]) if row is not None else 0.0
        is_silent = not self.is_streamed and 200 <= outcome.status < 300 and not (outcome.has_left or outcome.was_cut)
        if not tpot_s or self.declines_usage or is_silent:
            return self._reserved().output_tokens
        writing_s = outcome.duration_s - (self.waited_s if outcome.ttfb_s is None else outcome.ttfb_s)
        return self.answers * max(0.0, writing_s) / tpot_s


class Record(msgspec.Struct):
    """One request. ``origin``: the process that decides it, OURS for this one.

    ===================  =======================================================================
    field                meaning
    ===================  =======================================================================
    ``arrival``          the request until it is sent to an engine, then None
    ``run``              what it has at its engine, from then on
    ``queued``           how it stands, or stood, in its server's queue
    ``charges``          of the limits that all machines share
    ``limited``          the tokens that its limits were asked for, None without limits
    ``loading_since_s``  since when it waits for its adapter
    ``loading_s``        how long it has waited for adapters before
    ``engine_since_s``   since when it waits for an engine
    ``engine_wait_s``    how long it has waited for engines before
    ``engine_by_s``      until when it may wait for an engine
    ``answer_by_s``      until when its gateway waits, once the request is held
    ``meter``            where it counts as demand, None if another process decides it
    ``is_work_counted``  whether its prefill work counts there, too
    ``event``            what happens to it now, or happened last
    ``successors``       the states that this event may lead to
    ===================  =======================================================================
    """

    ticket: str
    state: State = State.ABSENT
    origin: str = OURS
    arrival: Arrival | None = None
    attachment: Attachment = BUNDLE
    wants_reasons: bool = False
    charges: Sequence[Charge] = ()
    limited: Usage | None = None
    tokens: Sequence[int] | None = None
    grants: tuple[Grant, ...] = ()
    queued: QueuedRequest | None = None
    run: Run | None = None
    loading_since_s: float = 0.0
    loading_s: float = 0.0
    meter: ModelMeter | None = None
    arrived_at_s: float = 0.0
    is_work_counted: bool = False
    engine_since_s: float = 0.0
    engine_wait_s: float = 0.0
    engine_by_s: float = math.inf
    answer_by_s: float = math.inf
    event: Event = Event.ARRIVED
    successors: frozenset[State] = frozenset()

    def happens(self, event: Event) -> bool:
        """``event`` begins. Returns whether it changes anything; raises IllegalEvent, with nothing changed."""
        after = successors(self.state, event, self.ticket)
        if not after:
            return False
        self.event, self.successors = event, after
        return True

    def become(self, state: State) -> None:
        """The only place where a state is set: a successor that the table has for the event that happens."""
        if state not in self.successors:
            raise IllegalEvent(f"{self.event.name} to {state.name}", self.state.name, f"request {self.ticket}")
        self.state = state

    @property
    def was_held(self) -> bool:
        """Whether its stream waits for a Decision or Refused already."""
        return self.event is not Event.ARRIVED and self.event is not Event.ANSWERED

    @property
    def arrived(self) -> Arrival:
        """Its arrival, before dispatch; raises ValueError afterwards."""
        if self.arrival is None:
            raise ValueError(f"request {self.ticket} was sent to an engine already")
        return self.arrival

    @property
    def is_ours(self) -> bool:
        """Whether this process decides it."""
        return self.origin == OURS
