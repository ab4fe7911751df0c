"""The way of a request, as plain function calls: it arrives, goes or waits, is over, and its outcome is known.

No clock, no event loop and no network in here: the same pipeline runs under Envoy, in tests and in virtual time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from extproc.admission.identity import Identities
from extproc.admission.limits import Usage
from extproc.admission.queued_request import QueuedRequest
from extproc.core.admission_controller import AdmissionController
from extproc.core.explanation import explain
from extproc.core.feedback import Outcome, Sent, learn, usage_of
from extproc.core.intake import Intake
from extproc.core.rewriting import changed_body, choice_of, prompt_of
from extproc.core.types import BUNDLE, Arrival, Attachment, Decision, Head, Held, Released, Settled, Terms
from extproc.errors import Refusal
from extproc.prefix.turns import tail_of
from extproc.routing.resolve import RoutingTable
from extproc.scheduling.pickers import PickerMaker, pickers_for
from extproc.scheduling.pool import Pool

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from extproc.config.types import Snapshot
    from extproc.core.admission_controller import Elsewhere
    from extproc.core.explanation import Explanation
    from extproc.endpoints.table import Bools
    from extproc.request.model import Api
    from extproc.scheduling.cache_estimator import Expectation
    from extproc.scheduling.pickers import MadePicker, MakePicker
    from extproc.scheduling.request_started import RequestStarted

# Access log entries that never come must not pile up: beyond this many, the oldest are given up.
_MOST_UNSETTLED: Final = 65_536


class Pipeline:
    """Decides with what it knows; every verb takes the time in seconds and returns what is to be done."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        rng: random.Random,
        ticket_prefix: str,
        make_picker: MakePicker | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._make_picker = make_picker or PickerMaker()
        self.pools: dict[str, Pool] = {}
        self._pickers: dict[str, MadePicker] = {}
        self._rng = rng
        self._ticket_prefix = ticket_prefix
        self._tickets = 0
        self._sent: dict[str, Sent] = {}
        self._unsettled: OrderedDict[str, Sent] = OrderedDict()
        self._snapshot = snapshot
        self.admission = AdmissionController(rng=rng, elsewhere=elsewhere)
        # whether anything depends on who asks, or on what a request is worth
        self.asks_who = False
        # of the configuration in use
        self.intake: Intake
        self.apply(snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """The configuration in use."""
        return self._snapshot

    def apply(self, snapshot: Snapshot) -> None:
        """Switch to another configuration at once; what is known of servers that stay is kept.

        Raises ConfigInvalid, with nothing changed, if a picker's file is wrong.
        """
        pickers = pickers_for(snapshot, self._pickers, self._make_picker)
        routing = RoutingTable(snapshot)
        pools: dict[str, Pool] = {}
        for server in snapshot.servers:
            name = server.metadata.key
            picker, known = pickers[name].picker, self.pools.get(name)
            # the loader gives what has not changed again, as the same object
            if known is not None and (known.spec is not server.spec or known.picker is not picker):
                known.update(server.spec, picker)
            pools[name] = known or Pool(name, server.spec, picker)
            pools[name].adapters = routing.adapters_of(name)
        self.pools, self._pickers = pools, pickers
        self.admission.apply(snapshot, pools)
        self._snapshot = snapshot
        self.asks_who = bool(self.admission.gates or snapshot.picker_files) or self.admission.has_any_limits
        self.intake = Intake(routing, Identities(snapshot), pools, self.admission, self._rng)

    def enter(self, arrival: Arrival, now: float, terms: Terms) -> Decision | Held:
        """Go at once, or wait for an engine to have room; raises a Refusal, and then nothing was granted."""
        try:
            if arrival.pool.name not in self.admission.gates:
                return self._send(arrival, now, terms)
            pool = arrival.pool
            expectation = pool.expect(prompt_of(arrival, terms.tokens), now)
            queued = self.admission.queued(self._next_ticket(), arrival, expectation, terms, now)
            found = self.admission.enter(queued, arrival, terms, now)
            if isinstance(found, Held):
                return found
            return self._send(arrival, now, terms, queued=queued, among=found, expectation=expectation)
        except Refusal:
            self.admission.settle_grants(terms.grants, None, now)
            raise

    def release(self, now: float) -> Iterator[Released]:
        """The waits that end: engines have room, or it took too long."""
        for held, found in self.admission.next(now):
            result: Decision | Refusal
            if isinstance(found, Refusal):
                result = found
            else:
                try:
                    result = self._send(held.arrival, now, held.terms, queued=held.queued, among=found)
                except Refusal as refusal:
                    result = refusal
            if isinstance(result, Refusal):
                self.admission.settle_grants(held.terms.grants, None, now)
            yield Released(held, result)

    def leave(self, held: Held, now: float) -> None:
        """The client of a held request has gone, before it heard of a decision."""
        if self.admission.leave(held):
            self.admission.settle_grants(held.terms.grants, None, now)
        sent = self._sent.get(held.ticket)
        if sent is not None:
            # let go, and never sent
            sent.is_settled = True
            self.finish(held.ticket, now)
            self._close(sent, None, 0.0, now)

    def dispatch(self, arrival: Arrival, now: float, terms: Terms = Terms()) -> Decision:  # noqa: B008 - frozen
        """Pick, and count the request as sent, whoever waits; raises a Refusal."""
        return self._send(arrival, now, terms)

    def _send(
        self,
        arrival: Arrival,
        now: float,
        terms: Terms,
        *,
        queued: QueuedRequest | None = None,
        among: Bools | None = None,
        expectation: Expectation | None = None,
    ) -> Decision:
        request, pool = arrival.request, arrival.pool
        choice = choice_of(arrival, terms, among)
        prompt = prompt_of(arrival, terms.tokens)
        considered = pool.consider(prompt, choice, now=now, rng=self._rng, expectation=expectation)
        explanation = explain(considered, pool) if terms.wants_reasons else None
        output_tokens = pool.expected_output(request.max_output_tokens)
        assignment, chain = pool.commit(considered, now, output_tokens), considered.expectation.chain
        ticket = self._next_ticket() if queued is None else queued.ticket
        covered = pool.caches.index.covered_bytes(len(chain))
        sent = self._sent[ticket] = Sent(
            pool=pool,
            assignment=assignment,
            chain=chain,
            tail=tail_of(request.prompt, covered),
            prompt_bytes=len(request.prompt),
            is_streamed=request.is_streamed,
            sent_at_s=now,
            grants=terms.grants,
            reserved=Usage(assignment.input_tokens, output_tokens),
            most_output=math.inf if request.max_output_tokens is None else request.max_output_tokens,
        )
        waited_s = 0.0
        gate = self.admission.gates.get(pool.name) if queued is not None else None
        if queued is not None and gate is not None:
            waited_s = now - queued.arrived_s
            sent.gate, sent.queued, sent.waited_s = gate, queued, waited_s
            sent.charged = gate.service(sent.reserved, assignment.cached_tokens)
            gate.sent(queued, sent.charged, now)
        return Decision(
            ticket,
            arrival.destination.server,
            assignment,
            changed_body(arrival),
            explanation,
            queued,
            waited_s,
            terms.grants,
        )

    def arrive(self, api: Api, head: Head, body: bytes, now: float) -> Decision:
        """Receive and dispatch in one; raises a Refusal."""
        return self.dispatch(self.intake.receive(api, head, body), now)

    def explain(
        self, arrival: Arrival, now: float, *, tokens: Sequence[int] | None = None, attachment: Attachment = BUNDLE
    ) -> Explanation:
        """What would be decided, with every reason, and nothing changed; raises a Refusal."""
        choice = choice_of(arrival, Terms(attachment=attachment, wants_reasons=True), None)
        pool = arrival.pool
        return explain(pool.consider(prompt_of(arrival, tokens), choice, now=now, rng=self._rng), pool)

    def sent(self, ticket: str) -> Sent | None:
        """A request that runs."""
        return self._sent.get(ticket)

    def repeat(self, event: RequestStarted, now: float) -> bool:
        """Count a request that another process has sent; whether it could be."""
        pool = self.pools.get(event.server)
        if pool is None or event.ticket in self._sent:
            return False
        assignment = pool.repeat(event, now)
        if assignment is None:
            return False
        sent = self._sent[event.ticket] = Sent(
            pool=pool,
            assignment=assignment,
            chain=event.chain,
            tail=event.tail,
            prompt_bytes=event.prompt_bytes,
            is_streamed=event.is_streamed,
            sent_at_s=now,
            is_ours=False,
        )
        gate = self.admission.gates.get(event.server)
        if gate is not None and event.flow is not None:
            # the flow has had it, wherever it came in
            sent.gate = gate
            sent.queued = QueuedRequest(event.ticket, event.flow, now, now, priority=event.priority)
            sent.charged, sent.reserved = event.service, Usage(event.input_tokens, event.tokens - event.input_tokens)
            gate.sent(sent.queued, event.service, now)
        return True

    def finish(self, ticket: str, now: float = 0.0) -> None:
        """The request's stream has ended: its endpoint is free of it."""
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return
        sent.pool.release(sent.assignment, sent.chain, now)
        if not sent.is_settled:
            self._unsettled[ticket] = sent
            if len(self._unsettled) > _MOST_UNSETTLED:
                _, lost = self._unsettled.popitem(last=False)
                self._close(lost, lost.reserved, lost.charged, now)

    def settle(self, outcome: Outcome, now: float) -> Settled | None:
        """Learn from what happened; None if the ticket is unknown (another process gave it, or it is settled)."""
        sent = self._sent.get(outcome.ticket) or self._unsettled.pop(outcome.ticket, None)
        if sent is None or sent.is_settled:
            return None
        sent.is_settled = True
        learn(sent, outcome, now)
        if sent.gate is None and not sent.grants:
            return Settled(sent.pool.name, sent.assignment, outcome, sent.is_ours)
        used = usage_of(sent, outcome)
        service = 0.0
        if sent.gate is not None:
            cached = sent.assignment.cached_tokens if outcome.cached_tokens is None else outcome.cached_tokens
            service = sent.gate.service(used, float(cached))
        self._close(sent, used, service, now)
        return Settled(sent.pool.name, sent.assignment, outcome, sent.is_ours, sent.queued, service)

    def _close(self, sent: Sent, used: Usage | None, service: float, now: float) -> None:
        """Correct the accounts of its flow and of its limits; None: it never went."""
        if sent.gate is not None and sent.queued is not None:
            tokens = 0.0 if used is None else used.input_tokens + used.output_tokens
            sent.gate.over(sent.queued, service - sent.charged, tokens=tokens, now=now)
        if sent.is_ours:
            self.admission.settle_grants(sent.grants, used, now)

    def _next_ticket(self) -> str:
        self._tickets += 1
        return f"{self._ticket_prefix}-{self._tickets:x}"
