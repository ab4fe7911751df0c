# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt another engine computes: records in state PREFILLING, from their pick to their decision.

And running ones whose decode engine has them at the same time: their legs end beside them, before or after they do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.core.dispatch import (
    changed_body,
    constraints_of,
    expected_tokens_of_dispatched,
    prompt_of,
    server_removed_refusal,
    usage_of_dispatched,
)
from extproc.core.effects import (
    AbortDecode,
    Broadcast,
    CancelPrefill,
    Effect,
    LogUsage,
    Prefill,
    PrefillEnded,
    run_or_report_fault,
)
from extproc.core.peer_events import RequestPrefilled
from extproc.core.remote_prefill import (
    PrefillVerdict,
    RemotePrefillTask,
    end_remote_prefill,
    judge_prefill,
    make_prefill_effect,
    outcome_of_client_left,
    prefill_outcome,
)
from extproc.core.request_record import PrefillLegResult
from extproc.core.request_states import IN_FLIGHT, RequestEvent, RequestState
from extproc.core.usage_log import client_left_line
from extproc.refusals import InternalError, NoEndpoint, PrefillFailed, PrefillRefused, Refusal
from extproc.scheduling.pool import DecodeTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.core.dispatch import Dispatcher, PendingDecision
    from extproc.core.remote_prefill import ConcurrentPrefill
    from extproc.core.request_record import DispatchedRequest, PrefillResult, RequestRecord
    from extproc.core.running_requests import RunningRequests
    from extproc.scheduling.pool import Pool

# The prefill engine answers when the decode engine has the KV cache; a short answer may be over as soon.
_GRACE_S: Final = 1.0


class NextPrefillAttempt(msgspec.Struct, frozen=True):
    """Another engine is asked for a prefill."""

    leg: RemotePrefillTask
    ask: Prefill


