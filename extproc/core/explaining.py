# SPDX-License-Identifier: Apache-2.0
"""What would be decided about a request now, with every reason, and nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extproc.core.dispatch import constraints_of, prompt_of
from extproc.core.explanation import Explanation, avoided_now, explain, silent_now, where_adapter_goes
from extproc.core.record import Arrival, Attachment

if TYPE_CHECKING:
    import random

    from extproc.core.activation import AwaitingRequests


class Asked(msgspec.Struct, frozen=True):
    """The request. ``tokens``: its prompt's, if known."""

    arrival: Arrival
    attachment: Attachment
    tokens: Sequence[int] | None


def explain_arrival(asked: Asked, awaiting: AwaitingRequests, *, now: float, rng: random.Random) -> Explanation:
    """Where it would go, or what it would wait for; raises a Refusal."""
    arrival, attachment = asked.arrival, asked.attachment
    pool, prompt = arrival.pool, prompt_of(arrival, asked.tokens)
    if awaiting.holds(pool) and attachment.subset is None:
        tokens = pool.expect(prompt, now).input_tokens
        return Explanation(
            server=pool.name,
            model=arrival.destination.model,
            input_tokens=round(tokens, 1),
            cached_tokens=0.0,
            addresses=(),
            cost_s=0.0,
            prefill=None,
            stage="",
            profiles=(),
            waits=awaiting.in_words(pool, now),
        )
    adapter, loader = where_adapter_goes(pool, arrival.adapter, attachment.subset, now)
    only = None if loader is None else np.arange(len(pool.table.addresses)) == loader
    constraints = constraints_of(arrival, attachment, only, wants_reasons=True)
    found = explain(pool.consider(prompt, constraints, now=now, rng=rng), pool)
    return msgspec.structs.replace(found, adapter=adapter, avoided=avoided_now(pool, now), silent=silent_now(pool, now))
