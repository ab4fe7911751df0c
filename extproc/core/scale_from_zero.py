# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for an engine: held while their ModelServer has none, sent on in order when one is there

Whether a server has engines follows from its configuration alone (``Pool.readiness``), so it changes only when that
does. While requests wait for a server, later ones for it wait behind them: none is overtaken. A request whose server
stays without engines moves to another server of its rule that has got one. Where too many wait, requests of the tenant
with most are refused.

With a bound alone, one tenant that fills it would keep all others out. Here a tenant that is alone may use all of it. A
request of a tenant that has less replaces the newest request of the tenant that has most, until both have the same.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.saturation import RECHECK_S
from extproc.core.dispatch import server_removed_refusal
from extproc.core.effects import Effect, EngineNeeded, EngineStarted, RequestHeld, WakeAt
from extproc.core.flow_control import MOST_AT_ONCE
from extproc.core.request_record import RequestRecord
from extproc.core.request_states import WAITING_AT_ENGINES, RequestEvent, RequestState
from extproc.refusals import EngineStarting, NoEndpoint, QueueFull, QueueTimeout, Refusal
from extproc.scheduling.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from extproc.api.model_server import ScaleFromZeroQueue
    from extproc.core.dispatch import Dispatcher
    from extproc.core.flow_control import AdmissionController
    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import Arrival

_WEIGHT: Final = 0.3
# A longer time does not count: the engine was not started for the request that waited.
_LONGEST_START_S: Final = 3600.0
# Of a start that is later than expected: clients come back when it has taken this share longer.
_LATE_SHARE: Final = 0.1
_LEAST_REST_S: Final = 1.0
# If no request has waited for the time of so many starts, the next request begins a new start.
_STARTS_TO_FORGET: Final = 2
# Most requests that are refused for a new one: a large body does not replace a crowd of small ones, nor justify the
# search.
_MOST_GIVE_WAY: Final = 16
# Over all servers of a process: beyond that, its memory is in danger.
MOST_REQUESTS: Final = 10_000
MOST_BYTES: Final = 1024 * 1024 * 1024


