# SPDX-License-Identifier: Apache-2.0
"""The mode Cheapest: the variants that carry the work for the least cost, starts included, within all limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.allocation.solver import EFFORT, SHARES, Pool, Problem, lightest
from controller.autoscaler.decision.allocation.variants import Allocation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.decision.allocation.variants import Rules, Variant

# Capacities count in thousandths, which is finer than anybody knows them; prices in millionths.
_CAPACITY: Final = 1000
_PRICE: Final = 1_000_000


def cheapest(need: float, variants: Sequence[Variant], rules: Rules, effort: int = EFFORT) -> Allocation:
    """Minimise cost over ``payback_s``, with the cost of each start, so that capacity is at least ``need``.

    Where that cannot be, as much capacity as can be had, for the least cost. Between equals the answer with fewer
    replicas wins, then the one with earlier names.
    """
    ordered = sorted(variants, key=lambda one: one.name)
    problems = []
    problem = problem_of(need, ordered, rules)
    answer = lightest(problem, effort)
    if answer is None:
        problems.append(
            f"{rules.min_on_demand:.0%} of the capacity cannot be on demand: the lower bounds of spot targets"
        )
        problem = problem_of(need, ordered, msgspec.structs.replace(rules, min_on_demand=0.0))
        answer = lightest(problem, effort)
    if answer is None:
        raise AssertionError("without a share on demand the lower bounds alone are an answer")
    found = dict(zip((one.name for one in ordered), answer.replicas, strict=True))
    capacity = sum(one.capacity * found[one.name] for one in ordered)
    missing = problem.need - sum(one * n for one, n in zip(problem.capacity, answer.replicas, strict=True))
    if missing > 0:
        problems += _limits(problem, answer.replicas)
    return Allocation(
        replicas=found,
        reasons={one.name: _reason(one, found[one.name]) for one in ordered},
        capacity=capacity,
        missing=max(0.0, need - capacity) if missing > 0 else 0.0,
        problems=tuple(problems),
        is_proven=answer.is_proven,
    )


def _limits(problem: Problem, replicas: Sequence[int]) -> list[str]:
    """What stands in the way of more capacity."""
    open_ = [index for index, (one, high) in enumerate(zip(replicas, problem.highs, strict=True)) if one < high]
    if not open_:
        return ["every target has all replicas that can be had"]
    found = []
    for pool in problem.pools:
        taken = sum(
            unit * (max(0, n - free) - max(0, low - free))
            for unit, n, free, low in zip(pool.units, replicas, pool.free_until, problem.lows, strict=True)
        )
        if any(pool.units[i] > pool.left - taken and replicas[i] >= pool.free_until[i] for i in open_):
            found.append(f"{pool.what} leaves no room for more")
    if problem.on_demand and any(problem.spot[i] for i in open_):
        found.append("more spot would leave too little of the capacity on demand")
    return found or ["limits together leave no room for more"]


def _reason(variant: Variant, replicas: int) -> str:
    if replicas > variant.running:
        return f"{replicas - variant.running} more: the cheapest that carries the work"
    if replicas < variant.running:
        return f"{variant.running - replicas} fewer: the rest carries the work for less"
    return "part of the cheapest that carries the work" if replicas else "not needed"


def problem_of(need: float, variants: Sequence[Variant], rules: Rules) -> Problem:
    """The variants are to be sorted by name: between equal answers the one with more of the first wins.

    A weight is one number: what the replicas cost over the payback time with the start of those that do not run yet,
    then how many they are, then the places of their names.
    """
    highs = [one.attainable for one in variants]
    lows = [min(one.least, high) for one, high in zip(variants, highs, strict=True)]
    if rules.min_on_demand == 1:
        highs = [low if one.spot else high for one, low, high in zip(variants, lows, highs, strict=True)]
    capacity = [max(1, round(one.capacity * _CAPACITY)) for one in variants]
    capacity_divisor = math.gcd(*capacity)
    kept, fresh = _weights(variants, sum(highs), round(rules.payback_s))
    at_most = sum(max(pair) * high for pair, high in zip(zip(kept, fresh, strict=True), highs, strict=True))
    on_demand = round(rules.min_on_demand * SHARES) if any(one.spot for one in variants) else 0
    return Problem(
        need=-(-round(need * _CAPACITY) // capacity_divisor),
        lows=lows,
        highs=highs,
        capacity=[one // capacity_divisor for one in capacity],
        running=[one.running for one in variants],
        kept=kept,
        fresh=fresh,
        missing=at_most + 1,
        pools=[pool for pool in _pools(variants, rules, lows) if _can_bind(pool, lows, highs)],
        on_demand=on_demand,
        spot=[one.spot for one in variants],
    )


def _weights(variants: Sequence[Variant], replicas: int, payback_s: int) -> tuple[list[int], list[int]]:
    prices = [max(1, round(one.cost * _PRICE)) for one in variants]
    kept = [price * max(1, payback_s) for price in prices]
    fresh = [
        value + price * max(0, round(one.start_s)) for value, price, one in zip(kept, prices, variants, strict=True)
    ]
    divisor = math.gcd(*kept, *fresh)
    places = len(variants) * replicas + 1

    def weight(value: int, place: int) -> int:
        return (value // divisor * (replicas + 1) + 1) * places + place

    return [weight(value, i) for i, value in enumerate(kept)], [weight(value, i) for i, value in enumerate(fresh)]


def _pools(variants: Sequence[Variant], rules: Rules, lows: Sequence[int]) -> list[Pool]:
    never = [0] * len(variants)
    running = [one.running for one in variants]
    found = []
    if rules.cost_per_hour is not None:
        prices = [round(one.cost * _PRICE) for one in variants]
        found.append(_pool("the budget of cost", round(rules.cost_per_hour * _PRICE), prices, never, lows))
    for kind, limit in sorted(rules.accelerators.items()):
        what = f"the budget of accelerators of the kind {kind}"
        units = [one.accelerators if one.is_of(kind) else 0 for one in variants]
        found.append(_pool(what, limit, units, never, lows))
    for pool, limit in sorted(rules.free.items()):
        what = f"what nodes have free of the kind {pool}"
        units = [one.accelerators if one.takes_from(pool) else 0 for one in variants]
        found.append(_pool(what, limit, units, running, lows))
    return found


def _pool(what: str, limit: int, units: list[int], free_until: list[int], lows: Sequence[int]) -> Pool:
    taken = sum(_taken(unit, free, low) for unit, free, low in zip(units, free_until, lows, strict=True))
    # lower bounds hold before limits do
    return Pool(what, max(0, limit - taken), units, free_until)


def _can_bind(pool: Pool, lows: Sequence[int], highs: Sequence[int]) -> bool:
    rows = zip(pool.units, pool.free_until, lows, highs, strict=True)
    return sum(_taken(unit, free, high) - _taken(unit, free, low) for unit, free, low, high in rows) > pool.left


def _taken(unit: int, free_until: int, replicas: int) -> int:
    return unit * max(0, replicas - free_until)
