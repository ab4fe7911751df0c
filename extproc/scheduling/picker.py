# SPDX-License-Identifier: Apache-2.0
"""The interface of pickers: what a picker sees, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from extproc.endpoints.breaker_ranks import breaker_ranks, least_by_row
from extproc.endpoints.in_flight import backlogs
from extproc.endpoints.table import Bools, EndpointTable, Floats
from extproc.refusals import NoEndpoint
from extproc.scheduling.sessions import TenantSessions

if TYPE_CHECKING:
    import random


class PluginFailed(Exception):
    """A plugin of another package raised, or returned what it must not; the request is decided without it.

    ``plugin``: its name in the file. ``where``: its file and line, empty if unknown. The cause is what it raised.
    """

    def __init__(self, plugin: str, cause: BaseException, where: str) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}" + (f" ({where})" if where else ""))
        self.plugin = plugin
        self.where = where
        self.__cause__ = cause


class RequestDemandByRow(msgspec.Struct, frozen=True):
    """What a request requires of each endpoint, by row.

    ``cached_tokens``: tokens of its prompt that are probably cached. ``work``: remaining prefill work in tokens,
    attention included. ``decode_s_per_token``: seconds that its answer takes longer for each other token in flight.
    ``tiers``: as ``cached_tokens``, of caches with a capacity of their own, by name.
    """

    cached_tokens: Floats
    work: Floats
    decode_s_per_token: float = 0.0
    tiers: Mapping[str, Floats] = {}

    def cached_by(self, tier: str) -> Floats:
        """``cached_tokens`` of the tier of this name; of the cache as a whole if there is none."""
        return self.tiers.get(tier, self.cached_tokens)


class RequestFacts(msgspec.Struct, frozen=True):
    """A request's facts that pickers may use.

    ``model``: its name in the engines; the adapter's name if one was requested. ``adapter``: the same name if it is a
    LoRA adapter's, else None. ``headers``: names in lower case. ``is_trusted``: a gateway wrote the headers that give
    the request's objectives. ``priority``: of its objective; known only to pickers with admitters. ``whole``: why no
    other engine may prefill its prompt, a key of WHOLE; empty if one may.
    """

    model: str
    input_tokens: float
    adapter: str | None = None
    headers: Mapping[str, str] = {}
    is_trusted: bool = False
    priority: int = 0
    whole: str = ""


class View(msgspec.Struct, frozen=True):
    """Everything a decision depends on.

    ``eligible``: the rows that may be chosen; None: every endpoint. ``choices``: how many endpoints to name,
    fallbacks included. ``wants_reasons``: whether the pick must be explained. ``sessions``: those of the caller, None
    if the picker keeps none. ``peer_row``: the endpoint that was picked before for the same request and hands its KV
    cache over, or gets it; None if there is none yet. ``failed``: plugins that failed, without which the decision was
    made. ``ranked``: which endpoints come first, drawn for this pick; see ``breaker_ranks``.
    """

    table: EndpointTable
    demand: RequestDemandByRow
    request: RequestFacts
    now_s: float
    eligible: Bools | None = None
    choices: int = 4
    wants_reasons: bool = False
    sessions: TenantSessions | None = None
    peer_row: int | None = None
    failed: list[PluginFailed] = msgspec.field(default_factory=list)
    ranked: Floats | None = None

    @property
    def ranks(self) -> Floats | None:
        """By row, which endpoints come first; see ``endpoints.breaker_ranks``. None: all are equal."""
        return breaker_ranks(self.table, self.now_s) if self.ranked is None and self.table.has_failures else self.ranked

    def preferred(self, candidates: Bools) -> Bools:
        """Those of ``candidates`` that come before the others, by their breakers."""
        return least_by_row(candidates, self.ranks)

    def ttft_s(self) -> Floats:
        """Expected seconds to the first token, by row: (backlog + own work) / learned prefill rate."""
        ttft_s: Floats = (backlogs(self.table, self.now_s) + self.demand.work) / self.table.prefill_rate
        return ttft_s

    def candidates(self) -> Bools:
        """The rows that may be chosen; raises NoEndpoint if there are none."""
        candidates = self.table.is_active.copy() if self.eligible is None else self.table.is_active & self.eligible
        if not candidates.any():
            raise NoEndpoint(
                "No engine is ready for this request; try again later. "
                "If that stays so, its ModelServer is missing, or none of its endpoints is ready."
            )
        return candidates

    def with_candidates(self, candidates: Bools, *, choices: int | None = None, peer_row: int | None = None) -> View:
        """The same view with only ``candidates`` to choose from, and other ``choices`` and ``peer_row`` if given."""
        eligible = candidates if self.eligible is None else self.eligible & candidates
        choices = self.choices if choices is None else choices
        return msgspec.structs.replace(
            self, eligible=eligible, choices=choices, peer_row=self.peer_row if peer_row is None else peer_row
        )


class ScorerValues(msgspec.Struct, frozen=True):
    """The values that one scorer gave to the rows left by the filters, in the order of ``Reasons.rows``."""

    name: str
    weight: float
    values: Floats


class Reasons(msgspec.Struct, frozen=True):
    """Why a profile picked as it did, in row numbers.

    ``candidates``: the rows at the start. ``after_filters``: each filter's name and the rows that it kept. ``rows``:
    the rows that were scored. ``scored``: the values of each scorer; a larger sum of ``weight * value`` is better, so
    costs in seconds have a weight of -1.
    """

    profile: str
    candidates: tuple[int, ...]
    after_filters: tuple[tuple[str, tuple[int, ...]], ...]
    rows: tuple[int, ...]
    scored: tuple[ScorerValues, ...]


class Pick(msgspec.Struct, frozen=True):
    """A picker's decision.

    ``rows``: in the order in which to try them. ``cost_s``: expected cost of the first, in seconds. ``prefill_row``:
    the endpoint that prefills, if not the first row itself. ``stage``: why there is, or is not, a separate prefill
    endpoint.
    """

    rows: list[int]
    cost_s: float
    prefill_row: int | None = None
    stage: str = ""
    reasons: tuple[Reasons, ...] = ()


class Picker(Protocol):
    """Chooses endpoints for one request."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Choose endpoints; raises NoEndpoint if there are none."""
        ...


def rows_of(mask: Bools) -> tuple[int, ...]:
    """The row numbers set in a mask."""
    return tuple(np.flatnonzero(mask).tolist())
