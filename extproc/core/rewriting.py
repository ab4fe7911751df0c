"""What is made of a request for its engine: the prompt that caches know, who may be chosen, the body if something in it must change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.request.openai import with_changes
from extproc.scheduling.cache_estimator import Prompt
from extproc.scheduling.pool import PickConstraints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.types import Arrival, Terms
    from extproc.endpoints.table import Bools


def prompt_of(arrival: Arrival, tokens: Sequence[int] | None) -> Prompt:
    """What is to be looked for in caches."""
    request, spec, model = arrival.request, arrival.pool.spec, arrival.destination.model
    header = spec.cache_scope_header
    return Prompt(
        text=request.prompt,
        model=model,
        adapter=adapter_of(arrival),
        scope="" if header is None else arrival.head.headers.get(header.lower(), ""),
        salt=request.cache_salt,
        tokens=tokens,
    )


def adapter_of(arrival: Arrival) -> str | None:
    """The LoRA adapter that was asked for, if it was one."""
    model = arrival.destination.model
    return model if model not in {arrival.pool.spec.model, ""} else None


def choice_of(arrival: Arrival, terms: Terms, candidates: Bools | None) -> PickConstraints:
    """What may be chosen for it; ``candidates``: the endpoints with room, None for all."""
    return PickConstraints(
        headers=arrival.head.headers,
        choices=terms.attachment.choices,
        subset=terms.attachment.subset,
        wants_reasons=terms.wants_reasons,
        candidates=candidates,
        is_trusted=arrival.head.is_trusted,
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
