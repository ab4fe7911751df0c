# SPDX-License-Identifier: Apache-2.0
"""What may happen to the requests of a core, and what must hold after each event.

``Life`` is the core's shell, the gateway, the store of global limits and two other workers in one. It knows which
streams are open and what each request was granted, and holds the core's records, loads, queues and accounts against
that.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from extproc.admission.local_limits import LocalLimits
from extproc.core import running_requests
from extproc.core.core import Core
from extproc.core.effects import (
    AbortDecode,
    AskGuard,
    AskLimits,
    AskPromptTokens,
    Broadcast,
    CancelPrefill,
    Decision,
    Effect,
    LoadAdapter,
    OutcomeJoined,
    Prefill,
    PrefillEnded,
    RequestHeld,
    RequestRefused,
    SettleGrant,
    WakeAt,
)
from extproc.core.guard_decisions import GuardFailed, GuardReply
from extproc.core.peer_events import (
    SILENCE_S,
    EventBatch,
    LimitSpent,
    OutcomeKnown,
    PeerEvent,
    ProcessAlive,
    RequestPrefilled,
    RequestStarted,
)
from extproc.core.request_record import AdapterLoadResult, Outcome, PrefillResult, RequestHead
from extproc.core.request_states import IN_FLIGHT, TRANSITIONS, WAITING, RequestEvent, RequestState
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.refusals import RateLimited, Refusal
from tests.extproc.core.setting import (
    GATES,
    LIMITS,
    MOST_ENDED,
    SERVER,
    STARTED,
    Worker,
    body,
    outcome_of,
    snapshot,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extproc.admission.rate_limits import Grant, RequestUsage
    from extproc.core.admission_pipeline import Answer
    from extproc.core.effects import RequestEffect
    from extproc.core.request_record import DispatchedRequest
    from extproc.endpoints.table import EndpointRef

GUARD_ANSWERS = {
    "granted": GuardReply(200, b'{"action": "change", "fields": {"messages": [{"role": "user", "content": "x"}]}}'),
    "refused": GuardReply(200, b'{"action": "refuse"}'),
    "nobody": GuardFailed("timeout", "no answer"),
}
_NOT_SETTLED = {RequestState.PREFILLING, RequestState.RUNNING, RequestState.ENDED}
# Ticks that one wake-up may lead to; far more than there are requests.
_MOST_TICKS = 500


def engines_of(run: DispatchedRequest) -> list[EndpointRef]:
    """Those at which it counts."""
    prefill = run.assignment.prefill
    return [run.assignment.endpoint] if prefill is None else [run.assignment.endpoint, prefill]


def demand_of(run: DispatchedRequest, state: RequestState) -> list[tuple[str, float]]:
    """The engines that have it, and its tokens there, as autoscalers read it: the decode engine after the prefill."""
    assignment = run.assignment
    found = [] if state is RequestState.PREFILLING else [(assignment.endpoint.address, assignment.tokens)]
    if assignment.prefill is not None:
        found.append((assignment.prefill.address, assignment.input_tokens))
    return found


class Life:
    """``reached``: how often each event happened in each state."""

    def __init__(self, reached: Counter[tuple[RequestState, RequestEvent]], pairs: str = "") -> None:
        self.reached, self.pairs = reached, pairs
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(running_requests, "MOST_ENDED", MOST_ENDED)
        # a step has failed: the end would fail, too, and hide why
        self.has_failed = False
        self.now = 0.0
        self.wake_at_s: float | None = None
        self.core = Core(
            snapshot(limits=LIMITS[2], pairs=pairs), rng=random.Random(0), ticket_prefix="t", machine="here"
        )
        self.store = LocalLimits()
        self.unsettled: list[Grant] = []
        # own requests: whose streams wait for something, which were sent and are not closed, all that there were
        self.pending: dict[str, AskLimits | AskGuard | AskPromptTokens | RequestHeld] = {}
        # by when the gateways of held ones are answered, as they were told
        self.answer_by_s: dict[str, float] = {}
        # loads that were asked for and have not ended
        self.loads: list[LoadAdapter] = []
        # prefills that were asked for and have not ended, and by when each must have
        self.legs: dict[str, tuple[Prefill, float]] = {}
        # the same of those beside their requests, and requests that decode engines are asked to end
        self.beside: dict[str, tuple[Prefill, float]] = {}
        self.aborting: set[str] = set()
        self.decided: list[str] = []
        self.own: list[str] = []
        # what each was granted by this process, and its run, from its decision until it is accounted for
        self.sent: dict[str, tuple[tuple[Grant, ...], DispatchedRequest]] = {}
        # by bucket: what the other workers were told, and what should be gone in the end
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.used: defaultdict[str, float] = defaultdict(float)
        gate = GATES[1].replace("maxRequests: 1}", "maxRequests: 99}")
        self.workers = {"p": Worker("p", gate, pairs), "q": Worker("q", "", pairs)}
        self.batches: list[tuple[str, PeerEvent]] = []
        # requests of other workers that run by what was heard, with their worker; and when each was last heard of
        self.elsewhere: dict[str, str] = {}
        self.heard_at_s: dict[str, float] = {}
        self.seen: list[str] = ["unknown"]

    def happens(self, event: RequestEvent | None, subject: str, verb: Callable[[], list[Effect]]) -> list[Effect]:
        """Call the core, hold every change of state against the table, and do what the core asks for.

        ``event`` happens to the request ``subject``; to others happens what follows from it.
        """
        self.has_failed = True
        before = {ticket: self.core.state_of(ticket) for ticket in self.seen}
        before.setdefault(subject, RequestState.ABSENT)
        if before[subject] is RequestState.PREFILLING and event in {RequestEvent.LEFT, RequestEvent.FINISHED}:
            # its prompt was computed, and nothing else
            record = self.core._records[subject]
            assert record.run is not None
            self.sent[subject] = record.grants, record.run
        effects = verb()
        if subject in self.sent and before[subject] is RequestState.PREFILLING:
            (settled,) = [one for one in effects if isinstance(one, OutcomeJoined)]
            assert (settled.used.input_tokens > 0, settled.used.output_tokens) == (True, 0.0)
            self.account(subject, settled.outcome)
        ends = {one.ticket: one for one in effects if isinstance(one, Decision | RequestRefused)}
        for ticket, state in before.items():
            after = self.core.state_of(ticket)
            happened = event if ticket == subject else None
            if ticket in ends and happened is not RequestEvent.GRANTED:
                gave_up = isinstance(ends[ticket], RequestRefused)
                happened = RequestEvent.GIVEN_UP if gave_up else RequestEvent.GRANTED
            elif happened is None and after is RequestState.PREFILLING is not state:
                happened = RequestEvent.GRANTED
            elif happened is None and after is not state and {state, after} <= WAITING:
                happened = RequestEvent.ENGINES_GONE if after is RequestState.AWAITING_ENGINE else RequestEvent.GRANTED
            elif happened is None and after is not state:
                assert state is RequestState.ENDED or ticket in self.elsewhere, (ticket, state, after, event)
                happened = RequestEvent.FORGOTTEN if state is RequestState.ENDED else RequestEvent.FINISHED
            if happened is RequestEvent.FINISHED and state is RequestState.RUNNING and after is RequestState.ABSENT:
                # many have ended at once, and this one first; or it ended before under the same ticket
                assert ticket in self.elsewhere
                self.check(ticket, happened, state, RequestState.ENDED)
                happened, state = RequestEvent.FORGOTTEN, RequestState.ENDED  # noqa: PLW2901 - the next event's
            if happened is not None:
                self.check(ticket, happened, state, after)
        self.perform(effects)
        self.has_failed = False
        return effects

    def check(self, ticket: str, event: RequestEvent, before: RequestState, after: RequestState) -> None:
        self.reached[before, event] += 1
        successors = TRANSITIONS[before][event]
        assert successors is not None, (event, before)
        assert after in successors or (not successors and after is before), (event, before, after)
        if event is RequestEvent.LEFT and before is RequestState.RUNNING:
            self.sent.pop(ticket, None)  # no engine got it: it costs nothing
        elif event is RequestEvent.FORGOTTEN:
            self.account(ticket, None)

    def account(self, ticket: str, outcome: Outcome | None) -> None:
        """The request has used what its outcome says, or what was reserved."""
        grants, run = self.sent.pop(ticket, ((), None))
        if run is None:
            return
        used: RequestUsage = run.reserved if outcome is None else run.used_tokens(outcome)
        for charge in (charge for grant in grants if not grant.is_global for charge in grant.charges):
            self.used[charge.key] += used.amount_of(charge.resource)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Decision() | RequestRefused():
                    # delivered to a stream that waits, and nobody else
                    assert isinstance(self.pending.pop(effect.ticket), RequestHeld)
                    self.follow(effect)
                case LoadAdapter():
                    self.asked_to_load(effect)
                case Prefill() | CancelPrefill() | AbortDecode():
                    self.perform_leg(effect)
                case SettleGrant():
                    self.unsettled.remove(effect.grant)
                    self.store.settle(effect.grant, effect.used, self.now)
                case Broadcast(LimitSpent() as spent):
                    self.spent[spent.key] += spent.amount
                case WakeAt():
                    self.wake_at_s = effect.at_s if self.wake_at_s is None else min(self.wake_at_s, effect.at_s)

    def perform_leg(self, effect: Prefill | CancelPrefill | AbortDecode) -> None:
        ticket = effect.ticket
        match effect:
            case Prefill():
                legs = self.beside if effect.is_beside else self.legs
                assert ticket not in legs
                legs[ticket] = effect, self.now + effect.timeout_s
            case CancelPrefill() if effect.after_s:
                ask, due_at_s = self.beside[ticket]
                self.beside[ticket] = ask, min(due_at_s, self.now + effect.after_s)
            case CancelPrefill() if ticket in self.aborting:
                self.aborting.remove(ticket)
            case CancelPrefill():
                del self.legs[ticket]
            case AbortDecode():
                assert ticket in self.decided
                self.aborting.add(ticket)

    def asked_to_load(self, ask: LoadAdapter) -> None:
        """Each load once, and no adapter is unloaded that a request needs."""
        keys = [(one.address, one.adapter) for one in self.loads]
        assert (ask.address, ask.adapter) not in keys
        for run in (one.run for one in self.core._records.values() if one.state in IN_FLIGHT):
            at = None if run is None else (run.assignment.endpoint.address, run.assignment.adapter)
            is_current = run is not None and run.pool.table.is_current(run.assignment.endpoint)
            assert not is_current or at not in [(ask.address, one) for one in ask.unload]
        self.loads.append(ask)

    def load_ends(self, ask: LoadAdapter, problem: AdapterLoadProblem | None = None) -> None:
        self.loads.remove(ask)
        gone = () if problem is AdapterLoadProblem.UNREACHABLE else ask.unload
        result = AdapterLoadResult(ask.server, ask.address, ask.adapter, problem, unloaded=gone)
        self.happens(None, "", lambda: self.core.on_work_result(result, self.now))
        self.must_wake()

    def leg_ends(self, ticket: str, result: PrefillResult) -> None:
        is_beside = ticket in self.beside
        ask, _ = (self.beside if is_beside else self.legs).pop(ticket)
        event = None if is_beside else RequestEvent.GRANTED
        effects = self.happens(event, ticket, lambda: self.core.on_work_result(result, self.now))
        (ended,) = [one for one in effects if isinstance(one, PrefillEnded)]
        assert ended.leg.address == ask.address
        self.must_wake()

    def follow(self, own: RequestEffect | None) -> None:
        match own:
            case AskLimits() | AskGuard() | AskPromptTokens() | RequestHeld():
                self.pending[own.ticket] = own
                if isinstance(own, RequestHeld):
                    self.answer_by_s[own.ticket] = self.now + own.longest_s
            case Decision():
                self.decided.append(own.ticket)
                run = self.core._records[own.ticket].run
                assert run is not None
                row, adapter = run.assignment.endpoint.row, run.assignment.adapter
                assert adapter is None or adapter in (run.pool.table.loras[row].served or ())
                self.sent[own.ticket] = own.grants, run

    def must_wake(self) -> None:
        """Room may have come up: whoever waits is looked at soon."""
        assert not self.core.count_requests(RequestState.QUEUED, RequestState.LOADING) or (
            self.wake_at_s is not None and self.wake_at_s <= self.now
        )

    def arrive(
        self,
        count: int,
        *,
        words: int = 50,
        tenant: str = "a",
        urgency: str = "",
        stream: bool = True,
        model: str = "m",
    ) -> None:
        headers = {"x-attache-tenant": tenant, "x-urgency": urgency}
        head = RequestHead("POST", "/v1/chat/completions", headers, has_body=True, is_trusted=True)
        for _ in range(count):
            arrival = self.core.builder.build_by_model(head, body(words, stream=stream, model=model))
            ticket = f"t-{len(self.own) + 1:x}"

            def verb() -> list[Effect]:
                own, effects = self.core.arrive(arrival, self.now)  # noqa: B023 - called at once
                assert own.ticket == ticket  # noqa: B023 - called at once
                self.follow(own)
                return effects

            self.happens(RequestEvent.ARRIVED, ticket, verb)
            self.own.append(ticket)
            self.seen.append(ticket)

    def asking(self) -> list[str]:
        return [ticket for ticket, one in self.pending.items() if not isinstance(one, RequestHeld)]

    def all_that_was_asked_for_comes(self) -> None:
        while asking := self.asking():
            for ticket in asking:
                self.answer(ticket, "granted")

    def answer(self, ticket: str, kind: str) -> None:
        ask = self.pending.pop(ticket)
        answer: Answer = None
        if isinstance(ask, AskLimits) and kind != "nobody":
            answer = self.grant(ask) if kind == "granted" else RateLimited("", kind="", headers={}, retry_after_s=1)
        elif isinstance(ask, AskGuard):
            answer = GUARD_ANSWERS[kind]
        elif isinstance(ask, AskPromptTokens) and kind == "granted":
            answer = list(range(100))
        self.resume(ticket, answer)

    def resume(self, ticket: str, answer: Answer) -> None:
        def verb() -> list[Effect]:
            own, effects = self.core.resume(ticket, answer, self.now)
            self.follow(own)
            return effects

        self.happens(RequestEvent.ANSWERED, ticket, verb)

    def grant(self, ask: AskLimits) -> Grant | Refusal:
        try:
            grant = msgspec.structs.replace(self.store.reserve(ask.charges, self.now), is_global=True)
        except RateLimited as refusal:
            return refusal
        self.unsettled.append(grant)
        return grant

    def make(self, event: RequestEvent, ticket: str, status: int = 200, tokens: int | None = 70) -> None:
        if event is RequestEvent.OUTCOME:
            outcome = outcome_of(ticket, status, tokens)
            self.settle(outcome, lambda: self.core.on_outcome(outcome, self.now))
        elif event is RequestEvent.STARTED_ELSEWHERE:
            self.hear("p", msgspec.structs.replace(STARTED, ticket=ticket))
        else:
            self.close(ticket, event)

    def close(self, ticket: str, event: RequestEvent) -> None:
        if self.pending.pop(ticket, None) is None and ticket in self.decided:
            self.decided.remove(ticket)
        changes = self.core.state_of(ticket) not in {RequestState.ABSENT, RequestState.ENDED}
        verb = self.core.on_disconnect if event is RequestEvent.LEFT else self.core.on_stream_closed
        self.happens(event, ticket, lambda: verb(ticket, self.now))
        if changes:
            self.must_wake()

    def settle(self, outcome: Outcome, verb: Callable[[], list[Effect]]) -> None:
        ticket, state = outcome.ticket, self.core.state_of(outcome.ticket)
        effects = self.happens(RequestEvent.OUTCOME, ticket, verb)
        counts = state in {RequestState.RUNNING, RequestState.ENDED}
        assert len([one for one in effects if isinstance(one, OutcomeJoined)]) == counts
        if counts:
            self.account(ticket, outcome)

    def pass_time(self, seconds: float) -> None:
        """As a shell with a timer: the core is called when it asked to be, and never else."""
        until, ticks = self.now + seconds, 0
        while True:
            due = [(at_s, ticket) for ticket, (_, at_s) in {**self.legs, **self.beside}.items() if at_s <= until]
            if due and (self.wake_at_s is None or min(due)[0] < self.wake_at_s):
                at_s, ticket = min(due)
                self.now = max(self.now, at_s)
                self.leg_ends(ticket, PrefillResult(ticket, "timeout"))
                continue
            if self.wake_at_s is None or self.wake_at_s > until:
                break
            self.now, self.wake_at_s = max(self.now, self.wake_at_s), None
            self.happens(None, "", lambda: self.core.tick(self.now))
            ticks += 1
            assert ticks < _MOST_TICKS
        self.now = until
        for record in self.core._records.values():
            if record.state in WAITING or record.state is RequestState.PREFILLING:
                assert self.answer_by_s[record.ticket] > self.now - 1e-6, "its gateway does not wait any longer"
            if record.state is RequestState.LOADING:
                assert record.since_s + 10.0 > self.now, "its client should have been told"
            if record.state is RequestState.AWAITING_ENGINE:
                assert record.engine_by_s > self.now, "its client should have been told"
                pool = record.arrival_before_dispatch.pool
                assert not pool.readiness.is_whole or pool.name in self.core.admission.gates
            if record.state is RequestState.QUEUED:
                assert record.queued is not None
                assert record.queued.expires_at_s > self.now, "its client should have been told"

    def configure(self, endpoints: str, gate: str, limits: str, activation: str = "", guard: str = "") -> None:
        made = snapshot(endpoints, gate, limits, activation, guard, self.pairs)
        self.happens(None, "", lambda: self.core.apply(made, self.now))
        self.must_wake()

    def set_feed(self, *, is_there: bool) -> None:
        """An engine says what it caches, or not: with it, requests ask for their tokens."""
        pool = self.core.pools[SERVER]
        if pool.table.is_active[:1].any():
            pool.caches.set_feed_state(0, is_whole=is_there or None)

    def deliver(self, name: str, events: list[PeerEvent], *, is_lost: bool) -> None:
        for one in events:
            self.batches.append((name, one))
            if not is_lost:
                self.hear(name, one)

    def hear(self, name: str, said: PeerEvent) -> None:
        self.heard_at_s[name] = self.now
        verb = lambda: self.core.apply_peer_batch(EventBatch(name, [said]), self.now)  # noqa: E731 - short
        match said:
            case RequestStarted(ticket=ticket):
                is_new = self.core.state_of(ticket) is RequestState.ABSENT
                engines = (said.assignment.endpoint, said.assignment.prefilled_by)
                is_known = all(self.core.pools[SERVER].table.row_of(one.address) is not None for one in engines)
                self.happens(RequestEvent.STARTED_ELSEWHERE, ticket, verb)
                if is_new and is_known:
                    self.elsewhere[ticket] = name
            case RequestPrefilled():
                self.happens(None, "", verb)
            case OutcomeKnown(outcome=outcome):
                self.settle(outcome, verb)
            case ProcessAlive(running=stays):
                self.happens(None, "", verb)
                self.over(ticket for ticket, at in self.elsewhere.items() if at == name and ticket not in stays)
            case _:
                ticket = getattr(said, "ticket", "")
                is_its = self.elsewhere.get(ticket) == name
                self.happens(RequestEvent.FINISHED if is_its else None, ticket, verb)
                self.over([ticket] if is_its else [])
        self.must_wake()

    def over(self, tickets: Iterable[str]) -> None:
        for ticket in list(tickets):
            del self.elsewhere[ticket]

    def beat(self, seconds: float) -> None:
        """Workers that were not heard of for long are taken for gone."""
        self.pass_time(seconds)
        effects = self.happens(None, "", lambda: self.core.heartbeat(self.now))
        (alive,) = [one for one in told(effects) if isinstance(one, ProcessAlive)]
        assert sorted(alive.running) == sorted([*self.decided, *self.legs])
        gone = {name for name, at_s in self.heard_at_s.items() if self.now - at_s > SILENCE_S}
        for name in gone:
            del self.heard_at_s[name]
        self.over(ticket for ticket, name in self.elsewhere.items() if name in gone)
        assert self.core.peer_view.peer_count == len(self.heard_at_s)
        self.must_wake()

    def holds(self) -> None:
        """What must be so after every event."""
        self._streams_and_records_agree()
        self._endpoints_hold_what_is_in_flight_and_nothing_else()
        self._gates_hold_who_waits_and_flows_what_runs()
        self._the_page_for_autoscalers_tells_what_waits_and_what_runs()

    def _streams_and_records_agree(self) -> None:
        records = self.core._records.values()
        assert {ticket for ticket, one in self.pending.items() if isinstance(one, RequestHeld)} == {
            one.ticket for one in records if one.state in WAITING or one.state is RequestState.PREFILLING
        }
        assert self.legs.keys() == {one.ticket for one in records if one.state is RequestState.PREFILLING}
        assert self.legs.keys() == self.core._dispatcher.legs.keys()
        beside = self.core._dispatcher.beside
        assert self.beside.keys() == {ticket for ticket, one in beside.items() if one is not None}
        assert self.aborting == beside.keys() - self.beside.keys()
        assert self.aborting <= {*self.decided}
        waiting = {name for group in self.core._pipeline.engines._groups.values() for name in group.records}
        assert waiting == {one.ticket for one in records if one.state is RequestState.AWAITING_ENGINE}
        groups = self.core._pipeline.engines._groups.values()
        everybody = [one for group in groups for one in group.records.values()]
        for held, theirs in [
            (self.core._pipeline.engines._held, everybody),
            *((g.held, [*g.records.values()]) for g in groups),
        ]:
            tenants = Counter(one.arrival_before_dispatch.caller.tenant for one in theirs)
            assert (held.requests, dict(held._requests)) == (len(theirs), dict(tenants))
            assert held.bytes == held._bytes.total() == sum(len(one.arrival_before_dispatch.body) for one in theirs)
            assert held._bytes.keys() == tenants.keys()
        assert {*self.decided, *self.legs, *self.elsewhere} == {one.ticket for one in records if one.state in IN_FLIGHT}
        # beside those that have ended and wait for their outcomes, there is nothing else
        assert len(records) == len(self.pending) + len(self.decided) + len(self.elsewhere) + self.core.count_requests(
            RequestState.ENDED
        )

    def _endpoints_hold_what_is_in_flight_and_nothing_else(self) -> None:
        for pool in self.core.pools.values():
            table, requests = pool.table, np.zeros(len(pool.table.in_flight))
            tokens = np.zeros(len(requests))
            adapters = Counter[tuple[int, str | None]]()
            for run in (one.run for one in self.core._records.values() if one.state in IN_FLIGHT):
                for one in () if run is None or run.pool is not pool else engines_of(run):
                    if table.is_current(one):
                        requests[one.row] += 1
                        tokens[one.row] += run.assignment.tokens
                        adapters[one.row, run.assignment.adapter] += 1
            assert (pool.slots is None) == bool(self.pairs)
            for row, name in (
                () if pool.slots is None else ((row, name) for row in table.active_rows for name in ("sql", "law"))
            ):
                assert pool.slots.in_flight_count(row, name) == adapters[row, name]
            # rows of endpoints that are gone keep their last numbers until they are used again
            assert (table.in_flight == requests)[table.is_active].all()
            assert np.isclose(table.in_flight_tokens, tokens)[table.is_active].all()

    def _gates_hold_who_waits_and_flows_what_runs(self) -> None:
        records = self.core._records.values()
        for gate in self.core.admission.gates.values():
            assert len(gate.queue) == self.core.count_requests(RequestState.QUEUED)
            not_settled = [one for one in records if one.run and one.run.gate is gate and one.state in _NOT_SETTLED]
            assert sum(band.flows.running.sum() for band in gate.queue.bands) == len(not_settled)

    def _the_page_for_autoscalers_tells_what_waits_and_what_runs(self) -> None:
        own = [one for one in self.core._records.values() if one.is_decided_here]
        waiting = [one for one in own if one.state in WAITING]
        runs = [
            load
            for one in own
            if one.run is not None and one.state in IN_FLIGHT
            for load in demand_of(one.run, one.state)
        ]
        said = self.core.demand(self.now).servers[SERVER]
        assert sum(one.arrivals for one in said.counted.values()) == len(self.own)
        assert said.queued == len(waiting)
        assert (said.queued_tokens > 0) == bool(waiting)
        assert said.oldest_wait_s == max([self.now - one.arrived_at_s for one in waiting], default=0.0)
        if self.core.pools[SERVER].readiness.can_serve:
            assert said.at_zero == len([one for one in waiting if one.state is RequestState.AWAITING_ENGINE])
        else:
            assert said.at_zero == len(waiting)
        assert {address: one.in_flight for address, one in said.engines.items() if one.in_flight} == Counter(
            address for address, _ in runs
        )
        for address, one in said.engines.items():
            tokens = sum(tokens for other, tokens in runs if other == address)
            assert np.isclose(one.in_flight_tokens, tokens)

    def end(self) -> None:
        """All that is open ends, and nothing may be left."""
        try:
            if not self.has_failed:
                self.everything_ends()
        finally:
            self.patch.undo()

    def everything_ends(self) -> None:
        self.all_that_was_asked_for_comes()
        # whoever is held is told within the longest wait, without anything else happening
        self.pass_time(41.0)
        assert not self.pending
        assert not self.core._pipeline.adapters._groups
        for ask in list(self.loads):
            self.load_ends(ask, AdapterLoadProblem.UNREACHABLE)
        for ticket in list(self.decided):
            self.close(ticket, RequestEvent.FINISHED)
        self.beat(SILENCE_S + 1)
        assert self.elsewhere == {}
        for ticket in self.seen:
            self.settle(one := outcome_of(ticket), lambda one=one: self.core.on_outcome(one, self.now))
        assert self.core._records == {}, [
            (one.ticket, one.state.name, one.origin) for one in self.core._records.values()
        ]
        assert self.unsettled == []
        assert self.sent == {}
        assert dict(self.spent) == pytest.approx({**dict.fromkeys(self.spent, 0.0), **self.used}, abs=1e-6)
        assert all(one.claims == pytest.approx(0, abs=1e-6) for one in self.core.admission.limits._buckets.values())
