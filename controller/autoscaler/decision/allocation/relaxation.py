# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a problem: what it would cost at least if replicas could be divided, with limits priced in."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.decision.allocation.problem import Problem

# Bounds count in this part of a weight, so that prices of what is limited need not be whole weights.
SCALE: Final = 1 << 20
_FINE: Final = 1 << 80
_SWEEPS: Final = 2
_HALVINGS: Final = 8
_FACTORS: Final = (0.5, 1.5)


class Segment(msgspec.Struct, frozen=True):
    """Up to ``count`` replicas of one variant, each with the same ``weight`` (scaled, with prices) and ``capacity``.
    ``variant``: its index; -1: capacity that is not carried. ``is_fresh``: replicas that must start.
    """

    variant: int
    is_fresh: bool
    weight: int
    capacity: int
    count: int


class Prices(msgspec.Struct, frozen=True):
    """Scaled: of a unit of each pool, and of a unit of capacity on demand that is missing. They turn limits into
    weights: whatever they are, bounds hold; the better they are, the tighter.
    """

    pools: tuple[int, ...]
    on_demand: int = 0


def segments(problem: Problem, prices: Prices) -> list[Segment]:
    """What may be added to the lower bounds, the lightest for its capacity first."""
    found = []
    for index, (low, high) in enumerate(zip(problem.lows, problem.highs, strict=True)):
        running = min(max(problem.running[index], low), high)
        for is_fresh, count in ((False, running - low), (True, high - running)):
            if count > 0:
                weight = priced(problem, prices, index, is_fresh=is_fresh)
                found.append(Segment(index, is_fresh, weight, problem.capacity[index], count))
    if problem.need > 0:
        found.append(Segment(-1, True, problem.missing * SCALE, 1, problem.need))
    return sorted(found, key=lambda one: one.weight * _FINE // one.capacity)


def priced(problem: Problem, prices: Prices, index: int, *, is_fresh: bool) -> int:
    """The scaled weight of one replica."""
    weight = (problem.fresh if is_fresh else problem.kept)[index] * SCALE
    for price, pool in zip(prices.pools, problem.pools, strict=True):
        if price and (is_fresh or not pool.free_until[index]):
            weight += price * pool.units[index]
    if prices.on_demand:
        weight -= prices.on_demand * problem.balance(index, 1)
    return weight


class Table:
    """Bounds of any need, from the segments of some variants."""

    def __init__(self, parts: Sequence[Segment]) -> None:
        """``parts``: sorted."""
        self._parts = parts
        self._carried = [0]
        self._weights = [0]
        self._slopes = [*((part.weight, part.capacity) for part in parts), (0, 1)]
        for part in parts:
            self._carried.append(self._carried[-1] + part.capacity * part.count)
            self._weights.append(self._weights[-1] + part.weight * part.count)
        # what lowers the bound is taken in any case
        self._least = sum(part.capacity * part.count for part in parts if part.weight < 0)

    def bound(self, need: int) -> int:
        """The least scaled weight that carries ``need``."""
        need = max(need, self._least)
        index = bisect_right(self._carried, need) - 1
        weight, capacity = self._slopes[index]
        return self._weights[index] + (need - self._carried[index]) * weight // capacity

    def replicas(self, variant: int, need: int) -> int:
        """How many replicas of the variant beyond its lower bound that takes, rounded down."""
        need = max(need, self._least)
        found = 0
        for part, before in zip(self._parts, self._carried, strict=False):
            if part.variant == variant and need > before:
                found += min(part.count, (need - before) // part.capacity)
        return found


def prices_of(problem: Problem, need: int) -> Prices:
    """Good prices for what carrying ``need`` would exceed: coordinate ascent, each price by halving a range."""
    limits = [float(pool.left) for pool in problem.pools]
    limits.append(float(sum(problem.balance(i, low) for i, low in enumerate(problem.lows))))
    limited = [*range(len(problem.pools)), *([len(problem.pools)] if problem.on_demand else [])]
    prices = [0.0] * len(limits)
    rows = _rows(problem, need) if limited else []
    for _ in range(_SWEEPS if len(limited) > 1 else 1):
        before = list(prices)
        for place in limited:
            prices[place] = _price(rows, need, prices, place, limits[place])
        if prices == before:
            break
    scaled = [round(one * SCALE) for one in prices]
    return Prices(tuple(scaled[:-1]), scaled[-1])


# Weight, capacity and count of a segment, and what a replica of it takes of each pool and of the balance.
_Row = tuple[float, float, float, tuple[float, ...]]


def _rows(problem: Problem, need: int) -> list[_Row]:
    nothing = Prices((0,) * len(problem.pools))
    rows: list[_Row] = []
    for part in segments(problem, nothing):
        if part.variant < 0:
            rows.append((float(problem.missing), 1.0, float(need), (0.0,) * (len(problem.pools) + 1)))
            continue
        uses = [
            float(pool.units[part.variant]) if part.is_fresh or not pool.free_until[part.variant] else 0.0
            for pool in problem.pools
        ]
        uses.append(-float(problem.balance(part.variant, 1)))
        rows.append((part.weight / SCALE, float(part.capacity), float(part.count), tuple(uses)))
    return rows


def _price(rows: Sequence[_Row], need: float, prices: Sequence[float], place: int, limit: float) -> float:
    """The price at which this limit is no longer exceeded, the others as they are."""
    others: list[_Row] = []
    for weight, capacity, count, uses in rows:
        priced_in = sum(price * use for i, (price, use) in enumerate(zip(prices, uses, strict=True)) if i != place)
        others.append((weight + priced_in, capacity, count, uses))

    def is_exceeded(price: float) -> bool:
        used, rest = 0.0, need
        found = sorted([((one[0] + price * one[3][place]) / one[1], one) for one in others], key=_first)
        for weight, (_, capacity, count, uses) in found:
            taken = count if weight < 0 else min(count, rest / capacity)
            rest = max(0.0, rest - taken * capacity)
            used += taken * uses[place]
        return used > limit + 1e-6

    if not is_exceeded(0.0):
        return 0.0
    most = max(abs(one[3][place]) for one in rows)
    if not most:
        return 0.0
    low = 1e-3 * min(one[0] for one in rows if one[0] > 0) / most
    high = 2 * max(one[0] / one[1] for one in rows) * max(one[1] for one in rows)
    # first the order of magnitude
    while high > 4 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_exceeded(middle) else (low, middle)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_exceeded(middle) else (low, middle)
    # too dear for capacity on demand, too cheap for pools: so the first answers are good ones
    return high if place == len(prices) - 1 else low


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def around(prices: Prices) -> list[Prices]:
    """Lower and higher prices for each limit: what is best at the beginning need not be best after some decisions."""
    binding = [(place, price) for place, price in enumerate((*prices.pools, prices.on_demand)) if price]
    return [_with(prices, place, round(price * factor)) for place, price in binding for factor in _FACTORS]


def _with(prices: Prices, place: int, price: int) -> Prices:
    if place == len(prices.pools):
        return Prices(prices.pools, price)
    return Prices((*prices.pools[:place], price, *prices.pools[place + 1 :]), prices.on_demand)
