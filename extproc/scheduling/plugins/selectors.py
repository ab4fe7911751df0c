"""Pickers: from scores to an order of endpoints.

All of them cost a few array operations, however many endpoints there are.
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


class MaxScore(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Highest score first, chance among equals: llm-d's ``max-score-picker`` (shuffle, then a stable sort)."""

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """The first ``count`` positions by falling score."""
        return _highest(scores, rng, count)


class Random(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Chance alone: llm-d's ``random-picker``."""

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Any order."""
        return rng.sample(range(scores.size), scores.size if count is None else min(count, scores.size))


class WeightedRandom(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """By chance in proportion to the scores, those of 0 last: llm-d's ``weighted-random-picker``.

    Algorithm A-Res (Efraimidis and Spirakis, 2006): every endpoint draws ``U ** (1 / score)``; the largest draws win. All
    scores 0: chance alone.
    """

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Positions by falling key."""
        keys = np.full(scores.size, -np.inf)
        # in the logarithm, and of that once more, small scores do not underflow
        np.divide(np.log(_uniforms(rng, scores.size)), scores, out=keys, where=scores > 1e-300)
        tiny = (scores > 0) & (scores <= 1e-300)
        keys[tiny] = -1e308
        return _highest(keys, rng, count)


class PowerOfTwoSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The better of two that chance proposes, then the others by score (Mitzenmacher, 2001).

    Where scores are late, this herds less than the maximum does.
    """

    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """The winner of the two first."""
        proposed = rng.sample(range(scores.size), min(2, scores.size))
        if not proposed:
            return []
        first = max(proposed, key=lambda position: scores[position])
        rest = _highest(scores, rng, None if count is None else count + 1)
        return [first, *(position for position in rest if position != first)][:count]


class Softmax(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """By chance in proportion to ``exp(score / temperature)``: towards 0 the maximum, towards infinity chance alone.

    Gumbel's trick: the order of ``score / temperature + G`` with standard Gumbel noise is a draw without replacement.
    """

    temperature: Positive = 0.1
    max_num_of_endpoints: Length | None = None

    def order(self, scores: Floats, rng: random.Random, count: int | None = None) -> list[int]:
        """Positions by falling perturbed score."""
        noise = -np.log(-np.log(_uniforms(rng, scores.size)))
        return _highest(scores / self.temperature + noise, rng, count)


def _uniforms(rng: random.Random, count: int) -> Floats:
    """``count`` numbers in (0, 1), both ends left out."""
    drawn = np.frombuffer(rng.randbytes(8 * count), np.uint64) >> np.uint64(11)
    uniforms: Floats = (drawn.astype(np.float64) + 0.5) * 2.0**-53
    return uniforms


def _highest(keys: Floats, rng: random.Random, count: int | None) -> list[int]:
    """The positions of the ``count`` highest keys, highest first; chance decides between equal ones."""
    size = keys.size
    if count is None or count >= size:
        shuffled = np.array(rng.sample(range(size), size), dtype=np.intp)
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
