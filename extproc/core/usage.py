# SPDX-License-Identifier: Apache-2.0
"""What the usage log gets to know of a request: at its decision, at its refusal, or where it could not even be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.usage import HTTP_ROUTE, UsageContext
from extproc.api.used_tokens import Expected
from extproc.protocol import api_of_path, truncate_name
from extproc.request.model_path import api_of_model_path

if TYPE_CHECKING:
    from extproc.admission.identity import Subject
    from extproc.api.admission import Band, FlowControl
    from extproc.api.pricing import Price
    from extproc.core.record import Arrival, Head
    from extproc.errors import Refusal
    from extproc.scheduling.pool import Assignment


def usage_of_decision(
    arrival: Arrival,
    assignment: Assignment,
    ticket: str,
    *,
    expected: Expected,
    price: Price | None,
) -> UsageContext:
    """Of a request that goes to an engine. ``price``: in force when it arrived."""
    return _usage_of(
        arrival,
        ticket,
        expected=expected,
        cached=round(assignment.cached_tokens),
        price=price,
    )


def usage_of_refusal(arrival: Arrival, ticket: str, refusal: Refusal, *, held_s: float) -> UsageContext:
    """Of a request that was routed and then refused: no engine has worked for it."""
    return _usage_of(arrival, ticket, expected=Expected(held_ms=milliseconds(held_s)), refused=refusal.outcome)


def _usage_of(
    arrival: Arrival,
    ticket: str,
    *,
    expected: Expected,
    cached: int = 0,
    price: Price | None = None,
    refused: str = "",
) -> UsageContext:
    request, destination, caller = arrival.request, arrival.destination, arrival.caller
    control, priority = arrival.pool.spec.flow_control, arrival.priority
    return UsageContext(
        ticket=ticket,
        tenant=caller.tenant,
        user=caller.user,
        api_key=caller.api_key,
        key_id=caller.key_id,
        route=destination.route or _http_route(arrival.head),
        server=destination.server,
        # of a request that no ModelRoute serves, whatever its client wrote
        model=truncate_name(request.model),
        served_model=truncate_name(destination.model),
        api="" if request.api is None else request.api.name,
        priority=priority,
        band="" if control is None else _band_of(control, priority),
        streamed=request.is_streamed,
        queued_ms=expected.held_ms,
        cached=cached,
        input_tokens=expected.input_tokens,
        output_tokens=expected.output_tokens,
        answers=expected.answers,
        most_output=expected.most_output,
        token_us=expected.token_us,
        tokens_per_event=expected.tokens_per_event,
        in_background=expected.in_background,
        price=price,
        refused=refused,
    )


def milliseconds(seconds: float) -> float:
    """As a row has them."""
    return round(seconds * 1000.0, 3)


def usage_of_unread(head: Head, subject: Subject, refusal: Refusal) -> UsageContext | None:
    """Of a request that was refused before it was routed; None if it asked for no inference."""
    api = (api_of_path(head.path) or api_of_model_path(head.path)) if head.method == "POST" else None
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


def _http_route(head: Head) -> str:
    return f"{HTTP_ROUTE}{head.http_route}" if head.http_route else ""


def _band_of(control: FlowControl, priority: int) -> str:
    """As queues have it: the highest band whose priority is at most ``priority``, or the lowest."""
    below = [band for band in control.bands if band.priority <= priority]
    return max(below, key=_priority).name if below else min(control.bands, key=_priority).name


def _priority(band: Band) -> int:
    return band.priority
