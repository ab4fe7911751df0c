# SPDX-License-Identifier: Apache-2.0
"""The inputs and results of an allocation, and the modes that follow an order instead of costs.

These fill one target after the other, by weights, or in growing batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.api.shared_types import matches_accelerator
from controller.autoscaler.decision.situation import EngineState, TargetSituation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Mode = Literal["Cheapest", "Priority", "Weights", "Expansion"]
# Rounding of sums of capacities.
_NOTHING: Final = 1e-9
# Steps are at most this part of what is still missing, where replicas are not all of one target.
_SMALL: Final = 128


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model. ``capacity``: work that a replica does, in units. ``cost``: of a replica and hour.
    ``least`` and ``most``: bounds of its replicas. ``running``: replicas that serve or will soon. ``start_s``: how long
    one takes to start. ``headroom``: further replicas for which nodes have accelerators; None if unknown. ``blocked``:
    why no more replicas can be added; empty if they can. ``accelerators``: of a replica, of the kind ``accelerator``.
    ``pools``: those of ``Rules.free`` that they are taken from; None: the one that is named as their kind.
    """

    name: str
    most: int
    least: int = 0
    capacity: float = 1.0
    cost: float = 1.0
    running: int = 0
    start_s: float = 60.0
    headroom: int | None = None
    blocked: str = ""
    priority: int = 0
    weight: int = 1
    spot: bool = False
    accelerator: str | None = None
    accelerators: int = 1
    pools: tuple[str, ...] | None = None

    def matches_kind(self, kind: str) -> bool:
        """Whether a budget for this kind is for it, however it is spelled."""
        return self.accelerator is not None and matches_accelerator(self.accelerator, kind)

    def takes_from(self, pool: str) -> bool:
        """Whether replicas that do not run yet need accelerators of this pool."""
        return pool == self.accelerator if self.pools is None else pool in self.pools

    @property
    def attainable_replicas(self) -> int:
        """Replicas of it that there could be now."""
        if self.blocked:
            return min(self.most, self.running)
        return self.most if self.headroom is None else min(self.most, self.running + self.headroom)


