# SPDX-License-Identifier: Apache-2.0
"""Flow control as the core applies it: gates of ModelServers, and requests that wait at them.

They are dispatched when there is room, refused when they have waited too long, and moved when the configuration
changes.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.admission.estimates import ASSUMED_BYTES_PER_TOKEN
from extproc.admission.flows import FlowKey, QueuedRequest
from extproc.admission.identity import name_in
from extproc.admission.limits import ChosenNames, LocalLimits, RouteLimits, Usage
from extproc.admission.queue import Gate
from extproc.admission.saturation import RECHECK_S, Stages
from extproc.api.spec import namespace_of
from extproc.core.effects import Effect, Fault, WakeAt
from extproc.core.states import Event, State
from extproc.errors import NoEndpoint, Refusal

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from extproc.api.admission import FlowControl
    from extproc.api.snapshot import Snapshot
    from extproc.core.adapter_load import LoadingRequests
    from extproc.core.dispatch import Dispatcher
    from extproc.core.record import Arrival, Attachment, Record
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.cache_estimator import Expectation
    from extproc.scheduling.pool import Pool

# Of the engines that hold a prompt, how many are remembered while it waits.
_MOST_HOLDERS: Final = 4
# After this time without a request, the name of a session may be replaced by another.
_FLOW_IDLE_S: Final = 60.0


class AdmissionController:
    """The limits of all routes, and the gates of all servers with flow control."""

    def __init__(self, *, rng: random.Random) -> None:
        self.limits = LocalLimits()
        self.gates: dict[str, Gate] = {}
        # by route, of those that have limits
        self.routes: dict[str, RouteLimits] = {}
        self._names = ChosenNames()
        self._rng = rng

    def apply(self, snapshot: Snapshot, pools: Mapping[str, Pool]) -> None:
        """Follow the configuration. A gate whose flow control stays the same stays, with all who wait there."""
        self.routes = {
            one.metadata.key: RouteLimits(one, self._names) for one in snapshot.routes if one.spec.rate_limits
        }
        before, self.gates = self.gates, {}
        for name, pool in pools.items():
            control, known = snapshot.flow_control_of(pool.spec, namespace_of(name)), before.get(name)
            if known is not None and known.control == control:
                self.gates[name] = known
            elif control is not None:
                self.gates[name] = self._new_gate(pool, control)

    def wake_at_s(self, now: float) -> float | None:
        """When a held request may go although nothing happens before; None: no request waits."""
        times = [when for gate in self.gates.values() if (when := gate.wake_at_s(now)) is not None]
        return min(times, default=None)

    def queue_entry(
        self, ticket: str, arrival: Arrival, attachment: Attachment, expectation: Expectation, now: float
    ) -> QueuedRequest:
        """How the request would stand in its server's queue."""
        gate, pool = self.gates[arrival.pool.name], arrival.pool
        cached = float(expectation.demand.cached_tokens[pool.table.is_active].max(initial=0.0))
        return QueuedRequest(
            ticket=ticket,
            flow=self._flow(arrival, gate.control, now),
            arrived_at_s=now,
            expires_at_s=now + gate.longest_wait_s(),
            priority=arrival.priority,
            size_bytes=len(arrival.body),
            input_tokens=expectation.input_tokens,
            uncached_tokens=expectation.input_tokens - cached,
            output_tokens=pool.expected_output(arrival.request.max_output_tokens, arrival.request.answers),
            deadline_at_s=now + _target_s(arrival),
            session=_session(arrival, gate.control),
            eligible=partial(pool.eligible, arrival.adapter, attachment.subset),
            holders=_holders(expectation.demand.cached_tokens) if cached else (),
        )

    def _flow(self, arrival: Arrival, control: FlowControl, now: float) -> FlowKey:
        """Whose part the request uses: first the tenant's, and of this the flow's."""
        caller, tenant = arrival.caller, arrival.tenant
        match control.flow_by:
            case "TenantAndModel":
                return FlowKey(tenant, arrival.destination.model)
            case "User":
                return FlowKey(tenant, part=caller.user)
            case "Header":
                value = name_in(arrival.head.headers, control.session_header)
                owner = f"flow/{arrival.pool.name}/{tenant}"
                return FlowKey(tenant, part=self._names.account(owner, value, now, idle_s=_FLOW_IDLE_S))
            case _:
                return FlowKey(tenant, part=self._named_flow(arrival, control, now) if control.flow_headers else "")

    def _named_flow(self, arrival: Arrival, control: FlowControl, now: float) -> str:
        """The account of the session that a header names; empty if none does, or if the request has a fairness ID."""
        headers = arrival.head.headers
        value = next((value for one in control.flow_headers if (value := name_in(headers, one))), "")
        if arrival.caller.flow or not value:
            return ""
        return self._names.account(f"flow/{arrival.pool.name}/{arrival.tenant}", value, now, idle_s=_FLOW_IDLE_S)

    def _new_gate(self, pool: Pool, control: FlowControl) -> Gate:
        def stages() -> Stages | None:
            found = pool.stages()
            return None if found is None else Stages(*found)

        return Gate(control, pool.table, stages=stages, rng=self._rng)


