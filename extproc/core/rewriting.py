# SPDX-License-Identifier: Apache-2.0
"""What must change in a request's body for its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.request.rewrite import with_changes

if TYPE_CHECKING:
    from extproc.core.types import Arrival


def asks_for_usage(arrival: Arrival) -> bool:
    """Whether we ask for the usage of a streamed answer because its client does not.

    A client that declines usage gets none, but only our own bundle keeps the chunk from it: elsewhere its word holds.
    """
    request = arrival.request
    if arrival.pool.spec.stream_usage != "Always" or not request.leaves_usage_out:
        return False
    return arrival.head.is_trusted or not request.declines_usage


def changed_body(arrival: Arrival) -> bytes | None:
    """The body under the engines' model name and with usage asked for; None if the client's own will do."""
    request = arrival.request
    changes: dict[str, object] = {}
    if arrival.destination.model != request.model:
        changes["model"] = arrival.destination.model
    if asks_for_usage(arrival):
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    return with_changes(arrival.body, changes, request.contents) if changes else None
