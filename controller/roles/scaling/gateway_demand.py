# SPDX-License-Identifier: Apache-2.0
"""Demand as the gateways tell it, each by a stream of its own, and when it calls for a decision at once."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscale.signals import Signals
from controller.cluster.demand import DemandFeed
from controller.cluster.informer import Informer, InformerTiming, Selection
from controller.cluster.resources import PODS
from controller.roles.scaling.demand import DemandView
from controller.roles.scaling.engines import together
from controller.roles.work.slimming import slim_pod
from extproc.config.demand import EngineDemand
from extproc.config.loads import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from controller.autoscale.engine_signals import EngineSignal
    from controller.autoscale.situation import EngineReport
    from controller.cluster.client import Client
    from controller.roles.scaling.demand import Urgent
    from extproc.config.demand import Demand, ServerDemand

_TICK_S: Final = 1.0
# So many more requests here or at engines than at the last jump, or than at their fewest since then, and twice as many,
# are a jump. Where nothing queues here, because flow control is off, they are all at engines. A burst takes gateways
# seconds to read, so one message is not compared with the one before it alone.
_JUMP: Final = 8
_TWICE: Final = 2


class GatewayDemand:
    """See ``DemandSource``. ``trusted``: namespaces whose gateways speak for ModelServers of all namespaces. ``clock``:
    seconds since the epoch.
    """

    def __init__(
        self, client: Client, trusted: Collection[str], timing: InformerTiming, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._gateways = Informer(client, PODS, Selection(labels=LOADS_LABEL), timing=timing, slim=slim_pod)
        self._signals = Signals(trusted)
        self._feed = DemandFeed(lambda: self._gateways.objects, self._hear, clock=clock, rng=Random(), trusted=trusted)
        self._urgent: Urgent = _nobody
        self._wanted: Collection[str] | None = None
        self._unfinished: dict[tuple[str, str], tuple[int, int]] = {}
        # by gateway and slot
        self._said: dict[tuple[str, str], Mapping[str, ServerDemand]] = {}
        self._last: tuple[tuple[str, ...], float, DemandView] | None = None

    async def run(self, urgent: Urgent) -> None:
        """See ``DemandSource``."""
        self._urgent = urgent
        self._gateways.subscribe(self._feed.look)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._gateways.run(), name="informer of gateways")
            await self._gateways.synced.wait()
            tasks.create_task(self._feed.run(), name="demand of gateways")
            while True:
                now_s = self._clock()
                present = self._feed.present().keys()
                self._signals.present(present, now_s)
                self._said = {slot: said for slot, said in self._said.items() if slot[0] in present}
                self._follow(now_s)
                self._signals.tick(now_s)
                await asyncio.sleep(_TICK_S)

    def follow(self, servers: Collection[str]) -> None:
        """See ``DemandSource``."""
        self._wanted = servers

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:
        """See ``DemandSource``. Asked for again at the same instant, it is the same."""
        asked = tuple(servers)
        if self._last is not None and self._last[:2] == (asked, now_s):
            return self._last[2]
        self._follow(now_s)
        found = self._signals.of(asked, now_s)
        reports, learned = by_pod(found.engines)
        view = DemandView(found.traffic, found.waiting, found.freshness, reports, learned)
        self._last = asked, now_s, view
        return view

    def _follow(self, now_s: float) -> None:
        if self._wanted is not None:
            self._signals.follow(frozenset(self._wanted), now_s)
            self._wanted = None

    def _hear(self, gateway: str, said: Demand, at_s: float) -> None:
        self._signals.hear(gateway, said, at_s)
        slot = gateway, said.slot
        before, self._said[slot] = self._said.get(slot, {}), said.servers
        for name, server in said.servers.items():
            # what is the same object jumps no more than it did
            if server is not before.get(name) and self._jumps((said.instance, name), server):
                self._urgent(name)

    def _jumps(self, place: tuple[str, str], server: ServerDemand) -> bool:
        """Whether more wait at zero than the last time, or many more wait or are in flight at all."""
        now = server.at_zero, server.queued + sum(one.in_flight for one in server.engines.values())
        if now == (0, 0):
            self._unfinished.pop(place, None)
            return False
        at_zero, unfinished = self._unfinished.get(place, (0, 0))
        is_more = now[1] >= max(unfinished + _JUMP, unfinished * _TWICE)
        self._unfinished[place] = now[0], now[1] if is_more else min(now[1], unfinished)
        return now[0] > at_zero or is_more


def by_pod(
    engines: Mapping[str, EngineSignal],
) -> tuple[Mapping[str, EngineReport], Mapping[str, EngineDemand]]:
    """Reports and learned speeds by IP address: the ranks of a pod have a port each."""
    several: dict[str, list[EngineSignal]] = {}
    for address, one in engines.items():
        several.setdefault(address.rpartition(":")[0].strip("[]"), []).append(one)
    reports = {ip: together([one.report for one in found]) for ip, found in several.items()}
    learned = {ip: _learned(found) for ip, found in several.items()}
    return reports, learned


def _learned(engines: Sequence[EngineSignal]) -> EngineDemand:
    """Ranks of a pod are alike, and work side by side."""
    one, number = engines[0], len(engines)
    made = EngineDemand(
        role=one.role,
        kv_capacity_tokens=sum(each.report.kv_capacity_tokens for each in engines),
        prefill_tokens_per_s=one.prefill_tokens_per_s,
        step_s=one.step_s,
        step_s_per_token=one.step_s_per_token,
    )
    if number == 1:
        return made
    prefill, per_token = one.prefill_tokens_per_s, one.step_s_per_token
    return msgspec.structs.replace(
        made,
        prefill_tokens_per_s=None if prefill is None else prefill * number,
        step_s_per_token=None if per_token is None else per_token / number,
    )


def _nobody(_: str) -> None:
    """Until it runs."""