class EngineStartTimes:
    """By server: since when an engine is awaited, and the recent mean of what starts took."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        # since when no request waits
        self._left_s: dict[str, float] = {}
        self._typical_s: dict[str, float] = {}

    @property
    def awaited_servers(self) -> Collection[str]:
        """The servers of which an engine is awaited, also by clients that have left since."""
        return self._since_s.keys()

    def on_request_waiting(self, server: str, now: float, assumed_s: float) -> None:
        """A request waits for an engine; only the first since the last one left counts.

        Clients that left long before are not counted: no start was begun for them, as where they hung up at once.
        """
        left_s = self._left_s.pop(server, None)
        if left_s is not None and now - left_s > _STARTS_TO_FORGET * self.typical_start_s(server, assumed_s):
            self._since_s.pop(server, None)
        self._since_s.setdefault(server, now)

    def on_no_request_waiting(self, server: str, now: float) -> None:
        """The last waiting request has left; an engine may still come."""
        if server in self._since_s:
            self._left_s[server] = now

    def on_engine_started(self, server: str, now: float) -> float:
        """An engine is there. Returns how long it took."""
        took_s = now - self._since_s.pop(server)
        self._left_s.pop(server, None)
        if took_s <= _LONGEST_START_S:
            known = self._typical_s.get(server)
            self._typical_s[server] = took_s if known is None else known + _WEIGHT * (took_s - known)
        return took_s

    def cancel(self, server: str) -> None:
        """The start is not measured: all requests that waited for it were served by other servers."""
        self._since_s.pop(server, None)
        self._left_s.pop(server, None)

    def retain_only(self, servers: Collection[str]) -> None:
        """Forget all other servers."""
        for server in {*self._since_s, *self._typical_s}.difference(servers):
            self._since_s.pop(server, None)
            self._left_s.pop(server, None)
            self._typical_s.pop(server, None)

    def typical_start_s(self, server: str, assumed_s: float) -> float:
        """The time of a start; ``assumed_s`` until one was measured."""
        return self._typical_s.get(server, assumed_s)

    def retry_after_s(self, server: str, assumed_s: float, now: float) -> int:
        """The expected rest of the start: whole seconds, at least one."""
        so_far_s = now - self._since_s.get(server, now)
        rest_s = self.typical_start_s(server, assumed_s) - so_far_s
        if rest_s <= 0:
            rest_s = _LATE_SHARE * so_far_s
        return math.ceil(max(_LEAST_REST_S, rest_s))


class WaitBounds(msgspec.Struct, frozen=True):
    """How many may wait, and how many bytes their bodies may have together."""

    requests: int
    bytes: int


class HeldRequestTotals:
    """By tenant: how many requests wait, and the size of their bodies."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self._requests = Counter[str]()
        self._bytes = Counter[str]()

    def add_request(self, record: RequestRecord) -> None:
        """It waits from now on."""
        tenant, size = record.arrival_before_dispatch.caller.tenant, len(record.arrival_before_dispatch.body)
        self.requests += 1
        self.bytes += size
        self._requests[tenant] += 1
        self._bytes[tenant] += size

    def subtract_request(self, record: RequestRecord) -> None:
        """It waits no more."""
        tenant, size = record.arrival_before_dispatch.caller.tenant, len(record.arrival_before_dispatch.body)
        self.requests -= 1
        self.bytes -= size
        self._requests[tenant] -= 1
        self._bytes[tenant] -= size
        if not self._requests[tenant]:
            del self._requests[tenant], self._bytes[tenant]

    def requests_to_evict(
        self, arrival: Arrival, bounds: WaitBounds, waiting: Iterable[RequestRecord]
    ) -> Sequence[RequestRecord] | None:
        """The records of ``waiting`` to refuse so that ``arrival`` fits; None if ``arrival`` is to be refused instead.

        ``waiting``: the newest first.
        """
        if self._fits(arrival, bounds, ()):
            return ()
        if len(arrival.body) > bounds.bytes:
            return None
        by_bytes = self.requests < bounds.requests
        held, mine = (self._bytes, len(arrival.body)) if by_bytes else (self._requests, 1)
        largest, most = max(held.items(), key=lambda item: item[1], default=("", 0))
        mine += held[arrival.caller.tenant]
        # it would have less than the newcomer's tenant then: no search among thousands that wait
        if largest == arrival.caller.tenant or most <= mine:
            return None
        # of those, first by the lowest priority, then by the shortest wait
        theirs = (one for one in waiting if one.arrival_before_dispatch.caller.tenant == largest)
        going: list[RequestRecord] = []
        for one in heapq.nsmallest(
            _MOST_GIVE_WAY, theirs, lambda one: (one.arrival_before_dispatch.priority, -one.arrived_at_s)
        ):
            most -= len(one.arrival_before_dispatch.body) if by_bytes else 1
            if most < mine:
                return None
            going.append(one)
            if self._fits(arrival, bounds, going):
                return going
        return None

    def _fits(self, arrival: Arrival, bounds: WaitBounds, without: Sequence[RequestRecord]) -> bool:
        size = self.bytes + len(arrival.body) - sum(len(one.arrival_before_dispatch.body) for one in without)
        return self.requests - len(without) < bounds.requests and size <= bounds.bytes


class _Group(msgspec.Struct):
    """All that wait for one server. ``soonest_s``: none of their deadlines is before that. ``is_sorted``: the records
    stand in order of arrival.
    """

    pool: Pool
    records: dict[str, RequestRecord]
    held: HeldRequestTotals = msgspec.field(default_factory=HeldRequestTotals)
    soonest_s: float = math.inf
    is_sorted: bool = True

    @property
    def may_go(self) -> bool:
        """Whether there are engines: for both stages, or, without ``activation`` by now, enough to serve."""
        readiness = self.pool.readiness
        return readiness.is_whole or (self.pool.spec.activation is None and readiness.can_serve)

    def sort(self) -> None:
        """Sort by arrival: once for all records that returned or came from another server, as thousands may at once."""
        if not self.is_sorted:
            self.records = dict(sorted(self.records.items(), key=lambda item: item[1].arrived_at_s))
            self.is_sorted = True


