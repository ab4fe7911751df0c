# SPDX-License-Identifier: Apache-2.0
"""The prefill leg as data: what the prefill engine is asked, what its answer means, and what both engines count then.

| the prefill engine | the request |
|---|---|
| answers what the connector must have | goes on to the decode engine |
| refuses it: 4xx, but for 408 and 429 | is refused as that engine refuses it |
| does not answer, fails, is too slow, or its answer cannot be used | goes to another prefill engine |
| answered longer ago than a third of the lease: the KV cache may be gone, and then D answers nonsense | likewise |

Without another one in the group, without time, and after three of them, ``onPrefillFailure`` decides. An engine that
hangs must leave time for another one (``attempt_timeout_s``).

Where both engines get the request at once, the leg is beside it: there is no second try, and if the prefill fails for
whatever reason, the decode engine ends the request with an error.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import parse_endpoint
from extproc.core.demand import count_prefill_end
from extproc.core.effects import Prefill, run_or_report_fault
from extproc.core.outcome_feedback import record_endpoint_outcome, update_estimates
from extproc.core.request_record import Arrival, DispatchedRequest, Outcome, PrefillOutcome
from extproc.endpoints.table import EndpointRef
from extproc.engines.engine_responses import (
    PrefillResponse,
    UnreadableResponse,
    error_message,
    is_engine_error,
    parse_prefill_response,
)
from extproc.request.json_rewrite import raw_top_level_fields, with_changes
from extproc.request.prefill_protocols import (
    BodyChanges,
    PrefillAttempt,
    PrefillProtocol,
    sglang_abort_bodies,
    why_body_not_disaggregated,
)
from extproc.wire_names import REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.effects import Effect
    from extproc.core.peer_events import RequestPrefilled
    from extproc.core.request_record import PrefillResult, RequestRecord

# Of both legs.
_HEADERS: Final = ("authorization", "traceparent", "tracestate")
# An answer is used within this part of the lease, and the engine must still get it.
_LEASE_SHARE: Final = 1 / 3
# A prompt at which engines crash must not meet all of them.
_MOST_TRIES: Final = 3
# While another engine could be asked, one gets so many seconds, and so many times what is expected of it; or this part
# of what is left, where nothing is known.
_PATIENCE_S: Final = 2.0
_PATIENCE: Final = 4.0
_SHARE_OF_UNKNOWN: Final = 0.5
# A prefill engine of SGLang may answer so, or not at all, because its decode engine has died.
_UNSURE: Final = frozenset({500, 504})
# As Envoy answers for an engine that does.
_STATUSES: Final = {"unreachable": 503, "timeout": 504, "unreadable": 502, "no_parameters": 502}


class RemotePrefillTask(msgspec.Struct, frozen=True):
    """A prefill that is to be made at the engine at ``address``, for the request with this ticket.

    ``base``: what changes of the client's body, whichever engine gets it. ``decode``: the engine that was picked to
    answer. ``work``: of the prefill, in tokens. ``failed``: the engines that were asked before.
    """

    protocol: PrefillProtocol
    ticket: str
    arrival: Arrival
    base: BodyChanges
    address: str
    decode: EndpointRef
    work: float
    failed: tuple[str, ...] = ()

    @property
    def make_attempt(self) -> PrefillAttempt:
        """Tickets are unique, so its id is."""
        group = self.arrival.pool.spec.pd_group
        port = 0 if group is None else group.effective_transfer_port
        return PrefillAttempt(f"{self.ticket}-{1 + len(self.failed)}", _host_of(self.address), port)

    @property
    def request_id(self) -> str:
        """Of both legs. A client may use its own a second time."""
        own = _sendable(self.arrival.head.headers, REQUEST_ID) or self.ticket
        return f"{own}-{self.ticket}" if self.protocol.joins_by_request_id else own

    def at_address(self, address: str) -> RemotePrefillTask:
        """The same, at another engine."""
        return msgspec.structs.replace(self, address=address, failed=(*self.failed, self.address))

    def next_address(self, now: float) -> str:
        """The address of the engine that is asked if this one fails; empty: there is none, or enough have failed."""
        asked, pool = (*self.failed, self.address), self.arrival.pool
        return "" if len(asked) >= _MOST_TRIES else pool.next_prefill_address(self.decode, self.work, asked, now)

    def prefill_body(self) -> bytes:
        """For the prefill engine."""
        request, body = self.arrival.request, self.arrival.body
        return self._changed(
            self.protocol.prefill_changes(request, raw_top_level_fields(body, request.contents), self.make_attempt)
        )

    def decode_body(self, answer: PrefillResponse, engine_id: str) -> bytes | None:
        """For the decode engine; None: ``answer`` lacks what it must have. ``engine_id``: see Try."""
        request, body = self.arrival.request, self.arrival.body
        this = msgspec.structs.replace(self.make_attempt, engine_id=engine_id)
        changes = self.protocol.decode_changes(request, raw_top_level_fields(body, request.contents), this, answer)
        return None if changes is None else self._changed(changes)

    def abort_bodies(self) -> tuple[bytes, ...]:
        """For the decode engine that has the request already."""
        return sglang_abort_bodies(self.arrival.request, self.make_attempt)

    def _changed(self, changes: BodyChanges) -> bytes:
        base = {name: value for name, value in self.base.fields.items() if name not in changes.without}
        return with_changes(
            self.arrival.body,
            base | changes.fields,
            self.arrival.request.contents,
            without=(*self.base.without, *changes.without),
        )


class ConcurrentPrefill(msgspec.Struct, frozen=True):
    """A leg whose decode engine has the request, too, since ``since_s``."""

    leg: RemotePrefillTask
    since_s: float


def why_not_disaggregated(arrival: Arrival, protocol: PrefillProtocol) -> str:
    """As ``why_body_not_disaggregated``, where extproc makes the leg."""
    if arrival.engine_api is not None:
        return "it is translated"
    return why_body_not_disaggregated(arrival.request, arrival.body, protocol)


def make_prefill_effect(leg: RemotePrefillTask, record: RequestRecord, now: float) -> Prefill:
    """What is asked of the engine. The request is answered within the time of the prefill, if not earlier."""
    arrival, group, is_beside = leg.arrival, leg.arrival.pool.spec.pd_group, leg.protocol.is_beside
    most_s = math.inf if group is None else float(group.prefill_timeout)
    if not is_beside:
        record.answer_by_s = min(record.answer_by_s, now + most_s)
    headers = {name: value for name in _HEADERS if (value := _sendable(arrival.head.headers, name))}
    headers[REQUEST_ID] = leg.request_id
    if record.trace is not None:
        headers["traceparent"] = f"00-{record.trace.parent.trace_id}-{record.trace.parent.span_id}-01"
    left_s = most_s if is_beside else max(0.0, record.answer_by_s - now)
    expected_s = arrival.pool.expected_prefill_s(leg.address, leg.work, now)
    path = "" if arrival.request.api is None else arrival.request.api.spec.paths[0]
    return Prefill(
        ticket=record.ticket,
        server=arrival.pool.name,
        address=leg.address,
        path=path,
        body=leg.prefill_body(),
        headers=headers,
        timeout_s=attempt_timeout_s(left_s, expected_s) if not is_beside and leg.next_address(now) else left_s,
        query_port=leg.make_attempt.port if leg.protocol.needs_engine_id else 0,
        is_beside=is_beside,
    )


@lru_cache(maxsize=4096)
def _host_of(address: str) -> str:
    # needed for each body of each leg
    return parse_endpoint(address).host


def _sendable(headers: Mapping[str, str], name: str) -> str:
    """A client's header; empty if it has none, or one that our HTTP client would refuse or encode anew."""
    value = headers.get(name, "")
    return value if value.isascii() and value.isprintable() else ""