def usage_to_reserve(arrival: Arrival) -> Usage:
    """What the request may take.

    Input: all of its prompts, by their tokens or else by their bytes, and its media. Output: for each answer as much as
    was asked for, or else as much as nearly all answers have had.
    """
    request, pool = arrival.request, arrival.pool
    prompts, most = request.prompts, request.max_output_tokens
    estimate = pool.input_estimates.of(arrival.caller.tenant)
    text = estimate.tokens(request.text_bytes, ASSUMED_BYTES_PER_TOKEN, prompts=prompts.count)
    output = pool.output_estimate.tokens if most is None else float(most)
    return Usage(text + prompts.token_ids + request.media.tokens, request.answers * output, is_guess=most is None)


def _holders(cached_tokens: Floats) -> tuple[tuple[int, float], ...]:
    """The rows that hold most of the prompt, with how many tokens."""
    rows = cached_tokens.argsort()[: -_MOST_HOLDERS - 1 : -1]
    return tuple((int(row), float(cached_tokens[row])) for row in rows if cached_tokens[row])


def _session(arrival: Arrival, control: FlowControl) -> str:
    """The session or program, within its tenant; empty if it names none."""
    name = name_in(arrival.head.headers, control.session_header)
    return f"{arrival.tenant}/{name}" if name else ""


def _target_s(arrival: Arrival) -> float:
    caller = arrival.caller
    targets = (caller.deadline_in_s, caller.ttft_target_s, arrival.destination.ttft_s)
    return next((one for one in targets if one is not None), math.inf)


# Held requests that one tick releases, so that other work gets its turn: a thousand take 0.1 s.
MOST_AT_ONCE: Final = 64


def no_longer_served(server: str) -> NoEndpoint:
    """For a request whose server left the configuration before an engine got it."""
    return NoEndpoint(f"The model is not served any more by '{server}'.")


