# SPDX-License-Identifier: Apache-2.0
"""Small changes that make an answer lighter: one or two replicas more, none or one fewer."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.decision.allocation.problem import Problem

_PASSES: Final = 5
# Weight, capacity, balance and what is left of each pool; of a change: by how much they change.
_Amounts = tuple[int, ...]


def improved(problem: Problem, replicas: Sequence[int]) -> tuple[int, ...]:
    """The lightest neighbour, and its lightest neighbour, and so on, within all limits."""
    found = list(replicas)
    for _ in range(_PASSES):
        best = _best_change(problem, found)
        if best is None:
            break
        for index, by in best:
            found[index] += by
    return tuple(found)


def _best_change(problem: Problem, replicas: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
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


def _change(problem: Problem, index: int, replicas: int, by: int) -> _Amounts:
    weight = problem.weight(index, replicas + by) - problem.weight(index, replicas)
    pools = [
        pool.units[index] * (max(0, replicas - pool.free_until[index]) - max(0, replicas + by - pool.free_until[index]))
        for pool in problem.pools
    ]
    balance = problem.balance(index, by) if problem.on_demand else 0
    return weight, problem.capacity[index] * by, balance, *pools


def _limits(problem: Problem, replicas: Sequence[int]) -> list[int]:
    """The balance, and what is left of each pool."""
    found = [sum(problem.balance(index, n) for index, n in enumerate(replicas)) if problem.on_demand else 0]
    for pool in problem.pools:
        rows = zip(pool.units, replicas, problem.lows, pool.free_until, strict=True)
        found.append(pool.left - sum(unit * (max(0, n - free) - max(0, low - free)) for unit, n, low, free in rows))
    return found


def _sum(one: _Amounts, other: _Amounts) -> _Amounts:
    return tuple(map(int.__add__, one, other))
