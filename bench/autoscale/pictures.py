# SPDX-License-Identifier: Apache-2.0
"""From what the core says each second, and from the fleet, to the situation that scalers decide on."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Final

from controller.autoscale.situation import (
    Engine,
    EngineReport,
    EngineState,
    Freshness,
    Situation,
    Speed,
    Target,
    Waiting,
)
from controller.autoscale.traffic import Point, Totals, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.autoscale.fleet import Fleet
    from bench.autoscale.replicas import Replica
    from controller.resources.autoscaling import LatencyObjective
    from extproc.config.demand import Demand, EngineDemand, ServerDemand

# As long as any law looks back.
_HISTORY_S: Final = 1800.0


class Pictures:
    """The history of one ModelServer, and the fleet as it is."""

    def __init__(self, objective: LatencyObjective, *, min_replicas: int) -> None:
        """``min_replicas``: of the first target."""
        self._objective = objective
        self._min_replicas = min_replicas
        self._points: deque[Point] = deque()
        self._server: ServerDemand | None = None

    def take(self, demand: Demand, now: float) -> None:
        """A page of the core."""
        (self._server,) = demand.servers.values()
        self._points.append(Point(now, _totals(self._server)))
        while self._points[0].at_s < now - _HISTORY_S:
            self._points.popleft()

    def situation(self, fleet: Fleet, now: float) -> Situation:
        """At an instant after the first page."""
        server = self._server
        assert server is not None
        targets = tuple(
            Target(
                spec=variant.target(0 if number else self._min_replicas),
                current=fleet.desired[variant.name],
                engines=tuple(_engines(fleet.replicas, variant.name, server.engines, now)),
                speed=_speed(fleet.replicas, variant.name, server.engines),
                start_s=variant.start_s,
            )
            for number, variant in enumerate(fleet.variants.values())
        )
        return Situation(
            now_s=now,
            targets=targets,
            traffic=Traffic(tuple(self._points)),
            waiting=Waiting(server.queued, server.queued_tokens, server.oldest_wait_s, server.at_zero),
            freshness=Freshness(),
            objective=self._objective,
        )


def _totals(server: ServerDemand) -> Totals:
    counts = list(server.counted.values())
    return Totals(
        arrivals=sum(one.arrivals for one in counts),
        refused=sum(one.refused for one in counts),
        finished=sum(one.finished for one in counts),
        prompt_tokens=sum(one.prompt_tokens for one in counts),
        cached_tokens=sum(one.cached_tokens for one in counts),
        output_tokens=sum(one.output_tokens for one in counts),
        prefill_work=sum(one.prefill_work for one in counts),
        ttft=server.ttft,
        tpot=server.tpot,
    )


def _speed(replicas: Iterable[Replica], target: str, said: dict[str, EngineDemand]) -> Speed | None:
    """The mean of what its engines are known to do; None before any is."""
    known = [
        said[one.address] for one in replicas if one.target == target and one.gone_at_s is None and one.address in said
    ]
    rates = [one.prefill_tokens_per_s for one in known if one.prefill_tokens_per_s is not None]
    steps = [
        (one.step_s, one.step_s_per_token)
        for one in known
        if one.step_s is not None and one.step_s_per_token is not None
    ]
    if not rates or not steps:
        return None
    return Speed(
        prefill_tokens_per_s=statistics.fmean(rates),
        step_s=statistics.fmean(step for step, _ in steps),
        step_s_per_token=statistics.fmean(more for _, more in steps),
        kv_tokens=max(one.kv_capacity_tokens for one in known) or None,
        is_measured=True,
    )


def _engines(replicas: Iterable[Replica], target: str, said: dict[str, EngineDemand], now: float) -> Iterable[Engine]:
    for one in replicas:
        if one.target != target or one.gone_at_s is not None:
            continue
        state = EngineState.STARTING if one.is_starting else EngineState.READY
        if one.draining_at_s is not None:
            state = EngineState.DRAINING
        report = _report(said[one.address], now) if one.address in said else None
        yield Engine(one.name, state, one.created_at_s, one.ready_at_s, report)


def _report(demand: EngineDemand, now: float) -> EngineReport:
    return EngineReport(
        at_s=now - (demand.report_age_s or 0.0),
        in_flight=demand.in_flight,
        in_flight_tokens=demand.in_flight_tokens,
        waiting=demand.waiting,
        running=demand.running,
        kv_usage=demand.kv_usage,
        kv_capacity_tokens=demand.kv_capacity_tokens,
    )
