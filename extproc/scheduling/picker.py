"""The seam of endpoint picking: what a picker sees, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.endpoints.table import Floats

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import EndpointTable


class Demand(msgspec.Struct, frozen=True):
    """What a request asks of each endpoint, by row: the tokens that its cache probably holds, and the prefill work left."""

    cached_tokens: Floats
    work: Floats


class Pick(msgspec.Struct, frozen=True):
    """Rows in the order in which to try them, and the first one's expected cost in seconds of waiting."""

    rows: list[int]
    cost_s: float


class Picker(Protocol):
    """Chooses endpoints for one request. Raises NoEndpoint when there is none."""

    def pick(self, table: EndpointTable, demand: Demand, *, now: float, rng: random.Random) -> Pick:
        """Who takes the request, at ``now`` in seconds."""
        ...
