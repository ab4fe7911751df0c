# SPDX-License-Identifier: Apache-2.0
"""The modes that follow an order instead of costs: one target after the other, by weights, or in growing batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from controller.autoscale.allocation.variants import Allocation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.autoscale.allocation.variants import Rules, Variant

# Rounding of sums of capacities.
_NOTHING: Final = 1e-9


class _Filling:
    """Replicas that were given so far, each checked against the limits that targets share."""

    def __init__(self, variants: Sequence[Variant], rules: Rules) -> None:
        self.replicas = {one.name: min(one.least, one.attainable) for one in variants}
        self.refusals: list[str] = []
        self._variants = {one.name: one for one in variants}
        self._rules = rules

    @property
    def capacity(self) -> float:
        return sum(self._variants[name].capacity * count for name, count in self.replicas.items())

    def give(self, name: str, most: int) -> int:
        """Up to ``most`` replicas more; returns how many it became."""
        given = 0
        while given < most and self._may_have(name):
            self.replicas[name] += 1
            given += 1
        return given

    def _may_have(self, name: str) -> bool:
        problem = self._problem(self._variants[name])
        if problem and problem not in self.refusals:
            self.refusals.append(problem)
        return not problem

    def _problem(self, one: Variant) -> str:
        """Why there can be no replica more; empty if there can."""
        rules, count = self._rules, self.replicas[one.name]
        if count >= one.attainable:
            return f"{one.name} has all replicas that can be had"
        if rules.cost_per_hour is not None:
            cost = sum(self._variants[name].cost * n for name, n in self.replicas.items())
            if cost + one.cost > rules.cost_per_hour + _NOTHING:
                return "the budget of cost leaves no room for more"
        kind = one.accelerator
        if kind is not None and self._taken(kind) + one.accelerators > rules.accelerators.get(kind, math.inf):
            return f"the budget of accelerators of the kind {kind} leaves no room for more"
        is_fresh = count >= one.running
        if kind is not None and is_fresh and self._fresh(kind) + one.accelerators > rules.free.get(kind, math.inf):
            return f"what nodes have free of the kind {kind} leaves no room for more"
        if one.spot and rules.min_on_demand:
            spot = sum(
                self._variants[name].capacity * n for name, n in self.replicas.items() if self._variants[name].spot
            )
            if spot + one.capacity > (1 - rules.min_on_demand) * (self.capacity + one.capacity) + _NOTHING:
                return "more spot would leave too little of the capacity on demand"
        return ""

    def _taken(self, kind: str) -> int:
        return sum(
            one.accelerators * self.replicas[one.name] for one in self._variants.values() if one.accelerator == kind
        )

    def _fresh(self, kind: str) -> int:
        return sum(
            one.accelerators * max(0, self.replicas[one.name] - one.running)
            for one in self._variants.values()
            if one.accelerator == kind
        )

    def result(self, need: float, why: str) -> Allocation:
        missing = max(0.0, need - self.capacity)
        is_short = missing > _NOTHING
        return Allocation(
            replicas=self.replicas,
            reasons={name: f"{why}" if count else "not needed" for name, count in self.replicas.items()},
            capacity=self.capacity,
            missing=missing if is_short else 0.0,
            problems=tuple(self.refusals) if is_short else (),
        )


def by_priority(need: float, variants: Sequence[Variant], rules: Rules) -> Allocation:
    """The highest priority as far as it goes, then the next; between equals the name decides.

    Spot waits for capacity on demand if a share of that is asked for: it is tried again after each of the others.
    """
    filling = _Filling(variants, rules)
    order = sorted(variants, key=lambda one: (-one.priority, one.name))
    while need - filling.capacity > _NOTHING:
        for one in order:
            # whole steps where nothing else has to be tried again
            step = 1 if rules.min_on_demand else _replicas_for(need - filling.capacity, one)
            if filling.give(one.name, step):
                break
        else:
            break
    return filling.result(need, "in the order of priorities")


def by_weights(need: float, variants: Sequence[Variant], rules: Rules) -> Allocation:
    """Replicas in the ratio of weights: the smallest number of them, shared out by largest remainders, that carries it.

    What a target cannot have goes to the others, in the same ratio.
    """
    filling = _Filling(variants, rules)
    order = sorted((one for one in variants if one.weight), key=lambda one: one.name)
    refused: set[str] = set()
    while need - filling.capacity > _NOTHING and len(refused) < len(order):
        total = sum(filling.replicas[one.name] for one in order if one.name not in refused) + 1
        shares = largest_remainders(total, [(one.name, one.weight) for one in order if one.name not in refused])
        behind = max(shares, key=lambda name: (shares[name] - filling.replicas[name], _weight(order, name)))
        if not filling.give(behind, 1):
            refused.add(behind)
    return filling.result(need, "by weights")


def largest_remainders(total: int, weights: Sequence[tuple[str, int]]) -> dict[str, int]:
    """``total`` in the ratio of the weights: whole parts, then one each to the largest remainders, the first name first."""
    whole = sum(weight for _, weight in weights)
    found = {name: total * weight // whole for name, weight in weights}
    order = sorted(weights, key=lambda one: (-(total * one[1] % whole), one[0]))
    for name, _ in order[: total - sum(found.values())]:
        found[name] += 1
    return found


def by_expansion(need: float, variants: Sequence[Variant], rules: Rules) -> Allocation:
    """Kthena's order: the prefix of ``expansion_sequence`` that carries the work."""
    filling = _Filling(variants, rules)
    for name in expansion_sequence(variants, rules.expansion_rate_percent):
        if need - filling.capacity <= _NOTHING:
            break
        filling.give(name, 1)
    return filling.result(need, "in batches, the cheapest first")


def expansion_sequence(variants: Iterable[Variant], rate_percent: int) -> list[str]:
    """Which target gets the next replica, from the lower bounds to the upper ones.

    Each target's replicas above its lower bound are cut into batches: the first has one replica, each further one as
    many as the rate makes of the one before (rounded down, the rate applied to the exact size), the last what is left. Batches are sorted by what the whole batch
    costs; between equals the order of the targets decides.
    """
    batches: list[tuple[float, str, int]] = []
    for one in variants:
        left, size = max(0, one.most - one.least), 1.0
        while left > 0:
            count = min(left, max(1, math.floor(size)))
            batches.append((one.cost * count, one.name, count))
            left -= count
            size = size * rate_percent / 100
    batches.sort(key=lambda batch: batch[0])
    return [name for _, name, count in batches for _ in range(count)]


def _replicas_for(need: float, one: Variant) -> int:
    return max(1, math.ceil(need / one.capacity - _NOTHING))


def _weight(order: Sequence[Variant], name: str) -> int:
    return next(one.weight for one in order if one.name == name)
