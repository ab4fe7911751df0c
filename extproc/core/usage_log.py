# SPDX-License-Identifier: Apache-2.0
"""What the usage log gets to know of a request: at its decision, at its refusal, or where it could not even be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.charged_tokens import CLIENT_LEFT, ExpectedTokens
from extproc.api.grpc_route import GRPC_ROUTE
from extproc.api.usage_log import HTTP_ROUTE, FallbackContext, UsageContext, UsageLine
from extproc.request.model_in_path import api_of_model_path
from extproc.wire_names import APIS_BY_CALL, REQUEST_ID, SERVER_CLUSTER, api_of_path, truncate_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.admission.identity import CallerIdentity
    from extproc.admission.slo_classes import ObjectiveClass
    from extproc.api.admission import FlowControl, PriorityBand
    from extproc.api.pricing import Price
    from extproc.core.request_record import Arrival, FallbackExpectation, Outcome, RequestHead, RequestRecord
    from extproc.refusals import Refusal
    from extproc.scheduling.pool import Assignment

# Of texts that clients choose, as in Envoy's lines.
_MOST_CHARACTERS: Final = 256


def usage_of_decision(
    arrival: Arrival,
    assignment: Assignment,
    ticket: str,
    *,
    expected: ExpectedTokens,
    price: Price | None,
    objectives: ObjectiveClass | None,
    reserves: Mapping[str, FallbackExpectation],
    is_short: bool,
) -> UsageContext:
    """Of a request that goes to an engine. ``price``: in force when it arrived. ``reserves``: its fallbacks.
    ``is_short``: its answer is limited to less than its client asks for.
    """
    found = _usage_of(
        arrival,
        ticket,
        objectives,
        expected=expected,
        cached=round(assignment.cached_tokens),
        price=price,
    )
    elsewhere = [
        FallbackContext(server, truncate_name(one.model), one.price, one.is_degraded)
        for server, one in reserves.items()
    ]
    degraded = arrival.destination.as_fallback.is_degraded or is_short
    return (
        msgspec.structs.replace(found, degraded=degraded, fallbacks=tuple(elsewhere))
        if elsewhere or degraded
        else found
    )


def usage_of_refusal(
    arrival: Arrival, ticket: str, refusal: Refusal, *, held_s: float, objectives: ObjectiveClass | None
) -> UsageContext:
    """Of a request that was routed and then refused: no engine has worked for it."""
    return _usage_of(
        arrival, ticket, objectives, expected=ExpectedTokens(held_ms=milliseconds(held_s)), refused=refusal.outcome
    )


def client_left_line(record: RequestRecord, head: RequestHead, context: UsageContext, outcome: Outcome) -> UsageLine:
    """The line of a request of which Envoy knows nothing but that its client left. Its ticket is its id: no other
    request has it.
    """
    return UsageLine(
        id=context.ticket,
        at=round(record.wall_s, 3),
        status=outcome.status,
        request_id=head.headers.get(REQUEST_ID, "")[:_MOST_CHARACTERS] or None,
        trace_id=None if record.trace is None else record.trace.parent.trace_id,
        path=head.path[:_MOST_CHARACTERS],
        context=msgspec.json.encode(context).decode(),
        served=outcome.served,
        cluster=f"{SERVER_CLUSTER}{context.server}",
        duration_ms=int(outcome.duration_s * 1000.0),
        flags=CLIENT_LEFT,
    )


def _usage_of(
    arrival: Arrival,
    ticket: str,
    objectives: ObjectiveClass | None,
    *,
    expected: ExpectedTokens,
    cached: int = 0,
    price: Price | None = None,
    refused: str = "",
) -> UsageContext:
    request, destination, caller = arrival.request, arrival.destination, arrival.caller
    control, priority = arrival.pool.spec.flow_control, arrival.priority
    band = "" if control is None else _band_of(control, priority)
    return UsageContext(
        ticket,  # by position: see Assignment
        caller.tenant,
        caller.user,
        caller.api_key,
        destination.route or _http_route(arrival.head),
        destination.server,
        # of a request that no ModelRoute serves, whatever its client wrote
        truncate_name(request.model),
        truncate_name(destination.model),
        "" if request.api is None else request.api.name,
        priority,
        band,
        request.is_streamed,
        expected.held_ms,
        cached,
        expected.input_tokens,
        expected.output_tokens,
        expected.answers,
        expected.most_output,
        expected.token_us,
        expected.tokens_per_event,
        in_background=expected.in_background,
        price=price,
        refused=refused,
        key_id=caller.key_id,
        service_class=band if objectives is None else objectives.name,
    )


def milliseconds(seconds: float) -> float:
    """As a row has them."""
    return round(seconds * 1000.0, 3)


def usage_of_unrouted_refusal(head: RequestHead, subject: CallerIdentity, refusal: Refusal) -> UsageContext | None:
    """Of a request that was refused before it was routed; None if it asked for no inference."""
    api = None
    if head.method == "POST":
        api = APIS_BY_CALL.get(head.path) or api_of_path(head.path) or api_of_model_path(head.path)
    if api is None:
        return None
    return UsageContext(
        tenant=subject.tenant,
        user=subject.user,
        api_key=subject.api_key,
        route=_http_route(head),
        model=truncate_name(refusal.model),
        api=api.name,
        refused=refusal.outcome,
    )


def _http_route(head: RequestHead) -> str:
    if not head.http_route or head.http_route.startswith(GRPC_ROUTE):
        return head.http_route
    return HTTP_ROUTE + head.http_route


def _band_of(control: FlowControl, priority: int) -> str:
    """As queues have it: the highest band whose priority is at most ``priority``, or the lowest."""
    below = [band for band in control.bands if band.priority <= priority]
    return max(below, key=_priority).name if below else min(control.bands, key=_priority).name


def _priority(band: PriorityBand) -> int:
    return band.priority
