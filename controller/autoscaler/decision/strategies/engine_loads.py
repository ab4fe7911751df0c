# SPDX-License-Identifier: Apache-2.0
"""What strategies read from a situation: engines, their loads and the metrics of source Gateway.

Metrics have the names that policies use:

| metric | value | kind |
|---|---|---|
| ``requests_in_flight`` | requests at engines, and those that wait at the gateways | total |
| ``requests_queued`` | requests that wait at the gateways or in engines' queues | total |
| ``requests_running`` | requests that engines work on | total |
| ``requests_per_second`` | arrivals, mean of a minute | total |
| ``tokens_in_flight`` | tokens of prompts and expected answers at engines, and prompts that wait | total |
| ``kv_usage`` | share of an engine's KV cache in use, 0 to 1 | by engine |

Requests of a draining engine are left out, as they finish there. A ready engine without data makes a total a lower
bound.

Engines are counted in replicas of the first target ("units"). With one target, a unit is a replica and answers are
whole numbers. With several that differ in capacity, an engine counts as many units as it does work, and answers are
fractions: the allocation over targets rounds, not the strategy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling import GATEWAY_METRICS
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.situation import Engine, EngineReport, EngineState, MetricReading, Situation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

RATE_WINDOW_S: Final = 60.0


def recent_report(situation: Situation, engine: Engine) -> EngineReport | None:
    """The recent report about an engine; None if there is none."""
    return None if engine.name in situation.freshness.unreported else engine.report


def kv_cache_usage(report: EngineReport) -> float | None:
    """The share of the cache in use: as the engine reports, else by the tokens that gateways have sent; None if
    unknown.
    """
    if report.kv_usage is not None:
        return report.kv_usage
    if report.kv_capacity_tokens > 0:
        return min(report.in_flight_tokens / report.kv_capacity_tokens, 1.0)
    return None


def running_requests(report: EngineReport) -> float:
    """Running requests of an engine: as it reports, else requests sent to it minus those waiting there."""
    if report.running is not None:
        return report.running
    return max(report.in_flight - (report.waiting or 0.0), 0.0)


def gateway_metric(name: str, situation: Situation) -> MetricReading:
    """A metric of this module by its name."""
    at_s = situation.now_s - situation.freshness.age_s
    if name == "kv_usage":
        return MetricReading(at_s=at_s, by_engine=_kv_usage(situation))
    if name == "requests_per_second":
        return _arrivals(situation, at_s)
    if name not in _TOTALS:
        return MetricReading(
            at_s=at_s, problem=f"the gateway has no metric {name}; it has {', '.join(GATEWAY_METRICS)}"
        )
    of_engine, of_gateways = _TOTALS[name]
    return _sum(situation, at_s, of_engine, of_gateways)


def _kv_usage(situation: Situation) -> dict[str, float]:
    reports = {one.name: recent_report(situation, one) for one in situation.ready_engines}
    usages = {name: kv_cache_usage(report) for name, report in reports.items() if report is not None}
    return {name: usage for name, usage in usages.items() if usage is not None}


def _arrivals(situation: Situation, at_s: float) -> MetricReading:
    rates = situation.traffic.rates(RATE_WINDOW_S, situation.now_s)
    if rates is None:
        return MetricReading(at_s=at_s, problem="arrivals have not been counted for long enough")
    return MetricReading(at_s=at_s, total=rates.arrivals, is_lower_bound=bool(situation.freshness.silent))


def _sum(
    situation: Situation,
    at_s: float,
    of_engine: Callable[[EngineReport], float | None],
    of_gateways: Callable[[Situation], float],
) -> MetricReading:
    total, is_lower_bound = of_gateways(situation), bool(situation.freshness.silent)
    for engine in situation.engines:
        if engine.state is EngineState.DRAINING:
            continue
        report = recent_report(situation, engine)
        value = of_engine(report) if report is not None else None
        total += value or 0.0
        is_lower_bound = is_lower_bound or (value is None and engine.state is EngineState.READY)
    return MetricReading(at_s=at_s, total=total, is_lower_bound=is_lower_bound)


_TOTALS: Final[dict[str, tuple[Callable[[EngineReport], float | None], Callable[[Situation], float]]]] = {
    "requests_in_flight": (lambda one: float(one.in_flight), lambda all_: float(all_.waiting.requests)),
    "requests_queued": (lambda one: one.waiting, lambda all_: float(all_.waiting.requests)),
    "requests_running": (running_requests, lambda _: 0.0),
    "tokens_in_flight": (lambda one: one.in_flight_tokens, lambda all_: all_.waiting.tokens),
}


class WeightedEngineLoad(msgspec.Struct, frozen=True):
    """A ready engine. ``units``: its weight. ``target``: the target's name. ``report``: None if its load is unknown."""

    name: str
    units: float
    target: str
    report: EngineReport | None


