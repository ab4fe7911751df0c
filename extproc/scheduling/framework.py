"""The scheduling framework: a profile runs filters, then weighted scorers, then one picker, over columns of endpoints.

The model is llm-d's (``pkg/epp/scheduling``), on arrays: a filter narrows a mask of rows, a scorer gives every row a number
from 0 to 1, the picker orders the rows that are left. Plugins are pure: what they may know is in the ``View``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from extproc.endpoints.table import Bools, Floats
from extproc.errors import NoEndpoint
from extproc.scheduling.picker import Pick, View

if TYPE_CHECKING:
    import random


class Filter(Protocol):
    """Takes endpoints out."""

    def keep(self, view: View, among: Bools) -> Bools:
        """The rows of ``among`` that may stay. Nobody: the profile finds no endpoint."""
        ...


class Scorer(Protocol):
    """Says how good each endpoint is."""

    def score(self, view: View, among: Bools) -> Floats:
        """By row, 0 (worst) to 1 (best). Rows outside ``among`` do not count, nor may they change those inside."""
        ...


class Choice(Protocol):
    """Orders endpoints by their scores: llm-d's pickers."""

    def order(self, scores: Floats, rng: random.Random) -> list[int]:
        """Positions in ``scores``, first choice first."""
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


class Scored(msgspec.Struct, frozen=True):
    """One scorer's part in a pick: values of the rows that were left, in their order."""

    name: str
    weight: float
    values: Floats


class Explanation(msgspec.Struct, frozen=True):
    """Why: how many rows each filter left, and each scorer's values for ``rows``."""

    left: tuple[tuple[str, int], ...]
    rows: tuple[int, ...]
    scored: tuple[Scored, ...]


class Ranking(msgspec.Struct, frozen=True):
    """Rows in the order in which to try them, and why."""

    rows: list[int]
    explanation: Explanation


class Profile(msgspec.Struct, frozen=True):
    """Filters in their order, scorers with their weights, and who chooses. ``choices``: the length of the ranking."""

    filters: tuple[NamedFilter, ...]
    scorers: tuple[NamedScorer, ...]
    choice: Choice
    choices: int = 4

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """A profile is a picker."""
        rows = self.run(view, rng).rows
        return Pick(rows, float(view.ttft_s()[rows[0]]))

    def run(self, view: View, rng: random.Random) -> Ranking:
        """Raises NoEndpoint, naming the filter that left nobody."""
        among = view.table.is_active.copy()
        left = []
        for one in self.filters:
            among &= one.plugin.keep(view, among)
            left.append((one.name, int(np.count_nonzero(among))))
            if not left[-1][1]:
                msg = f"No engine is left for this request after '{one.name}'; try again later."
                raise NoEndpoint(msg)
        rows = among.nonzero()[0]
        if not rows.size:
            raise NoEndpoint("No engine is configured for this model; add endpoints to its ModelServer.")
        total = np.zeros(rows.size)
        scored = []
        for scorer in self.scorers:
            values = scorer.plugin.score(view, among)[rows].clip(0.0, 1.0)
            total += scorer.weight * values
            scored.append(Scored(scorer.name, scorer.weight, values))
        order = self.choice.order(total, rng)[: self.choices]
        explanation = Explanation(tuple(left), tuple(map(int, rows)), tuple(scored))
        return Ranking([int(rows[position]) for position in order], explanation)
