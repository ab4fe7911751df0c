# SPDX-License-Identifier: Apache-2.0
"""What must change in a request's body for its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.request.rewrite import with_changes

if TYPE_CHECKING:
    from extproc.core.types import Arrival


def changed_body(arrival: Arrival) -> bytes | None:
    """The body under the engines' model name and with usage asked for; None if the client's own will do."""
    request = arrival.request
    changes: dict[str, object] = {}
    if arrival.destination.model != request.model:
        changes["model"] = arrival.destination.model
    if request.leaves_usage_out and arrival.pool.spec.stream_usage == "Always":
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    return with_changes(arrival.body, changes, request.contents) if changes else None
