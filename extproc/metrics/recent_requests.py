# SPDX-License-Identifier: Apache-2.0
"""Requests of the last minutes, with where their time went and why their engine: kept only while the console is open.

Nothing of prompts and no key is kept, and nothing at all while nobody has asked for it: then a request costs one
comparison at each of its steps.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.core.effects import Decision, RequestRefused
from extproc.core.explanation import MOST_EXPLAINED, why_chosen
from extproc.core.request_states import STEP_NAMES, StepName
from extproc.refusals import StoredAnswer
from extproc.wire_names import REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.core.effects import OutcomeJoined, RequestEffect
    from extproc.core.explanation import Explanation
    from extproc.core.request_record import Arrival, RequestHead
    from extproc.refusals import Refusal

# Nobody has the console open who has not asked for so long.
OPEN_S: Final = 30.0
MOST: Final = 1_000
# Between two explanations at the least, and for each endpoint that one compares, which takes 5 µs.
_EXPLAIN_EACH_S: Final = 0.5
_EXPLAIN_EACH_ENDPOINT_S: Final = 0.001
_MOST_ENDPOINTS: Final = 5
_MOST_TEXT: Final = 300
# Clients choose the names of models.
_MOST_NAME: Final = 128

# What a request does, or how it ended.
Phase = Literal[StepName, "running", "answered", "refused", "left"]


class ScoredCandidate(msgspec.Struct, frozen=True, rename="camel"):
    """An endpoint that was compared: its value from each scorer, and the weighted total."""

    address: str
    total: float
    scores: dict[str, float]


class PickReason(msgspec.Struct, frozen=True, rename="camel"):
    """Why an engine was chosen. ``filters``: how many endpoints each left. ``best``: the first of those compared."""

    sentence: str
    candidates: int
    filters: dict[str, int]
    best: tuple[ScoredCandidate, ...]


class RecentRequest(msgspec.Struct, rename="camel"):
    """One request. Times are in seconds.

    ``age_s``: since it arrived. ``phase``: what it does now, or how it ended. ``waits_s``: what it waited here,
    by step. ``held_s``: from its arrival to its engine or its refusal. ``ttft_s``: from its engine's choice to
    the first byte of the answer. ``writing_s``: from there to the end. ``duration_s``: all of it; of one that has not
    ended, None. ``input_tokens``: expected before, reported afterwards. ``expected_cached``: when the engine was
    chosen. ``served``: the engine that answered, ``chosen``: the first choice.
    """

    number: int
    ticket: str
    tenant: str
    user: str
    api_key: str
    request_id: str
    api: str
    model: str
    server: str
    age_s: float = 0.0
    phase: Phase = "running"
    waits_s: dict[StepName, float] = {}
    held_s: float | None = None
    ttft_s: float | None = None
    writing_s: float | None = None
    duration_s: float | None = None
    status: int | None = None
    refusal: str = ""
    chosen: str = ""
    served: str = ""
    prefill: str = ""
    input_tokens: float | None = None
    expected_cached: float = 0.0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    why: PickReason | None = None


class _Open(msgspec.Struct):
    """A request whose end is not known. ``step``: what it waits for since ``since_s``."""

    row: RecentRequest
    began_s: float
    since_s: float
    step: StepName | None = None


class RecentRequests:
    """A ring of requests. ``is_open``: somebody looks at it; all other calls are made only then."""

    def __init__(self, *, most: int = MOST) -> None:
        self.is_open = False
        self._most = most
        self._until_s = 0.0
        self._explain_at_s = 0.0
        self._numbers = 0
        # with when each arrived
        self._rows: deque[tuple[float, RecentRequest]] = deque(maxlen=most)
        self._running: dict[str, _Open] = {}

    def on_viewed(self, now: float) -> None:
        """Somebody has asked."""
        self._close_if_idle(now)
        self.is_open, self._until_s = True, now + OPEN_S

    def wants_reasons(self, endpoints: int, now: float) -> bool:
        """Whether the pick of the request that arrives now is explained. ``endpoints``: of its ModelServer."""
        if now < self._explain_at_s or endpoints > MOST_EXPLAINED:
            return False
        self._explain_at_s = now + max(_EXPLAIN_EACH_S, _EXPLAIN_EACH_ENDPOINT_S * endpoints)
        return True

    def on_arrival(self, ticket: str, arrival: Arrival, now: float) -> None:
        """A request has arrived."""
        self._close_if_idle(now)
        if not self.is_open:
            return
        caller, api = arrival.caller, arrival.request.api
        row = RecentRequest(
            number=self._next_number(),
            ticket=ticket,
            tenant=arrival.tenant,
            user=caller.user,
            api_key=caller.api_key,
            request_id=arrival.head.headers.get(REQUEST_ID, "")[:_MOST_NAME],
            api="" if api is None else api.name.lower(),
            model=arrival.request.model[:_MOST_NAME],
            server=arrival.pool.name,
        )
        self._rows.append((now, row))
        if len(self._running) >= self._most:
            del self._running[next(iter(self._running))]
        self._running[ticket] = _Open(row, now, now)

    def on_early_refusal(self, head: RequestHead | None, refusal: Refusal, now: float) -> None:
        """A request was refused before it had a ModelServer."""
        self._close_if_idle(now)
        if not self.is_open:
            return
        path = "" if head is None else head.path[:_MOST_NAME]
        row = RecentRequest(
            self._next_number(), ticket="", tenant="", user="", api_key="", request_id="", api=path, model="", server=""
        )
        row.phase, row.status, row.refusal = "refused", refusal.status, refusal.message[:_MOST_TEXT]
        row.held_s = row.duration_s = 0.0
        self._rows.append((now, row))

    def on_step(self, own: RequestEffect, now: float) -> None:
        """What a request gets or waits for now."""
        found = self._running.get(own.ticket)
        if found is None:
            return
        row = found.row
        _end_step(found, now)
        match own:
            case Decision():
                _decided(row, own)
                row.phase, row.held_s = "running", now - found.began_s
            case RequestRefused():
                row.phase = "answered" if isinstance(own.refusal, StoredAnswer) else "refused"
                row.status, row.refusal = own.refusal.status, own.refusal.message[:_MOST_TEXT]
                row.held_s = row.duration_s = now - found.began_s
                del self._running[own.ticket]
            case _:
                found.step = row.phase = STEP_NAMES[own.state]
                found.since_s = now

    def on_outcome(self, settled: OutcomeJoined) -> None:
        """How a request ended, as the gateway reports it."""
        outcome = settled.outcome
        found = self._running.pop(outcome.ticket, None)
        if found is None:
            return
        row = found.row
        row.phase = "left" if outcome.has_left or outcome.status == 0 else "answered"
        row.status, row.served, row.duration_s = outcome.status, outcome.served, outcome.duration_s
        row.input_tokens = row.input_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens
        row.cached_tokens, row.output_tokens = outcome.cached_tokens, outcome.completion_tokens
        if outcome.ttfb_s is not None:
            # the gateway counts from the request's first byte
            row.ttft_s = max(0.0, outcome.ttfb_s - (row.held_s or 0.0))
            row.writing_s = max(0.0, outcome.duration_s - outcome.ttfb_s)

    def on_stream_closed(self, ticket: str, now: float) -> None:
        """The stream is closed; the outcome may come later, or never."""
        found = self._running.get(ticket)
        if found is None:
            return
        row = found.row
        row.phase, row.duration_s = "answered", now - found.began_s
        if row.held_s is None:
            _end_step(found, now)
            row.phase, row.held_s = "left", row.duration_s
            del self._running[ticket]

    def newest(self, now: float, *, most: int, find: str = "", server: str = "") -> list[RecentRequest]:
        """The newest first, at most ``most``. ``find``: a part of a name or an address. ``server``: a ModelServer."""
        text = find.lower()
        return list(islice(self._found(now, text, server), most))

    def __len__(self) -> int:
        return len(self._rows)

    def _found(self, now: float, text: str, server: str) -> Iterator[RecentRequest]:
        for began_s, row in reversed(self._rows):
            names = (row.tenant, row.user, row.api_key, row.model, row.server, row.chosen, row.served, row.request_id)
            if server in {"", row.server} and (not text or any(text in one.lower() for one in names)):
                shown, found = (
                    msgspec.structs.replace(row, age_s=max(0.0, now - began_s)),
                    self._running.get(row.ticket),
                )
                if found is not None:
                    _add_wait(shown, found, now)
                yield shown

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _close_if_idle(self, now: float) -> None:
        if self.is_open and now > self._until_s:
            self.is_open = False
            self._rows.clear()
            self._running.clear()


def _end_step(found: _Open, now: float) -> None:
    _add_wait(found.row, found, now)
    found.step = None


def _add_wait(row: RecentRequest, found: _Open, now: float) -> None:
    """To ``row``, what its request has waited in its step."""
    if found.step is not None:
        # another dict: a row that is shown is a copy
        row.waits_s = {**row.waits_s, found.step: row.waits_s.get(found.step, 0.0) + now - found.since_s}


def _decided(row: RecentRequest, decision: Decision) -> None:
    assignment = decision.assignment
    row.server, row.chosen = decision.server, assignment.endpoint.address
    row.prefill = decision.prefill_address
    row.input_tokens, row.expected_cached = round(assignment.input_tokens, 1), round(assignment.cached_tokens, 1)
    # a held request goes from one wait to the next without a message to its stream
    row.waits_s = {**row.waits_s, **{STEP_NAMES[state]: waited_s for state, waited_s in decision.history.waits.items()}}
    row.why = None if decision.history.explanation is None else _why(decision.history.explanation)


def _why(one: Explanation) -> PickReason:
    chosen = one.addresses[0] if one.addresses else ""
    profile = next((each for each in one.profiles if any(e.address == chosen for e in each.endpoints)), None)
    if profile is None:
        return PickReason(why_chosen(one)[:_MOST_TEXT], 0, {}, ())
    best = [each for each in profile.endpoints[:_MOST_ENDPOINTS] if each.address != chosen]
    own = [each for each in profile.endpoints if each.address == chosen]
    return PickReason(
        why_chosen(one)[:_MOST_TEXT],
        profile.candidates,
        {step.filter: step.left for step in profile.filters},
        tuple(ScoredCandidate(each.address, each.total, each.scores) for each in [*own, *best]),
    )