def ready_loads(situation: Situation) -> tuple[WeightedEngineLoad, ...]:
    """Ready engines with their reports."""
    return tuple(
        WeightedEngineLoad(engine.name, target.capacity, target.name, recent_report(situation, engine))
        for target in situation.targets
        for engine in target.engines_in_state(EngineState.READY)
    )


def ready_units(situation: Situation) -> float:
    """Engines that serve."""
    return sum(len(target.engines_in_state(EngineState.READY)) * target.capacity for target in situation.targets)


def pending_units(situation: Situation) -> float:
    """Replicas in the specs that do not serve yet, without those of blocked targets: these may never start."""
    return sum(
        max((target.current or 0) - len(target.engines_in_state(EngineState.READY)), 0) * target.capacity
        for target in situation.targets
        if not target.blocked
    )


def are_units_replicas(situation: Situation) -> bool:
    """Whether a unit is a replica of every target."""
    return all(target.capacity == 1.0 for target in situation.targets)


def round_up_units(units: float, situation: Situation) -> float:
    """The next whole number of replicas; where targets differ in capacity, ``units`` as they are."""
    return float(math.ceil(units)) if are_units_replicas(situation) else units


def round_down_units(units: float, situation: Situation) -> float:
    """As ``round_up_units``, downward."""
    return float(math.floor(units)) if are_units_replicas(situation) else units


def capacity_after_scale_in(situation: Situation, units: float = 1.0) -> float:
    """``units`` fewer than now, but not below the last replica: only the idle rule removes that one."""
    current = situation.current_replicas
    return max(current - units, min(current, 1.0))


def scale_out_only(
    strategy: str, situation: Situation, replicas: float, reason: str, inputs: Mapping[str, float], why_unsure: str
) -> Recommendation:
    """A recommendation from incomplete data: it may scale out; otherwise the replicas are None."""
    if replicas > situation.current_replicas:
        return Recommendation(strategy, replicas, reason, inputs)
    return Recommendation(strategy, None, f"{why_unsure}, so it does not scale in; otherwise: {reason}", inputs)


def is_load_unknown(report: EngineReport | None) -> bool:
    """Whether cache usage or queue length of an engine is unknown."""
    return kv_and_queue(report) is None


def kv_and_queue(report: EngineReport | None) -> tuple[float, float] | None:
    """The share of the cache in use and the requests that wait in the engine; None unless both are known."""
    kv_usage = kv_cache_usage(report) if report is not None else None
    if report is None or kv_usage is None or report.waiting is None or not math.isfinite(kv_usage + report.waiting):
        return None
    return kv_usage, report.waiting


def unmeasured_recommendation(strategy: str, loads: Iterable[WeightedEngineLoad]) -> Recommendation | None:
    """An unknown recommendation if each ready engine lacks its cache usage or queue length; else None."""
    if any(not is_load_unknown(load.report) for load in loads):
        return None
    return Recommendation(strategy, None, "no ready engine says what it has, so nothing is measured")
