# SPDX-License-Identifier: Apache-2.0
"""Dispatch: pick an endpoint, write the body as its engine is to read it, and count the request there."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.admission.fair_queue import weighted_tokens
from extproc.admission.flow_queues import QueuedRequest
from extproc.admission.rate_limits import RequestUsage
from extproc.admission.slo_classes import ObjectiveTable
from extproc.api.charged_tokens import ExpectedTokens
from extproc.core.breakers import check_server_breaker
from extproc.core.demand import count_dispatch, count_refusal
from extproc.core.effects import (
    Broadcast,
    Decision,
    Effect,
    Fault,
    RequestHeld,
    RequestHistory,
    RequestRefused,
    RequestSloJudged,
    run_or_report_fault,
)
from extproc.core.explanation import MOST_EXPLAINED, Explanation, explain_pick
from extproc.core.outcome_feedback import SWEEP_S, SilentEngineSweep
from extproc.core.peer_events import RequestStarted
from extproc.core.remote_prefill import ConcurrentPrefill, RemotePrefillTask, make_prefill_effect, why_not_disaggregated
from extproc.core.request_record import NO_RESERVES, DispatchedRequest, PrefillLegResult, RequestRecord, SentRequest
from extproc.core.request_states import WAITING, RequestEvent, RequestState
from extproc.core.slo_verdicts import judge_client_left, judge_refusal
from extproc.core.usage_log import milliseconds, usage_of_decision, usage_of_refusal
from extproc.engines.engine_responses import PrefillResponse
from extproc.refusals import EngineStarting, NoEndpoint, Refusal
from extproc.request.grpc_call import with_model_name
from extproc.request.json_rewrite import has_unambiguous_names, raw_top_level_fields, with_changes
from extproc.request.multipart_form import read_form, with_fields
from extproc.request.parameter_overrides import lowered_token_limits
from extproc.request.prefill_protocols import BodyChanges
from extproc.scheduling.cache_estimator import Prompt
from extproc.scheduling.pool import PickConstraints
from extproc.translate.directive import NAMES, TranslationDirective
from extproc.wire_names import DEGRADED, SERVED_BY

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.admission.slo_classes import ObjectiveClass
    from extproc.api.usage_log import UsageContext
    from extproc.core.demand import DemandMeter
    from extproc.core.limit_accounting import LimitAccounting
    from extproc.core.request_record import Arrival, FallbackExpectation, FallbackPlan, GatewayProperties
    from extproc.endpoints.table import Bools
    from extproc.request.inference_request import InferenceRequest
    from extproc.scheduling.cache_estimator import PromptExpectation
    from extproc.scheduling.picker import PluginFailed
    from extproc.scheduling.pool import Assignment, Pool, UncommittedPick


_NO_COPY: Final = "the copy of a request could not be drawn"
_NO_PLAN: Final = "the fallbacks of a request could not be planned"


def server_removed_refusal(server: str) -> NoEndpoint:
    """For a request whose server left the configuration before an engine got it."""
    return NoEndpoint(f"The model is not served any more by '{server}'.")


class PendingDecision(msgspec.Struct, frozen=True):
    """What a pick knows of its decision. ``whole``: see RequestHistory. ``mirror``: see Decision."""

    adds_usage: bool
    explanation: Explanation | None = None
    whole: str = ""
    mirror: str = ""


class AttemptPlanner(Protocol):
    """Plans where Envoy may go on to."""

    def plan_attempts(
        self,
        record: RequestRecord,
        addresses: Sequence[str],
        now: float,
        *,
        base: BodyChanges,
        body: bytes | None,
        is_paired: bool,
        has_sidecar: bool,
    ) -> FallbackPlan | None:
        """All attempts of a request that is about to be sent; None if its rule has no fallbacks."""
        ...

    def on_dispatch(self, ticket: str, run: DispatchedRequest) -> None:
        """The request is sent to an engine."""
        ...

    def on_prefilled(self, ticket: str, run: DispatchedRequest) -> None:
        """The request is sent to its decode engine, and what follows is planned."""
        ...


class MirrorSampler(Protocol):
    """Draws copies of requests."""

    def draw_copy(
        self, arrival: Arrival, attachment: GatewayProperties, considered: UncommittedPick, now: float
    ) -> str:
        """The directive for one, for Envoy; empty: there is none."""
        ...

    def describe_copy(self, arrival: Arrival, considered: UncommittedPick, now: float) -> str:
        """In words; empty if its rule has no mirror."""
        ...


class Dispatcher:
    """Ends an arrival or a wait: an engine gets the request, or it is refused. Owns the table's entries."""

    def __init__(
        self,
        records: dict[str, RequestRecord],
        accounts: LimitAccounting,
        demand: DemandMeter,
        fallbacks: AttemptPlanner,
        mirrors: MirrorSampler,
        *,
        rng: random.Random,
        has_peers: bool,
    ) -> None:
        self._records = records
        self._accounts = accounts
        self._demand = demand
        self._fallbacks = fallbacks
        self.mirrors = mirrors
        self._rng = rng
        self._has_peers = has_peers
        self._overdue = SilentEngineSweep(records)
        # one for each record in state PREFILLING
        self.legs: dict[str, tuple[RemotePrefillTask, PendingDecision]] = {}
        # those that have not ended; None: the decode engine is asked to end the request
        self.beside: dict[str, ConcurrentPrefill | None] = {}
        # the configuration has a usage log
        self.logs_usage = False
        # those of the configuration
        self.objectives = ObjectiveTable()

    def add_record(self, record: RequestRecord, state: RequestState, now: float) -> None:
        """Enter the request in the table, in this state."""
        was_waiting = record.state in WAITING
        record.set_state(state, now)
        if record.trace is not None:
            record.trace.enter_state(state, now)
        if state in WAITING:
            self._demand.begin_wait(record, state)
        elif was_waiting:
            _end_wait(record)
        self._records[record.ticket] = record

    def move_to_server(self, record: RequestRecord, other: Arrival) -> None:
        """A request that is held goes to another ModelServer, as ``other``. Its tokens are those of the first one's
        model.
        """
        self._demand.move_request(record, other)
        record.arrival, record.tokens = other, None

    def remove_and_refund(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """Remove the request from the table and refund its grants: no engine gets it."""
        self._records.pop(record.ticket, None)
        if record.state in WAITING:
            _end_wait(record)
        record.set_state(RequestState.ABSENT, now)
        grants, record.grants = record.grants, ()
        self._accounts.settle_grants(grants, None, now, out)

    def on_client_left(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """The client did not wait for an engine."""
        self.remove_and_refund(record, now, out)
        found = self.objectives_of(record.arrival_before_dispatch)
        if found is not None:
            waited_s, is_streamed = now - record.arrived_at_s, record.arrival_before_dispatch.request.is_streamed
            out.append(RequestSloJudged(found, judge_client_left(found, waited_s, is_streamed=is_streamed)))

    def objectives_of(self, arrival: Arrival) -> ObjectiveClass | None:
        """Of the request's class; None: nothing is promised to it."""
        route, known = arrival.destination.route, self.objectives
        return known.class_of(route, arrival.priority) if route in known.routes else None

    def refuse(self, record: RequestRecord, refusal: Refusal, now: float, out: list[Effect]) -> RequestRefused:
        """Answer the client with the reason why its request cannot be served."""
        self.remove_and_refund(record, now, out)
        count_refusal(record, is_for_want_of_engines=isinstance(refusal, NoEndpoint | EngineStarting))
        arrival, usage = record.arrival_before_dispatch, None
        objectives = self.objectives_of(arrival)
        if objectives is not None:
            verdicts = judge_refusal(objectives, refusal, is_streamed=arrival.request.is_streamed)
            out.append(RequestSloJudged(objectives, verdicts))
        if self.logs_usage:
            held_s = now - record.arrived_at_s if record.is_stream_waiting else 0.0
            usage = usage_of_refusal(arrival, record.ticket, refusal, held_s=held_s, objectives=objectives)
        return RequestRefused(record.ticket, refusal, arrival, record.queued, record.is_stream_waiting, usage)

    def refuse_held(self, record: RequestRecord, refusal: Refusal, now: float, out: list[Effect]) -> None:
        """Refuse a held request that has waited too long, or gives way to another."""
        record.begin_transition(RequestEvent.GIVEN_UP)
        out.append(self.refuse(record, refusal, now, out))

    def dispatch(
        self,
        record: RequestRecord,
        now: float,
        out: list[Effect],
        *,
        gate: FlowControlGate | None = None,
        with_room: Bools | None = None,
        expectation: PromptExpectation | None = None,
    ) -> Decision | RequestHeld:
        """Pick endpoints, and count the request as running there. Raises a Refusal, with nothing counted.

        Held: its prompt is computed first, by another engine than the one that answers. ``gate``: of its server, if the
        request has passed one. ``with_room``: by row, whether the endpoint has room; None: all have. ``expectation``:
        of its prompt, computed if not given.
        """
        arrival = record.arrival_before_dispatch
        request, pool = arrival.request, arrival.pool
        if pool.breaker.trips:
            check_server_breaker(pool, now, is_drawn=record.is_drawn)
        constraints = constraints_of(arrival, record.attachment, with_room, wants_reasons=record.wants_reasons)
        considered = pool.pick_endpoints(
            prompt_of(arrival, record.tokens), constraints, now=now, rng=self._rng, expectation=expectation
        )
        if considered.view.failed:
            out.extend(plugin_faults(pool.name, considered.view.failed))
        base = body_changes(arrival, record.attachment)
        leg = None if considered.pick.prefill_row is None else _leg_of(record, considered, base)
        prefill = None if leg is None else make_prefill_effect(leg, record, now)
        is_beside = leg is not None and leg.protocol.is_beside
        body = changed_body(arrival, base) if leg is None else _body_beside(leg)
        plan = None
        if leg is None or is_beside:
            plan = self._plan(
                record,
                # the prefill engine meets one alone
                considered.addresses[: 1 if is_beside else None],
                base,
                now,
                out,
                body=body,
                is_paired=is_beside,
                has_sidecar=leg is None and considered.pick.prefill_row is not None,
            )
        mirror = ""
        if arrival.destination.rule.mirror is not None:
            draw = partial(self.mirrors.draw_copy, arrival, record.attachment, considered, now)
            mirror = run_or_report_fault(out, _NO_COPY, draw) or ""
        pending = _pending(record, considered, base, constraints.whole, plan, mirror)
        # from here on the request counts, and nothing may fail
        self.add_record(record, RequestState.RUNNING if leg is None or is_beside else RequestState.PREFILLING, now)
        # of the server that serves: the request may have moved since its limits were asked
        estimate = None if record.limited is None else pool.input_estimates.of_tenant(arrival.caller.tenant)
        price = pool.price_at(record.wall_s)
        output_tokens = pool.expected_output(request.max_output_tokens, request.answers)
        found = considered.expectation
        assignment, pins = pool.commit(considered, now, output_tokens, ticket=record.ticket)
        if is_beside or arrival.destination.is_copy:
            # the prefill engine meets one alone; a copy is never sent again
            assignment = msgspec.structs.replace(assignment, addresses=assignment.addresses[:1])
        run = record.run = DispatchedRequest(
            pool,
            assignment,
            pins,  # by position: see Assignment
            SentRequest(
                chain=found.chain,
                tail=found.tail,
                prompt_bytes=len(request.prompt) if request.tokens_scale_with_bytes else 0,
                is_streamed=request.is_streamed,
                tenant=arrival.tenant,
                answers=request.answers,
                expects_usage=request.reports_usage_unchanged or pending.adds_usage,
                waited_s=record.held_s,
                # that of a client is no reason for a fallback
                checks_refusal=None
                if arrival.destination.fallbacks or arrival.engine_api
                else _checks_refusal(record.attachment, pool, assignment, now),
                is_fallback=arrival.destination.is_fallback,
                next_servers=() if plan is None or plan.attempts is None else tuple(plan.reserves),
            ),
            now,
            RequestUsage(assignment.input_tokens, output_tokens),
            record.limited,
            math.inf if request.max_output_tokens is None else request.answers * request.max_output_tokens,
            request.prompts.count,
            request.has_stored_prompt,
            input_estimate=estimate,
            is_for_model=arrival.destination.model == pool.spec.model,
            api=request.api,
            price=price,
            objectives=self.objectives_of(arrival),
            model=arrival.destination.model,
            has_leg=leg is not None and not is_beside,
            attempts=None if plan is None else plan.attempts,
            reserves=NO_RESERVES if plan is None else plan.reserves,
        )
        own: Decision | RequestHeld
        if leg is None:
            own = self.make_decision(record, run, pending, body=body, is_leased=arrival.destination.is_copy)
        elif is_beside:
            under_way = PrefillLegResult(leg.address, "beside", 0.0)
            own = self.make_decision(record, run, pending, body=body, leg=under_way, is_leased=True)
            self.beside[record.ticket] = ConcurrentPrefill(leg, now)
        else:
            own = RequestHeld(record.ticket, RequestState.PREFILLING, max(0.0, record.answer_by_s - now))
            self.legs[record.ticket] = leg, pending
        self._count(record, run, gate, now, out)
        if prefill is not None:
            out.append(prefill)
        return own

    def plan_after_prefill(
        self,
        record: RequestRecord,
        run: DispatchedRequest,
        pending: PendingDecision,
        base: BodyChanges,
        now: float,
        out: list[Effect],
        *,
        body: bytes | None,
        is_paired: bool,
    ) -> PendingDecision:
        """Where Envoy may go on to from the decode engine that gets ``body`` now. ``base``: see ``body_changes``."""
        plan = self._plan(record, run.assignment.addresses, base, now, out, body=body, is_paired=is_paired)
        if plan is None:
            return pending
        run.attempts, run.reserves = plan.attempts, plan.reserves
        run.sent = msgspec.structs.replace(run.sent, next_servers=tuple(plan.reserves))
        self._fallbacks.on_prefilled(record.ticket, run)
        if pending.explanation is None:
            return pending
        explanation = msgspec.structs.replace(pending.explanation, fallbacks=plan.states)
        return msgspec.structs.replace(pending, explanation=explanation)

    def _plan(
        self,
        record: RequestRecord,
        addresses: Sequence[str],
        base: BodyChanges,
        now: float,
        out: list[Effect],
        *,
        body: bytes | None,
        is_paired: bool,
        has_sidecar: bool = False,
    ) -> FallbackPlan | None:
        """See AttemptPlanner."""
        if record.arrival_before_dispatch.destination.fallbacks is None:
            return None
        plan = partial(self._fallbacks.plan_attempts, record, addresses, now, base=base, body=body)
        # it can do without
        return run_or_report_fault(out, _NO_PLAN, partial(plan, is_paired=is_paired, has_sidecar=has_sidecar))

    def _count(
        self, record: RequestRecord, run: DispatchedRequest, gate: FlowControlGate | None, now: float, out: list[Effect]
    ) -> None:
        """Wherever requests are counted that are at engines."""
        if run.sent.is_fallback or run.reserves:
            self._fallbacks.on_dispatch(record.ticket, run)
        queued = record.queued
        if gate is not None and queued is not None:
            _charge(run, gate, queued, weighted_tokens(gate.control, run.reserved, run.assignment.cached_tokens), now)
        count_dispatch(record, run)
        if record.grants:
            self._accounts.report_soft_budgets(record.grants, out)
        if now >= self._overdue.sweep_at_s.get(run.pool.name, SWEEP_S):
            self._overdue.sweep(run.pool, now, out)
        if self._has_peers:
            out.append(Broadcast(request_started_event(record, run)))

    def make_decision(
        self,
        record: RequestRecord,
        run: DispatchedRequest,
        pending: PendingDecision,
        *,
        body: bytes | None,
        leg: PrefillLegResult | None = None,
        is_leased: bool = False,
        request_id: str = "",
    ) -> Decision:
        """The request goes to the engine that answers. ``body``: in place of the client's, None for that. ``leg``:
        see RequestHistory. ``is_leased``, ``request_id``: see Decision.
        """
        arrival = record.arrival_before_dispatch
        run.expected = expected_tokens_of_dispatched(run, arrival.request)
        usage = None
        if self.logs_usage and not arrival.destination.is_copy:
            usage = usage_of_dispatched(record, run, arrival)
        # an outcome may take hours, or never come: the prompt is not kept that long
        record.arrival, record.tokens = None, None
        return Decision(
            record.ticket,  # by position: see Assignment
            arrival.destination.server,
            arrival.tenant,
            run.assignment,
            body,
            _history(record, arrival, pending, leg),
            record.grants,
            run.attempts,
            adds_usage=pending.adds_usage,
            checks_refusal=bool(run.sent.checks_refusal),
            policy=run.pool.spec.traffic_policy.route_settings_text,
            usage=usage,
            is_leased=is_leased,
            request_id=request_id,
            path=changed_path(arrival),
            response_model=response_model(arrival, record.attachment, run.reserves),
            translation=_directive_of(arrival),
            mirror=pending.mirror,
            cache_bytes=_cache_bytes(record, arrival),
        )


def _history(
    record: RequestRecord, arrival: Arrival, pending: PendingDecision, leg: PrefillLegResult | None
) -> RequestHistory:
    return RequestHistory(
        explanation=pending.explanation,
        queued=record.queued,
        waits=record.waits,
        was_held=record.is_stream_waiting,
        tier="" if record.placement is None else record.placement.choice.reason,
        fell_back_for=record.fell_back_for,
        leg=leg,
        whole=pending.whole,
        size_bytes=len(arrival.body),
    )


def _cache_bytes(record: RequestRecord, arrival: Arrival) -> int:
    """A request that has gone elsewhere since it was looked up has another key."""
    wanted, destination = record.to_store, arrival.destination
    if wanted is None or (wanted.server, wanted.model) != (destination.server, destination.model):
        return 0
    return wanted.most_bytes


def _directive_of(arrival: Arrival) -> TranslationDirective | None:
    """Without the headers by which the engine is found. None: the request is not translated."""
    api, to, engine = arrival.request.api, arrival.destination, arrival.engine_api
    if api is None or engine is None:
        return None
    answer_headers = {}
    if to.is_fallback or to.fallbacks is not None:
        answer_headers[SERVED_BY] = arrival.pool.name
        how = ("model",) * to.as_fallback.is_degraded + ("max_tokens",) * bool(fallback_token_limits(arrival))
        if how:
            answer_headers[DEGRADED] = ", ".join(how)
    is_strict = arrival.pool.spec.translation == "Strict"
    return TranslationDirective(
        NAMES[api],
        NAMES[engine],
        is_strict=is_strict,
        answer_headers=answer_headers,
        limit_s=float(arrival.pool.spec.traffic_policy.timeout),
    )


def _pending(
    record: RequestRecord,
    considered: UncommittedPick,
    base: BodyChanges,
    whole: str,
    plan: FallbackPlan | None,
    mirror: str,
) -> PendingDecision:
    """Before anything is counted. ``base``: see ``body_changes``. ``mirror``: see Decision."""
    arrival, explanation = record.arrival_before_dispatch, None
    if record.wants_reasons:
        explanation = explain_pick(
            considered,
            arrival,
            record.trace,
            record.placement,
            record.forecast,
            guarded=record.guarded,
            most=MOST_EXPLAINED,
            fallbacks=() if plan is None else plan.states,
        )
    adds_usage = "stream_options" in base.fields
    return PendingDecision(adds_usage, explanation, whole, mirror)


def _leg_of(record: RequestRecord, considered: UncommittedPick, base: BodyChanges) -> RemotePrefillTask | None:
    """The leg that extproc makes, None if it makes none."""
    arrival = record.arrival_before_dispatch
    protocol, row, table = arrival.pool.prefill_protocol, considered.pick.prefill_row, arrival.pool.table
    if protocol is None or row is None:
        return None
    decode, work = table.endpoint_ref(considered.pick.rows[0]), float(considered.expectation.demand.work[row])
    return RemotePrefillTask(protocol, record.ticket, arrival, base, table.addresses[row], decode, work)


def _body_beside(leg: RemotePrefillTask) -> bytes | None:
    """For an engine that gets the request beside its leg. While another one computes the prompt first, it is not kept
    twice.
    """
    return leg.decode_body(PrefillResponse(), "") if leg.protocol.is_beside else None


def plugin_faults(server: str, failed: Sequence[PluginFailed]) -> list[Effect]:
    """Failures of plugins without which a request was decided. A plugin may run many times for one request: each place
    where it fails counts once.
    """
    return [
        Fault(
            f"the plugin '{one.plugin}' of {server} fails in {one.where or 'an unknown place'}; requests are decided "
            "without it",
            one.__cause__ or one,
            server,
            one.plugin,
        )
        for one in {(one.plugin, one.where): one for one in failed}.values()
    ]


def prompt_of(arrival: Arrival, tokens: Sequence[int] | None) -> Prompt:
    """The prompt to look up in caches; ``tokens``: the prompt's, if known."""
    return Prompt(
        text=arrival.request.prompt,
        model=arrival.destination.model,
        adapter=arrival.adapter,
        salt=arrival.cache_salt,
        tokens=tokens,
    )


def constraints_of(
    arrival: Arrival, attachment: GatewayProperties, with_room: Bools | None = None, *, wants_reasons: bool = False
) -> PickConstraints:
    """Which endpoints the request may go to; ``with_room``: by row, whether there is room for it, None: all have."""
    return PickConstraints(
        headers=arrival.head.headers,
        choices=attachment.choices,
        subset=attachment.subset,
        wants_reasons=wants_reasons,
        candidates=with_room,
        is_trusted=arrival.head.is_trusted,
        tenant=arrival.tenant,
        priority=arrival.priority,
        whole=""
        if arrival.pool.prefill_protocol is None
        else why_not_disaggregated(arrival, arrival.pool.prefill_protocol),
    )


def usage_of_dispatched(record: RequestRecord, run: DispatchedRequest, arrival: Arrival) -> UsageContext:
    """For the usage log."""
    return usage_of_decision(
        arrival,
        run.assignment,
        record.ticket,
        expected=run.expected,
        price=run.price,
        objectives=run.objectives,
        reserves=run.reserves,
        is_short=bool(fallback_token_limits(arrival)),
    )


def expected_tokens_of_dispatched(run: DispatchedRequest, request: InferenceRequest) -> ExpectedTokens:
    """What its limits have reserved, or what is expected of it without limits."""
    pool, reserved = run.pool, run.reserved if run.limited is None else run.limited
    row = pool.table.row_of(run.assignment.endpoint.address)
    return ExpectedTokens(
        # a body that is not read has none, as far as we know
        input_tokens=round(reserved.input_tokens) if not request.is_unread else 0,
        output_tokens=round(reserved.output_tokens),
        answers=run.sent.answers,
        most_output=None if math.isinf(run.most_output) else int(run.most_output),
        token_us=0 if row is None else round(float(pool.table.tpot_s[row]) * 1e6),
        tokens_per_event=round(pool.tokens_per_event, 2),
        held_ms=milliseconds(run.sent.waited_s) if run.sent.waited_s else 0,
        is_streamed=run.sent.is_streamed,
        in_background=request.runs_in_background,
    )


def track_peer_request(
    event: RequestStarted, origin: str, pool: Pool, gate: FlowControlGate | None, now: float
) -> RequestRecord | None:
    """Count a request dispatched by the process ``origin``; None if its endpoint is not configured here."""
    counted = pool.track_peer_request(event.assignment, event.sent.chain, now)
    if counted is None:
        return None
    assignment, pins = counted
    run = DispatchedRequest(pool, assignment, pins, event.sent, now)
    record = RequestRecord(event.ticket, origin=origin, run=run)
    record.begin_transition(RequestEvent.STARTED_ELSEWHERE)
    record.set_state(RequestState.RUNNING, now)
    if gate is not None and event.flow is not None:
        # the flow has had this service, whichever process the request came to
        record.queued = QueuedRequest(event.ticket, event.flow, now, now, priority=event.priority)
        run.reserved = RequestUsage(assignment.input_tokens, assignment.tokens - assignment.input_tokens)
        _charge(run, gate, record.queued, event.service, now)
    return record


def _checks_refusal(attachment: GatewayProperties, pool: Pool, assignment: Assignment, now: float) -> bool | None:
    """See SentRequest."""
    if not attachment.is_bundle or len(assignment.addresses) == 1 or not pool.spec.traffic_policy.retry.attempts:
        return None
    return now < pool.table.healths[assignment.endpoint.row].checks_refusals_until_s


def request_started_event(record: RequestRecord, run: DispatchedRequest) -> RequestStarted:
    """The event by which the other processes count the request."""
    queued = record.queued if run.gate is not None else None
    flow, priority = (None, 0) if queued is None else (queued.flow, queued.priority)
    return RequestStarted(record.ticket, run.pool.name, run.assignment, run.sent, flow, priority, run.charged)


def _end_wait(record: RequestRecord) -> None:
    if record.meter is not None:
        record.meter.server.end_wait(record.ticket)


def _charge(run: DispatchedRequest, gate: FlowControlGate, queued: QueuedRequest, service: float, now: float) -> None:
    run.gate, run.charged = gate, service
    gate.on_dispatch(queued, service, now)


def adds_usage_request(arrival: Arrival, attachment: GatewayProperties) -> bool:
    """Whether extproc requests the usage of a streamed answer because its client does not.

    A client that declines usage gets none. Only our own bundle removes the chunk from the answer; for other gateways,
    usage is not requested for such a client.
    """
    request = arrival.request
    if arrival.pool.spec.stream_usage != "Always" or not request.lacks_stream_usage:
        return False
    hides_usage = arrival.head.is_trusted and attachment.is_bundle
    return hides_usage or not request.declines_usage


def body_changes(arrival: Arrival, attachment: GatewayProperties) -> BodyChanges:
    """What an engine must read otherwise than the client wrote it: the engines' model name, usage if it is to be asked
    for (see ``adds_usage_request``), the gateway's cache salt, the limit of a fallback's answers, and none of the
    fields that clients may not set.
    """
    request, changes = arrival.request, dict[str, object]()
    # a provider knows no such field; with fallbacks there is one body for all attempts, and Envoy cuts it out there
    is_chained = arrival.destination.fallbacks is not None and arrival.engine_api is None
    has_salt = arrival.pool.spec.provider is None or is_chained
    if has_salt and arrival.cache_salt is not None and arrival.cache_salt != request.cache_salt:
        changes["cache_salt"] = arrival.cache_salt
    if arrival.destination.model != request.model:
        changes["model"] = arrival.destination.model
    changes.update(fallback_token_limits(arrival))
    if adds_usage_request(arrival, attachment):
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    allowed = arrival.pool.spec.allowed_fields
    return BodyChanges(changes, tuple([name for name in request.internal_fields if name not in allowed]))


def fallback_token_limits(arrival: Arrival) -> dict[str, int]:
    """The fields that limit the answer to what its fallback gives; none if the client asks for no more."""
    most, request = arrival.destination.as_fallback.max_output_tokens, arrival.request
    if most is None or request.api is None or request.api.spec.body != "json":
        return {}
    if not request.api.spec.limits or "." in request.api.spec.limits[0]:
        return {}
    if request.max_output_tokens is not None and request.max_output_tokens <= most:
        return {}
    return lowered_token_limits(request.api, raw_top_level_fields(arrival.body, request.contents), most)


def changed_body(arrival: Arrival, changes: BodyChanges) -> bytes | None:
    """The body as its engine is to read it; None if the client's own will do.

    An engine must read what was read here: names that are repeated or escaped come out once and plain.
    """
    request, fields, dropped = arrival.request, changes.fields, changes.without
    if request.call is not None:
        model = arrival.destination.model
        return None if model == request.model else with_model_name(arrival.body, request.call, model)
    if request.api is None or request.path is not None:
        return None
    if request.api.spec.body == "form":
        if not fields and not dropped:
            return None
        form = read_form(arrival.body, arrival.head.headers.get("content-type", ""))
        return with_fields(form, {name: str(value) for name, value in fields.items()}, without=dropped)
    if not fields and not dropped and has_unambiguous_names(arrival.body, request.contents):
        return arrival.body if arrival.is_changed else None
    return with_changes(arrival.body, fields, request.contents, without=dropped)


def response_model(arrival: Arrival, attachment: GatewayProperties, reserves: Mapping[str, FallbackExpectation]) -> str:
    """What answers have as the model's name, as JSON text; empty: what engines write.

    That is the name that the client asked for, where an engine that may answer has another one. Only our own bundle
    writes it.
    """
    destination, request = arrival.destination, arrival.request
    if not destination.rule.renames_answers or not attachment.is_bundle or request.path is not None:
        return ""
    asked = request.model
    if destination.model == asked and all(one.model == asked for one in reserves.values()):
        return ""
    return msgspec.json.encode(asked).decode()


def changed_path(arrival: Arrival) -> str:
    """The path as its engine is to read it, with the client's query; empty if the client's own will do.

    Where the gateway has chosen the ModelServer, it writes the path.
    """
    path = arrival.request.path
    if path is None or arrival.candidates is None:
        return ""
    wanted = path.for_model(arrival.destination.model)
    if wanted == arrival.head.path:
        return ""
    _, mark, query = arrival.head.headers.get(":path", "").partition("?")
    return f"{wanted}{mark}{query}"
