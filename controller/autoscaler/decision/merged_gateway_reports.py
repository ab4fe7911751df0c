# SPDX-License-Identifier: Apache-2.0
"""Gateways' reports of clients' demand and of engines, merged into one.

Sums only grow, even when a process restarts or falls silent.

Each process counts since its start. The increase since its last report is added to the sums of its ModelServers; so a
process that ends subtracts nothing, and one that restarts is no jump. What a process counted during a gap in its
reports is spread evenly over the gap. Gauges (waiting, in flight) are those of running processes; a silent one keeps
its last values until its pod is gone or another process has taken its slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.gateway_reports import (
    SILENT_AFTER_S,
    EngineSignal,
    ReportedServer,
    ReportingGateway,
    ReportingProcess,
    engine_signals_by_address,
    sanitize_gauges,
)
from controller.autoscaler.decision.situation import Backlog, Freshness
from controller.autoscaler.decision.traffic import Traffic, TrafficCounters, TrafficHistory, sum_traffic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from extproc.api.status_page_contents import ProcessDemand, ServerDemand

# At most one tick a second.
_SHORTEST_TICK_S: Final = 0.9
# Untrusted gateways of a namespace.
_MOST_OWN: Final = 32


class ModelServerSignals(msgspec.Struct, frozen=True):
    """The data of one or several ModelServers together. ``engines``: by address."""

    traffic: Traffic
    waiting: Backlog
    engines: Mapping[str, EngineSignal]
    freshness: Freshness


class _Server(msgspec.Struct):
    """``since_s``: since when it is followed. ``has_changed``: its sums, since the last tick."""

    since_s: float
    sums: TrafficCounters = msgspec.field(default_factory=TrafficCounters)
    history: TrafficHistory = msgspec.field(default_factory=TrafficHistory)
    has_changed: bool = False


class SignalAggregator:
    """Call ``follow`` and ``set_gateways`` when these change, ``ingest`` with each message, and
    ``record_traffic_points`` once a second.

    A gateway outside of the ``trusted`` namespaces may report only ModelServers of its own namespace.
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._trusted = frozenset(trusted)
        self._servers: dict[str, _Server] = {}
        self._gateways: dict[str, ReportingGateway] = {}
        # by namespace, of trusted ones under "": when a gateway left of which something may be missing
        self._gap_at_s: dict[str, float] = {}
        self._ticks = 0
        self._ticked_at_s = -math.inf

    def set_subscriptions(self, servers: Collection[str], now: float) -> None:
        """Only these ModelServers (``namespace/name``) are kept."""
        for name in [one for one in self._servers if one not in servers]:
            del self._servers[name]
            for gateway in self._gateways.values():
                for process in gateway.processes.values():
                    process.servers.pop(name, None)
        for name in servers:
            if name not in self._servers:
                self._servers[name] = _Server(now)

    def set_gateways(self, gateways: Collection[str], now: float) -> None:
        """Set the running gateways (``namespace/name``): reports are expected of each; all others have nothing in
        flight.
        """
        for key in [one for one in self._gateways if one not in gateways]:
            gone = self._gateways.pop(key)
            if any(True for _ in gone.silent_slots(now)):
                self._gap_at_s[self._scope(key)] = now
        for key in gateways:
            if key not in self._gateways:
                self._gateways[key] = ReportingGateway(now)

    def ingest(self, gateway: str, demand: ProcessDemand, received_at_s: float) -> bool:
        """One message of one process. Repeated and late messages are ignored: False for these."""
        known = self._gateways.get(gateway)
        if known is None:
            known = self._gateways[gateway] = ReportingGateway(received_at_s)
        if known.is_without_reports() and self._is_one_too_many(gateway):
            return False
        follows_since_s = min((one.since_s for one in self._servers.values()), default=math.inf)
        found = known.ingest(demand, received_at_s, follows_since_s=follows_since_s)
        if found is None:
            return False
        process, before_s = found
        for name, page in demand.servers.items():
            reports = process.servers.get(name)
            # nearly always: a message names all servers
            is_known = reports is not None and reports.server is page
            if not is_known and name in self._servers and self.is_authorised(gateway, name):
                self._take(process, name, page, before_s, received_at_s)
        for name in process.servers.keys() - demand.servers.keys():
            if process.servers[name].server is not None:
                process.servers[name].server = None
        return True

    def _take(self, process: ReportingProcess, name: str, page: ServerDemand, before_s: float, now: float) -> None:
        """``before_s``: time of the process's report before."""
        server, reports = self._servers[name], process.servers.get(name)
        # counts from before the first report are left out
        is_new = reports is not None or before_s >= server.since_s
        if reports is None:
            reports = process.servers[name] = ReportedServer()
        more = reports.store(page)
        if more is not None and is_new:
            _count(server, more, since_s=before_s, now=now)

    def record_traffic_points(self, now: float) -> None:
        """Record the sums, at most once a second.

        After the clock was set back, earlier records are dropped: their times are no longer comparable.
        """
        if now < self._ticked_at_s - _SHORTEST_TICK_S:
            for server in self._servers.values():
                server.since_s, server.history, server.has_changed = now, TrafficHistory(), True
        elif now - self._ticked_at_s < _SHORTEST_TICK_S:
            return
        self._ticks += 1
        self._ticked_at_s = now
        for server in self._servers.values():
            server.history.add_point(self._ticks, now, server.sums if server.has_changed else None)
            server.has_changed = False

    def merged_signals(self, servers: Iterable[str], now: float) -> ModelServerSignals:
        """The data of these ModelServers together; those without a subscription are left out."""
        names = [one for one in servers if one in self._servers]
        known = [self._servers[one] for one in names]
        sources = [key for key in self._gateways if any(self.is_authorised(key, name) for name in names)]
        gathered = [
            (sanitize_gauges(reports.server), process.last_report_s)
            for key in sources
            for process in self._gateways[key].live_processes(now)
            for name in names
            if (reports := process.servers.get(name)) is not None and reports.server is not None
        ]
        points = sum_traffic([one.history.points(now, one.sums) for one in known]) if known else ()
        return ModelServerSignals(
            traffic=Traffic(points),
            waiting=_waiting(gathered, now),
            engines=engine_signals_by_address(gathered),
            freshness=self._freshness(names, sources, now),
        )

    def is_authorised(self, gateway: str, server: str) -> bool:
        """Whether a gateway's reports of a ModelServer count."""
        namespace = _namespace(gateway)
        return namespace in self._trusted or namespace == _namespace(server)

    def _freshness(self, names: list[str], sources: list[str], now: float) -> Freshness:
        found = [(key, self._gateways[key]) for key in sources]
        silent = [f"{key} {slot}".rstrip() for key, one in found for slot in one.silent_slots(now)]
        since_s = [self._servers[one].since_s for one in names]
        since_s += [one.gapless_since_s(now) for _, one in found]
        since_s += [self._gap_at_s.get(scope, -math.inf) for scope in {"", *(_namespace(one) for one in names)}]
        ages_s = [
            now
            - (
                one.seen_at_s
                if one.is_without_reports()
                else min(process.last_report_s for process in one.live_processes(now))
            )
            for _, one in found
        ]
        return Freshness(
            age_s=max(ages_s, default=math.inf),
            gateways=len(found),
            silent=tuple(sorted(silent)),
            since_s=0.0 if silent or not found else max(0.0, now - max(since_s)),
        )

    def _scope(self, gateway: str) -> str:
        namespace = _namespace(gateway)
        return "" if namespace in self._trusted else namespace

    def _is_one_too_many(self, gateway: str) -> bool:
        """Whether a namespace has too many untrusted gateways: any pod can carry the label, and reports take memory."""
        namespace = _namespace(gateway)
        if namespace in self._trusted:
            return False
        own = [
            key for key, one in self._gateways.items() if _namespace(key) == namespace and not one.is_without_reports()
        ]
        return len(own) >= _MOST_OWN


def _count(server: _Server, more: TrafficCounters, *, since_s: float, now: float) -> None:
    server.sums.add(more)
    server.has_changed = True
    since_s = max(since_s, server.since_s)
    if now - since_s > SILENT_AFTER_S:
        server.history.spread_over(more, since_s, now)


def _waiting(gathered: list[tuple[ServerDemand, float]], now: float) -> Backlog:
    requests, tokens, oldest_s, at_zero = 0, 0.0, 0.0, 0
    for one, last_report_s in gathered:
        requests += one.queued
        tokens += one.queued_tokens
        at_zero += one.at_zero
        if one.queued:
            oldest_s = max(oldest_s, one.oldest_wait_s + min(SILENT_AFTER_S, max(0.0, now - last_report_s)))
    return Backlog(requests, tokens, oldest_s, at_zero)


def _namespace(key: str) -> str:
    return key.partition("/")[0]