class EngineWaitStage:
    """Records in state AWAITING_ENGINE. Effects go to ``out``."""

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        admission: AdmissionController,
        dispatcher: Dispatcher,
        proceed: Callable[[RequestRecord, float, list[Effect]], bool],
        withdraw: Callable[[RequestRecord, float], None],
    ) -> None:
        """``proceed``: takes on a request whose server has an engine, and withdraws it here; False if its queue is
        full. ``withdraw``: from what it waits for behind this.
        """
        self._records = records
        self._admission = admission
        self._dispatcher = dispatcher
        self._proceed = proceed
        self._withdraw_behind = withdraw
        self._groups: dict[str, _Group] = {}
        self._held = HeldRequestTotals()
        self.start_times = EngineStartTimes()

    @property
    def is_empty(self) -> bool:
        """Whether no request waits here."""
        return not self._groups

    def may_hold(self, pool: Pool) -> bool:
        """Whether requests of the ModelServer may wait here."""
        return pool.spec.activation is not None

    def would_hold(self, pool: Pool) -> bool:
        """Whether a request for ``pool`` would wait for an engine now."""
        return pool.spec.activation is not None and (not pool.readiness.can_serve or pool.name in self._groups)

    def describe_wait(self, pool: Pool, now: float) -> str:
        """What a new request would wait for, and the longest wait."""
        activation, group = pool.spec.activation, self._groups.get(pool.name)
        if activation is None:
            return ""
        return (
            f"no engine is there; the request would wait for one, up to {activation.hold_timeout}; "
            f"{0 if group is None else len(group.records)} wait; "
            f"an engine is expected in {self._retry_after_s(pool, now)} s"
        )

    def admit(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestHeld | None:
        """Hold the request until its server has an engine; None: it need not wait. Raises QueueFull.

        A request that its gateway has limited to some addresses cannot be served by an engine that is yet to come.
        """
        arrival, pool = record.arrival_before_dispatch, record.arrival_before_dispatch.pool
        activation = pool.spec.activation
        if activation is None or record.attachment.subset is not None or not self.would_hold(pool):
            return None
        self._evict_for(arrival, activation, now, out)
        self._add(record, pool, now, out)
        return self._admission.make_held_effect(record, now)

    def withdraw(self, record: RequestRecord, now: float) -> None:
        """It waits no more."""
        group = self._groups.get(record.arrival_before_dispatch.pool.name)
        if group is not None and group.records.pop(record.ticket, None) is not None:
            group.held.subtract_request(record)
            self._held.subtract_request(record)
            if not group.records:
                del self._groups[record.arrival_before_dispatch.pool.name]
                self.start_times.on_no_request_waiting(record.arrival_before_dispatch.pool.name, now)

    def tick(self, now: float, out: list[Effect]) -> None:
        """Send on those whose engine is there, in order, and refuse those that have waited too long."""
        left = MOST_AT_ONCE
        for group in list(self._groups.values()):
            if group.soonest_s <= now:
                self._expire(group, now, out)
            at_s = group.soonest_s
            if group.may_go:
                in_order = sorted(group.records.values(), key=lambda one: -one.arrival_before_dispatch.priority)
                for record in in_order[:left]:
                    if not self._proceed(record, now, out):
                        at_s = min(at_s, now + RECHECK_S)
                        break
                    left -= 1
                else:
                    at_s = now
            if group.records:
                out.append(WakeAt(at_s))

    def on_config_change(self, builder: RequestBuilder, now: float, out: list[Effect]) -> None:
        """After a change of configuration: take back those whose server has lost its last engine, and move those that
        another server of their rule can serve.
        """
        pools = builder.pools
        self._take_back(pools, now, out)
        self.start_times.retain_only(pools.keys())
        for name in list(self.start_times.awaited_servers):
            if pools[name].readiness.is_whole:
                took_s = self.start_times.on_engine_started(name, now)
                out.append(EngineStarted(name, took_s))
        for group in list(self._groups.values()):
            is_there = pools.get(group.pool.name) is group.pool
            if not (is_there and group.may_go):
                group.sort()
                for record in list(group.records.values()):
                    self._move(
                        record,
                        builder.move_to_other_server(record.arrival_before_dispatch),
                        now,
                        out,
                        is_there=is_there,
                    )
        for group in self._groups.values():
            group.sort()
        if self._groups:
            out.append(WakeAt(now))

    def _take_back(self, pools: Mapping[str, Pool], now: float, out: list[Effect]) -> None:
        """Held requests whose server has lost its last engine wait for the next one, before those that came later."""
        for record in [one for one in self._records.values() if _has_lost_engines(one, pools)]:
            record.begin_transition(RequestEvent.ENGINES_GONE)
            self._withdraw_behind(record, now)
            record.queued = None
            self._add(record, record.arrival_before_dispatch.pool, now, out).is_sorted = False

    def _move(
        self, record: RequestRecord, other: Arrival | None, now: float, out: list[Effect], *, is_there: bool
    ) -> None:
        """Of a request whose server has no engines, or has left."""
        pool = record.arrival_before_dispatch.pool
        if other is not None:
            self.withdraw(record, now)
            if pool.name not in self._groups:
                self.start_times.cancel(pool.name)
            # it waits there in order of arrival
            self._dispatcher.move_to_server(record, other)
            self._put(record, other.pool).is_sorted = False
        elif not is_there:
            self._refuse(record, server_removed_refusal(pool.name), now, out)
        elif pool.spec.activation is None:
            self._refuse(record, NoEndpoint("No engine is ready for this request; try again later."), now, out)

    def _add(self, record: RequestRecord, pool: Pool, now: float, out: list[Effect]) -> _Group:
        activation = pool.spec.activation
        if activation is not None and record.engine_by_s == math.inf:
            # one limit for all its waits for an engine, even if engines come and go meanwhile
            record.engine_by_s = now + activation.hold_timeout
        self._dispatcher.add_record(record, RequestState.AWAITING_ENGINE, now)
        if pool.name not in self._groups:
            out.append(EngineNeeded(pool.name))
        if not pool.readiness.is_whole:
            self.start_times.on_request_waiting(pool.name, now, _assumed_s(pool))
        group = self._put(record, pool)
        out.append(WakeAt(group.soonest_s))
        return group

    def _put(self, record: RequestRecord, pool: Pool) -> _Group:
        group = self._groups.setdefault(pool.name, _Group(pool, {}))
        group.records[record.ticket] = record
        group.held.add_request(record)
        self._held.add_request(record)
        group.soonest_s = min(group.soonest_s, wait_deadline_s(record))
        return group

    def _evict_for(self, arrival: Arrival, activation: ScaleFromZeroQueue, now: float, out: list[Effect]) -> None:
        """Raises QueueFull where no waiting request is to be refused in place of this one."""
        pool, group = arrival.pool, self._groups.get(arrival.pool.name)
        bounds = WaitBounds(activation.max_requests, activation.max_bytes)
        held, records = (HeldRequestTotals(), {}) if group is None else (group.held, group.records)
        going = held.requests_to_evict(arrival, bounds, reversed(records.values()))
        if going is None:
            raise self._full(f"Too many requests wait for an engine of '{pool.name}'", pool, now)
        self._give_way(going, now, out)
        everybody = (one for each in self._groups.values() for one in reversed(each.records.values()))
        going = self._held.requests_to_evict(arrival, WaitBounds(MOST_REQUESTS, MOST_BYTES), everybody)
        if going is None:
            raise self._full("Too many requests wait for engines", pool, now)
        self._give_way(going, now, out)

    def _give_way(self, going: Sequence[RequestRecord], now: float, out: list[Effect]) -> None:
        for record in going:
            what = "Too many requests wait for engines, and most of them are of your tenant"
            self._refuse(record, self._full(what, record.arrival_before_dispatch.pool, now), now, out)

    def _full(self, what: str, pool: Pool, now: float) -> Refusal:
        return QueueFull(f"{what}; try again later.", retry_after_s=self._retry_after_s(pool, now))

    def _retry_after_s(self, pool: Pool, now: float) -> int:
        return self.start_times.retry_after_s(pool.name, _assumed_s(pool), now)

    def _expire(self, group: _Group, now: float, out: list[Effect]) -> None:
        for record in list(group.records.values()):
            if wait_deadline_s(record) <= now:
                self._refuse(record, self._too_late(group, record, now), now, out)
        group.soonest_s = min(map(wait_deadline_s, group.records.values()), default=math.inf)

    def _too_late(self, group: _Group, record: RequestRecord, now: float) -> Refusal:
        waited = f"{now - record.arrived_at_s:.0f} s"
        if group.may_go:
            return QueueTimeout(f"The engines had no room for this request within {waited}; try again later.")
        message = f"No engine of this model became ready within {waited}; try again later."
        return EngineStarting(message, retry_after_s=self._retry_after_s(group.pool, now))

    def _refuse(self, record: RequestRecord, refusal: Refusal, now: float, out: list[Effect]) -> None:
        self.withdraw(record, now)
        self._dispatcher.refuse_held(record, refusal, now, out)


def _assumed_s(pool: Pool) -> float:
    """The time of a start, as configured."""
    activation = pool.spec.activation
    return 0.0 if activation is None else float(activation.start_time)


def _has_lost_engines(record: RequestRecord, pools: Mapping[str, Pool]) -> bool:
    if record.state not in WAITING_AT_ENGINES or record.attachment.subset is not None:
        return False
    pool = record.arrival_before_dispatch.pool
    return pools.get(pool.name) is pool and pool.spec.activation is not None and not pool.readiness.can_serve


def wait_deadline_s(record: RequestRecord) -> float:
    """When it has waited too long: by its server's activation, and by the time limit that its gateway was sent."""
    return min(record.engine_by_s, record.answer_by_s)