class PrefillCompletion:
    """The second half of a leg: its end. ``Dispatcher.dispatch`` begins it."""

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        dispatcher: Dispatcher,
        running: RunningRequests,
        way_to_fallback: Callable[[RequestRecord, float, list[Effect]], Callable[[], None] | None],
        *,
        has_peers: bool,
    ) -> None:
        """``way_to_fallback``: see AdmissionPipeline."""
        self._records = records
        self._way_to_fallback = way_to_fallback
        self._dispatcher = dispatcher
        self._running = running
        self._has_peers = has_peers

    def on_prefill_result(
        self, result: PrefillResult, pools: Mapping[str, Pool], now: float, out: list[Effect]
    ) -> None:
        """The prefill engine has answered, or has not: the request goes on, or is refused."""
        record, beside = self._records.get(result.ticket), self._dispatcher.beside.get(result.ticket)
        if beside is not None:
            self._end_beside(result, beside, now, out)
            return
        if record is None or record.run is None or record.state is not RequestState.PREFILLING:
            # its client left meanwhile
            return
        run, (asked, pending) = record.run, self._dispatcher.legs.pop(record.ticket)
        record.begin_transition(RequestEvent.GRANTED)
        took_s, group = now - record.since_s, run.pool.spec.pd_group
        judged = _judge(asked, result, now, out, lease_s=0.0 if group is None else float(group.lease))
        is_done, is_served = judged.outcome == "prefilled", pools.get(run.pool.name) is run.pool
        then = _next_of(record, asked, judged, now, out) if is_served else None
        event = RequestPrefilled(
            record.ticket,
            prefill_outcome(judged, result, asked.address, took_s),
            is_done=is_done,
            is_leased=is_done and asked.protocol.has_lease,
            waited_s=record.held_s + took_s,
            decode=_decode_of(record, run, now, out, is_prefilled=is_done) if then is None else DecodeTarget(""),
            next="" if then is None else then.leg.address,
        )
        refusal = None
        if then is None:
            refusal = _refusal_of(run, judged, result, event) if is_served else server_removed_refusal(run.pool.name)
        leg = PrefillLegResult(asked.address, judged.outcome, took_s, judged.detail, 1 + len(asked.failed))
        # a refusal of the prompt is the client's
        has_failed = isinstance(refusal, PrefillFailed | NoEndpoint)
        go_elsewhere = self._way_to_fallback(record, now, out) if has_failed and is_served else None
        goes_on = refusal is None or go_elsewhere is not None
        out.append(PrefillEnded(record.ticket, run.pool.name, leg, goes_on=goes_on))
        try:
            end_remote_prefill(record, run, event, now, out)
            body = judged.body
            if then is None and refusal is None:
                self._dispatcher.add_record(record, RequestState.RUNNING, now)
                body = body if is_done else changed_body(asked.arrival, asked.base)
                pending = self._dispatcher.plan_after_prefill(
                    record, run, pending, asked.base, now, out, body=body, is_paired=is_done
                )
            if self._has_peers:
                out.append(Broadcast(msgspec.structs.replace(event, next_servers=run.sent.next_servers)))
            if then is not None:
                self._ask_next(record, then, pending, now, out)
                return
            if go_elsewhere is not None:
                self._running.release_for_move(record, run, now, out)
                go_elsewhere()
                return
            if refusal is None:
                decision = self._dispatcher.make_decision(
                    record,
                    run,
                    pending,
                    body=body,
                    leg=leg,
                    is_leased=event.is_leased,
                    request_id=asked.request_id if is_done and asked.protocol.joins_by_request_id else "",
                )
                out.append(decision)
                return
        except Exception as error:  # noqa: BLE001 - a mistake of ours, and nobody else would end the wait
            refusal = InternalError(error)
        release = partial(self._running.release_endpoints, record, run, now, out)
        run_or_report_fault(out, "the engines of a request could not be freed after its prefill", release)
        out.append(self._dispatcher.refuse(record, refusal, now, out))

    def _ask_next(
        self, record: RequestRecord, then: NextPrefillAttempt, pending: PendingDecision, now: float, out: list[Effect]
    ) -> None:
        """The prefill engine has failed, and another one is asked."""
        self._dispatcher.add_record(record, RequestState.PREFILLING, now)
        self._dispatcher.legs[record.ticket] = then.leg, pending
        out.append(then.ask)

    def on_client_left(self, record: RequestRecord, run: DispatchedRequest, now: float, out: list[Effect]) -> None:
        """The client of a request that prefills has left: neither engine goes on with it. It pays for its prompt, as
        other clients that leave before the first byte of their answers.
        """
        asked, _ = self._dispatcher.legs.pop(record.ticket)
        leg = PrefillLegResult(asked.address, "left", now - record.since_s)
        out += [CancelPrefill(record.ticket), PrefillEnded(record.ticket, run.pool.name, leg, goes_on=False)]
        # no engine has begun an answer
        run.expected = msgspec.structs.replace(
            expected_tokens_of_dispatched(run, asked.arrival.request), output_tokens=0, most_output=0
        )
        outcome = outcome_of_client_left(asked, now - record.arrived_at_s)
        if self._dispatcher.logs_usage:
            usage = usage_of_dispatched(record, run, asked.arrival)
            out.append(LogUsage(client_left_line(record, asked.arrival.head, usage, outcome)))
        self._running.undo_dispatch(record, run, now, out, outcome=outcome)

    def on_request_ended(self, ticket: str, out: list[Effect]) -> None:
        """The request is over; its prefill may still run beside it, or its decode engine may be asked to end it."""
        legs = self._dispatcher.beside
        if ticket not in legs:
            return
        if legs[ticket] is None:
            del legs[ticket]
            out.append(CancelPrefill(ticket))
        else:
            out.append(CancelPrefill(ticket, after_s=_GRACE_S))

    def _end_beside(self, result: PrefillResult, beside: ConcurrentPrefill, now: float, out: list[Effect]) -> None:
        ticket, asked, took_s = result.ticket, beside.leg, now - beside.since_s
        del self._dispatcher.beside[ticket]
        judged = _judge(asked, result, now, out)
        is_done, record = judged.outcome == "prefilled", self._records.get(ticket)
        leg = PrefillLegResult(asked.address, judged.outcome, took_s, judged.detail)
        out.append(PrefillEnded(ticket, asked.arrival.pool.name, leg, goes_on=is_done, is_beside=True))
        if record is None or record.run is None or not record.is_decided_here:
            # it is over, and its ticket may be that of a request elsewhere
            return
        run = record.run
        run.leg = leg
        if record.state not in IN_FLIGHT:
            # both engines are free of it
            return
        decode = DecodeTarget(run.assignment.endpoint.address, run.assignment.moved_tokens)
        outcome = prefill_outcome(judged, result, asked.address, took_s)
        event = RequestPrefilled(
            ticket, outcome, is_done=is_done, is_leased=True, waited_s=record.held_s, decode=decode, is_beside=True
        )
        run_or_report_fault(
            out, "a prefill engine could not be freed", partial(end_remote_prefill, record, run, event, now, out)
        )
        if self._has_peers:
            out.append(Broadcast(event))
        if not is_done and record.state is RequestState.RUNNING:
            # The prefill engine may have died in the milliseconds between the transfer and its answer. Then the decode
            # engine could go on, but no API of SGLang says so, and extproc sees no byte of the answer. The decode
            # engine itself would find out by two failed heartbeats, 5 s each: all that lack their KV cache would wait.
            self._dispatcher.beside[ticket] = None
            out.append(AbortDecode(ticket, run.pool.name, decode.address, asked.abort_bodies()))


