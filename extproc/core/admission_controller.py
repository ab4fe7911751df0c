"""Limits and gates: what a request must pass before it is given an engine."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from extproc.admission.gate import Gate
from extproc.admission.identity import name_in
from extproc.admission.limits import LocalLimits, RouteLimits, Usage
from extproc.admission.queued_request import FlowKey, QueuedRequest
from extproc.admission.saturation import Stages
from extproc.core.rewriting import adapter_of
from extproc.core.types import Held, Terms
from extproc.errors import NoEndpoint, Refusal

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from extproc.admission.limits import Ask, Grant
    from extproc.config.admission import FlowControl
    from extproc.config.types import Snapshot
    from extproc.core.types import Arrival
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.cache_estimator import Expectation
    from extproc.scheduling.pool import Pool


# Of the engines that hold a prompt, so many are remembered while it waits.
_MOST_HOLDERS: Final = 4


class Elsewhere(Protocol):
    """Who else is to know of what limits have granted."""

    def settle(self, grant: Grant, used: Usage | None) -> None:
        """The store of global limits: it was so much in the end, or nothing and not even a request."""
        ...

    def spent(self, ask: Ask, amount: float) -> None:
        """Other processes of this machine: so much of a local limit is gone, or, below 0, back."""
        ...


class AdmissionController:
    """The limits of all routes, and the gates of all servers with flow control."""

    def __init__(self, *, rng: random.Random, elsewhere: Elsewhere | None) -> None:
        self.limits = LocalLimits()
        self.gates: dict[str, Gate] = {}
        self._routes: dict[str, RouteLimits] = {}
        self._held: dict[str, Held] = {}
        # those whose gate is gone
        self._freed: deque[Held] = deque()
        self._evicted: deque[tuple[Held, Refusal]] = deque()
        self._rng = rng
        self._elsewhere = elsewhere

    def apply(self, snapshot: Snapshot, pools: Mapping[str, Pool]) -> None:
        """Follow the configuration: who waits goes on waiting, in a new queue if there is another."""
        self._routes = {one.metadata.key: RouteLimits(one) for one in snapshot.routes if one.spec.rate_limits}
        before, self.gates = self.gates, {}
        for name, pool in pools.items():
            control, known = snapshot.flow_control_of(pool.spec), before.get(name)
            if known is not None and known.control == control:
                self.gates[name] = known
            elif control is not None:
                self.gates[name] = self._new_gate(pool, control)
        for held in list(self._held.values()):
            name = held.arrival.pool.name
            if self.gates.get(name) is not before.get(name) or pools.get(name) is not held.arrival.pool:
                self._move(held, pools)

    @property
    def has_any_limits(self) -> bool:
        """Whether any route has."""
        return bool(self._routes)

    def has_limits(self, route: str) -> bool:
        """Whether requests of a route are limited."""
        return route in self._routes

    def asks(self, arrival: Arrival) -> list[Ask]:
        """What its route's limits are to grant; nothing if there are none."""
        limits = self._routes.get(arrival.destination.route)
        if limits is None:
            return []
        return limits.asks(arrival.caller, arrival.head.headers, _reserved(arrival))

    def reserve(self, asks: Sequence[Ask], now: float) -> Grant:
        """By this process's own buckets; raises RateLimited."""
        grant = self.limits.reserve(asks, now)
        if self._elsewhere is not None:
            for ask in asks:
                self._elsewhere.spent(ask, ask.amount)
        return grant

    def settle_grants(self, grants: Sequence[Grant], used: Usage | None, now: float) -> None:
        """What was granted and what came of it; None: the request never went."""
        for grant in grants:
            if grant.is_global:
                if self._elsewhere is not None:
                    self._elsewhere.settle(grant, used)
                continue
            self.limits.settle(grant, used, now)
            if self._elsewhere is not None:
                for ask in grant.asks:
                    self._elsewhere.spent(ask, (0.0 if used is None else used.of(ask.resource)) - ask.amount)

    @property
    def has_waiting(self) -> bool:
        """Whether anybody waits, or is to be told that it need not."""
        return bool(self._held or self._freed or self._evicted)

    def enter(self, queued: QueuedRequest, arrival: Arrival, terms: Terms, now: float) -> Bools | Held:
        """The endpoints that have room, or the request held; raises a Refusal."""
        gate = self.gates[arrival.pool.name]
        rows = gate.pass_through(queued, now)
        if rows is not None:
            return rows
        held = Held(arrival, terms, queued)
        self._enter(gate, held, now)
        return held

    def next(self, now: float) -> Iterator[tuple[Held, Bools | Refusal | None]]:
        """Waits that end: with room at some endpoints, with a refusal, or, None, with the gate itself.

        What it yields must be sent before it is asked for more: that changes who has room.
        """
        while self._evicted:
            yield self._evicted.popleft()
        while self._freed:
            yield self._freed.popleft(), None
        for gate in self.gates.values():
            if not len(gate.queue):
                continue
            for queued, refusal in gate.expired(now):
                yield self._held.pop(queued.ticket), refusal
            while (found := gate.next(now)) is not None:
                yield self._held.pop(found[0].ticket), found[1]

    def leave(self, held: Held) -> bool:
        """The client of a request that waits has gone; whether it waited still."""
        if self._held.pop(held.ticket, None) is None:
            return False
        gate = self.gates.get(held.arrival.pool.name)
        if gate is not None:
            gate.leave(held.ticket)
        return True

    def look_again_s(self, now: float) -> float | None:
        """When to ask for what may go, if nothing happens before; None: nobody waits."""
        if self._evicted or self._freed:
            return now
        times = [when for gate in self.gates.values() if (when := gate.look_again_s(now)) is not None]
        return min(times, default=None)

    def queued(
        self, ticket: str, arrival: Arrival, expectation: Expectation, terms: Terms, now: float
    ) -> QueuedRequest:
        """How a request stands in its server's queue."""
        control, pool = self.gates[arrival.pool.name].control, arrival.pool
        cached = float(expectation.demand.cached_tokens[pool.table.is_active].max(initial=0.0))
        return QueuedRequest(
            ticket=ticket,
            flow=_flow(arrival, control),
            arrived_s=now,
            expires_s=now + self.gates[pool.name].longest_wait_s(),
            priority=arrival.priority,
            size_bytes=len(arrival.body),
            input_tokens=expectation.input_tokens,
            uncached_tokens=expectation.input_tokens - cached,
            output_tokens=pool.expected_output(arrival.request.max_output_tokens),
            deadline_s=now + _target_s(arrival),
            session=name_in(arrival.head.headers, control.session_header),
            eligible=partial(pool.eligible, adapter_of(arrival), terms.attachment.subset),
            holders=_holders(expectation.demand.cached_tokens) if cached else (),
        )

    def _new_gate(self, pool: Pool, control: FlowControl) -> Gate:
        def stages() -> Stages | None:
            found = pool.stages()
            return None if found is None else Stages(*found)

        return Gate(control, pool.table, stages=stages, rng=self._rng)

    def _enter(self, gate: Gate, held: Held, now: float) -> None:
        for one in gate.enter(held.queued):
            self._evicted.append((self._held.pop(one.ticket), gate.gave_way(now)))
        self._held[held.ticket] = held

    def _move(self, held: Held, pools: Mapping[str, Pool]) -> None:
        """From a gate that is gone to the one that took its place."""
        del self._held[held.ticket]
        name = held.arrival.pool.name
        gate = self.gates.get(name)
        if pools.get(name) is not held.arrival.pool:
            self._evicted.append((held, NoEndpoint(f"The model is not served any more by '{name}'.")))
        elif gate is None:
            self._freed.append(held)
        else:
            try:
                self._enter(gate, held, held.queued.arrived_s)
            except Refusal as refusal:
                self._evicted.append((held, refusal))


