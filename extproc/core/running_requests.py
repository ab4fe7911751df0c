# SPDX-License-Identifier: Apache-2.0
"""Dispatched requests, until the stream is closed and the outcome known; and each engine's load by them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.admission.fair_queue import weighted_tokens
from extproc.admission.rate_limits import NO_USAGE
from extproc.api.admission import FlowControl
from extproc.api.status_page_contents import EndpointLoad
from extproc.core.demand import count_outcome, count_request_end
from extproc.core.dispatch import request_started_event, track_peer_request
from extproc.core.effects import Broadcast, Effect, OutcomeJoined, RequestSloJudged, run_or_report_fault
from extproc.core.outcome_feedback import (
    forget_missing_adapter,
    record_attempt_outcomes,
    record_endpoint_outcome,
    release_untried_probes,
    update_estimates,
)
from extproc.core.peer_events import RequestEnded
from extproc.core.remote_prefill import end_remote_prefill, learn_from_leg
from extproc.core.request_states import IN_FLIGHT, RequestEvent, RequestState
from extproc.core.slo_verdicts import answer_latencies, judge_client_left, judge_outcome
from extproc.scheduling.model_check import on_model_outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.core.fallback_budget import FallbackBudgets
    from extproc.core.limit_accounting import LimitAccounting
    from extproc.core.peer_events import RequestPrefilled, RequestStarted
    from extproc.core.request_record import DispatchedRequest, Outcome, RequestRecord
    from extproc.scheduling.pool import Pool

# Its weights hold where there is no flow control.
_NO_CONTROL: Final = FlowControl()
# Outcomes that never come must not pile up: beyond this many ended requests, the oldest are given up.
MOST_ENDED: Final = 65_536


class RunningRequests:
    """The second half of a request's life, over the one table of ``records``."""

    def __init__(
        self, records: dict[str, RequestRecord], accounts: LimitAccounting, budgets: FallbackBudgets, *, has_peers: bool
    ) -> None:
        self._records = records
        self._accounts = accounts
        self._budgets = budgets
        self._has_peers = has_peers
        # tickets of records in state ENDED, in the order in which their streams closed
        self._ended: OrderedDict[str, None] = OrderedDict()

    def track_peer_request(
        self, event: RequestStarted, origin: str, pool: Pool | None, gate: FlowControlGate | None, now: float
    ) -> bool:
        """Count a request that the process ``origin`` has sent; whether it could be counted."""
        if pool is None or event.ticket in self._records:
            return False
        record = track_peer_request(event, origin, pool, gate, now)
        if record is not None and record.run is not None:
            self._records[event.ticket] = record
            self._budgets.on_dispatch(event.ticket, record.run)
        return record is not None

    def started_events(self, tickets: Iterable[str]) -> Iterator[RequestStarted]:
        """As the other processes were told of those that are in flight here."""
        for ticket in tickets:
            record = self._records.get(ticket)
            if record is not None and record.run is not None and record.is_decided_here and record.state in IN_FLIGHT:
                yield request_started_event(record, record.run)

    def on_stream_closed(self, record: RequestRecord, run: DispatchedRequest, now: float, out: list[Effect]) -> None:
        """Its stream is closed: its endpoint is free of it."""
        self._free(record, run, now, out)
        if record.state is RequestState.SETTLED:
            self._remove(record, now)
            return
        record.set_state(RequestState.ENDED, now)
        self._ended[record.ticket] = None
        if len(self._ended) > MOST_ENDED:
            self._forget(next(iter(self._ended)), now, out)

    def finish_remote(self, tickets: Iterable[str], now: float, out: list[Effect], *, is_moved: bool = False) -> None:
        """Requests of another process are over. ``is_moved``: at these engines, which got none of them."""
        event = RequestEvent.LEFT if is_moved else RequestEvent.FINISHED
        for ticket in tickets:
            record = self._records.get(ticket)
            if record is None or record.run is None or not record.begin_transition(event):
                continue
            if is_moved:
                self.undo_dispatch(record, record.run, now, out)
            else:
                self.on_stream_closed(record, record.run, now, out)

    def undo_dispatch(
        self,
        record: RequestRecord,
        run: DispatchedRequest,
        now: float,
        out: list[Effect],
        *,
        outcome: Outcome | None = None,
    ) -> None:
        """Its client went away before the decision reached the gateway. ``outcome``: of an engine that has worked for
        it all the same; None: no engine got it, and it costs nothing.
        """
        self._remove(record, now)
        if outcome is None:
            self.release_endpoints(record, run, now, out)
        else:
            self._free(record, run, now, out)
            self._close(record, run, outcome, now, out)
        if run.objectives is not None:
            verdicts = judge_client_left(run.objectives, now - record.arrived_at_s, is_streamed=run.sent.is_streamed)
            out.append(RequestSloJudged(run.objectives, verdicts))

    def release_endpoints(self, record: RequestRecord, run: DispatchedRequest, now: float, out: list[Effect]) -> None:
        """It is refused although its engines were picked: they are free of it, and it costs nothing."""
        self._free(record, run, now, out)
        self._accounts.settle_request(record, None, 0.0, now, out)

    def release_for_move(self, record: RequestRecord, run: DispatchedRequest, now: float, out: list[Effect]) -> None:
        """It goes to another ModelServer, and what its limits have granted goes with it."""
        release_untried_probes(run)
        self._free(record, run, now, out, is_moved=True)
        grants, record.grants = record.grants, ()
        self._accounts.settle_request(record, None, 0.0, now, out)
        record.run, record.grants = None, grants

    def on_peer_prefill_ended(self, event: RequestPrefilled, now: float, out: list[Effect]) -> None:
        """The prefill of another process's request has ended."""
        record = self._records.get(event.ticket)
        if record is not None and record.run is not None and record.state in IN_FLIGHT and not record.is_decided_here:
            is_planned = bool(record.run.sent.next_servers)
            end_remote_prefill(record, record.run, event, now, out)
            if not is_planned:
                self._budgets.on_planned(event.ticket, record.run)

    def settle(self, outcome: Outcome, now: float, out: list[Effect]) -> None:
        """Learn from the outcome of a request, and correct what it was charged."""
        record = self._records.get(outcome.ticket)
        if record is None or record.run is None or not record.begin_transition(RequestEvent.OUTCOME):
            return
        run = record.run
        if record.state is RequestState.ENDED:
            self._remove(record, now)
        else:
            record.set_state(RequestState.SETTLED, now)
        self._budgets.learn(run, outcome)
        # what is learned is an estimate; what was granted must be settled
        run_or_report_fault(
            out, "an outcome could not be learned from", partial(_learn, record, run, outcome, now, out)
        )
        reserve, first = run.reserves.get(outcome.served_by), run.pool.name
        if reserve is not None:
            # limits, prices and rows are of the ModelServer that has served it
            run = run.as_served_by_fallback(reserve)
        if record.is_decided_here and run.objectives is not None:
            out.append(RequestSloJudged(run.objectives, judge_outcome(run.objectives, run, outcome)))
        self._close(record, run, outcome, now, out, fell_back_from="" if reserve is None else first)

    def local_tickets(self) -> list[str]:
        """The tickets of this process that are in flight."""
        return [one.ticket for one in self._records.values() if one.is_decided_here and one.state in IN_FLIGHT]

    def _close(
        self,
        record: RequestRecord,
        run: DispatchedRequest,
        outcome: Outcome,
        now: float,
        out: list[Effect],
        *,
        fell_back_from: str = "",
    ) -> None:
        """Charge what it has used. ``fell_back_from``: the ModelServer before that of ``run``."""
        used, service = NO_USAGE, 0.0
        if record.is_decided_here or run.gate is not None:
            used = run.used_tokens(outcome)
            cached = run.assignment.cached_tokens if outcome.cached_tokens is None else outcome.cached_tokens
            control = _NO_CONTROL if run.gate is None else run.gate.control
            service = weighted_tokens(control, used, float(cached))
            if run.api is not None and run.api.spec.body == "unread":
                # no tokens are known of it: it keeps what its dispatch has charged
                service = run.charged
            self._accounts.settle_request(record, used, service, now, out)
        priority = 0 if run.gate is None or record.queued is None else record.queued.priority
        out.append(
            OutcomeJoined(
                run.pool.name,
                run.assignment,
                outcome,
                record.is_decided_here,
                run.sent.tenant,
                used,
                service,
                priority,
                currency="" if run.price is None else run.price.currency,
                model=run.model if run.pool.has_model_name(run.model) else "",
                waited_s=run.sent.waited_s,
                times=answer_latencies(run, outcome) if record.is_decided_here and _is_answered(outcome) else None,
                objectives=run.objectives,
                leg=run.leg,
                prefilled_by=run.prefilled_by,
                is_streamed=run.sent.is_streamed,
                fell_back_from=fell_back_from,
            )
        )

    def _remove(self, record: RequestRecord, now: float) -> None:
        record.set_state(RequestState.ABSENT, now)
        del self._records[record.ticket]
        self._ended.pop(record.ticket, None)

    def _free(
        self, record: RequestRecord, run: DispatchedRequest, now: float, out: list[Effect], *, is_moved: bool = False
    ) -> None:
        run.pool.release(run.assignment, run.pins, now)
        self._budgets.on_stream_closed(record.ticket, run)
        count_request_end(record, run)
        if self._has_peers and record.is_decided_here:
            out.append(Broadcast(RequestEnded(record.ticket, is_moved)))

    def _forget(self, ticket: str, now: float, out: list[Effect]) -> None:
        record = self._records[ticket]
        record.begin_transition(RequestEvent.FORGOTTEN)
        self._remove(record, now)
        if record.run is not None:
            reserved = record.run.reserved.with_cost(record.run.price)
            self._accounts.settle_request(record, reserved, record.run.charged, now, out)


