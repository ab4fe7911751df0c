# SPDX-License-Identifier: Apache-2.0
"""What all gateways say of clients' demand and of engines, merged into one.

Sums only grow, whoever restarts or falls silent.

Each process counts since it began. What it has counted more than the last time is added to the sums of its
ModelServers; so a process that ends takes nothing away, and one that begins anew is no jump. What a process counted
while it was not heard is spread evenly over that time. Gauges (what waits, what is in flight) are those of processes
that run; a silent one keeps its last ones until its pod is gone, or another process has taken its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.gateway_reports import (
    SILENT_AFTER_S,
    EngineSignal,
    Gateway,
    Process,
    ServerReports,
    cleaned,
    merged,
)
from controller.autoscaler.decision.situation import Freshness, Waiting
from controller.autoscaler.decision.traffic import History, Sums, Traffic, summed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from extproc.api.status_pages import Demand, ServerDemand

# A tick a second, however often it is asked for.
_SHORTEST_TICK_S: Final = 0.9
# Gateways of a namespace that nobody vouches for.
_MOST_OWN: Final = 32


class ServerSignals(msgspec.Struct, frozen=True):
    """What is known of one or several ModelServers together. ``engines``: by address."""

    traffic: Traffic
    waiting: Waiting
    engines: Mapping[str, EngineSignal]
    freshness: Freshness


class _Server(msgspec.Struct):
    """``since_s``: since when it is followed. ``has_changed``: its sums, since the last tick."""

    since_s: float
    sums: Sums = msgspec.field(default_factory=Sums)
    history: History = msgspec.field(default_factory=History)
    has_changed: bool = False


class Signals:
    """Call ``follow`` and ``set_gateways`` when these change, ``ingest`` with each message, and ``tick`` once a second.

    A gateway outside of the ``trusted`` namespaces speaks for the ModelServers of its own one alone.
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._trusted = frozenset(trusted)
        self._servers: dict[str, _Server] = {}
        self._gateways: dict[str, Gateway] = {}
        # by namespace, of trusted ones under "": when a gateway left of which something may be missing
        self._gap_at_s: dict[str, float] = {}
        self._ticks = 0
        self._ticked_at_s = -math.inf

    def follow(self, servers: Collection[str], now: float) -> None:
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
        """The gateways (``namespace/name``) that run: each is expected to speak, and others have nothing in flight any
        more.
        """
        for key in [one for one in self._gateways if one not in gateways]:
            gone = self._gateways.pop(key)
            if any(True for _ in gone.silent(now)):
                self._gap_at_s[self._scope(key)] = now
        for key in gateways:
            if key not in self._gateways:
                self._gateways[key] = Gateway(now)

    def ingest(self, gateway: str, said: Demand, received_at_s: float) -> bool:
        """One message of one process. Those that are repeated or come late change nothing: False for these."""
        known = self._gateways.get(gateway)
        if known is None:
            known = self._gateways[gateway] = Gateway(received_at_s)
        if known.is_without_reports() and self._is_one_too_many(gateway):
            return False
        follows_since_s = min((one.since_s for one in self._servers.values()), default=math.inf)
        found = known.ingest(said, received_at_s, follows_since_s=follows_since_s)
        if found is None:
            return False
        process, before_s = found
        for name, page in said.servers.items():
            heard = process.servers.get(name)
            # nearly always: a message names all servers
            is_known = heard is not None and heard.server is page
            if not is_known and name in self._servers and self.is_authorised(gateway, name):
                self._take(process, name, page, before_s, received_at_s)
        for name in process.servers.keys() - said.servers.keys():
            if process.servers[name].server is not None:
                process.servers[name].server = None
        return True

    def _take(self, process: Process, name: str, page: ServerDemand, before_s: float, now: float) -> None:
        """``before_s``: until when the process was heard before."""
        server, heard = self._servers[name], process.servers.get(name)
        # what was counted before anybody looked does not count
        is_new = heard is not None or before_s >= server.since_s
        if heard is None:
            heard = process.servers[name] = ServerReports()
        more = heard.take(page)
        if more is not None and is_new:
            _count(server, more, since_s=before_s, now=now)

    def tick(self, now: float) -> None:
        """Write the sums down. Once a second; called more often, it does nothing.

        After the clock has been set back, what was written before has no place in time any more, and is forgotten.
        """
        if now < self._ticked_at_s - _SHORTEST_TICK_S:
            for server in self._servers.values():
                server.since_s, server.history, server.has_changed = now, History(), True
        elif now - self._ticked_at_s < _SHORTEST_TICK_S:
            return
        self._ticks += 1
        self._ticked_at_s = now
        for server in self._servers.values():
            server.history.tick(self._ticks, now, server.sums if server.has_changed else None)
            server.has_changed = False

    def of(self, servers: Iterable[str], now: float) -> ServerSignals:
        """What is known of these ModelServers together; those that are not followed are left out."""
        names = [one for one in servers if one in self._servers]
        known = [self._servers[one] for one in names]
        sources = [key for key in self._gateways if any(self.is_authorised(key, name) for name in names)]
        said = [
            (cleaned(heard.server), process.last_report_s)
            for key in sources
            for process in self._gateways[key].living(now)
            for name in names
            if (heard := process.servers.get(name)) is not None and heard.server is not None
        ]
        points = summed([one.history.points(now, one.sums) for one in known]) if known else ()
        return ServerSignals(
            traffic=Traffic(points),
            waiting=_waiting(said, now),
            engines=merged(said),
            freshness=self._freshness(names, sources, now),
        )

    def is_authorised(self, gateway: str, server: str) -> bool:
        """Whether what a gateway says of a ModelServer counts."""
        namespace = _namespace(gateway)
        return namespace in self._trusted or namespace == _namespace(server)

    def _freshness(self, names: list[str], sources: list[str], now: float) -> Freshness:
        found = [(key, self._gateways[key]) for key in sources]
        silent = [f"{key} {slot}".rstrip() for key, one in found for slot in one.silent(now)]
        since_s = [self._servers[one].since_s for one in names]
        since_s += [one.whole_since_s(now) for _, one in found]
        since_s += [self._gap_at_s.get(scope, -math.inf) for scope in {"", *(_namespace(one) for one in names)}]
        ages_s = [
            now
            - (one.seen_at_s if one.is_without_reports() else min(process.last_report_s for process in one.living(now)))
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
        """Anybody may say of a pod that it is a gateway, and what is heard of it is kept."""
        namespace = _namespace(gateway)
        if namespace in self._trusted:
            return False
        own = [
            key for key, one in self._gateways.items() if _namespace(key) == namespace and not one.is_without_reports()
        ]
        return len(own) >= _MOST_OWN


def _count(server: _Server, more: Sums, *, since_s: float, now: float) -> None:
    server.sums.add(more)
    server.has_changed = True
    since_s = max(since_s, server.since_s)
    if now - since_s > SILENT_AFTER_S:
        server.history.spread(more, since_s, now)


def _waiting(said: list[tuple[ServerDemand, float]], now: float) -> Waiting:
    requests, tokens, oldest_s, at_zero = 0, 0.0, 0.0, 0
    for one, last_report_s in said:
        requests += one.queued
        tokens += one.queued_tokens
        at_zero += one.at_zero
        if one.queued:
            oldest_s = max(oldest_s, one.oldest_wait_s + min(SILENT_AFTER_S, max(0.0, now - last_report_s)))
    return Waiting(requests, tokens, oldest_s, at_zero)


def _namespace(key: str) -> str:
    return key.partition("/")[0]
