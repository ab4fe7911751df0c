# SPDX-License-Identifier: Apache-2.0
"""Selectors: the order by scores, and its randomness."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.scheduling.plugins.score_selectors import (
    MaxScoreSelector,
    PowerOfTwoSelector,
    RandomSelector,
    SoftmaxSelector,
    WeightedRandomSelector,
)

if TYPE_CHECKING:
    from extproc.scheduling.framework import Selector

ALL: list[Selector] = [
    MaxScoreSelector(),
    RandomSelector(),
    WeightedRandomSelector(),
    PowerOfTwoSelector(),
    SoftmaxSelector(),
]
DRAWS = 6000


def firsts(choice: Selector, scores: list[float]) -> list[float]:
    """How often each position comes first, as a share."""
    rng = random.Random(7)
    counts = Counter(choice.order(np.array(scores), rng)[0] for _ in range(DRAWS))
    return [counts[position] / DRAWS for position in range(len(scores))]


def test_the_highest_score_comes_first_and_equals_share() -> None:
    assert MaxScoreSelector().order(np.array([0.1, 0.9, 0.5]), random.Random(0)) == [1, 2, 0]
    assert firsts(MaxScoreSelector(), [0.5, 1.0, 1.0, 0.0]) == pytest.approx([0.0, 0.5, 0.5, 0.0], abs=0.03)


def test_weighted_random_follows_the_scores_and_leaves_zero_for_last() -> None:
    assert firsts(WeightedRandomSelector(), [1.0, 2.0, 0.0, 1.0]) == pytest.approx([0.25, 0.5, 0.0, 0.25], abs=0.03)
    assert firsts(WeightedRandomSelector(), [0.0, 0.0]) == pytest.approx([0.5, 0.5], abs=0.03)
    assert WeightedRandomSelector().order(np.array([0.0, 1e-9, 1.0]), random.Random(0))[-1] == 0


def test_the_smallest_scores_do_not_underflow() -> None:
    assert WeightedRandomSelector().order(np.array([1e-300, 1.0, 0.0]), random.Random(0)) == [1, 0, 2]
    assert sorted(WeightedRandomSelector().order(np.array([5e-324, 1.0]), random.Random(0))) == [0, 1]


def test_softmax_is_proportional_to_the_exponential() -> None:
    weights = [math.exp(score / 0.5) for score in (0.2, 0.7, 1.0)]
    expected = [weight / sum(weights) for weight in weights]
    assert firsts(SoftmaxSelector(temperature=0.5), [0.2, 0.7, 1.0]) == pytest.approx(expected, abs=0.03)
    assert firsts(SoftmaxSelector(temperature=0.001), [0.2, 0.7, 1.0]) == [0.0, 0.0, 1.0]


def test_power_of_two_takes_the_better_of_two() -> None:
    # of the 6 pairs of 4, the best is in 3, the second wins 2, the third 1, the last none
    assert firsts(PowerOfTwoSelector(), [0.1, 0.4, 0.3, 0.2]) == pytest.approx([0, 3 / 6, 2 / 6, 1 / 6], abs=0.03)
    assert PowerOfTwoSelector().order(np.array([0.5]), random.Random(0)) == [0]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.sampled_from(ALL), st.integers(0, 1000))
def test_every_endpoint_appears_once(scores: list[float], choice: Selector, seed: int) -> None:
    order = choice.order(np.array(scores), random.Random(seed))
    assert sorted(order) == list(range(len(scores)))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.sampled_from(ALL), st.integers(0, 99), st.integers(1, 6)
)
def test_a_short_list_is_as_good_as_the_head_of_a_long_one(
    scores: list[int], choice: Selector, seed: int, count: int
) -> None:
    order = choice.order(np.array(scores, dtype=float), random.Random(seed), count)
    assert len(order) == len(set(order)) == min(count, len(scores))
    if isinstance(choice, MaxScoreSelector):
        assert [scores[position] for position in order] == sorted(scores, reverse=True)[:count]


@pytest.mark.parametrize("count", [1, 4])
def test_equals_share_a_short_list_too(count: int) -> None:
    rng = random.Random(3)
    scores = np.array([1.0] * 10 + [0.5] * 90)
    counts = Counter(MaxScoreSelector().order(scores, rng, count)[0] for _ in range(5000))
    assert set(counts) == set(range(10))
    assert min(counts.values()) > 400


@pytest.mark.parametrize("choice", ALL)
def test_the_place_in_the_table_does_not_matter(choice: Selector) -> None:
    scores = [0.9, 0.1, 0.5, 0.5]
    turned = firsts(choice, scores[2:] + scores[:2])
    assert turned[2:] + turned[:2] == pytest.approx(firsts(choice, scores), abs=0.03)
