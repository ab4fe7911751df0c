# SPDX-License-Identifier: Apache-2.0
"""A distribution in five numbers: the mean and percentiles by the nearest rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Distribution(msgspec.Struct, frozen=True):
    """In the unit of the values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def distribution(values: Iterable[float]) -> Distribution:
    """All 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0.0, 0.0, 0.0, 0.0, 0.0)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(mean, *(nearest_rank(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The percentile of sorted values by the nearest rank. ``share``: above 0, at most 1. Needs at least one value."""
    return ordered[math.ceil(share * len(ordered)) - 1]
