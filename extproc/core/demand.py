# SPDX-License-Identifier: Apache-2.0
"""The demand for each ModelServer and the load of its engines: counters of this process, as a page for autoscalers.

A request counts once at each step: it arrives, its prefill work becomes known, it is refused or its outcome comes.
Tokens count with its outcome: as reported there, else as estimated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from extproc.api.status_page_contents import EngineDemand, ProcessDemand, RequestCounters, ServerDemand
from extproc.core.demand_counters import NEVER, InFlightLoad, ModelMeter, ServerMeter, WaitingRequest, add_model_meter
from extproc.core.request_states import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.core.request_record import Arrival, DispatchedRequest, Outcome, RequestRecord
    from extproc.scheduling.pool import Assignment, Pool


# Counters of servers that have left the configuration are kept, so that they continue if the server returns: at most so
# many in all.
_MOST_SERVERS: Final = 10_000
_NOTHING: Final = InFlightLoad()


class DemandMeter:
    """Of one process. ``alarms``: grows when a request is the first to wait for a ModelServer without engines.
    ``crowded``: ModelServers whose unfinished requests have reached the number at which a watcher gets a line; its
    reader empties it.
    """

    def __init__(self, instance: str) -> None:
        """``instance``: the name of this process, another one after each start."""
        self.alarms = 0
        self.crowded: set[str] = set()
        self._instance = instance
        self._sequence = 0
        self._servers: dict[str, ServerMeter] = {}

    def count_arrival(self, record: RequestRecord, arrival: Arrival) -> None:
        """A request has come to its ModelServer."""
        meter = self._meter_of(arrival)
        meter.arrivals += 1
        record.meter = meter
        server = meter.server
        if server.unfinished >= server.notify_at:
            server.notify_at = NEVER
            self.crowded.add(arrival.pool.name)

    def unfinished_requests(self, name: str) -> int:
        """Requests of a ModelServer that wait here or are at engines."""
        server = self._servers.get(name)
        return 0 if server is None else server.unfinished

    def set_notify_threshold(self, name: str, unfinished: int) -> None:
        """Add the ModelServer to ``crowded`` once it has so many unfinished requests, or fewer if an earlier call set
        that.
        """
        server = self._servers.get(name)
        if server is not None:
            server.notify_at = min(server.notify_at, unfinished)

    def move_request(self, record: RequestRecord, arrival: Arrival) -> None:
        """A request that waits for an engine goes to another ModelServer; it has arrived at the first one alone."""
        before = record.meter
        if before is not None:
            wait = before.server.waiting.get(record.ticket)
            before.server.end_wait(record.ticket)
            record.meter = self._meter_of(arrival)
            if wait is not None:
                record.meter.server.begin_wait(record.ticket, wait)

    def begin_wait(self, record: RequestRecord, state: RequestState) -> None:
        """The request is held, in ``state`` from now on."""
        meter, pool = record.meter, record.arrival_before_dispatch.pool
        if meter is None:
            return
        server, awaits_engine = meter.server, state is RequestState.AWAITING_ENGINE
        is_first = (
            not any(one.state is state for one in server.waiting.values()) if awaits_engine else not server.waiting
        )
        if is_first and (awaits_engine or not pool.readiness.can_serve):
            self.alarms += 1
        uncached = _count_work(meter, record)
        server.begin_wait(record.ticket, WaitingRequest(record.arrived_at_s, uncached, state))

    def waiting_in(self, state: RequestState) -> dict[str, int]:
        """By ModelServer: how many requests wait in ``state``, where any does."""
        return {name: count for name, one in self._servers.items() if one.waiting and (count := one.waiting_in(state))}

    def process_demand(self, pools: Mapping[str, Pool], now: float, *, began_at_s: float = 0.0) -> ProcessDemand:
        """All of it. ``began_at_s``: when the process began."""
        return self.process_demand_of(dict(self.server_demands(pools, now)), now - began_at_s)

    def process_demand_of(self, servers: dict[str, ServerDemand], age_s: float) -> ProcessDemand:
        """A page of ``servers``, with the next number. ``age_s``: since the process began."""
        self._sequence += 1
        return ProcessDemand(self._instance, self._sequence, age_s, servers)

    def server_names(self, pools: Mapping[str, Pool]) -> list[str]:
        """Names of the servers on a page: those with a pool, and those that have left and still have requests."""
        return [*pools, *(name for name, one in self._servers.items() if name not in pools and one.is_busy)]

    def server_demands(self, pools: Mapping[str, Pool], now: float) -> Iterator[tuple[str, ServerDemand]]:
        """All of them."""
        for name in self.server_names(pools):
            found = self.server_demand(pools, name, now)
            if found is not None:
                yield name, found

    def server_demand(self, pools: Mapping[str, Pool], name: str, now: float) -> ServerDemand | None:
        """One of them; None if it has left by now."""
        pool, server = pools.get(name), self._servers.get(name)
        if pool is not None:
            return _server_demand(pool, server, now)
        if server is None or not server.is_busy:
            return None
        return _counts(server, {address: _flight(one) for address, one in server.in_flight.items()}, now)

    def activity_mark_if_idle(self, pools: Mapping[str, Pool], name: str) -> object | None:
        """A value that changes when this process has had a request for the server; None while it has one."""
        pool, server = pools.get(name), self._servers.get(name)
        if pool is None or (server is not None and server.is_busy):
            return None
        counted = (
            0 if server is None else sum(one.arrivals + one.refused + one.finished for one in server.models.values())
        )
        return counted, pool.spec, len(pool.table.active_rows)

    def _meter_of(self, arrival: Arrival) -> ModelMeter:
        pool, model = arrival.pool, arrival.destination.model
        server = self._servers.get(pool.name)
        if server is None:
            server = self._add(pool.name)
        if model not in pool.adapters:
            # clients may send any name
            model = pool.spec.model or ""
        meter = server.models.get(model)
        return add_model_meter(server, model, pool.spec.model or "") if meter is None else meter

    def _add(self, name: str) -> ServerMeter:
        if len(self._servers) >= _MOST_SERVERS:
            del self._servers[next(iter(self._servers))]
        server = self._servers[name] = ServerMeter()
        return server


def count_refusal(record: RequestRecord, *, is_for_want_of_engines: bool) -> None:
    """Count a refusal by extproc. After one for want of engines, the request's work counts as demand."""
    if record.meter is not None:
        record.meter.refused += 1
        if is_for_want_of_engines:
            _count_work(record.meter, record)


