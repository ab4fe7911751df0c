"""The seam of endpoint picking: what a picker sees, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.endpoints.ledger import backlogs
from extproc.endpoints.table import EndpointTable, Floats

if TYPE_CHECKING:
    import random


class Demand(msgspec.Struct, frozen=True):
    """What a request asks of each endpoint, by row: the tokens that its cache probably holds, and the prefill work left."""

    cached_tokens: Floats
    work: Floats


class RequestFacts(msgspec.Struct, frozen=True):
    """What may be known of a request. ``model``: the name that engines know, an adapter's if one was asked for.

    ``adapter``: that name if it is a LoRA adapter's. Header names are lower-case.
    """

    model: str
    input_tokens: float
    adapter: str | None = None
    headers: Mapping[str, str] = {}


class View(msgspec.Struct, frozen=True):
    """All that a decision rests on: endpoints as columns, the request, what it asks of each, and the time in seconds."""

    table: EndpointTable
    demand: Demand
    request: RequestFacts
    now_s: float

    def ttft_s(self) -> Floats:
        """Expected seconds to the first token: what waits and this prompt's own work over the learned rate."""
        waiting: Floats = (backlogs(self.table, self.now_s) + self.demand.work) / self.table.prefill_rate
        return waiting


class Pick(msgspec.Struct, frozen=True):
    """Rows in the order in which to try them, and the first one's expected cost in seconds of waiting."""

    rows: list[int]
    cost_s: float


class Picker(Protocol):
    """Chooses endpoints for one request. Raises NoEndpoint when there is none."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Who takes the request."""
        ...
