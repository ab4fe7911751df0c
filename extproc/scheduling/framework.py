"""The scheduling framework: a profile runs filters, then weighted scorers, then one picker, over columns of endpoints.

The model is llm-d's (``pkg/epp/scheduling``), on arrays: a filter narrows a mask of rows, a scorer gives every row a number
from 0 to 1, the picker orders the rows that are left, and a profile handler says which profiles run. Plugins are pure: what
they may know is in the ``View``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from extproc.errors import NoEndpoint
from extproc.scheduling.picker import Pick, Reasons, ScorerValues, View, rows_of

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Bools, Floats


class Filter(Protocol):
    """Takes endpoints out."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """The rows of ``candidates`` that may stay. Nobody: the profile finds no endpoint."""
        ...


class Scorer(Protocol):
    """Says how good each endpoint is."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """By row, 0 (worst) to 1 (best). Rows outside ``candidates`` do not count, nor may they change those inside."""
        ...


class Selector(Protocol):
    """Orders endpoints by their scores: llm-d's pickers. ``max_num_of_endpoints`` bounds the list, where it is set."""

    @property
    def max_num_of_endpoints(self) -> int | None:
        """The most that the list may name; None: as many as the attachment takes."""
        ...

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """The first ``count`` positions in ``scores``, first choice first."""
        ...


class Decider(Protocol):
    """Says whether a request's prefill goes to an engine of its own."""

    def wants_prefill(self, view: View, decode_row: int) -> bool:
        """``decode_row``: who will decode."""
        ...


class NamedFilter(msgspec.Struct, frozen=True):
    """A filter under the name by which it was configured."""

    name: str
    plugin: Filter


class NamedScorer(msgspec.Struct, frozen=True):
    """A scorer under its name, and how much it counts."""

    name: str
    plugin: Scorer
    weight: float = 1.0


class Profile(msgspec.Struct, frozen=True):
    """Filters in their order, scorers with their weights, and who chooses."""

    filters: tuple[NamedFilter, ...]
    scorers: tuple[NamedScorer, ...]
    choice: Selector
    name: str = "default"

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """A profile is a picker. Raises NoEndpoint, naming the filter that left nobody."""
        candidates = start = view.candidates()
        left = []
        for one in self.filters:
            candidates = candidates & one.plugin.keep(view, candidates)
            if view.wants_reasons:
                left.append((one.name, rows_of(candidates)))
            if not candidates.any():
                msg = f"No engine is left for this request after '{one.name}'; try again later."
                raise NoEndpoint(msg)
        rows = candidates.nonzero()[0]
        total = np.zeros(rows.size)
        scored = []
        for scorer in self.scorers:
            values = scorer.plugin.score(view, candidates)[rows].clip(0.0, 1.0)
            total += scorer.weight * values
            if view.wants_reasons:
                scored.append(ScorerValues(scorer.name, scorer.weight, values))
        count = min(view.choices, self.choice.max_num_of_endpoints or view.choices)
        chosen: list[int] = rows[self.choice.order(total, rng, count)].tolist()
        reasons: tuple[Reasons, ...] = ()
        if view.wants_reasons:
            reasons = (Reasons(self.name, rows_of(start), tuple(left), tuple(rows.tolist()), tuple(scored)),)
        return Pick(chosen, float(view.ttft_s()[chosen[0]]), reasons=reasons)


class ProfileHandler(Protocol):
    """Says which profiles run, and makes one pick of what they find."""

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """What is wrong with the profiles that it is to choose candidates, if anything is."""
        ...

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, Decider], rng: random.Random
    ) -> Pick:
        """Raises NoEndpoint."""
        ...


class ConfiguredPicker(msgspec.Struct, frozen=True):
    """Profiles under the handler that chooses among them: what an EndpointPickerConfig describes."""

    handler: ProfileHandler
    profiles: Mapping[str, Profile]
    deciders: Mapping[str, Decider] = {}

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """As the handler says."""
        return self.handler.run(view, self.profiles, self.deciders, rng)