class WaitingRequests:
    """Records in state QUEUED. The queues of the gates hold their tickets."""

    def __init__(
        self,
        records: Mapping[str, Record],
        admission: AdmissionController,
        loading: LoadingRequests,
        dispatcher: Dispatcher,
    ) -> None:
        self._records = records
        self._admission = admission
        self._loading = loading
        self._dispatcher = dispatcher
        # tickets whose gate is gone: they go at the next tick
        self._freed: deque[str] = deque()

    def wake(self, now: float, out: list[Effect]) -> None:
        """Something has changed that may let a held request go, or one that waits for its adapter."""
        if self._loading.groups or self._freed or any(len(gate.queue) for gate in self._admission.gates.values()):
            out.append(WakeAt(now))

    def enter(self, record: Record, gate: Gate, now: float, out: list[Effect]) -> None:
        """The request waits from now on; raises QueueFull. Those that must give way to it are refused."""
        if record.queued is not None:
            for one in gate.enqueue(record.queued):
                self._give_up(one.ticket, gate.eviction_refusal(now), now, out)

    def withdraw(self, record: Record) -> None:
        """Its client went away."""
        gate = self._admission.gates.get(record.arrived.pool.name)
        if gate is not None:
            gate.withdraw(record.ticket)
        if record.ticket in self._freed:
            self._freed.remove(record.ticket)

    def tick(self, now: float, out: list[Effect]) -> None:
        """Let go those that can go, and refuse those that have waited too long."""
        released, faults = 0, list[Effect]()
        while self._freed and released < MOST_AT_ONCE:
            self._release(self._freed.popleft(), None, now, out)
            released += 1
        for gate in self._admission.gates.values():
            if not len(gate.queue):
                continue
            for queued, refusal in gate.expired(now):
                self._give_up(queued.ticket, refusal, now, out)
            # one after the other: each that goes changes who has room
            while released < MOST_AT_ONCE and (found := _next(gate, now, faults)) is not None:
                self._release(found[0].ticket, found[1], now, out)
                released += 1
        out.extend(faults)
        at_s = now if released == MOST_AT_ONCE else self._admission.wake_at_s(now)
        if at_s is not None:
            # a queue that fails is not tried again at once
            out.append(WakeAt(max(at_s, now + RECHECK_S) if faults else at_s))

    def move(self, before: Mapping[str, Gate], pools: Mapping[str, Pool], now: float, out: list[Effect]) -> None:
        """After a change of configuration: those whose gate is gone wait at the new one, or go, or are refused."""
        for record in [one for one in self._records.values() if one.state is State.QUEUED]:
            pool = record.arrived.pool
            gate = self._admission.gates.get(pool.name)
            if pools.get(pool.name) is not pool:
                self.withdraw(record)
                self._give_up(record.ticket, no_longer_served(pool.name), now, out)
            elif gate is None and before.get(pool.name) is not None:
                self._freed.append(record.ticket)
            elif gate is not None and before.get(pool.name) is not gate:
                self._move_to(gate, record, now, out)

    def _move_to(self, gate: Gate, record: Record, now: float, out: list[Effect]) -> None:
        if record.ticket in self._freed:
            self._freed.remove(record.ticket)
        try:
            self.enter(record, gate, now, out)
        except Refusal as refusal:
            self._give_up(record.ticket, refusal, now, out)

    def _release(self, ticket: str, with_room: Bools | None, now: float, out: list[Effect]) -> None:
        record = self._records[ticket]
        record.happens(Event.DISPATCHED)
        arrival = record.arrived
        slots = arrival.pool.slots
        if slots is not None:
            try:
                if self._loading.admit(record, arrival, slots, now, out):
                    # its adapter has gone meanwhile
                    return
            except Refusal as refusal:
                out.append(self._dispatcher.refuse(record, refusal, now, out))
                return
        gate = self._admission.gates.get(arrival.pool.name)
        out.append(self._dispatcher.dispatch(record, arrival, now, out, gate=gate, with_room=with_room))

    def _give_up(self, ticket: str, refusal: Refusal, now: float, out: list[Effect]) -> None:
        record = self._records[ticket]
        record.happens(Event.GIVEN_UP)
        out.append(self._dispatcher.refuse(record, refusal, now, out))


def _next(gate: Gate, now: float, faults: list[Effect]) -> tuple[QueuedRequest, Bools] | None:
    """The gate's next request, if it has one and can say so: what was decided before must reach its streams."""
    try:
        return gate.next(now)
    except Exception as error:  # noqa: BLE001 - policies of packages may raise anything
        faults.append(Fault("the queue of a server could not be served", error))
        return None