def attempt_timeout_s(left_s: float, expected_s: float | None) -> float:
    """How long an engine may take before another one is asked. ``left_s``: of ``prefillTimeout``. ``expected_s``: of
    this prefill, what waits before it included; None: unknown.
    """
    if expected_s is None:
        return _SHARE_OF_UNKNOWN * left_s
    left_for_another_s = left_s - expected_s
    # if it is enough for one engine alone, this one gets all of it
    return left_s if left_for_another_s < expected_s else min(left_for_another_s, _PATIENCE_S + _PATIENCE * expected_s)


class PrefillVerdict(msgspec.Struct, frozen=True):
    """What a prefill engine's answer means. ``body``: for the decode engine, None for the one without a prefill.
    ``tokens``: of the prompt, as the engine reports them.
    """

    outcome: PrefillOutcome
    body: bytes | None = None
    tokens: PrefillResponse = PrefillResponse()
    detail: str = ""


def judge_prefill(leg: RemotePrefillTask, result: PrefillResult, *, age_s: float, lease_s: float) -> PrefillVerdict:
    """``age_s``: of the answer."""
    if result.failure or result.status != 200:
        return _judge_failure(result)
    try:
        answer = parse_prefill_response(result.body)
    except UnreadableResponse as error:
        return PrefillVerdict("unreadable", detail=str(error))
    if leg.protocol.is_beside:
        return PrefillVerdict("prefilled", tokens=answer)
    if leg.protocol.has_lease and age_s > _LEASE_SHARE * lease_s:
        return PrefillVerdict("expired", tokens=answer, detail=f"it is {age_s:.3g} s old, of a lease of {lease_s:g} s")
    body = leg.decode_body(answer, result.engine_id)
    if body is None:
        return PrefillVerdict("no_parameters", detail="the answer ended early, or the engine has another connector")
    return PrefillVerdict("prefilled", body, answer)


