# SPDX-License-Identifier: Apache-2.0
"""Kthena's behaviour as the block of HPA v2, and its panic as ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from controller.convert.reading import seconds

if TYPE_CHECKING:
    from controller.convert.reading import Fields

_LONGEST_WINDOW_S: Final = 3600
_LONGEST_PERIOD_S: Final = 1800
# Theirs, where nothing is written.
_INSTANCES: Final = 1
_PERCENT: Final = 100
_PERIOD: Final = "15s"
_PANIC_THRESHOLD: Final = 200
_PANIC_HOLD: Final = "60s"


def behavior_and_panic(
    behavior: Fields, tolerance: float, warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks ``behavior`` and ``panic`` of a policy of ours; raises Invalid."""
    up = behavior.below("scaleUp")
    found = {
        "scaleUp": _rules(up.below("stablePolicy"), tolerance, warnings),
        "scaleDown": _rules(behavior.below("scaleDown"), tolerance, warnings),
    }
    # their webhook writes it where it is left out
    panic = up.below("panicPolicy")
    for name in ("percent", "period"):
        if name in panic:
            panic.take(name)
            warnings.append(f"{panic.where}.{name}: not carried over; in a panic growth is limited by scaleUp alone")
    hold = str(panic.take("panicModeHold", _PANIC_HOLD))
    seconds(hold, f"{panic.where}.panicModeHold")
    return found, {"thresholdPercent": panic.number("panicThresholdPercent", _PANIC_THRESHOLD), "hold": hold}


def _rules(stable: Fields, tolerance: float, warnings: list[str]) -> dict[str, Any]:
    """Or takes the larger of both limits, And the smaller one; 0 allows nothing."""
    instances, percent = stable.number("instances", _INSTANCES), stable.number("percent", _PERCENT)
    takes_smaller = stable.take("selectPolicy", "Or") == "And"
    period_s = _whole(stable, "period", _PERIOD, _LONGEST_PERIOD_S, warnings)
    found: dict[str, Any] = {"tolerance": tolerance}
    if "stabilizationWindow" in stable:
        found["stabilizationWindowSeconds"] = _whole(stable, "stabilizationWindow", "0s", _LONGEST_WINDOW_S, warnings)
    limits = [
        {"type": kind, "value": value, "periodSeconds": max(1, period_s)}
        for kind, value in (("Pods", instances), ("Percent", percent))
        if value > 0
    ]
    if not limits or (takes_smaller and len(limits) == 1):
        found["selectPolicy"] = "Disabled"
    else:
        found |= {"selectPolicy": "Min" if takes_smaller else "Max", "policies": limits}
    return found


def _whole(stable: Fields, name: str, otherwise: str, longest_s: int, warnings: list[str]) -> int:
    """Whole seconds, as HPA v2 has them."""
    where = f"{stable.where}.{name}"
    exact_s = seconds(stable.take(name, otherwise), where)
    found_s = min(longest_s, math.ceil(exact_s))
    if found_s != exact_s:
        warnings.append(
            f"{where}: {found_s} s instead of {exact_s:g} s; whole seconds up to {longest_s} can be written"
        )
    return found_s
