# SPDX-License-Identifier: Apache-2.0
"""Clients' demand: the gateways' streams, merged, and the jumps that call for a decision at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from controller.autoscaler.decision.merged_gateway_reports import SignalAggregator
from controller.autoscaler.decision.situation import Backlog, EngineReport, Freshness
from controller.autoscaler.decision.traffic import Traffic
from controller.kube.gateway_reports import DemandFeed
from extproc.api.status_page_contents import EngineDemand, ServerDemand, unfinished_notify_threshold

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.autoscaler.decision.gateway_reports import EngineSignal
    from controller.kube.informer import Informer
    from extproc.api.status_page_contents import ProcessDemand

Urgent = Callable[[str], None]
_TICK_S: Final = 1.0


def merge_engine_reports(reports: Sequence[EngineReport]) -> EngineReport:
    """One report of several engines: amounts are summed; age is that of the oldest; cache usage is the largest."""
    if len(reports) == 1:
        return reports[0]
    return EngineReport(
        at_s=min(one.at_s for one in reports),
        in_flight=sum(one.in_flight for one in reports),
        in_flight_tokens=sum(one.in_flight_tokens for one in reports),
        waiting=_sum(one.waiting for one in reports),
        running=_sum(one.running for one in reports),
        kv_usage=max((one.kv_usage for one in reports if one.kv_usage is not None), default=None),
        kv_capacity_tokens=sum(one.kv_capacity_tokens for one in reports),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None


"""Gets the key of a ModelServer about which something should be decided at once."""


class DemandView(msgspec.Struct, frozen=True):
    """Of some ModelServers together. ``reports``: of engines, by the IP address of their pod; those of several ports of
    it as one. ``learned``: the speeds of these engines.
    """

    traffic: Traffic = Traffic()
    waiting: Backlog = Backlog()
    freshness: Freshness = Freshness(age_s=float("inf"), gateways=0, since_s=0.0)
    reports: Mapping[str, EngineReport] = {}
    learned: Mapping[str, EngineDemand] = {}

    def with_api_unreachable(self, for_s: float | None) -> DemandView:
        """The same with ``cut_off_s`` set: for how many seconds the API server has not been reachable; None: it is."""
        if for_s is None:
            return self
        return msgspec.structs.replace(self, freshness=msgspec.structs.replace(self.freshness, cut_off_s=for_s))


class DemandSource(Protocol):
    """Gathers demand. One object lives for one term of leadership."""

    async def run(self, urgent: Urgent) -> None:
        """Collect demand until cancelled; call ``urgent`` when a server's demand jumps."""
        ...

    def set_servers(self, servers: Collection[str]) -> None:
        """Set the ModelServers, by key, whose demand is requested."""
        ...

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:
        """The demand for these ModelServers. ``now_s``: since the epoch, as all times of the result."""
        ...


class _SlotReport(msgspec.Struct):
    """The last report of one gateway process. ``unfinished``: by server, requests held at zero and all unfinished ones,
    at the last jump or the fewest since then.
    """

    instance: str
    servers: Mapping[str, ServerDemand]
    unfinished: dict[str, tuple[int, int]]


class GatewayDemandSource:
    """See ``DemandSource``. ``gateways``: the informer of pods with the label ``attache.dev/tells-loads``. ``trusted``:
    namespaces whose gateways may report demand for ModelServers of all namespaces. ``clock``: seconds since the epoch.
    """

    def __init__(self, gateways: Informer, trusted: Collection[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gateways = gateways
        self._signals = SignalAggregator(trusted)
        self._feed = DemandFeed(lambda: gateways.objects, self._on_demand, clock=clock, rng=Random(), trusted=trusted)
        self._urgent: Urgent = _ignore
        self._wanted: Collection[str] | None = None
        # by gateway and slot
        self._last_reports: dict[tuple[str, str], _SlotReport] = {}
        self._last: tuple[tuple[str, ...], float, DemandView] | None = None

    async def run(self, urgent: Urgent) -> None:
        """Read the gateways' pages until cancelled; call ``urgent`` when a server's demand jumps."""
        self._urgent = urgent
        self._gateways.subscribe(self._feed.on_gateways_changed)
        async with asyncio.TaskGroup() as tasks:
            await self._gateways.synced.wait()
            tasks.create_task(self._feed.run(), name="demand of gateways")
            while True:
                now_s = self._clock()
                present = self._feed.gateway_addresses().keys()
                self._signals.set_gateways(present, now_s)
                self._last_reports = {slot: demand for slot, demand in self._last_reports.items() if slot[0] in present}
                self._follow(now_s)
                self._signals.record_traffic_points(now_s)
                await asyncio.sleep(_TICK_S)

    def set_servers(self, servers: Collection[str]) -> None:
        """Request the demand of these ModelServers, by key."""
        self._wanted = servers

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:
        """The demand for these ModelServers; calls at the same instant return the same object."""
        wanted = tuple(servers)
        if self._last is not None and self._last[:2] == (wanted, now_s):
            return self._last[2]
        self._follow(now_s)
        found = self._signals.merged_signals(wanted, now_s)
        reports, learned = group_by_pod(found.engines)
        view = DemandView(found.traffic, found.waiting, found.freshness, reports, learned)
        self._last = wanted, now_s, view
        return view

    def _follow(self, now_s: float) -> None:
        if self._wanted is not None:
            self._signals.set_subscriptions(frozenset(self._wanted), now_s)
            self._wanted = None

    def _on_demand(self, gateway: str, demand: ProcessDemand, at_s: float) -> None:
        if not self._signals.ingest(gateway, demand, at_s):
            return
        before = self._last_reports.get((gateway, demand.slot))
        if before is None or before.instance != demand.instance:
            before = _SlotReport(demand.instance, {}, {})
        now = _SlotReport(demand.instance, demand.servers, {})
        for name, server in demand.servers.items():
            if not self._signals.is_authorised(gateway, name):
                continue
            known = before.unfinished.get(name, (0, 0))
            # what is the same object jumps no more than it did
            if server is before.servers.get(name):
                jumps, unfinished = False, known
            else:
                jumps, unfinished = _jump(known, server)
            if unfinished != (0, 0):
                now.unfinished[name] = unfinished
            if jumps:
                self._urgent(name)
        self._last_reports[gateway, demand.slot] = now


def _jump(before: tuple[int, int], server: ServerDemand) -> tuple[bool, tuple[int, int]]:
    """Whether more wait at zero than the last time, or many more wait or are in flight at all; and what to compare with
    the next time.

    Where nothing queues here, because flow control is off, all are in flight. A burst takes gateways seconds to read:
    a message is compared with the last jump, or with the fewest since then, and not with the one before it alone.
    """
    at_zero, unfinished = server.at_zero, server.queued + sum(one.in_flight for one in server.engines.values())
    if (at_zero, unfinished) == (0, 0):
        return False, (0, 0)
    is_more = unfinished >= unfinished_notify_threshold(before[1])
    return at_zero > before[0] or is_more, (at_zero, unfinished if is_more else min(unfinished, before[1]))


def group_by_pod(
    engines: Mapping[str, EngineSignal],
) -> tuple[Mapping[str, EngineReport], Mapping[str, EngineDemand]]:
    """Reports and learned speeds by IP address: the ranks of a pod have a port each."""
    several: dict[str, list[EngineSignal]] = {}
    for address, one in engines.items():
        several.setdefault(address.rpartition(":")[0].strip("[]"), []).append(one)
    reports = {ip: merge_engine_reports([one.report for one in found]) for ip, found in several.items()}
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


def _ignore(_: str) -> None:
    """Until it runs."""