def _judge_failure(result: PrefillResult) -> PrefillVerdict:
    if result.failure:
        return PrefillVerdict(result.failure, detail=result.detail)
    message = error_message(result.body)
    if result.status >= 400 and not is_engine_error(result.status):
        return PrefillVerdict("refused", detail=message)
    return PrefillVerdict("error", detail=f"{result.status} {message}")


def prefill_outcome(judged: PrefillVerdict, result: PrefillResult, address: str, took_s: float) -> Outcome | None:
    """As of a request that the prefill engine alone has answered; None: nothing is learned of it."""
    if judged.outcome in {"not_asked", "left"}:
        return None
    answered = judged.outcome in {"prefilled", "expired"}
    status = result.status if answered or result.status >= 400 else 502
    return Outcome(
        ticket=result.ticket,
        status=_STATUSES.get(judged.outcome, status),
        served=address,
        duration_s=took_s,
        ttfb_s=took_s if answered else None,
        prompt_tokens=judged.tokens.prompt_tokens,
        completion_tokens=None,
        cached_tokens=judged.tokens.cached_tokens,
    )


def outcome_of_client_left(leg: RemotePrefillTask, duration_s: float) -> Outcome:
    """Of a request whose client has left while its prompt was computed."""
    return Outcome(
        ticket=leg.ticket,
        status=0,
        served=leg.address,
        duration_s=duration_s,
        ttfb_s=None,
        prompt_tokens=None,
        completion_tokens=None,
        cached_tokens=None,
        has_left=True,
    )


def end_remote_prefill(
    record: RequestRecord, run: DispatchedRequest, event: RequestPrefilled, now: float, out: list[Effect]
) -> None:
    """The prefill engine is free of the request, whichever process decides it: another one, or the decode engine, gets
    it now.
    """
    before, pool = run.assignment, run.pool
    if before.prefill is None:
        return
    if event.outcome is not None and event.is_beside and run.sent.next_servers and event.outcome.status in _UNSURE:
        run.unjudged = _run_of_leg(run), event.outcome
    elif event.outcome is not None:
        # what is learned is an estimate; what is counted must be undone
        learn = partial(learn_from_leg, _run_of_leg(run), event.outcome, now, out, is_ours=record.is_decided_here)
        run_or_report_fault(out, "a prefill could not be learned from", learn)
    if event.next:
        run.assignment, run.pins = pool.move_prefill(before, run.pins, run.sent.chain, event.next, now)
        run.sent_at_s = now
        count_prefill_end(record, run, before)
        return
    is_done = event.is_done or event.is_beside
    assignment, run.pins = pool.end_prefill(before, run.pins, run.sent.chain, now, decode=event.decode, is_done=is_done)
    run.prefilled_by = before.prefill.address if event.is_done else ""
    if event.is_beside:
        run.assignment, run.is_aborted = assignment, not event.is_done
        count_prefill_end(record, run, before)
        return
    if event.is_leased:
        # what one engine has fetched is gone: another one would read what is not its own
        assignment = msgspec.structs.replace(assignment, addresses=assignment.addresses[:1])
    checks_refusal = run.sent.checks_refusal if len(assignment.addresses) > 1 else None
    run.sent = msgspec.structs.replace(
        run.sent, waited_s=event.waited_s, checks_refusal=checks_refusal, next_servers=event.next_servers
    )
    run.assignment, run.sent_at_s = assignment, now
    count_prefill_end(record, run, before)


def learn_from_leg(leg: DispatchedRequest, outcome: Outcome, now: float, out: list[Effect], *, is_ours: bool) -> None:
    """Of an engine that has, or has not, computed a prompt for another one."""
    record_endpoint_outcome(leg, outcome, now, out)
    update_estimates(leg, outcome, now, is_ours=is_ours, has_limits=False)


def _run_of_leg(run: DispatchedRequest) -> DispatchedRequest:
    """The leg as a request of its own: its answer is its first token."""
    prefill = run.assignment.prefilled_by
    assignment = msgspec.structs.replace(run.assignment, endpoint=prefill, addresses=(prefill.address,), prefill=None)
    sent = msgspec.structs.replace(run.sent, is_streamed=True, expects_usage=False, checks_refusal=None, waited_s=0.0)
    return DispatchedRequest(run.pool, assignment, {}, sent, run.sent_at_s, is_part=True)