def count_dispatch(record: RequestRecord, run: DispatchedRequest) -> None:
    """The request is sent to an engine, or to two."""
    meter, assignment = record.meter, run.assignment
    if meter is None:
        return
    if not record.is_work_counted:
        meter.prefill_work += assignment.work
    for address, tokens in _load(run, assignment):
        meter.server.begin_run(address, tokens)


def count_prefill_end(record: RequestRecord, run: DispatchedRequest, before: Assignment) -> None:
    """Its prefill engine is free of it, and it may be at other engines than ``before``."""
    if record.meter is None or before.prefill is None:
        return
    server = record.meter.server
    for address, tokens in _load(run, before):
        server.end_run(address, tokens)
    for address, tokens in _load(run, run.assignment):
        server.begin_run(address, tokens)


def count_request_end(record: RequestRecord, run: DispatchedRequest) -> None:
    """Its stream is closed."""
    if record.meter is not None:
        for address, tokens in _load(run, run.assignment):
            record.meter.server.end_run(address, tokens)


def _load(run: DispatchedRequest, assignment: Assignment) -> tuple[tuple[str, float], ...]:
    """The engines that have it, and its tokens there. The decode engine gets it after our own leg, and from a sidecar
    or beside its prefill at once.
    """
    decode = assignment.endpoint.address, assignment.tokens
    if assignment.prefill is None:
        return (decode,)
    prefill = assignment.prefill.address, assignment.input_tokens
    return (prefill,) if run.has_leg else (prefill, decode)


def count_outcome(record: RequestRecord, run: DispatchedRequest, outcome: Outcome) -> None:
    """Count the outcome of a request."""
    meter = record.meter
    if meter is None:
        return
    meter.finished += 1
    assignment, prompt, written = run.assignment, outcome.prompt_tokens, outcome.completion_tokens
    if prompt is None or written is None:
        used = run.used_tokens(outcome)
        # without a report, limits count the most that clients may have had
        most = math.inf if run.limited is None else run.reserved.output_tokens
        meter.output_tokens += min(used.output_tokens, most) if written is None else written
        if used.input_tokens:
            meter.prompt_tokens += assignment.input_tokens if prompt is None else prompt
            meter.cached_tokens += assignment.cached_tokens if outcome.cached_tokens is None else outcome.cached_tokens
    else:
        meter.output_tokens += written
        meter.prompt_tokens += prompt
        meter.cached_tokens += outcome.cached_tokens or 0
    if run.sent.is_streamed and outcome.ttfb_s is not None and 200 <= outcome.status < 300:
        # of each answer: all are written side by side
        steps = (written or 0) / (run.sent.answers or 1) - 1
        tpot_s = (outcome.duration_s - outcome.ttfb_s) / steps if steps > 0 else None
        meter.server.count_latencies(outcome.ttfb_s, tpot_s)


