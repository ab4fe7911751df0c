# SPDX-License-Identifier: Apache-2.0
"""From arrival to dispatch: limits grant, tokens are counted, the gate passes or holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from extproc.admission.limits import Grant, StoreAway, unavailable
from extproc.core.dispatch import prompt_of
from extproc.core.effects import (
    AskLimits,
    AskTokens,
    AwaitAdapter,
    AwaitEngine,
    Decision,
    Effect,
    Hold,
    Left,
    Refused,
    RequestEffect,
)
from extproc.core.queue import WaitingRequests, no_longer_served
from extproc.core.states import Event, IllegalEvent, State
from extproc.errors import InternalError, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.admission.flows import QueuedRequest
    from extproc.admission.limits import Charge
    from extproc.admission.queue import Gate
    from extproc.core.accounts import Accounts
    from extproc.core.activation import AwaitingRequests
    from extproc.core.adapter_load import LoadingRequests
    from extproc.core.dispatch import Dispatcher
    from extproc.core.record import Arrival, Record
    from extproc.core.request_builder import Intake
    from extproc.scheduling.cache_estimator import Expectation
    from extproc.scheduling.pool import Pool

from extproc.core.queue import AdmissionController, usage_to_reserve

# What a shell may resume a request with: what was asked for, or None if it cannot be had.
Answer = Grant | Refusal | StoreAway | Sequence[int] | None


class EnteringRequests:
    """From the arrival to a Decision, a Refused, or something to wait for. Other effects go to ``out``."""

    def __init__(
        self,
        admission: AdmissionController,
        accounts: Accounts,
        waiting: WaitingRequests,
        loading: LoadingRequests,
        awaiting: AwaitingRequests,
        dispatcher: Dispatcher,
        intake: Callable[[], Intake],
    ) -> None:
        """``intake``: of the configuration in use."""
        self._admission = admission
        self._accounts = accounts
        self._waiting = waiting
        self._loading = loading
        self._awaiting = awaiting
        self._dispatcher = dispatcher
        self._intake = intake

    def begin(self, record: Record, arrival: Arrival, now: float, out: list[Effect]) -> RequestEffect:
        """The request has come: local limits first, then those that all machines share."""
        limits = self._admission.routes.get(arrival.destination.route)
        if limits is None:
            return self._ask_tokens(record, arrival, now, out)
        record.limited = usage_to_reserve(arrival)
        charges = limits.charges(arrival.caller, arrival.head.headers, record.limited, now)
        local = [charge for charge in charges if not charge.is_global]
        if local:
            try:
                record.grants = (self._accounts.reserve(local, now, out),)
            except Refusal as refusal:
                return self._dispatcher.refuse(record, refusal, now, out)
        everywhere = [charge for charge in charges if charge.is_global]
        if not everywhere:
            return self._ask_tokens(record, arrival, now, out)
        self._dispatcher.put(record, State.ASKING_LIMITS)
        record.charges = everywhere
        return AskLimits(record.ticket, everywhere)

    def resume(self, record: Record, answer: Answer, now: float, out: list[Effect]) -> RequestEffect:
        """What the request asked for is here."""
        arrival, charges = record.arrived, record.charges
        if record.state is State.ASKING_LIMITS:
            if answer is None or isinstance(answer, Grant | Refusal | StoreAway):
                return self._granted(record, arrival, charges, answer, now, out)
        elif not isinstance(answer, Grant | Refusal | StoreAway):
            record.tokens = answer
            return self._enter(record, arrival, now, out)
        raise IllegalEvent(type(answer).__name__, record.state.name, f"request {record.ticket}")

    def loaded(self, record: Record, now: float, out: list[Effect]) -> None:
        """An engine has its adapter: the request goes there, or to the queue."""
        record.happens(Event.LOADED)
        record.loading_s += now - record.loading_since_s
        try:
            own = self._pass_gate(record, record.arrived, now, out)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others of its group go on
            own = self.fail(record, error, now, out)
        if not isinstance(own, Hold):
            # a stream that is held already waits on
            out.append(own)

    def started(self, record: Record, now: float, out: list[Effect]) -> bool:
        """An engine is there: the request goes to its adapter, to the queue or to the engine.

        Returns False if the queue is full: the request keeps its place before it.
        """
        record.happens(Event.ENGINE_READY)
        arrival, waited_s = record.arrived, record.engine_wait_s
        gate, slots = self._gate_for(arrival), arrival.pool.slots
        record.engine_wait_s += now - record.engine_since_s
        try:
            if slots is None or not self._loading.admit(record, arrival, slots, now, out):
                if gate is None:
                    self._awaiting.withdraw(record, now)
                    out.append(self._dispatcher.dispatch(record, arrival, now, out))
                    return True
                expectation = arrival.pool.expect(prompt_of(arrival, record.tokens), now)
                record.queued = self._queue_entry(record, arrival, expectation, now)
                if not gate.queue.takes(record.queued):
                    record.engine_wait_s, record.queued = waited_s, None
                    return False
                # whoever has priority is first in the queue; the next tick looks who has room
                self._waiting.enter(record, gate, now, out)
                self._dispatcher.put(record, State.QUEUED)
        except Refusal as refusal:
            self._awaiting.withdraw(record, now)
            out.append(self._dispatcher.refuse(record, refusal, now, out))
            return True
        except Exception as error:  # noqa: BLE001 - whatever it is, the others of its server go on
            out.append(self.fail(record, error, now, out))
            return True
        self._awaiting.withdraw(record, now)
        return True

    def fail(self, record: Record, error: Exception, now: float, out: list[Effect]) -> Refused:
        """Our own code has failed: the request is refused, and nothing of it remains."""
        self._awaiting.withdraw(record, now)
        self._loading.withdraw(record)
        self._waiting.withdraw(record)
        return self._dispatcher.refuse(record, InternalError(error), now, out)

    def withdraw(self, record: Record, now: float, out: list[Effect]) -> None:
        """Its client went away while it waited for something."""
        if record.state is State.QUEUED and record.queued is not None:
            self._waiting.withdraw(record)
            out.append(Left(record.ticket, record.arrived.pool.name, record.queued))
        elif record.state is State.LOADING:
            self._loading.withdraw(record)
        elif record.state is State.AWAITING_ENGINE:
            self._awaiting.withdraw(record, now)
        self._dispatcher.drop(record, now, out)

    def _granted(
        self,
        record: Record,
        arrival: Arrival,
        charges: Sequence[Charge],
        answer: Grant | Refusal | StoreAway | None,
        now: float,
        out: list[Effect],
    ) -> RequestEffect:
        try:
            grant = self._grant_of(charges, answer, now, out)
        except Refusal as refusal:
            return self._dispatcher.refuse(record, refusal, now, out)
        record.grants = (*record.grants, grant)
        return self._ask_tokens(record, arrival, now, out)

    def _grant_of(
        self, charges: Sequence[Charge], answer: Grant | Refusal | StoreAway | None, now: float, out: list[Effect]
    ) -> Grant:
        """What the store has granted, or else this process grants by itself, where that is allowed; raises a
        Refusal.
        """
        if isinstance(answer, Grant | Refusal):
            self._accounts.store_answered()
        if isinstance(answer, Refusal):
            raise answer
        if isinstance(answer, Grant):
            return answer
        if any(charge.needs_redis for charge in charges):
            raise unavailable()
        if answer is None:
            return self._accounts.reserve(charges, now, out)
        return self._accounts.reserve_alone(charges, answer.most_left, now, out)

    def _ask_tokens(self, record: Record, arrival: Arrival, now: float, out: list[Effect]) -> RequestEffect:
        if arrival.pool.caches.kv_index is None or not arrival.wants_tokens:
            return self._enter(record, arrival, now, out)
        self._dispatcher.put(record, State.ASKING_TOKENS)
        return AskTokens(record.ticket, arrival)

    def _enter(self, record: Record, arrival: Arrival, now: float, out: list[Effect]) -> RequestEffect:
        pool = arrival.pool
        if self._intake().pools.get(pool.name) is pool:
            if pool.spec.activation is not None and not pool.readiness.can_serve:
                # the configuration may have changed while the request asked for what it needs
                other = self._intake().elsewhere(arrival)
                if other is not None:
                    self._dispatcher.move(record, other)
                    arrival, pool = other, other.pool
            try:
                if self._awaiting.admit(record, arrival, now, out):
                    return AwaitEngine(record.ticket, pool.name, self._answered_within_s(record, pool, now))
                slots = pool.slots
                if slots is not None and self._loading.admit(record, arrival, slots, now, out):
                    longest_s = self._answered_within_s(record, pool, now)
                    return AwaitAdapter(record.ticket, arrival.destination.model, longest_s)
            except Refusal as refusal:
                return self._dispatcher.refuse(record, refusal, now, out)
        return self._pass_gate(record, arrival, now, out)

    def _pass_gate(self, record: Record, arrival: Arrival, now: float, out: list[Effect]) -> Decision | Refused | Hold:
        gate, pool, dispatcher = self._gate_for(arrival), arrival.pool, self._dispatcher
        if self._intake().pools.get(pool.name) is not pool:
            # the configuration changed while the request waited for its limits, tokens or adapter
            return dispatcher.refuse(record, no_longer_served(pool.name), now, out)
        if gate is None:
            return dispatcher.dispatch(record, arrival, now, out)
        expectation = pool.expect(prompt_of(arrival, record.tokens), now)
        queued = record.queued = self._queue_entry(record, arrival, expectation, now)
        try:
            with_room = gate.pass_through(queued, now)
            if with_room is not None:
                return dispatcher.dispatch(
                    record,
                    arrival,
                    now,
                    out,
                    gate=gate,
                    with_room=with_room,
                    expectation=expectation,
                )
            self._waiting.enter(record, gate, now, out)
        except Refusal as refusal:
            return dispatcher.refuse(record, refusal, now, out)
        dispatcher.put(record, State.QUEUED)
        self._waiting.wake(now, out)
        longest_s = gate.control.longest_wait_s
        if pool.spec.activation is not None:
            # its engines may leave before it is its turn
            longest_s = self._answered_within_s(record, pool, now)
        return Hold(record.ticket, longest_s)

    def _gate_for(self, arrival: Arrival) -> Gate | None:
        """None if the request passes by the queue: to count tokens takes nothing that generations wait for."""
        if not arrival.request.waits_in_queue and arrival.pool.readiness.can_serve:
            return None
        return self._admission.gates.get(arrival.pool.name)

    def _queue_entry(self, record: Record, arrival: Arrival, expectation: Expectation, now: float) -> QueuedRequest:
        """How the request stands in its server's queue. If it has waited for something else before, its deadlines
        know.
        """
        entry = self._admission.queue_entry(record.ticket, arrival, record.attachment, expectation, now)
        if record.answer_by_s == math.inf:
            return entry
        return msgspec.structs.replace(
            entry,
            expires_at_s=min(entry.expires_at_s, record.answer_by_s),
            deadline_at_s=entry.deadline_at_s - (now - record.arrived_at_s),
        )

    def _answered_within_s(self, record: Record, pool: Pool, now: float) -> float:
        """The longest that the request is held from now on, for all that it may have to wait for: its gateway is
        told.
        """
        gate, loading, activation = (
            self._admission.gates.get(pool.name),
            pool.spec.adapter_loading,
            pool.spec.activation,
        )
        longest_s = 0.0 if gate is None else gate.control.longest_wait_s
        longest_s += 0.0 if loading is None else float(loading.timeout)
        longest_s += 0.0 if activation is None else float(activation.hold_timeout)
        record.answer_by_s = min(record.answer_by_s, now + longest_s)
        return longest_s
