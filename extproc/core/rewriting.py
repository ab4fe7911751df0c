# SPDX-License-Identifier: Apache-2.0
"""What must change in a request's body for its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.errors import SteeringRefused
from extproc.request.model import STEERING_FIELDS
from extproc.request.rewrite import is_plain, with_changes

if TYPE_CHECKING:
    from extproc.api.model_server import ModelServerSpec
    from extproc.core.types import Arrival, Attachment
    from extproc.request.model import InferenceRequest


def asks_for_usage(arrival: Arrival, attachment: Attachment) -> bool:
    """Whether we ask for the usage of a streamed answer because its client does not.

    A client that declines usage gets none, but only our own bundle keeps the chunk from it: elsewhere its word holds.
    """
    request = arrival.request
    if arrival.pool.spec.stream_usage != "Always" or not request.leaves_usage_out:
        return False
    hides_usage = arrival.head.is_trusted and not attachment.passes_usage
    return hides_usage or not request.declines_usage


def changed_body(arrival: Arrival, *, with_usage: bool) -> bytes | None:
    """The body as its engine is to read it; None if the client's own will do.

    It has the engines' model name, usage asked for if ``with_usage`` (see ``asks_for_usage``), the gateway's cache
    salt, and none of the fields that clients may not set. An engine must read what was read here: names that are
    repeated or escaped come out once and plain.
    """
    request = arrival.request
    if request.api is None:
        return None
    changes: dict[str, object] = {}
    if arrival.cache_salt is not None and arrival.cache_salt != request.cache_salt:
        changes["cache_salt"] = arrival.cache_salt
    if arrival.destination.model != request.model:
        changes["model"] = arrival.destination.model
    if with_usage:
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    allowed = arrival.pool.spec.allowed_fields
    dropped = [name for name in request.internal_fields if name not in allowed]
    if not changes and not dropped and is_plain(arrival.body, request.contents):
        return None
    return with_changes(arrival.body, changes, request.contents, without=dropped)


def refuse_steering(request: InferenceRequest, spec: ModelServerSpec) -> None:
    """Raise SteeringRefused if the client says where an engine connects or where the request runs, and may not."""
    for name in request.internal_fields:
        if name in STEERING_FIELDS and name not in spec.allowed_fields:
            raise SteeringRefused(f"The field '{name}' is for gateways, not for clients; leave it out.", param=name)
