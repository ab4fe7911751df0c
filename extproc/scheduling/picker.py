"""The seam of endpoint picking: what a picker sees, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import EndpointTable, Floats


class Pick(msgspec.Struct, frozen=True):
    """Rows in the order in which to try them, and the first one's expected cost in seconds of waiting."""

    rows: list[int]
    cost_s: float


class Picker(Protocol):
    """Chooses endpoints for one request. Raises NoEndpoint when there is none."""

    def pick(
        self, table: EndpointTable, *, input_tokens: float, cached_tokens: Floats, now: float, rng: random.Random
    ) -> Pick:
        """``cached_tokens``: by row, how much of ``input_tokens`` the endpoint's cache probably holds."""
        ...