def _learn(record: RequestRecord, run: DispatchedRequest, outcome: Outcome, now: float, out: list[Effect]) -> None:
    count_outcome(record, run, outcome)
    if run.is_aborted and not _has_lost_its_engine(run, outcome):
        # at our request
        if run.unjudged is not None:
            learn_from_leg(*run.unjudged, now, out, is_ours=record.is_decided_here)
        return
    if outcome.is_of_gateway:
        release_untried_probes(run)
        return
    if outcome.served_by not in {"", run.pool.name}:
        record_attempt_outcomes(run, outcome, now, out, is_ours=record.is_decided_here)
        return
    record_endpoint_outcome(run, outcome, now, out)
    update_estimates(run, outcome, now, is_ours=record.is_decided_here, has_limits=bool(record.grants))
    if run.assignment.adapter is not None:
        forget_missing_adapter(run, outcome, now)
    if run.is_for_model:
        on_model_outcome(run.pool, outcome.served, outcome.status, run.api)


def _has_lost_its_engine(run: DispatchedRequest, outcome: Outcome) -> bool:
    """Whether a fallback has it because its engine was gone: one that ends it at our request answers 500."""
    is_elsewhere = outcome.served_by not in {"", run.pool.name}
    return is_elsewhere and run.assignment.endpoint.address not in outcome.errors


