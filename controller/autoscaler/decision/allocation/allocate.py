# SPDX-License-Identifier: Apache-2.0
"""Shares work out among targets, by the mode of their binding and within its budget, and keeps their ratios.

The mode Cheapest has the variants that carry the work for the least cost, starts included, within all limits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.allocation.solver import EFFORT, SHARES, AllocationProblem, ResourcePool, solve
from controller.autoscaler.decision.allocation.variants import (
    Allocation,
    AllocationRules,
    allocate_by_expansion,
    allocate_by_priority,
    allocate_by_weights,
)
from controller.autoscaler.decision.decision import AppliedRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.api.autoscaling_binding import AutoscalingPolicyBindingSpec, RatioConstraint
    from controller.autoscaler.decision.allocation.variants import Mode, Variant

# Capacities are integers in thousandths, finer than their accuracy; prices in millionths.
_CAPACITY: Final = 1000
_PRICE: Final = 1_000_000
_HALVINGS: Final = 7
_ROUNDING: Final = 1e-9
# More than any target may have: ratios may be beyond all bounds.
_MOST: Final = 1e9


def cheapest_allocation(
    need: float, variants: Sequence[Variant], rules: AllocationRules, effort: int = EFFORT
) -> Allocation:
    """Minimise cost over ``payback_s``, with the cost of each start, so that capacity is at least ``need``.

    Where that cannot be, as much capacity as can be had, for the least cost. Between equals the answer with fewer
    replicas wins, then the one with earlier names.
    """
    ordered = sorted(variants, key=lambda one: one.name)
    problems = []
    problem = build_allocation_problem(need, ordered, rules)
    answer = solve(problem, effort)
    if answer is None:
        problems.append(
            f"{rules.min_on_demand:.0%} of the capacity cannot be on demand: the lower bounds of spot targets"
        )
        problem = build_allocation_problem(need, ordered, msgspec.structs.replace(rules, min_on_demand=0.0))
        answer = solve(problem, effort)
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


def _limits(problem: AllocationProblem, replicas: Sequence[int]) -> list[str]:
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


def build_allocation_problem(need: float, variants: Sequence[Variant], rules: AllocationRules) -> AllocationProblem:
    """The variants are to be sorted by name: between equal answers the one with more of the first wins.

    A weight is one number: what the replicas cost over the payback time with the start of those that do not run yet,
    then how many they are, then the places of their names.
    """
    highs = [one.attainable_replicas for one in variants]
    lows = [min(one.least, high) for one, high in zip(variants, highs, strict=True)]
    if rules.min_on_demand == 1:
        highs = [low if one.spot else high for one, low, high in zip(variants, lows, highs, strict=True)]
    capacity = [max(1, round(one.capacity * _CAPACITY)) for one in variants]
    capacity_divisor = math.gcd(*capacity)
    kept, fresh = _weights(variants, sum(highs), round(rules.payback_s))
    at_most = sum(max(pair) * high for pair, high in zip(zip(kept, fresh, strict=True), highs, strict=True))
    on_demand = round(rules.min_on_demand * SHARES) if any(one.spot for one in variants) else 0
    return AllocationProblem(
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


def _pools(variants: Sequence[Variant], rules: AllocationRules, lows: Sequence[int]) -> list[ResourcePool]:
    never = [0] * len(variants)
    running = [one.running for one in variants]
    found = []
    if rules.cost_per_hour is not None:
        prices = [round(one.cost * _PRICE) for one in variants]
        found.append(_pool("the budget of cost", round(rules.cost_per_hour * _PRICE), prices, never, lows))
    for kind, limit in sorted(rules.accelerators.items()):
        what = f"the budget of accelerators of the kind {kind}"
        units = [one.accelerators if one.matches_kind(kind) else 0 for one in variants]
        found.append(_pool(what, limit, units, never, lows))
    for pool, limit in sorted(rules.free.items()):
        what = f"what nodes have free of the kind {pool}"
        units = [one.accelerators if one.takes_from(pool) else 0 for one in variants]
        found.append(_pool(what, limit, units, running, lows))
    return found


def _pool(what: str, limit: int, units: list[int], free_until: list[int], lows: Sequence[int]) -> ResourcePool:
    taken = sum(_taken(unit, free, low) for unit, free, low in zip(units, free_until, lows, strict=True))
    # lower bounds hold before limits do
    return ResourcePool(what, max(0, limit - taken), units, free_until)


def _can_bind(pool: ResourcePool, lows: Sequence[int], highs: Sequence[int]) -> bool:
    rows = zip(pool.units, pool.free_until, lows, highs, strict=True)
    return sum(_taken(unit, free, high) - _taken(unit, free, low) for unit, free, low, high in rows) > pool.left


def _taken(unit: int, free_until: int, replicas: int) -> int:
    return unit * max(0, replicas - free_until)


_MODES: Final[Mapping[Mode, Callable[[float, Sequence[Variant], AllocationRules], Allocation]]] = {
    "Cheapest": cheapest_allocation,
    "Priority": allocate_by_priority,
    "Weights": allocate_by_weights,
    "Expansion": allocate_by_expansion,
}


def allocation_rules(spec: AutoscalingPolicyBindingSpec, free: Mapping[str, int] | None = None) -> AllocationRules:
    """``free``: free accelerators of nodes, by pool; None if unknown."""
    budget = spec.budget
    return AllocationRules(
        mode=spec.allocation,
        expansion_rate_percent=spec.expansion_rate_percent,
        min_on_demand=spec.min_on_demand,
        cost_per_hour=None if budget is None else budget.cost_per_hour,
        accelerators={} if budget is None else budget.accelerators,
        free=free or {},
    )


def allocate(need: float, variants: Sequence[Variant], rules: AllocationRules) -> Allocation:
    """Replicas of each variant that carry ``need`` units of work.

    Lower bounds always hold: replicas that a target cannot get now (it is blocked, or no node fits) are requested up to
    its lower bound, but count as no capacity here.
    """
    found = _MODES[rules.mode](need, variants, rules)
    replicas, reasons = dict(found.replicas), dict(found.reasons)
    for one in variants:
        if one.blocked:
            reasons[one.name] = f"left out for a while: {one.blocked}"
        if replicas[one.name] < one.least:
            replicas[one.name] = one.least
            reasons[one.name] = f"its lower bound; {one.attainable_replicas} can be had now"
    return msgspec.structs.replace(found, replicas=replicas, reasons=reasons)


def allocate_stages(
    needs: Mapping[str, float], variants: Mapping[str, Sequence[Variant]], rules: AllocationRules
) -> dict[str, Allocation]:
    """Several stages that share the limits of one binding: ``needs`` and ``variants`` by stage.

    Where limits do not allow the sum of all needs, each stage gets the same fraction of its need, as large as limits
    allow: prefill beyond what decode can follow serves no request.
    """
    unlimited = msgspec.structs.replace(rules, cost_per_hour=None, accelerators={}, free={})
    if len(needs) == 1:
        return {stage: allocate(need, variants[stage], rules) for stage, need in needs.items()}
    whole = {stage: allocate(need, variants[stage], unlimited) for stage, need in needs.items()}
    if _keeps(whole, variants, rules):
        return whole
    # what one stage takes may be dear for the next
    is_proven = rules.mode != "Cheapest" or all(len(one) < 2 for one in variants.values())
    for order in (list(needs), list(needs)[::-1]):
        whole = _in_turn(order, needs, variants, rules)
        if not any(one.missing for one in whole.values()):
            return {stage: msgspec.structs.replace(one, is_proven=is_proven) for stage, one in whole.items()}
    low, high = 0.0, 1.0
    found = _in_turn(list(needs), dict.fromkeys(needs, 0.0), variants, rules)
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        tried = _in_turn(list(needs), {stage: share * need for stage, need in needs.items()}, variants, rules)
        if any(one.missing for one in tried.values()):
            high = share
        else:
            low, found = share, tried
    reasons = dict.fromkeys(text for one in whole.values() for text in one.problems)
    problems = (*reasons, f"limits allow for {low:.0%} of what the stages need")
    return {
        stage: msgspec.structs.replace(
            one, problems=problems, missing=max(0.0, needs[stage] - one.capacity), is_proven=is_proven
        )
        for stage, one in found.items()
    }


def _in_turn(
    order: Sequence[str], needs: Mapping[str, float], variants: Mapping[str, Sequence[Variant]], rules: AllocationRules
) -> dict[str, Allocation]:
    """One stage after the other, each within what those before it and the lower bounds of those behind it leave."""
    taken = {stage: {one.name: min(one.least, one.attainable_replicas) for one in variants[stage]} for stage in order}
    found: dict[str, Allocation] = {}
    for stage in order:
        others = [(one, n[one.name]) for other, n in taken.items() if other != stage for one in variants[other]]
        found[stage] = allocate(needs[stage], variants[stage], _less(rules, others))
        taken[stage] = dict(found[stage].replicas)
    return {stage: found[stage] for stage in needs}


def _less(rules: AllocationRules, taken: Sequence[tuple[Variant, int]]) -> AllocationRules:
    """What these replicas leave of the limits."""
    cost = rules.cost_per_hour
    if cost is not None:
        cost = max(0.0, cost - sum(one.cost * n for one, n in taken))
    return msgspec.structs.replace(
        rules,
        cost_per_hour=cost,
        accelerators={
            kind: max(0, limit - sum(one.accelerators * n for one, n in taken if one.matches_kind(kind)))
            for kind, limit in rules.accelerators.items()
        },
        free={
            pool: max(0, limit - sum(_fresh(one, n) for one, n in taken if one.takes_from(pool)))
            for pool, limit in rules.free.items()
        },
    )


def _fresh(one: Variant, replicas: int) -> int:
    """Accelerators of those that do not run yet."""
    return one.accelerators * max(0, replicas - one.running)


def _keeps(found: Mapping[str, Allocation], variants: Mapping[str, Sequence[Variant]], rules: AllocationRules) -> bool:
    """Whether all stages together are within the limits."""
    rows = [(one, found[stage].replicas[one.name]) for stage in found for one in variants[stage]]
    if rules.cost_per_hour is not None and sum(one.cost * n for one, n in rows) > rules.cost_per_hour:
        return False
    if any(
        sum(one.accelerators * n for one, n in rows if one.matches_kind(kind)) > limit
        for kind, limit in rules.accelerators.items()
    ):
        return False
    return all(
        sum(_fresh(one, n) for one, n in rows if one.takes_from(pool)) <= limit for pool, limit in rules.free.items()
    )


def enforce_ratios(
    replicas: Mapping[str, int], constraints: Sequence[RatioConstraint], most: Mapping[str, int]
) -> tuple[dict[str, int], list[AppliedRule]]:
    """Replicas that keep the ratios as far as ``most``, the upper bounds, allows, and what was changed.

    Nothing is ever lowered: the other side has work to do. Where no whole number is within both bounds of a ratio, the
    smallest one that is not short stays.
    """
    found, steps = dict(replicas), list[AppliedRule]()
    # raising one side of a ratio may make another ratio short
    for _ in range(len(constraints) + 1):
        changed = [step for one in constraints for step in _repair_one(found, one, most)]
        steps += changed
        if not changed:
            break
    return found, steps


def _repair_one(found: dict[str, int], one: RatioConstraint, most: Mapping[str, int]) -> list[AppliedRule]:
    numerator, denominator = found[one.numerator], found[one.denominator]
    if not numerator and not denominator:
        return []
    steps = []
    wanted = max(1, math.ceil(min(_MOST, one.min * denominator) - _ROUNDING))
    if numerator < wanted:
        steps += _raise(found, one.numerator, wanted, most, f"at least {one.min:g} for each of {one.denominator}")
    wanted = max(1, math.ceil(min(_MOST, found[one.numerator] / one.max) - _ROUNDING))
    is_rounded_up = found[one.numerator] - 1 < one.min * denominator - _ROUNDING
    if denominator < wanted and not (denominator and is_rounded_up):
        steps += _raise(found, one.denominator, wanted, most, f"at most {one.max:g} of {one.numerator} for each")
    return steps


def _raise(found: dict[str, int], name: str, wanted: int, most: Mapping[str, int], why: str) -> list[AppliedRule]:
    before, after = found[name], max(found[name], min(wanted, most[name]))
    if after == before:
        return []
    found[name] = after
    short = f"; {wanted} would be needed, its upper bound is {after}" if after < wanted else ""
    return [AppliedRule("Ratio", before, after, f"{name}: {why}{short}")]