def _judge(
    asked: RemotePrefillTask, result: PrefillResult, now: float, out: list[Effect], *, lease_s: float = 0.0
) -> PrefillVerdict:
    judge = partial(judge_prefill, asked, result, age_s=now - result.answered_at_s, lease_s=lease_s)
    return run_or_report_fault(out, "the answer to a prefill could not be used", judge) or PrefillVerdict("unreadable")


def _decode_of(
    record: RequestRecord, run: DispatchedRequest, now: float, out: list[Effect], *, is_prefilled: bool
) -> DecodeTarget:
    """Where the answer comes from: no decode engine has had the request yet."""
    arrival, pool = record.arrival_before_dispatch, run.pool
    place = partial(
        pool.decode_target,
        run.assignment,
        prompt_of(arrival, record.tokens),
        constraints_of(arrival, record.attachment),
        run.sent.chain,
        now,
        is_prefilled=is_prefilled,
    )
    found = run_or_report_fault(out, "a decode engine could not be chosen again after a prefill", place)
    return found or pool.first_listed_decode(run.assignment)


def _next_of(
    record: RequestRecord, asked: RemotePrefillTask, judged: PrefillVerdict, now: float, out: list[Effect]
) -> NextPrefillAttempt | None:
    """After a failure; None: ``onPrefillFailure`` decides, or there is no need."""
    if judged.outcome in {"prefilled", "refused"} or now >= record.answer_by_s:
        return None

    def find() -> NextPrefillAttempt | None:
        address = asked.next_address(now)
        if not address:
            return None
        leg = asked.at_address(address)
        return NextPrefillAttempt(leg, make_prefill_effect(leg, record, now))

    return run_or_report_fault(out, "another prefill engine could not be chosen", find)


def _refusal_of(
    run: DispatchedRequest, judged: PrefillVerdict, result: PrefillResult, event: RequestPrefilled
) -> Refusal | None:
    """Why the request cannot go on; None: it can."""
    group = run.pool.spec.pd_group
    if judged.outcome == "refused":
        return PrefillRefused(judged.detail, status=result.status)
    if judged.outcome != "prefilled" and group is not None and group.on_prefill_failure == "Fail":
        return PrefillFailed("The engine that was to compute the prompt failed; try again later.", retry_after_s=1)
    if not event.decode.address:
        return NoEndpoint("No decode engine is left for this model; try again later.")
    return None