def _is_answered(outcome: Outcome) -> bool:
    return 200 <= outcome.status < 300 and not (outcome.has_left or outcome.was_cut or outcome.is_cut)


def endpoint_loads_by_pool(
    records: Iterable[RequestRecord], pools: Iterable[Pool]
) -> Iterator[dict[str, EndpointLoad]]:
    """By address: every configured engine, and every other one that has a request running. In parts, one for each pool,
    so that others may have their turn between two; ``merge_loads`` puts them together.

    Of a request with fallbacks the first choice counts, and with prefill elsewhere both engines do. One that a fallback
    serves is in that engine's own report.
    """
    running = Counter(
        address
        for record in records
        if record.is_decided_here and record.run is not None and record.state in IN_FLIGHT
        for address in _engines_of(record.run)
    )
    yield {address: EndpointLoad(count) for address, count in running.items()}
    for pool in list(pools):
        table, tokens_held = pool.table, pool.caches.tokens_held
        # reading single values of a column costs more than all other work for an endpoint
        has = (table.running + table.waiting).round().tolist()
        yield {
            address: EndpointLoad(running[address], tokens_held(row), int(has[row]))
            for address, row in zip(table.active_addresses, table.active_rows, strict=True)
        }


def merge_loads(found: dict[str, EndpointLoad], part: dict[str, EndpointLoad]) -> None:
    """An engine of several pools gets the largest values of any of them."""
    for address, one in part.items():
        known = found.get(address)
        if known is not None:
            one = EndpointLoad(  # noqa: PLW2901 - what both know
                one.in_flight,
                max(known.cached_tokens, one.cached_tokens),
                max(known.reported, one.reported),
            )
        found[address] = one


def endpoint_loads(records: Iterable[RequestRecord], pools: Iterable[Pool]) -> dict[str, EndpointLoad]:
    """All parts at once."""
    found: dict[str, EndpointLoad] = {}
    for part in endpoint_loads_by_pool(records, pools):
        merge_loads(found, part)
    return found


def _engines_of(run: DispatchedRequest) -> set[str]:
    assignment = run.assignment
    return {one.address for one in (assignment.endpoint, assignment.prefill) if one is not None}
