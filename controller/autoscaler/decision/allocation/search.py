# SPDX-License-Identifier: Apache-2.0
"""The lightest answer to a problem, by branch and bound: exact, unless it takes more effort than is allowed."""

from __future__ import annotations

from itertools import islice
from operator import mul
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.allocation.improving import improved
from controller.autoscaler.decision.allocation.relaxation import (
    SCALE,
    Prices,
    Segment,
    Table,
    around,
    priced,
    prices_of,
    segments,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from controller.autoscaler.decision.allocation.problem import Problem

# Bounds that are looked up, each in about half a microsecond.
EFFORT: Final = 1250
# Choices of one variant that are looked at: in the first of two passes, and in the other.
_BROAD: Final = 2
_ALL: Final = 1_000_000
# Places that are tried one by one.
_STEPS: Final = 16
# While there is no answer at all, so many times that.
_PATIENCE: Final = 10


class Answer(msgspec.Struct, frozen=True):
    """``replicas``: by variant. ``is_proven``: nothing is lighter."""

    replicas: tuple[int, ...]
    is_proven: bool


def lightest(problem: Problem, effort: int = EFFORT) -> Answer | None:
    """None: no answer keeps the share on demand, or none was found with ten times the effort."""
    if problem.on_demand and not problem.has_balance:
        return None
    search = _Search(problem, effort)
    search.run()
    if search.best is None:
        return None
    is_proven = search.effort > 0
    return Answer(search.best if is_proven else improved(problem, search.best), is_proven)


class _Relaxed:
    """Bounds at some prices. ``prices``: in the order of a state. ``tables``: of the undecided variants, by depth.
    ``kept`` and ``fresh``: the scaled weight of a replica of each variant.
    """

    __slots__ = ("fresh", "kept", "prices", "tables")

    def __init__(self, problem: Problem, prices: Prices, parts: Sequence[Segment], order: Sequence[int]) -> None:
        places = {variant: place for place, variant in enumerate(order)} | {-1: len(order)}
        self.prices = (prices.on_demand, *prices.pools)
        self.tables = [Table([one for one in parts if places[one.variant] >= depth]) for depth in range(len(order) + 1)]
        self.kept = [priced(problem, prices, index, is_fresh=False) for index in range(len(order))]
        self.fresh = [priced(problem, prices, index, is_fresh=True) for index in range(len(order))]


class _Search:
    """Variants are decided one after the other. What the undecided ones weigh at least comes from relaxations.

    A state is the balance of what is decided with the lower bounds of the rest, then what is left of each pool.
    """

    def __init__(self, problem: Problem, effort: int) -> None:
        self.effort = effort
        self.best: tuple[int, ...] | None = None
        self._problem = problem
        self._best_weight = 0
        self._width = _ALL
        need = problem.need - sum(low * one for low, one in zip(problem.lows, problem.capacity, strict=True))
        self._need = max(0, need)
        prices = prices_of(problem, self._need)
        parts = segments(problem, prices)
        self._order = _order(parts, problem)
        self._relaxed = [_Relaxed(problem, prices, parts, self._order)]
        self._relaxed += [_Relaxed(problem, one, segments(problem, one), self._order) for one in around(prices)]
        self._chosen = list(problem.lows)
        # what variants that are still to be decided may add to the balance
        self._hopes = [sum(self._hope(index) for index in self._order[depth:]) for depth in range(len(self._order) + 1)]
        self._seen: dict[tuple[int, ...], int] = {}

    def _hope(self, index: int) -> int:
        problem = self._problem
        return max(0, problem.balance(index, problem.highs[index] - problem.lows[index])) if problem.on_demand else 0

    def run(self) -> None:
        problem = self._problem
        weight = sum(problem.weight(index, low) for index, low in enumerate(problem.lows))
        balance = sum(problem.balance(index, low) for index, low in enumerate(problem.lows))
        state = (balance, *(pool.left for pool in problem.pools))
        if len(self._relaxed) > 1:
            # where limits bind, first guesses may be wrong early: look broadly before looking closely
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
            spare = state[0] + self._hopes[depth]
            if spare < 0:
                return -1
            if self._problem.spot[index]:
                most = min(most, spare // -self._problem.balance(index, 1))
        for pool, left in zip(self._problem.pools, state[1:], strict=True):
            if pool.units[index]:
                most = min(most, max(0, pool.free_until[index] - low) + left // pool.units[index])
        return most

    def _after(self, state: tuple[int, ...], index: int, replicas: int) -> tuple[int, ...]:
        problem, low = self._problem, self._problem.lows[index]
        balance, *lefts = state
        if problem.on_demand:
            balance += problem.balance(index, replicas - low)
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


def _order(parts: Sequence[Segment], problem: Problem) -> list[int]:
    """Variants by their lightest segment; those that nothing can be added to last.

    With a share on demand, spot comes after the others, so that the room for it is known.
    """
    found = dict.fromkeys(one.variant for one in parts if one.variant >= 0)
    order = [*found, *(index for index in range(len(problem.lows)) if index not in found)]
    return sorted(order, key=lambda index: problem.spot[index]) if problem.on_demand else order
