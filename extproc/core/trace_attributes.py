# SPDX-License-Identifier: Apache-2.0
"""What spans say of a request and of its pick. No text of a prompt, and no name of a key."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.effects import Decision
    from extproc.core.explanation import Explanation
    from extproc.core.request_record import Arrival
    from extproc.core.trace import Attributes, AttributeValue

_MOST_SCORES: Final = 3
# Clients choose the names of models.
_LONGEST_TEXT: Final = 256
# The conventions' names of operations; other APIs keep our own.
_OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"completions": "text_completion", "responses": "chat", "messages": "chat"}
)


def request_tags(arrival: Arrival) -> dict[str, str | int]:
    """Of the gateway's spans, as they are before a decision."""
    request, destination = arrival.request, arrival.destination
    api = "" if request.api is None else request.api.name.lower()
    operation, model = _OPERATIONS.get(api, api), request.model[:_LONGEST_TEXT]
    return {
        "name": f"{operation} {model}".strip(),
        "operation": operation,
        "provider": arrival.pool.spec.engine.lower(),
        "model": model,
        "served_model": destination.model,
        "route": destination.route,
        "server": destination.server,
        "tenant": arrival.tenant[:_LONGEST_TEXT],
    }


def decision_tags(decision: Decision) -> dict[str, str | int]:
    """What a decision adds to them."""
    return {"server": decision.server, "queue_ms": round(1000 * decision.history.waited_s)}


def pick_attributes(decision: Decision) -> Attributes:
    """The endpoint, and what spoke for it."""
    assignment = decision.assignment
    found: dict[str, AttributeValue] = {
        "attache.pick.endpoint": assignment.endpoint.address,
        "attache.pick.input_tokens": round(assignment.input_tokens),
        "attache.pick.cached_tokens": round(assignment.cached_tokens),
    }
    if decision.prefill_address:
        found["attache.pick.prefill"] = decision.prefill_address
    if decision.history.explanation is not None and (scores := best_scores(decision.history.explanation)):
        found["attache.pick.best"] = scores
    return found


def best_scores(explanation: Explanation) -> tuple[str, ...]:
    """The three best endpoints of the profile that chose, with their totals."""
    chosen = explanation.addresses[0] if explanation.addresses else ""
    for profile in explanation.profiles:
        if any(one.address == chosen for one in profile.endpoints):
            return tuple(f"{one.address} {one.total:.6g}" for one in profile.endpoints[:_MOST_SCORES])
    return ()
