"""The seam of endpoint picking: what a picker sees, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from extproc.endpoints.ledger import backlogs
from extproc.endpoints.table import Bools, EndpointTable, Floats
from extproc.errors import NoEndpoint

if TYPE_CHECKING:
    import random


class Demand(msgspec.Struct, frozen=True):
    """What a request asks of each endpoint, by row: the tokens that its cache probably holds, and the prefill work left.

    ``decode_s_per_token``: seconds that its answer takes longer for each token in flight beside it.
    """

    cached_tokens: Floats
    work: Floats
    decode_s_per_token: float = 0.0


class RequestFacts(msgspec.Struct, frozen=True):
    """What may be known of a request. ``model``: the name that engines know, an adapter's if one was asked for.

    ``adapter``: that name if it is a LoRA adapter's. Header names are lower-case. ``is_trusted``: a gateway vouches for headers that
    say what the request is worth.
    """

    model: str
    input_tokens: float
    adapter: str | None = None
    headers: Mapping[str, str] = {}
    is_trusted: bool = False


class View(msgspec.Struct, frozen=True):
    """All that a decision rests on: endpoints as columns, the request, what it asks of each, and the time in seconds.

    ``eligible``: the rows that may be chosen at all, None for every endpoint there is. ``choices``: how many the answer may
    name, fallbacks included. ``wants_reasons``: the pick is to be explained.
    """

    table: EndpointTable
    demand: Demand
    request: RequestFacts
    now_s: float
    eligible: Bools | None = None
    choices: int = 4
    wants_reasons: bool = False

    def ttft_s(self) -> Floats:
        """Expected seconds to the first token: what waits and this prompt's own work over the learned rate."""
        waiting: Floats = (backlogs(self.table, self.now_s) + self.demand.work) / self.table.prefill_rate
        return waiting

    def candidates(self) -> Bools:
        """The rows that may be chosen; raises NoEndpoint."""
        candidates = self.table.is_active.copy() if self.eligible is None else self.table.is_active & self.eligible
        if not candidates.any():
            raise NoEndpoint(
                "No engine is ready for this request; add endpoints to its ModelServer or try again later."
            )
        return candidates

    def narrowed(self, candidates: Bools, *, choices: int | None = None) -> View:
        """The same with only ``candidates`` to choose from."""
        eligible = candidates if self.eligible is None else self.eligible & candidates
        return msgspec.structs.replace(self, eligible=eligible, choices=self.choices if choices is None else choices)


class ScorerValues(msgspec.Struct, frozen=True):
    """One scorer's part in a pick: values of the rows that were left, in their order."""

    name: str
    weight: float
    values: Floats


class Reasons(msgspec.Struct, frozen=True):
    """Why: the rows at the start, those that each filter left, and each scorer's values for the last of these.

    A larger total of ``weight * value`` is better; costs in seconds have a weight of -1.
    """

    profile: str
    candidates: tuple[int, ...]
    after_filters: tuple[tuple[str, tuple[int, ...]], ...]
    rows: tuple[int, ...]
    scored: tuple[ScorerValues, ...]


class Pick(msgspec.Struct, frozen=True):
    """Rows in the order in which to try them, and the first one's expected cost in seconds of waiting.

    ``prefill_row``: who computes the prompt, if not the first row itself. ``stage``: why there is or is no such pair.
    """

    rows: list[int]
    cost_s: float
    prefill_row: int | None = None
    stage: str = ""
    reasons: tuple[Reasons, ...] = ()


class Picker(Protocol):
    """Chooses endpoints for one request. Raises NoEndpoint when there is none."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Who takes the request."""
        ...


def rows_of(mask: Bools) -> tuple[int, ...]:
    """A mask as row numbers."""
    return tuple(np.flatnonzero(mask).tolist())
