"""What an engine is sent of a request: the prompt that its cache will know, and the body if something in it must change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.request.openai import with_changes
from extproc.scheduling.knowledge import Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.passage import Arrival


def prompt_of(arrival: Arrival, tokens: Sequence[int] | None) -> Prompt:
    """What is to be looked for in caches."""
    request, spec, model = arrival.request, arrival.pool.spec, arrival.destination.model
    header = spec.cache_scope_header
    return Prompt(
        text=request.prompt,
        model=model,
        adapter=model if model not in {spec.model, ""} else None,
        scope="" if header is None else arrival.head.headers.get(header.lower(), ""),
        salt=request.cache_salt,
        tokens=tokens,
    )


def changed_body(arrival: Arrival) -> bytes | None:
    """The body under the engines' model name and with usage asked for; None if the client's own will do."""
    request = arrival.request
    changes: dict[str, object] = {}
    if arrival.destination.model != request.model:
        changes["model"] = arrival.destination.model
    if request.leaves_usage_out and arrival.pool.spec.stream_usage == "Always":
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    return with_changes(arrival.body, changes) if changes else None