class AllocationRules(msgspec.Struct, frozen=True, kw_only=True):
    """How work is shared out. ``expansion_rate_percent``: of the mode Expansion. ``min_on_demand``: the share of
    capacity that must not be spot. ``cost_per_hour``: of all replicas together; None: any. ``accelerators``: how many
    there may be, by kind. ``free``: how many nodes have left, by pool; kinds without one are not limited.
    ``payback_s``: a running replica is replaced only if what that saves in so long is more than what the start of
    another costs.
    """

    mode: Mode = "Cheapest"
    expansion_rate_percent: int = 200
    min_on_demand: float = 0.0
    cost_per_hour: float | None = None
    accelerators: Mapping[str, int] = {}
    free: Mapping[str, int] = {}
    payback_s: float = 3600.0


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas`` and ``reasons``: by the variant's name. ``capacity``: units that they carry, as far as they can be
    had. ``missing``: units that nothing carries. ``problems``: what stood in the way, for people. ``is_proven``: False
    if a slightly cheaper answer may exist: the search ended early, or stages with a common limit were served in turn.
    """

    replicas: Mapping[str, int]
    reasons: Mapping[str, str]
    capacity: float
    missing: float = 0.0
    problems: tuple[str, ...] = ()
    is_proven: bool = True


def variant_from_target(target: TargetSituation) -> Variant:
    """The target of a binding. Replicas of a blocked one that find no node, or do not start, do not count as
    running.
    """
    spec, running = target.spec, target.current or 0
    if target.blocked:
        running = max(0, running - len(target.engines_in_state(EngineState.UNSCHEDULABLE, EngineState.FAILING)))
    return Variant(
        name=spec.name,
        most=spec.max_replicas,
        least=spec.min_replicas,
        capacity=target.capacity,
        cost=spec.cost,
        running=running,
        start_s=target.start_s,
        headroom=target.headroom,
        blocked=target.blocked,
        priority=spec.priority,
        weight=spec.weight,
        spot=spec.spot,
        accelerator=spec.accelerator,
        accelerators=spec.accelerators,
        pools=target.pools,
    )


class _Assignment:
    """Replicas that were given so far, each checked against the limits that targets share."""

    def __init__(self, variants: Sequence[Variant], rules: AllocationRules) -> None:
        self.replicas = {one.name: min(one.least, one.attainable_replicas) for one in variants}
        self.refusals: list[str] = []
        self._variants = {one.name: one for one in variants}
        self._rules = rules

    @property
    def capacity(self) -> float:
        return sum(self._variants[name].capacity * count for name, count in self.replicas.items())

    def give(self, name: str, most: int) -> int:
        """Up to ``most`` replicas more; returns how many it became. Limits that refuse one refuse more of the same."""
        one, given = self._variants[name], most
        if most and self._problem(one, most):
            given, high = 0, most - 1
            while given < high and not self._problem(one, given + 1):
                middle = (given + high + 1) // 2
                given, high = (given, middle - 1) if self._problem(one, middle) else (middle, high)
            problem = self._problem(one, given + 1)
            if problem not in self.refusals:
                self.refusals.append(problem)
        self.replicas[name] += given
        return given

    def _problem(self, one: Variant, more: int) -> str:
        """Why there can be no ``more`` replicas more; empty if there can."""
        rules, count = self._rules, self.replicas[one.name] + more
        if count > one.attainable_replicas:
            return f"{one.name} has all replicas that can be had"
        if rules.cost_per_hour is not None:
            cost = sum(self._variants[name].cost * n for name, n in self.replicas.items())
            if cost + more * one.cost > rules.cost_per_hour + _NOTHING:
                return "the budget of cost leaves no room for more"
        for kind, limit in rules.accelerators.items():
            if one.matches_kind(kind) and self._taken(kind) + more * one.accelerators > limit:
                return f"the budget of accelerators of the kind {kind} leaves no room for more"
        fresh = (max(0, count - one.running) - max(0, count - more - one.running)) * one.accelerators
        for pool, limit in rules.free.items():
            if fresh and one.takes_from(pool) and self._fresh(pool) + fresh > limit:
                return f"what nodes have free of the kind {pool} leaves no room for more"
        if one.spot and rules.min_on_demand:
            spot = sum(
                self._variants[name].capacity * n for name, n in self.replicas.items() if self._variants[name].spot
            )
            if (
                spot + more * one.capacity
                > (1 - rules.min_on_demand) * (self.capacity + more * one.capacity) + _NOTHING
            ):
                return "more spot would leave too little of the capacity on demand"
        return ""

    def _taken(self, kind: str) -> int:
        return sum(
            one.accelerators * self.replicas[one.name] for one in self._variants.values() if one.matches_kind(kind)
        )

    def _fresh(self, pool: str) -> int:
        return sum(
            one.accelerators * max(0, self.replicas[one.name] - one.running)
            for one in self._variants.values()
            if one.takes_from(pool)
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


def allocate_by_priority(need: float, variants: Sequence[Variant], rules: AllocationRules) -> Allocation:
    """The highest priority up to its limits, then the next; equal priorities are ordered by name.

    If a share on demand is required, spot is limited by the capacity on demand: spot is retried after each of the
    others.
    """
    filling = _Assignment(variants, rules)
    order = sorted(variants, key=lambda one: (-one.priority, one.name))
    while need - filling.capacity > _NOTHING:
        for one in order:
            # whole steps where nothing else has to be tried again
            step = _replicas_for(need - filling.capacity, one)
            step = max(1, step // _SMALL) if rules.min_on_demand else step
            if filling.give(one.name, step):
                break
        else:
            break
    return filling.result(need, "in the order of priorities")


def allocate_by_weights(need: float, variants: Sequence[Variant], rules: AllocationRules) -> Allocation:
    """Replicas in the ratio of weights: the smallest number of them, shared out by largest remainders, that carries it.

    The share that a target cannot have is distributed over the others, in the same ratio.
    """
    filling = _Assignment(variants, rules)
    order = sorted((one for one in variants if one.weight), key=lambda one: one.name)
    refused: set[str] = set()
    while need - filling.capacity > _NOTHING and len(refused) < len(order):
        # one by one at last: a million replicas would take minutes
        open_ = [one for one in order if one.name not in refused]
        mean = sum(one.weight * one.capacity for one in open_) / sum(one.weight for one in open_)
        step = max(1, math.ceil((need - filling.capacity) / mean) // _SMALL)
        total = sum(filling.replicas[one.name] for one in open_) + step
        shares = largest_remainders(total, [(one.name, one.weight) for one in open_])
        if step > 1 and _give_all(filling, shares, refused):
            continue
        behind = max(shares, key=lambda name: (shares[name] - filling.replicas[name], _weight(order, name)))
        if not filling.give(behind, 1):
            refused.add(behind)
    return filling.result(need, "by weights")


def _give_all(filling: _Assignment, shares: Mapping[str, int], refused: set[str]) -> bool:
    """What each target that is behind its share lacks; whether any had room."""
    behind = {name: share - filling.replicas[name] for name, share in shares.items() if share > filling.replicas[name]}
    given = {name: filling.give(name, lack) for name, lack in behind.items()}
    refused.update(name for name, count in given.items() if not count)
    return any(given.values())


def largest_remainders(total: int, weights: Sequence[tuple[str, int]]) -> dict[str, int]:
    """``total`` in the ratio of the weights: whole parts, then one each to the largest remainders, the first name
    first.
    """
    whole = sum(weight for _, weight in weights)
    found = {name: total * weight // whole for name, weight in weights}
    order = sorted(weights, key=lambda one: (-(total * one[1] % whole), one[0]))
    for name, _ in order[: total - sum(found.values())]:
        found[name] += 1
    return found


def allocate_by_expansion(need: float, variants: Sequence[Variant], rules: AllocationRules) -> Allocation:
    """Kthena's order: the prefix of ``expansion_sequence`` that carries the work."""
    filling = _Assignment(variants, rules)
    by_name, closed = {one.name: one for one in variants}, set[str]()
    for name, count in _batches(variants, rules.expansion_rate_percent):
        missing = need - filling.capacity
        if missing <= _NOTHING:
            break
        if name in closed:
            continue
        # only spot may be refused now and taken later
        given = filling.give(name, min(count, _replicas_for(missing, by_name[name])))
        if not given and not (by_name[name].spot and rules.min_on_demand):
            closed.add(name)
    return filling.result(need, "in batches, the cheapest first")


