# SPDX-License-Identifier: Apache-2.0
"""The lightest replicas of variants, by branch and bound: exact, unless the limit of effort is reached.

Variants are decided one after the other. What the undecided ones weigh at least comes from relaxations: replicas may be
divided there, and limits are priced in. A search that ends early is followed by small changes that make its answer
lighter. ``docs/decisions/0022-own-solver.md`` compares it with HiGHS.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import combinations, islice
from operator import mul
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Shares count in thousandths.
SHARES: Final = 1000
# Evaluations of bounds, each about half a microsecond.
EFFORT: Final = 1250
# Choices of one variant that are tried: in the first of two passes, and in the second.
_BROAD: Final = 2
_ALL: Final = 1_000_000
# Places that are tried one by one.
_STEPS: Final = 16
# While there is no answer at all, so many times that.
_PATIENCE: Final = 10
# Bounds count in this part of a weight, so that prices of what is limited need not be whole weights.
SCALE: Final = 1 << 20
_FINE: Final = 1 << 80
_SWEEPS: Final = 2
_HALVINGS: Final = 8
_FACTORS: Final = (0.5, 1.5)
# Weight, capacity and count of a segment, and what a replica of it takes of each pool and of the balance.
_Row = tuple[float, float, float, tuple[float, ...]]
_PASSES: Final = 5
# Weight, capacity, balance and what is left of each pool; of a change: by how much they change.
_Amounts = tuple[int, ...]


class ResourcePool(msgspec.Struct, frozen=True):
    """Something of which there is only so much. ``what``: for people. ``left``: beyond what the lower bounds take.
    ``units``: what a replica of each variant takes of it. ``free_until``: replicas of each variant that take nothing.
    """

    what: str
    left: int
    units: Sequence[int]
    free_until: Sequence[int]


class AllocationProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Minimise the sum of weights, with ``need`` carried and no pool exceeded.

    ``lows``, ``highs``: bounds of replicas by variant. ``capacity``: of a replica. ``running``: replicas that need no
    start. ``kept`` and ``fresh``: the weight of a replica that runs, and of one that must start. ``missing``: of a unit
    of capacity that is not carried; more than of everything else. ``on_demand``: thousandths of all capacity that must
    not be spot. ``spot``: which variants are.
    """

    need: int
    lows: Sequence[int]
    highs: Sequence[int]
    capacity: Sequence[int]
    running: Sequence[int]
    kept: Sequence[int]
    fresh: Sequence[int]
    missing: int
    pools: Sequence[ResourcePool] = ()
    on_demand: int = 0
    spot: Sequence[bool] = ()

    def weight(self, index: int, replicas: int) -> int:
        """Of so many replicas of a variant."""
        running = min(replicas, self.running[index])
        return self.kept[index] * running + self.fresh[index] * (replicas - running)

    @property
    def can_meet_on_demand_share(self) -> bool:
        """Whether enough of the capacity could be on demand, were there no pools."""
        pairs = zip(self.spot, self.lows, self.highs, strict=True)
        return (
            sum(self.on_demand_surplus(i, low if is_spot else high) for i, (is_spot, low, high) in enumerate(pairs))
            >= 0
        )

    def on_demand_surplus(self, index: int, replicas: int) -> int:
        """What they add to capacity on demand beyond the share that must be; negative for spot."""
        share = -self.on_demand if self.spot[index] else SHARES - self.on_demand
        return share * self.capacity[index] * replicas


class Solution(msgspec.Struct, frozen=True):
    """``replicas``: by variant. ``is_proven``: nothing is lighter."""

    replicas: tuple[int, ...]
    is_proven: bool


def solve(problem: AllocationProblem, effort: int = EFFORT) -> Solution | None:
    """None: no answer keeps the share on demand, or none was found with ten times the effort."""
    if problem.on_demand and not problem.can_meet_on_demand_share:
        return None
    search = _Search(problem, effort)
    search.run()
    if search.best is None:
        return None
    is_proven = search.effort > 0
    return Solution(search.best if is_proven else local_search(problem, search.best), is_proven)


