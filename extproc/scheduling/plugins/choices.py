"""Pickers: from scores to an order of endpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats

Positive = Annotated[float, msgspec.Meta(gt=0)]


class MaxScore(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Highest score first, chance among equals: llm-d's ``max-score-picker`` (shuffle, then a stable sort)."""

    max_num_of_endpoints: Annotated[int, msgspec.Meta(ge=1)] = 1

    def order(self, scores: Floats, rng: random.Random) -> list[int]:
        """Positions by falling score."""
        shuffled = _shuffled(scores.size, rng)
        return [int(shuffled[place]) for place in np.argsort(-scores[shuffled], kind="stable")]


class Random(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Chance alone: llm-d's ``random-picker``."""

    max_num_of_endpoints: Annotated[int, msgspec.Meta(ge=1)] = 1

    def order(self, scores: Floats, rng: random.Random) -> list[int]:
        """Any order."""
        return [int(position) for position in _shuffled(scores.size, rng)]


class WeightedRandom(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """By chance in proportion to the scores, those of 0 last: llm-d's ``weighted-random-picker``.

    Algorithm A-Res (Efraimidis and Spirakis, 2006): every endpoint draws ``U ** (1 / score)``; the largest draws win. All
    scores 0: chance alone.
    """

    max_num_of_endpoints: Annotated[int, msgspec.Meta(ge=1)] = 1

    def order(self, scores: Floats, rng: random.Random) -> list[int]:
        """Positions by falling key."""
        # in the logarithm, where small scores do not underflow
        keys = [math.log(1.0 - rng.random()) / score if score > 0 else -math.inf for score in scores.tolist()]
        ties = _shuffled(scores.size, rng)
        return sorted((int(position) for position in ties), key=lambda position: -keys[position])


class PowerOfTwo(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The better of two that chance proposes, then the others by score (Mitzenmacher, 2001).

    Where scores are late, this herds less than the maximum does.
    """

    def order(self, scores: Floats, rng: random.Random) -> list[int]:
        """The winner of the two first."""
        by_score = MaxScore().order(scores, rng)
        proposed = rng.sample(range(scores.size), min(2, scores.size))
        first = max(proposed, key=lambda position: scores[position])
        return [first, *(position for position in by_score if position != first)]


class Softmax(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """By chance in proportion to ``exp(score / temperature)``: towards 0 the maximum, towards infinity chance alone.

    Gumbel's trick: the order of ``score / temperature + G`` with standard Gumbel noise is a draw without replacement.
    """

    temperature: Positive = 0.1

    def order(self, scores: Floats, rng: random.Random) -> list[int]:
        """Positions by falling perturbed score."""
        keys = [score / self.temperature - math.log(-math.log(_inside(rng))) for score in scores.tolist()]
        return sorted(range(scores.size), key=lambda position: -keys[position])


def _inside(rng: random.Random) -> float:
    """Uniform in (0, 1), both ends left out."""
    return max(rng.random(), 1e-300)


def _shuffled(count: int, rng: random.Random) -> Floats:
    positions = list(range(count))
    rng.shuffle(positions)
    return np.array(positions, dtype=np.intp)