def _reserved(arrival: Arrival) -> Usage:
    """Input by what characters of this model make; output as much as was asked for, or else as answers have had."""
    request, pool = arrival.request, arrival.pool
    most = request.max_output_tokens
    tokens = pool.input_estimate.tokens(len(request.prompt), pool.caches.bytes_per_token)
    return Usage(tokens, pool.caches.output_tokens if most is None else float(most))


def _holders(cached_tokens: Floats) -> tuple[tuple[int, float], ...]:
    """The rows that hold most, and how much."""
    rows = cached_tokens.argsort()[: -_MOST_HOLDERS - 1 : -1]
    return tuple((int(row), float(cached_tokens[row])) for row in rows if cached_tokens[row])


def _flow(arrival: Arrival, control: FlowControl) -> FlowKey:
    caller = arrival.caller
    tenant = caller.flow or caller.tenant
    match control.flow_by:
        case "TenantAndModel":
            return FlowKey(tenant, arrival.destination.model)
        case "User":
            return FlowKey(tenant, part=caller.user)
        case "Header":
            # within the tenant: nobody gains by many sessions of another's name
            return FlowKey(tenant, part=name_in(arrival.head.headers, control.session_header))
        case _:
            return FlowKey(tenant)


def _target_s(arrival: Arrival) -> float:
    caller = arrival.caller
    targets = (caller.deadline_s, caller.ttft_s, arrival.destination.ttft_s)
    return next((one for one in targets if one is not None), math.inf)