class _Relaxed:
    """Bounds at some prices. ``prices``: in the order of a state. ``tables``: of the undecided variants, by depth.
    ``kept`` and ``fresh``: the scaled weight of a replica of each variant.
    """

    __slots__ = ("fresh", "kept", "prices", "tables")

    def __init__(
        self, problem: AllocationProblem, prices: DualPrices, parts: Sequence[CapacitySegment], order: Sequence[int]
    ) -> None:
        places = {variant: place for place, variant in enumerate(order)} | {-1: len(order)}
        self.prices = (prices.on_demand, *prices.pools)
        self.tables = [
            LowerBoundTable([one for one in parts if places[one.variant] >= depth]) for depth in range(len(order) + 1)
        ]
        self.kept = [priced_weight(problem, prices, index, is_fresh=False) for index in range(len(order))]
        self.fresh = [priced_weight(problem, prices, index, is_fresh=True) for index in range(len(order))]


class _Search:
    """The search of one problem.

    A state is the balance of the variants decided so far with the lower bounds of the rest, then what is left of each
    pool.
    """

    def __init__(self, problem: AllocationProblem, effort: int) -> None:
        self.effort = effort
        self.best: tuple[int, ...] | None = None
        self._problem = problem
        self._best_weight = 0
        self._width = _ALL
        need = problem.need - sum(low * one for low, one in zip(problem.lows, problem.capacity, strict=True))
        self._need = max(0, need)
        prices = find_dual_prices(problem, self._need)
        parts = capacity_segments(problem, prices)
        self._order = _order(parts, problem)
        self._relaxed = [_Relaxed(problem, prices, parts, self._order)]
        self._relaxed += [
            _Relaxed(problem, one, capacity_segments(problem, one), self._order) for one in perturbed_prices(prices)
        ]
        self._chosen = list(problem.lows)
        # what variants that are still to be decided may add to the balance, by depth
        self._attainable_balance = [
            sum(self._balance_gain(index) for index in self._order[depth:]) for depth in range(len(self._order) + 1)
        ]
        self._seen: dict[tuple[int, ...], int] = {}

    def _balance_gain(self, index: int) -> int:
        problem = self._problem
        return (
            max(0, problem.on_demand_surplus(index, problem.highs[index] - problem.lows[index]))
            if problem.on_demand
            else 0
        )

    def run(self) -> None:
        problem = self._problem
        weight = sum(problem.weight(index, low) for index, low in enumerate(problem.lows))
        balance = sum(problem.on_demand_surplus(index, low) for index, low in enumerate(problem.lows))
        state = (balance, *(pool.left for pool in problem.pools))
        if len(self._relaxed) > 1:
            # where limits bind, first guesses may be wrong early: search broadly first
            whole, self._width = self.effort, _BROAD
            self.effort = whole // 2
            self._visit(0, self._need, weight, state)
            self.effort, self._width = self.effort + whole - whole // 2, _ALL
            self._seen.clear()
        self._visit(0, self._need, weight, state)

    def _visit(self, depth: int, need: int, weight: int, state: tuple[int, ...]) -> None:
        """``weight``: of what is decided, and of the lower bounds of the rest."""
        self.effort -= 1
        if depth == len(self._order):
            self._take(weight + need * self._problem.missing, state)
            return
        key = (depth, need, *state)
        seen = self._seen.get(key)
        if seen is not None and seen <= weight:
            return
        self._seen[key] = weight
        index = self._order[depth]
        problem, low = self._problem, self._problem.lows[index]
        base = problem.weight(index, low)
        for more in islice(self._choices(depth, need, weight, state), self._width):
            replicas = low + more
            self._chosen[index] = replicas
            self._visit(
                depth + 1,
                max(0, need - more * problem.capacity[index]),
                weight + problem.weight(index, replicas) - base,
                self._after(state, index, replicas),
            )
            if self.effort <= 0 and (self.best is not None or self.effort <= -_PATIENCE * EFFORT):
                break
        self._chosen[index] = low

    def _choices(self, depth: int, need: int, weight: int, state: tuple[int, ...]) -> Iterator[int]:
        """Replicas beyond the lower bound; the most promising first.

        Bounds are convex in the replicas, so they only rise on both sides of the least one.
        """
        most = self._most(depth, state)
        if most < 0:
            return
        bounds = self._bounds(depth, need, weight, state)
        down = min(self._relaxed[0].tables[depth].replicas(self._order[depth], need), most)
        start, at_start = down, bounds(down)
        down, at_down, _ = _descended(bounds, start, at_start, most)
        up, at_up = down + 1, bounds(down + 1) if down < most else None
        if down == start:
            down, at_down, before = _descended(bounds, start, at_start, 0)
            if down < start:
                up, at_up = down + 1, before
        while True:
            can_down = down >= 0 and self._is_promising(at_down)
            can_up = at_up is not None and self._is_promising(at_up)
            if can_down and (not can_up or at_up is None or at_down <= at_up):
                yield down
                down -= 1
                at_down = bounds(down) if down >= 0 else 0
            elif can_up:
                yield up
                up += 1
                at_up = bounds(up) if up <= most else None
            else:
                return

    def _bounds(self, depth: int, need: int, weight: int, state: tuple[int, ...]) -> Callable[[int], int]:
        """The bound of any number of replicas beyond the lower bound."""
        index = self._order[depth]
        problem = self._problem
        capacity = problem.capacity[index]
        kept = max(0, problem.running[index] - problem.lows[index])
        rows = [
            (
                weight * SCALE - sum(map(mul, one.prices, state)),
                one.kept[index],
                one.fresh[index],
                one.tables[depth + 1].bound,
            )
            for one in self._relaxed
        ]

        def bound(more: int) -> int:
            self.effort -= len(rows)
            rest, running, started = max(0, need - more * capacity), min(more, kept), max(0, more - kept)
            found: list[int] = []
            for start, weight_kept, weight_fresh, bound_of in rows:
                found.append(start + weight_kept * running + weight_fresh * started + bound_of(rest))
            return max(found)

        return bound

    def _is_promising(self, total: int) -> bool:
        return self.best is None or total <= (self._best_weight - 1) * SCALE

    def _most(self, depth: int, state: tuple[int, ...]) -> int:
        """Replicas beyond the lower bound that pools and the share on demand leave room for; less than 0: not even
        that.
        """
        index = self._order[depth]
        low = self._problem.lows[index]
        most = self._problem.highs[index] - low
        if self._problem.on_demand:
            spare = state[0] + self._attainable_balance[depth]
            if spare < 0:
                return -1
            if self._problem.spot[index]:
                most = min(most, spare // -self._problem.on_demand_surplus(index, 1))
        for pool, left in zip(self._problem.pools, state[1:], strict=True):
            if pool.units[index]:
                most = min(most, max(0, pool.free_until[index] - low) + left // pool.units[index])
        return most

    def _after(self, state: tuple[int, ...], index: int, replicas: int) -> tuple[int, ...]:
        problem, low = self._problem, self._problem.lows[index]
        balance, *lefts = state
        if problem.on_demand:
            balance += problem.on_demand_surplus(index, replicas - low)
        for place, pool in enumerate(problem.pools):
            free = pool.free_until[index]
            lefts[place] -= pool.units[index] * (max(0, replicas - free) - max(0, low - free))
        return (balance, *lefts)

    def _take(self, weight: int, state: tuple[int, ...]) -> None:
        if self._problem.on_demand and state[0] < 0:
            return
        if self.best is None or weight < self._best_weight:
            self.best, self._best_weight = tuple(self._chosen), weight


def _descended(bounds: Callable[[int], int], at: int, value: int, end: int) -> tuple[int, int, int]:
    """From ``at``, whose bound is ``value``, towards ``end`` for as long as bounds fall: where that leads, the bound
    there, and that of the place before it. The way may be a million places long.
    """
    step, before = (1 if end > at else -1), value
    for _ in range(_STEPS):
        if at == end or (after := bounds(at + step)) >= value:
            return at, value, before
        at, value, before = at + step, after, value
    near, far = 0, abs(end - at)
    while near < far:
        middle = (near + far) // 2
        if bounds(at + step * (middle + 1)) < bounds(at + step * middle):
            near = middle + 1
        else:
            far = middle
    found = at + step * near
    return found, bounds(found), bounds(found - step)


def _order(parts: Sequence[CapacitySegment], problem: AllocationProblem) -> list[int]:
    """Variants by their lightest segment; those that nothing can be added to last.

    With a share on demand, spot comes after the others, so that the room for it is known.
    """
    found = dict.fromkeys(one.variant for one in parts if one.variant >= 0)
    order = [*found, *(index for index in range(len(problem.lows)) if index not in found)]
    return sorted(order, key=lambda index: problem.spot[index]) if problem.on_demand else order


class CapacitySegment(msgspec.Struct, frozen=True):
    """Up to ``count`` replicas of one variant, each with the same ``weight`` (scaled, with prices) and ``capacity``.
    ``variant``: its index; -1: capacity that is not carried. ``is_fresh``: replicas that must start.
    """

    variant: int
    is_fresh: bool
    weight: int
    capacity: int
    count: int


class DualPrices(msgspec.Struct, frozen=True):
    """Scaled: of a unit of each pool, and of a unit of capacity on demand that is missing. They turn limits into
    weights: whatever they are, bounds hold; the better they are, the tighter.
    """

    pools: tuple[int, ...]
    on_demand: int = 0


def capacity_segments(problem: AllocationProblem, prices: DualPrices) -> list[CapacitySegment]:
    """What may be added to the lower bounds, the lightest for its capacity first."""
    found = []
    for index, (low, high) in enumerate(zip(problem.lows, problem.highs, strict=True)):
        running = min(max(problem.running[index], low), high)
        for is_fresh, count in ((False, running - low), (True, high - running)):
            if count > 0:
                weight = priced_weight(problem, prices, index, is_fresh=is_fresh)
                found.append(CapacitySegment(index, is_fresh, weight, problem.capacity[index], count))
    if problem.need > 0:
        found.append(CapacitySegment(-1, True, problem.missing * SCALE, 1, problem.need))
    return sorted(found, key=lambda one: one.weight * _FINE // one.capacity)


def priced_weight(problem: AllocationProblem, prices: DualPrices, index: int, *, is_fresh: bool) -> int:
    """The scaled weight of one replica."""
    weight = (problem.fresh if is_fresh else problem.kept)[index] * SCALE
    for price, pool in zip(prices.pools, problem.pools, strict=True):
        if price and (is_fresh or not pool.free_until[index]):
            weight += price * pool.units[index]
    if prices.on_demand:
        weight -= prices.on_demand * problem.on_demand_surplus(index, 1)
    return weight


class LowerBoundTable:
    """Bounds of any need, from the segments of some variants."""

    def __init__(self, parts: Sequence[CapacitySegment]) -> None:
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


def find_dual_prices(problem: AllocationProblem, need: int) -> DualPrices:
    """Good prices for what carrying ``need`` would exceed: coordinate ascent, each price by halving a range."""
    limits = [float(pool.left) for pool in problem.pools]
    limits.append(float(sum(problem.on_demand_surplus(i, low) for i, low in enumerate(problem.lows))))
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
    return DualPrices(tuple(scaled[:-1]), scaled[-1])


def _rows(problem: AllocationProblem, need: int) -> list[_Row]:
    nothing = DualPrices((0,) * len(problem.pools))
    rows: list[_Row] = []
    for part in capacity_segments(problem, nothing):
        if part.variant < 0:
            rows.append((float(problem.missing), 1.0, float(need), (0.0,) * (len(problem.pools) + 1)))
            continue
        uses = [
            float(pool.units[part.variant]) if part.is_fresh or not pool.free_until[part.variant] else 0.0
            for pool in problem.pools
        ]
        uses.append(-float(problem.on_demand_surplus(part.variant, 1)))
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


def perturbed_prices(prices: DualPrices) -> list[DualPrices]:
    """Lower and higher prices for each limit: what is best at the beginning need not be best after some decisions."""
    binding = [(place, price) for place, price in enumerate((*prices.pools, prices.on_demand)) if price]
    return [_with(prices, place, round(price * factor)) for place, price in binding for factor in _FACTORS]


def _with(prices: DualPrices, place: int, price: int) -> DualPrices:
    if place == len(prices.pools):
        return DualPrices(prices.pools, price)
    return DualPrices((*prices.pools[:place], price, *prices.pools[place + 1 :]), prices.on_demand)


def local_search(problem: AllocationProblem, replicas: Sequence[int]) -> tuple[int, ...]:
    """The lightest neighbour, and its lightest neighbour, and so on, within all limits."""
    found = list(replicas)
    for _ in range(_PASSES):
        best = _best_change(problem, found)
        if best is None:
            break
        for index, by in best:
            found[index] += by
    return tuple(found)


def _best_change(problem: AllocationProblem, replicas: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    ups = [(index, _change(problem, index, n, 1)) for index, n in enumerate(replicas) if n < problem.highs[index]]
    downs = [(index, _change(problem, index, n, -1)) for index, n in enumerate(replicas) if n > problem.lows[index]]
    limits = _limits(problem, replicas)
    need = problem.need - sum(one * n for one, n in zip(problem.capacity, replicas, strict=True))
    nothing = (0,) * (2 + len(limits))
    more: list[tuple[tuple[int, ...], _Amounts]] = [((), nothing), *(((one,), change) for one, change in ups)]
    more += [((one, other), _sum(a, b)) for (one, a), (other, b) in combinations(ups, 2)]
    best, least = None, 0
    for added, up in more:
        for removed, down in [(None, nothing), *downs]:
            weight = up[0] + down[0] + problem.missing * (max(0, need - up[1] - down[1]) - max(0, need))
            if weight >= least or removed in added:
                continue
            if all(left + a + b >= 0 for left, a, b in zip(limits, up[2:], down[2:], strict=True)):
                least = weight
                best = (*((one, 1) for one in added), *(() if removed is None else ((removed, -1),)))
    return best


def _change(problem: AllocationProblem, index: int, replicas: int, by: int) -> _Amounts:
    weight = problem.weight(index, replicas + by) - problem.weight(index, replicas)
    pools = [
        pool.units[index] * (max(0, replicas - pool.free_until[index]) - max(0, replicas + by - pool.free_until[index]))
        for pool in problem.pools
    ]
    balance = problem.on_demand_surplus(index, by) if problem.on_demand else 0
    return weight, problem.capacity[index] * by, balance, *pools


def _limits(problem: AllocationProblem, replicas: Sequence[int]) -> list[int]:
    """The balance, and what is left of each pool."""
    found = [sum(problem.on_demand_surplus(index, n) for index, n in enumerate(replicas)) if problem.on_demand else 0]
    for pool in problem.pools:
        rows = zip(pool.units, replicas, problem.lows, pool.free_until, strict=True)
        found.append(pool.left - sum(unit * (max(0, n - free) - max(0, low - free)) for unit, n, low, free in rows))
    return found


def _sum(one: _Amounts, other: _Amounts) -> _Amounts:
    return tuple(map(int.__add__, one, other))
