# SPDX-License-Identifier: Apache-2.0
"""The metrics of source Gateway: what extproc knows of the load, by the names that policies use.

| metric | value | kind |
|---|---|---|
| ``requests_in_flight`` | requests at engines, and those that wait at the gateways | total |
| ``requests_queued`` | requests that wait at the gateways or in engines' queues | total |
| ``requests_running`` | requests that engines work on | total |
| ``requests_per_second`` | arrivals, mean of a minute | total |
| ``tokens_in_flight`` | tokens of prompts and expected answers at engines, and prompts that wait | total |
| ``kv_usage`` | share of an engine's KV cache in use, 0 to 1 | by engine |

What an engine that drains has is left out: it ends there. A ready engine of which nobody knows anything makes a total a
lower bound, never smaller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.api.autoscaling_mistakes import GATEWAY_METRICS
from controller.autoscaler.decision.situation import Engine, EngineReport, EngineState, Metric, Situation

if TYPE_CHECKING:
    from collections.abc import Callable

RATE_WINDOW_S: Final = 60.0


def report_of(situation: Situation, engine: Engine) -> EngineReport | None:
    """What is known of an engine; None if nothing is, or nothing recent."""
    return None if engine.name in situation.freshness.unreported else engine.report


def kv_usage_of(report: EngineReport) -> float | None:
    """The share of the cache in use: as the engine says, else by the tokens that gateways have sent; None if
    unknown.
    """
    if report.kv_usage is not None:
        return report.kv_usage
    if report.kv_capacity_tokens > 0:
        return min(report.in_flight_tokens / report.kv_capacity_tokens, 1.0)
    return None


def running_of(report: EngineReport) -> float:
    """Requests that an engine works on: as it says, else what was sent there without what waits there."""
    if report.running is not None:
        return report.running
    return max(report.in_flight - (report.waiting or 0.0), 0.0)


def gateway_metric(name: str, situation: Situation) -> Metric:
    """A metric of this module by its name."""
    at_s = situation.now_s - situation.freshness.age_s
    if name == "kv_usage":
        return Metric(at_s=at_s, by_engine=_kv_usage(situation))
    if name == "requests_per_second":
        return _arrivals(situation, at_s)
    if name not in _TOTALS:
        return Metric(at_s=at_s, problem=f"the gateway has no metric {name}; it has {', '.join(GATEWAY_METRICS)}")
    of_engine, of_gateways = _TOTALS[name]
    return _sum(situation, at_s, of_engine, of_gateways)


def _kv_usage(situation: Situation) -> dict[str, float]:
    reports = {one.name: report_of(situation, one) for one in situation.ready}
    usages = {name: kv_usage_of(report) for name, report in reports.items() if report is not None}
    return {name: usage for name, usage in usages.items() if usage is not None}


def _arrivals(situation: Situation, at_s: float) -> Metric:
    rates = situation.traffic.rates(RATE_WINDOW_S, situation.now_s)
    if rates is None:
        return Metric(at_s=at_s, problem="arrivals have not been counted for long enough")
    return Metric(at_s=at_s, total=rates.arrivals, is_lower_bound=bool(situation.freshness.silent))


def _sum(
    situation: Situation,
    at_s: float,
    of_engine: Callable[[EngineReport], float | None],
    of_gateways: Callable[[Situation], float],
) -> Metric:
    total, is_lower_bound = of_gateways(situation), bool(situation.freshness.silent)
    for engine in situation.engines:
        if engine.state is EngineState.DRAINING:
            continue
        report = report_of(situation, engine)
        value = of_engine(report) if report is not None else None
        total += value or 0.0
        is_lower_bound = is_lower_bound or (value is None and engine.state is EngineState.READY)
    return Metric(at_s=at_s, total=total, is_lower_bound=is_lower_bound)


_TOTALS: Final[dict[str, tuple[Callable[[EngineReport], float | None], Callable[[Situation], float]]]] = {
    "requests_in_flight": (lambda one: float(one.in_flight), lambda all_: float(all_.waiting.requests)),
    "requests_queued": (lambda one: one.waiting, lambda all_: float(all_.waiting.requests)),
    "requests_running": (running_of, lambda _: 0.0),
    "tokens_in_flight": (lambda one: one.in_flight_tokens, lambda all_: all_.waiting.tokens),
}