def expansion_sequence(variants: Iterable[Variant], rate_percent: int) -> list[str]:
    """Which target gets the next replica, from the lower bounds to the upper ones.

    Each target's replicas above its lower bound are cut into batches: the first has one replica, each further one as
    many as the rate makes of the one before (rounded down, the rate applied to the exact size), the last what is left.
    Batches are sorted by what the whole batch costs; between equals the order of the targets decides.
    """
    return [name for name, count in _batches(variants, rate_percent) for _ in range(count)]


def _batches(variants: Iterable[Variant], rate_percent: int) -> list[tuple[str, int]]:
    """Targets with the replicas of each batch, in the order of ``expansion_sequence``."""
    batches: list[tuple[float, str, int]] = []
    for one in variants:
        left, size = max(0, one.most - one.least), 1.0
        while left > 0:
            count = min(left, max(1, math.floor(size)))
            batches.append((one.cost * count, one.name, count))
            left -= count
            size = size * rate_percent / 100
    batches.sort(key=lambda batch: batch[0])
    return [(name, count) for _, name, count in batches]


def _replicas_for(need: float, one: Variant) -> int:
    return max(1, math.ceil(need / one.capacity - _NOTHING))


def _weight(order: Sequence[Variant], name: str) -> int:
    return next(one.weight for one in order if one.name == name)