def _count_work(meter: ModelMeter, record: RequestRecord) -> float:
    """Its prefill work, if that is not counted yet; returns its uncached tokens."""
    arrival, queued = record.arrival_before_dispatch, record.queued
    caches = arrival.pool.caches
    if queued is not None:
        uncached, cached = queued.uncached_tokens, queued.most_cached_tokens
    else:
        uncached, cached = max(len(arrival.request.prompt) / caches.bytes_per_token, 1.0), 0.0
    if not record.is_work_counted:
        record.is_work_counted = True
        meter.prefill_work += caches.prompt_cost.prefill_work(uncached, cached)
    return uncached


def _server_demand(pool: Pool, server: ServerMeter | None, now: float) -> ServerDemand:
    engines = _engines(pool, server, now)
    if server is None:
        return ServerDemand(model=pool.spec.model or "", engines=engines)
    at_zero = len(server.waiting)
    if pool.readiness.can_serve:
        # of two stages, both are awaited once one of them was
        at_zero = server.waiting_in(RequestState.AWAITING_ENGINE)
    return _counts(server, engines, now, model=pool.spec.model or "", at_zero=at_zero)


def _counts(
    server: ServerMeter, engines: dict[str, EngineDemand], now: float, *, model: str = "", at_zero: int = 0
) -> ServerDemand:
    first_s = min((one.since_s for one in server.waiting.values()), default=now)
    return ServerDemand(
        model=model,
        counted={
            name: RequestCounters(
                one.arrivals,
                one.refused,
                one.finished,
                one.prompt_tokens,
                one.cached_tokens,
                one.output_tokens,
                one.prefill_work,
            )
            for name, one in server.models.items()
        },
        ttft=tuple(server.ttft),
        tpot=tuple(server.tpot),
        queued=len(server.waiting),
        queued_tokens=max(0.0, server.waiting_tokens),
        oldest_wait_s=max(0.0, now - first_s),
        at_zero=at_zero,
        engines=engines,
    )


def _engines(pool: Pool, server: ServerMeter | None, now: float) -> dict[str, EngineDemand]:
    """All configured engines, and those that have left and still answer requests."""
    table, cost = pool.table, pool.caches.decode_speed
    flights = {} if server is None else server.in_flight
    stages = pool.prefill_decode_rows()
    prefill, decode = ([], []) if stages is None else (stages[0].tolist(), stages[1].tolist())
    step_s, step_s_per_token = (cost.step_s, cost.step_s_per_token) if cost.is_learned else (None, None)
    waiting, running, kv_usage = table.waiting.tolist(), table.running.tolist(), table.kv_usage.tolist()
    at_s, kv_capacity = table.reported_at_s.tolist(), table.kv_capacity_tokens.tolist()
    rates, samples = table.prefill_rate.tolist(), table.rate_samples.tolist()
    found: dict[str, EngineDemand] = {}
    for row in table.active_rows:
        address = table.addresses[row]
        flight, has_reported = flights.get(address, _NOTHING), table.has_reported(row)
        found[address] = EngineDemand(
            _role(prefill[row], decode[row]) if prefill else "",
            flight.requests,
            flight.tokens,
            waiting[row] if has_reported else None,
            running[row] if has_reported else None,
            kv_usage[row] if has_reported else None,
            round(now - at_s[row], 3) if has_reported else None,
            kv_capacity[row],
            rates[row] if samples[row] else None,
            step_s,
            step_s_per_token,
        )
    for address, flight in flights.items():
        if address not in found:
            found[address] = _flight(flight)
    return found


def _flight(flight: InFlightLoad) -> EngineDemand:
    return EngineDemand(in_flight=flight.requests, in_flight_tokens=flight.tokens)


def _role(prefills: bool, decodes: bool) -> str:
    if prefills == decodes:
        return ""
    return "prefill" if prefills else "decode"
