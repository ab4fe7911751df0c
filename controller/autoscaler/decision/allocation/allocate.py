# SPDX-License-Identifier: Apache-2.0
"""Shares work out among targets, by the mode of their binding and within its budget, and keeps their ratios."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.allocation.cheapest import cheapest
from controller.autoscaler.decision.allocation.filling import by_expansion, by_priority, by_weights
from controller.autoscaler.decision.allocation.variants import Allocation, Rules
from controller.autoscaler.decision.decision import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.api.autoscaling_binding import AutoscalingPolicyBindingSpec, RatioConstraint
    from controller.autoscaler.decision.allocation.variants import Mode, Variant

_MODES: Final[Mapping[Mode, Callable[[float, Sequence[Variant], Rules], Allocation]]] = {
    "Cheapest": cheapest,
    "Priority": by_priority,
    "Weights": by_weights,
    "Expansion": by_expansion,
}
_HALVINGS: Final = 7


def rules_of(spec: AutoscalingPolicyBindingSpec, free: Mapping[str, int] | None = None) -> Rules:
    """``free``: accelerators that nodes have left, by pool, as far as that is known."""
    budget = spec.budget
    return Rules(
        mode=spec.allocation,
        expansion_rate_percent=spec.expansion_rate_percent,
        min_on_demand=spec.min_on_demand,
        cost_per_hour=None if budget is None else budget.cost_per_hour,
        accelerators={} if budget is None else budget.accelerators,
        free=free or {},
    )


def allocate(need: float, variants: Sequence[Variant], rules: Rules) -> Allocation:
    """Replicas of each variant that carry ``need`` units of work.

    Lower bounds hold always: what a target cannot have now (it is blocked, nodes have no room) is asked for up to its
    lower bound, but carries nothing here.
    """
    found = _MODES[rules.mode](need, variants, rules)
    replicas, reasons = dict(found.replicas), dict(found.reasons)
    for one in variants:
        if one.blocked:
            reasons[one.name] = f"left out for a while: {one.blocked}"
        if replicas[one.name] < one.least:
            replicas[one.name] = one.least
            reasons[one.name] = f"its lower bound; {one.attainable} can be had now"
    return msgspec.structs.replace(found, replicas=replicas, reasons=reasons)


def allocate_stages(
    needs: Mapping[str, float], variants: Mapping[str, Sequence[Variant]], rules: Rules
) -> dict[str, Allocation]:
    """Several stages that share the limits of one binding: ``needs`` and ``variants`` by stage.

    Where limits do not allow what all ask for, each stage gets the same share of its need, as large as limits allow:
    more prefill than decode can follow serves nobody.
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
    order: Sequence[str], needs: Mapping[str, float], variants: Mapping[str, Sequence[Variant]], rules: Rules
) -> dict[str, Allocation]:
    """One stage after the other, each within what those before it and the lower bounds of those behind it leave."""
    taken = {stage: {one.name: min(one.least, one.attainable) for one in variants[stage]} for stage in order}
    found: dict[str, Allocation] = {}
    for stage in order:
        others = [(one, n[one.name]) for other, n in taken.items() if other != stage for one in variants[other]]
        found[stage] = allocate(needs[stage], variants[stage], _less(rules, others))
        taken[stage] = dict(found[stage].replicas)
    return {stage: found[stage] for stage in needs}


def _less(rules: Rules, taken: Sequence[tuple[Variant, int]]) -> Rules:
    """What these replicas leave of the limits."""
    cost = rules.cost_per_hour
    if cost is not None:
        cost = max(0.0, cost - sum(one.cost * n for one, n in taken))
    return msgspec.structs.replace(
        rules,
        cost_per_hour=cost,
        accelerators={
            kind: max(0, limit - sum(one.accelerators * n for one, n in taken if one.is_of(kind)))
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


def _keeps(found: Mapping[str, Allocation], variants: Mapping[str, Sequence[Variant]], rules: Rules) -> bool:
    """Whether all stages together are within the limits."""
    rows = [(one, found[stage].replicas[one.name]) for stage in found for one in variants[stage]]
    if rules.cost_per_hour is not None and sum(one.cost * n for one, n in rows) > rules.cost_per_hour:
        return False
    if any(
        sum(one.accelerators * n for one, n in rows if one.is_of(kind)) > limit
        for kind, limit in rules.accelerators.items()
    ):
        return False
    return all(
        sum(_fresh(one, n) for one, n in rows if one.takes_from(pool)) <= limit for pool, limit in rules.free.items()
    )


_ROUNDING: Final = 1e-9
# More than any target may have: ratios may be beyond all bounds.
_MOST: Final = 1e9


def repair(
    replicas: Mapping[str, int], constraints: Sequence[RatioConstraint], most: Mapping[str, int]
) -> tuple[dict[str, int], list[Step]]:
    """Replicas that keep the ratios as far as ``most``, the upper bounds, allows, and what was changed.

    Nothing is ever lowered: the other side has work to do. Where no whole number is within both bounds of a ratio, the
    smallest one that is not short stays.
    """
    found, steps = dict(replicas), list[Step]()
    # raising one side of a ratio may make another ratio short
    for _ in range(len(constraints) + 1):
        changed = [step for one in constraints for step in _repair_one(found, one, most)]
        steps += changed
        if not changed:
            break
    return found, steps


def _repair_one(found: dict[str, int], one: RatioConstraint, most: Mapping[str, int]) -> list[Step]:
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


def _raise(found: dict[str, int], name: str, wanted: int, most: Mapping[str, int], why: str) -> list[Step]:
    before, after = found[name], max(found[name], min(wanted, most[name]))
    if after == before:
        return []
    found[name] = after
    short = f"; {wanted} would be needed, its upper bound is {after}" if after < wanted else ""
    return [Step("Ratio", before, after, f"{name}: {why}{short}")]
