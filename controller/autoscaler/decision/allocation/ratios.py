# SPDX-License-Identifier: Apache-2.0
"""Ratios between targets, such as prefill to decode: the short side is raised, and both are zero together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.decision import Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling_binding import RatioConstraint

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
