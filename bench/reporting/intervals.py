# SPDX-License-Identifier: Apache-2.0
"""How certain a number is: bootstrap over windows of requests in a row (Künsch, 1989).

Requests of one burst meet the same queues, so they are not independent observations; windows of a trace, and seeds,
nearly are. Two policies meet the same requests, so their windows are drawn in pairs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_DRAWS: Final = 2000
WINDOWS: Final = 12


class Interval(msgspec.Struct, frozen=True):
    """An estimate, and the bounds of 95% of its resampled values."""

    value: float
    low: float
    high: float


def windows(values: Sequence[float], count: int = WINDOWS) -> list[Sequence[float]]:
    """Cut values in the order of time into ``count`` windows of equal numbers."""
    edges = np.linspace(0, len(values), min(count, max(1, len(values))) + 1).astype(int)
    return [values[low:high] for low, high in itertools.pairwise(edges) if high > low]


def mean_interval(blocks: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """The interval of the mean of all values. ``blocks``: windows, which are drawn whole."""
    sums = np.array([float(np.sum(block)) for block in blocks])
    counts = np.array([len(block) for block in blocks], float)
    if not counts.sum():
        return Interval(0.0, 0.0, 0.0)
    drawn = np.random.default_rng(seed).integers(0, len(blocks), (_DRAWS, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def ratio_interval(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """The interval of the mean of ``ours`` over that of ``theirs``, minus 1, from paired windows: -0.1 is ten percent
    less.
    """

    ours_sums = np.array([float(np.sum(block)) for block in ours])
    their_sums = np.array([float(np.sum(block)) for block in theirs])
    if not their_sums.sum():
        return Interval(0.0, 0.0, 0.0)
    drawn = np.random.default_rng(seed).integers(0, len(ours), (_DRAWS, len(ours)))
    ratios = ours_sums[drawn].sum(axis=1) / np.maximum(their_sums[drawn].sum(axis=1), 1e-12) - 1
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(ours_sums.sum() / their_sums.sum() - 1), float(low), float(high))
