# SPDX-License-Identifier: Apache-2.0
"""Selectors, which llm-d calls pickers: from scores to an order of endpoints.

Each takes a few array operations, for any number of endpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats

Positive = Annotated[float, msgspec.Meta(gt=0)]
Length = Annotated[int, msgspec.Meta(ge=1)]


class MaxScoreSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``max-score-picker``: highest score first, ties at random."""

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Positions by descending score."""
        return _highest(scores, rng, count)


class RandomSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``random-picker``: uniformly at random."""

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Positions in random order."""
        return rng.sample(range(scores.size), scores.size if count is None else min(count, scores.size))


class WeightedRandomSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``weighted-random-picker``: at random in proportion to the scores, scores of 0 last.

    Algorithm A-Res (Efraimidis and Spirakis, 2006): each endpoint draws ``U ** (1 / score)``; the largest draws win.
    If all scores are 0, the order is uniformly random.
    """

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Positions by descending draw."""
        keys = np.full(scores.size, -np.inf)
        # compare logarithms: the draws themselves would underflow for small scores
        np.divide(np.log(_uniforms(rng, scores.size)), scores, out=keys, where=scores > 1e-300)
        tiny = (scores > 0) & (scores <= 1e-300)
        keys[tiny] = -1e308
        return _highest(keys, rng, count)


class PowerOfTwoSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Power of two choices: the better of two random endpoints, then the others by score (Mitzenmacher, 2001).

    With outdated scores it causes less herding than taking the maximum.
    """

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """The better of the two first."""
        proposed = rng.sample(range(scores.size), min(2, scores.size))
        if not proposed:
            return []
        first = max(proposed, key=lambda position: scores[position])
        rest = _highest(scores, rng, None if count is None else count + 1)
        return [first, *(position for position in rest if position != first)][:count]


class SoftmaxSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """At random in proportion to ``exp(score / temperature)``.

    A temperature towards 0 approaches the maximum, towards infinity a uniform choice. Ordering by ``score /
    temperature + G`` with standard Gumbel noise G is such a draw without replacement (the Gumbel trick).
    """

    temperature: Positive = 0.1
    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Positions by descending perturbed score."""
        noise = -np.log(-np.log(_uniforms(rng, scores.size)))
        return _highest(scores / self.temperature + noise, rng, count)


def _uniforms(rng: random.Random, count: int) -> Floats:
    """``count`` uniform random numbers in the open interval (0, 1)."""
    drawn = np.frombuffer(rng.randbytes(8 * count), np.uint64) >> np.uint64(11)
    uniforms: Floats = (drawn.astype(np.float64) + 0.5) * 2.0**-53
    return uniforms


def _highest(keys: Floats, rng: random.Random, count: int | None) -> list[int]:
    """The positions of the ``count`` highest keys, highest first, ties at random."""
    size = keys.size
    if count is None or count >= size:
        shuffled = np.array(rng.sample(range(size), size), dtype=np.intp)
    elif count == 1:
        # of every request where the gateway takes one address
        equal = (keys == keys.max()).nonzero()[0]
        return [int(equal[rng.randrange(equal.size)])]
    else:
        least = np.partition(keys, size - count)[size - count]
        above = (keys > least).nonzero()[0]
        equal = (keys == least).nonzero()[0]
        drawn = rng.sample(range(equal.size), count - above.size)
        chosen = [*above.tolist(), *equal[drawn].tolist()]
        rng.shuffle(chosen)
        shuffled = np.array(chosen, dtype=np.intp)
    order: list[int] = shuffled[(-keys[shuffled]).argsort(kind="stable")].tolist()
    return order
