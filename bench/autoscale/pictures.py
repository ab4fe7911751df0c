# SPDX-License-Identifier: Apache-2.0
"""From what the core says each second, through the live merge, to the situation that scalers decide on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.signals import Signals
from controller.autoscaler.decision.situation import Engine, EngineState, Situation, Target
from controller.autoscaler.decision.speeds import speed_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench.autoscale.fleet import Fleet, Replica
    from controller.api.autoscaling import LatencyObjective
    from controller.autoscaler.decision.gateway_reports import EngineSignal
    from extproc.api.status_pages import Demand, EngineDemand

# In a namespace of its own, with the ModelServer.
_GATEWAY: Final = "default/lab"


class Pictures:
    """One ModelServer with one gateway, and the fleet as it is."""

    def __init__(self, objective: LatencyObjective, *, min_replicas: int) -> None:
        """``min_replicas``: of the first target."""
        self._objective = objective
        self._min_replicas = min_replicas
        self._signals = Signals()
        self._signals_at_s = 0.0
        self._servers: tuple[str, ...] = ()
        self._engines: Mapping[str, EngineDemand] = {}

    def take(self, demand: Demand, now: float) -> None:
        """A page of the core."""
        if not self._servers:
            self._servers = tuple(demand.servers)
            self._signals.follow(self._servers, now)
            self._signals.set_gateways([_GATEWAY], now)
        self._signals.ingest(_GATEWAY, demand, now)
        self._signals.tick(now)
        self._signals_at_s = now
        self._engines = demand.servers[self._servers[0]].engines

    def is_missed(self, fleet: Fleet) -> bool:
        """Whether a request waits and no replica is there or ordered."""
        waiting = self._signals.of(self._servers, self._signals_at_s).waiting
        return waiting.requests > 0 and not any(one.is_wanted for one in fleet.replicas)

    def situation(self, fleet: Fleet, now: float) -> Situation:
        """At an instant after the first page."""
        known = self._signals.of(self._servers, now)
        targets = []
        for number, variant in enumerate(fleet.variants.values()):
            spec = variant.target(0 if number else self._min_replicas)
            mine = [one for one in fleet.replicas if one.target == variant.name and one.gone_at_s is None]
            said = [self._engines[one.address] for one in mine if one.address in self._engines]
            targets.append(
                Target(
                    spec=spec,
                    current=fleet.desired[variant.name],
                    engines=tuple(_engines(mine, known.engines)),
                    speed=speed_of(spec.capacity, said),
                    start_s=variant.start_s,
                )
            )
        return Situation(
            now_s=now,
            targets=tuple(targets),
            traffic=known.traffic,
            waiting=known.waiting,
            freshness=known.freshness,
            objective=self._objective,
        )


def _engines(replicas: Iterable[Replica], said: Mapping[str, EngineSignal]) -> Iterable[Engine]:
    for one in replicas:
        state = EngineState.STARTING if one.is_starting else EngineState.READY
        if one.draining_at_s is not None:
            state = EngineState.DRAINING
        signal = said.get(one.address)
        report = None if signal is None else signal.report
        yield Engine(one.name, state, one.created_at_s, one.ready_at_s, report)
