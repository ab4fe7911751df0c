# SPDX-License-Identifier: Apache-2.0
"""The choice of the cheapest variants as a problem in integers: weights, capacities and what is limited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from controller.autoscaler.decision.allocation.variants import Rules, Variant

# Capacities and shares count in thousandths, which is finer than anybody knows them; prices in millionths.
SHARES: Final = 1000
_CAPACITY: Final = 1000
_PRICE: Final = 1_000_000


class Pool(msgspec.Struct, frozen=True):
    """Something of which there is only so much. ``what``: for people. ``left``: beyond what the lower bounds take.
    ``units``: what a replica of each variant takes of it. ``free_until``: replicas of each variant that take nothing.
    """

    what: str
    left: int
    units: Sequence[int]
    free_until: Sequence[int]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
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
    pools: Sequence[Pool] = ()
    on_demand: int = 0
    spot: Sequence[bool] = ()

    def weight(self, index: int, replicas: int) -> int:
        """Of so many replicas of a variant."""
        running = min(replicas, self.running[index])
        return self.kept[index] * running + self.fresh[index] * (replicas - running)

    @property
    def has_balance(self) -> bool:
        """Whether enough of the capacity could be on demand, were there no pools."""
        pairs = zip(self.spot, self.lows, self.highs, strict=True)
        return sum(self.balance(i, low if is_spot else high) for i, (is_spot, low, high) in enumerate(pairs)) >= 0

    def balance(self, index: int, replicas: int) -> int:
        """What they add to capacity on demand beyond the share that must be; negative for spot."""
        share = -self.on_demand if self.spot[index] else SHARES - self.on_demand
        return share * self.capacity[index] * replicas


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
