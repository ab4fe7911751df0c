# SPDX-License-Identifier: Apache-2.0
"""Requests that wait at a gate: dispatched when there is room, timed out, moved on reload."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from extproc.admission.saturation import RECHECK_S
from extproc.core.effects import Effect, Fault, WakeAt
from extproc.core.states import Event, State, is_legal
from extproc.errors import NoEndpoint, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.admission.gate import Gate
    from extproc.admission.queued_request import QueuedRequest
    from extproc.core.admission_controller import AdmissionController
    from extproc.core.dispatch import Dispatcher
    from extproc.core.loading import LoadingRequests
    from extproc.core.record import Record
    from extproc.endpoints.table import Bools
    from extproc.scheduling.pool import Pool

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
        is_legal(record.state, Event.DISPATCHED, ticket)
        arrival = record.arrived
        slots = arrival.pool.slots
        if slots is not None:
            try:
                if self._loading.admit(record, arrival, slots, now, out):
                    # its adapter has gone meanwhile
                    return
            except Refusal as refusal:
                out.append(self._dispatcher.refuse(record, refusal, now, out, was_held=True))
                return
        gate = self._admission.gates.get(arrival.pool.name)
        out.append(self._dispatcher.dispatch(record, arrival, now, out, gate=gate, with_room=with_room, was_held=True))

    def _give_up(self, ticket: str, refusal: Refusal, now: float, out: list[Effect]) -> None:
        record = self._records[ticket]
        is_legal(record.state, Event.GIVEN_UP, ticket)
        out.append(self._dispatcher.refuse(record, refusal, now, out, was_held=True))


def _next(gate: Gate, now: float, faults: list[Effect]) -> tuple[QueuedRequest, Bools] | None:
    """The gate's next request, if it has one and can say so: what was decided before must reach its streams."""
    try:
        return gate.next(now)
    except Exception as error:  # noqa: BLE001 - policies of packages may raise anything
        faults.append(Fault("the queue of a server could not be served", error))
        return None
