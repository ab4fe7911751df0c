# SPDX-License-Identifier: Apache-2.0
"""Which tier a request takes: the cheapest ModelServer that is predicted to hold its objective.

    miss  = max(predicted TTFT / what is left of its objective, predicted TPOT / its objective)     at most 1: holds
    home  = the cheapest that could hold the objective if it were idle; the cheapest of all if none could
    taken = of the home and the tiers that ``spill`` allows: the cheapest that holds, else the one that misses least

A prediction that is not known yet is no miss: a request is how it becomes known. A ModelServer without a price, or with
one in another currency than the first one's, counts as dearer than all others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.api.cost_tiers import Spill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.model_route import RouteRule

# A shorter wait is not worth the place in a queue.
_SHORTEST_WAIT_S: Final = 0.01
# Of the time that a dearer tier leaves for a wait: predictions are not exact.
_WAITED_SHARE: Final = 0.8

Reason = Literal["holds", "waits", "up", "down", "misses"]


class TierPolicy(msgspec.Struct, frozen=True):
    """What holds for one request. Objectives that are None hold always."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    wait_s: float = 0.0
    spill: Spill = "Up"


class TierCandidate(msgspec.Struct, frozen=True):
    """One tier, for one request.

    ``cost_micros``: expected, None without a price. ``ttft_s``, ``tpot_s``: predicted, None if unknown.
    ``idle_ttft_s``, ``idle_tpot_s``: the same if no other request were there. ``holds_back``: it would wait in a queue
    there.
    """

    server: str
    cost_micros: int | None = None
    currency: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    idle_ttft_s: float | None = None
    idle_tpot_s: float | None = None
    holds_back: bool = False


class TierChoice(msgspec.Struct, frozen=True):
    """``taken``, ``home``: positions among the candidates. ``ask_again_s``: after so long in its home's queue the
    request is to be asked about again; 0: never. ``misses``: by candidate.
    """

    taken: int
    home: int
    reason: Reason
    misses: tuple[float, ...]
    ask_again_s: float = 0.0


class _Class(msgspec.Struct, frozen=True):
    tenants: frozenset[str]
    min_priority: float
    policy: TierPolicy


class CompiledTiers(msgspec.Struct, frozen=True):
    """Of a rule."""

    policy: TierPolicy
    classes: tuple[_Class, ...] = ()

    def policy_of(self, tenant: str, priority: int) -> TierPolicy:
        """Of the first class that matches."""
        for one in self.classes:
            if priority >= one.min_priority and (not one.tenants or tenant in one.tenants):
                return one.policy
        return self.policy


def compile_tiers(rule: RouteRule) -> CompiledTiers | None:
    """None if the rule has no tiers."""
    tiers = rule.tiers
    if tiers is None:
        return None
    ttft = rule.ttft_target if tiers.ttft is None else tiers.ttft
    usual = TierPolicy(_seconds(ttft), _seconds(tiers.tpot), float(tiers.wait), tiers.spill)
    classes = tuple(
        _Class(
            frozenset(one.tenants),
            -math.inf if one.min_priority is None else float(one.min_priority),
            TierPolicy(
                usual.ttft_s if one.ttft is None else float(one.ttft),
                usual.tpot_s if one.tpot is None else float(one.tpot),
                usual.wait_s if one.wait is None else float(one.wait),
                usual.spill if one.spill is None else one.spill,
            ),
        )
        for one in tiers.classes
    )
    return CompiledTiers(usual, classes)


def _seconds(given: float | None) -> float | None:
    return None if given is None else float(given)


def choose_tier(candidates: Sequence[TierCandidate], policy: TierPolicy, waited_s: float = 0.0) -> TierChoice:
    """Of at least one candidate, in the order of the rule, which decides between equal costs. ``waited_s``: for its
    home so far.
    """
    left_s = None if policy.ttft_s is None else policy.ttft_s - waited_s
    misses = tuple(max(_miss(one.ttft_s, left_s), _miss(one.tpot_s, policy.tpot_s)) for one in candidates)
    order = cost_order(candidates)
    home = order[0]
    for one in order:
        idle = max(_miss(candidates[one].idle_ttft_s, left_s), _miss(candidates[one].idle_tpot_s, policy.tpot_s))
        if min(idle, misses[one]) <= 1:
            home = one
            break
    if misses[home] <= 1:
        return TierChoice(home, home, "holds", misses)
    place = order.index(home)
    allowed = [home]
    if policy.spill in ("Up", "UpOrDown"):
        allowed += order[place + 1 :]
    if policy.spill in ("Down", "UpOrDown"):
        allowed += order[:place]
    taken = next((one for one in allowed if misses[one] <= 1), None)
    if taken is None:
        # of equals, the cheaper one
        taken = min(sorted(allowed, key=order.index), key=misses.__getitem__)
    if taken == home:
        return TierChoice(home, home, "misses", misses)
    wait_s = policy.wait_s - waited_s
    if misses[taken] <= 1 and left_s is not None:
        wait_s = min(wait_s, _WAITED_SHARE * (left_s - (candidates[taken].ttft_s or 0.0)))
    if candidates[home].holds_back and wait_s >= _SHORTEST_WAIT_S:
        return TierChoice(home, home, "waits", misses, wait_s)
    return TierChoice(taken, home, "up" if order.index(taken) > place else "down", misses)


def cost_order(candidates: Sequence[TierCandidate]) -> list[int]:
    """Positions from the cheapest to the dearest; equals, and those that cannot be compared, in their order."""
    currency = next((one.currency for one in candidates if one.cost_micros is not None), "")

    def dearness(position: int) -> tuple[bool, int]:
        one = candidates[position]
        return (True, 0) if one.cost_micros is None or one.currency != currency else (False, one.cost_micros)

    return sorted(range(len(candidates)), key=dearness)


def _miss(predicted_s: float | None, objective_s: float | None) -> float:
    """The prediction as a part of its objective; 0 where either is not known."""
    if predicted_s is None or objective_s is None:
        return 0.0
    return predicted_s / objective_s if objective_s > 0 and not math.isnan(predicted_s) else math.inf
