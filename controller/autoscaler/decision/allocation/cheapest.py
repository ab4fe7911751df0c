# SPDX-License-Identifier: Apache-2.0
"""The mode Cheapest: the variants that carry the work for the least cost, starts included, within all limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.decision.allocation.problem import problem_of
from controller.autoscaler.decision.allocation.search import EFFORT, lightest
from controller.autoscaler.decision.allocation.variants import Allocation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.decision.allocation.problem import Problem
    from controller.autoscaler.decision.allocation.variants import Rules, Variant


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
