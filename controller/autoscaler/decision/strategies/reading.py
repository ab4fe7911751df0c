# SPDX-License-Identifier: Apache-2.0
"""What laws read from a situation: engines and their loads, counted in replicas of the first target ("units").

With one target, a unit is a replica and answers are whole numbers. With several that differ in capacity, an engine
counts as many units as it does work, and answers are fractions: the allocation over targets rounds, not the law.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.decision.law import Recommendation
from controller.autoscaler.decision.metrics import kv_usage_of, report_of
from controller.autoscaler.decision.situation import EngineReport, EngineState, Situation

if TYPE_CHECKING:
    from collections.abc import Mapping


class Load(msgspec.Struct, frozen=True):
    """A ready engine. ``units``: what it counts. ``target``: whose it is. ``report``: None if its load is unknown."""

    name: str
    units: float
    target: str
    report: EngineReport | None


def ready_loads(situation: Situation) -> tuple[Load, ...]:
    """Engines that serve, with what is known of them."""
    return tuple(
        Load(engine.name, target.capacity, target.name, report_of(situation, engine))
        for target in situation.targets
        for engine in target.having(EngineState.READY)
    )


def ready_units(situation: Situation) -> float:
    """Engines that serve."""
    return sum(len(target.having(EngineState.READY)) * target.capacity for target in situation.targets)


def pending_units(situation: Situation) -> float:
    """Replicas that were asked for and do not serve yet, without those of targets that are blocked: these may not
    come.
    """
    return sum(
        max((target.current or 0) - len(target.having(EngineState.READY)), 0) * target.capacity
        for target in situation.targets
        if not target.blocked
    )


def is_whole(situation: Situation) -> bool:
    """Whether a unit is a replica of every target."""
    return all(target.capacity == 1.0 for target in situation.targets)


def rounded_up(units: float, situation: Situation) -> float:
    """The next whole number of replicas; where targets differ in capacity, ``units`` as they are."""
    return float(math.ceil(units)) if is_whole(situation) else units


def rounded_down(units: float, situation: Situation) -> float:
    """As ``rounded_up``, downward."""
    return float(math.floor(units)) if is_whole(situation) else units


def one_fewer(situation: Situation, units: float = 1.0) -> float:
    """``units`` fewer than now, but not the last one: that goes only when nobody has come for a while."""
    current = situation.current
    return max(current - units, min(current, 1.0))


def growth_only(
    law: str, situation: Situation, replicas: float, reason: str, inputs: Mapping[str, float], why_unsure: str
) -> Recommendation:
    """A recommendation from incomplete data: it may ask for more; otherwise the law does not know."""
    if replicas > situation.current:
        return Recommendation(law, replicas, reason, inputs)
    return Recommendation(law, None, f"{why_unsure}, so it does not scale in; otherwise: {reason}", inputs)


def is_unknown(report: EngineReport | None) -> bool:
    """Whether cache or queue of an engine is not known."""
    return kv_and_queue(report) is None


def kv_and_queue(report: EngineReport | None) -> tuple[float, float] | None:
    """The share of the cache in use and the requests that wait in the engine; None unless both are known."""
    kv_usage = kv_usage_of(report) if report is not None else None
    if report is None or kv_usage is None or report.waiting is None or not math.isfinite(kv_usage + report.waiting):
        return None
    return kv_usage, report.waiting
