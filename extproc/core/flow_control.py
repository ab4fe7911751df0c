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

import msgspec

from extproc.admission.budget_recovery import RemainingBudgets, UsageQuery, usage_queries
from extproc.admission.budgets import (
    GATEWAY,
    BudgetAccountAllocator,
    BudgetSet,
    CallerCharges,
    CompiledBudget,
    compile_key_budgets,
)
from extproc.admission.fair_queue import FlowControlGate
from extproc.admission.flow_queues import FlowKey, QueuedRequest
from extproc.admission.identity import Caller, read_name
from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import ClientChosenNames, RequestUsage, RouteLimits, api_key_charges
from extproc.admission.saturation import RECHECK_S, PrefillDecodeMasks
from extproc.api.model_server import max_wait_by_field
from extproc.api.spec import namespace_of
from extproc.core.dispatch import prompt_of, server_removed_refusal
from extproc.core.effects import Effect, RequestHeld, WakeAt, run_or_report_fault
from extproc.core.request_states import RequestEvent, RequestState
from extproc.refusals import Refusal

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Mapping, Sequence

    from extproc.admission.rate_limits import Charge
    from extproc.api.admission import FlowControl, KeyRateLimit
    from extproc.api.config_snapshot import Snapshot
    from extproc.core.dispatch import Dispatcher
    from extproc.core.effects import Decision
    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import Arrival, RequestRecord
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.cache_estimator import PromptExpectation
    from extproc.scheduling.pool import Pool

# Of the engines that hold a prompt, how many are recorded while it waits.
_MOST_HOLDERS: Final = 4
# After this time without a request, the name of a session may be replaced by another.
_FLOW_IDLE_S: Final = 60.0
_QUEUE_FAILED: Final = "the queue of a server could not be served"
# Callers whose accounts are kept, over all routes; where there are more, all are looked up anew.
_MOST_CALLERS: Final = 10_000
# Held requests that one tick releases, so that other work gets its turn: a thousand take 0.1 s.
MOST_AT_ONCE: Final = 64


class AdmissionController:
    """The limits and budgets of all routes, and the gates of all servers with flow control."""

    def __init__(self, *, rng: random.Random) -> None:
        self._budget_accounts = BudgetAccountAllocator()
        self.limits = LocalLimits(self._budget_accounts)
        self.gates: dict[str, FlowControlGate] = {}
        # by route, of those that have limits
        self.routes: dict[str, RouteLimits] = {}
        self.budgets: dict[str, BudgetSet] = {}
        # by the name of the key, of those that have limits themselves
        self.key_limits: dict[str, Sequence[KeyRateLimit]] = {}
        # of requests whose route has none
        self.gateway_budgets = BudgetSet()
        # by route, tenant, user and API key: what the budgets of the configuration charge
        self._accounts: dict[tuple[str, str, str, str], CallerCharges] = {}
        self._names = ClientChosenNames()
        self._rng = rng
        # by the name of an API key
        self._key_owners: dict[str, Caller] = {}

    def apply(self, snapshot: Snapshot, pools: Mapping[str, Pool]) -> None:
        """Follow the configuration. A gate whose flow control stays the same stays, with all who wait there."""
        self.routes = {
            one.metadata.key: RouteLimits(one, self._names) for one in snapshot.routes if one.spec.rate_limits
        }
        authentication = snapshot.gateway.authentication
        keys = () if authentication is None else authentication.api_keys
        self._key_owners = {one.name: Caller(one.tenant, one.user, one.name) for one in keys}
        accounts = self._budget_accounts
        of_gateway = [CompiledBudget(GATEWAY, one, accounts) for one in snapshot.gateway.budgets]
        self.key_limits = {one.name: one.rate_limits for one in keys if one.rate_limits}
        of_keys = compile_key_budgets(keys, accounts)
        self.gateway_budgets = BudgetSet(of_gateway, of_keys=of_keys)
        self.budgets = {
            route.metadata.key: BudgetSet(
                [CompiledBudget(route.metadata.key, one, accounts) for one in route.spec.budgets],
                # what a step asks for was charged to the client that it works for
                of_gateway if route.serves_listener(None) else (),
                of_keys=of_keys,
            )
            for route in snapshot.routes
            if route.spec.budgets or route.spec.callers == "Steps"
        }
        self._accounts.clear()
        before, self.gates = self.gates, {}
        for name, pool in pools.items():
            control, known = snapshot.flow_control_of(pool.spec, namespace_of(name)), before.get(name)
            if known is not None and known.control == control:
                self.gates[name] = known
            elif control is not None:
                self.gates[name] = self._new_gate(pool, control)

    @property
    def has_limits(self) -> bool:
        """Whether there is any limit or budget."""
        return bool(self.routes or self.key_limits or self.budgets or self.gateway_budgets.has_any)

    def budgets_of_route(self, route: str) -> BudgetSet:
        """Those of the route and of the gateway."""
        return self.budgets.get(route, self.gateway_budgets)

    def may_limit_route(self, route: str) -> bool:
        """Whether any limit or budget may apply to requests of the route."""
        return route in self.routes or bool(self.key_limits) or self.budgets_of_route(route).has_any

    def charges(self, arrival: Arrival, usage: RequestUsage, *, now: float, wall_s: float) -> list[Charge]:
        """What the request requires of its route's limits and of all budgets that apply to it."""
        route, caller = arrival.destination.route, arrival.caller
        limits, budgets = self.routes.get(route), self.budgets_of_route(route)
        charges = [] if limits is None else limits.charges(caller, arrival.head.headers, usage, now)
        if caller.api_key in self.key_limits:
            charges += api_key_charges(self.key_limits[caller.api_key], caller, usage)
        if budgets.has_any:
            charges += self._accounts_of(route, budgets, caller, wall_s).charges(usage, wall_s)
        return charges

    def _accounts_of(self, route: str, budgets: BudgetSet, caller: Caller, wall_s: float) -> CallerCharges:
        name = route, caller.tenant, caller.user, caller.api_key
        found = self._accounts.get(name)
        if found is None or not found.since_s <= wall_s < found.until_s:
            if len(self._accounts) >= _MOST_CALLERS:
                self._accounts.clear()
            found = self._accounts[name] = budgets.accounts(caller, wall_s)
        return found

    def usage_queries(self, wall_s: float) -> list[UsageQuery]:
        """Those that all budgets need."""
        return usage_queries(self._budget_groups(), wall_s, has_keys=bool(self._key_owners))

    def budget_account_settings(self) -> set[tuple[str, str, str, str]]:
        """What the accounts of all budgets depend on: name, whose they are, window and time zone."""
        every = (one for group in self._budget_groups() for one in group)
        return {(one.name, one.budget.per, one.budget.window, one.budget.time_zone) for one in every}

    def budget_names(self) -> set[str]:
        """Of all budgets, with those of whom they are."""
        return {one.name for group in self._budget_groups() for one in group}

    def _budget_groups(self) -> Collection[Sequence[CompiledBudget]]:
        found = (group for one in (self.gateway_budgets, *self.budgets.values()) for group in one.budget_groups())
        return {id(group): group for group in found}.values()

    def make_remaining_budgets(self, query: UsageQuery, wall_s: float) -> RemainingBudgets:
        """Nothing yet."""
        return RemainingBudgets(query, self.budgets_of_route, self._key_owners.get, wall_s)

    def forget_ended_windows(self, wall_s: float) -> None:
        """Forget windows of budgets that have ended."""
        self.limits.forget_ended(wall_s)

    def wake_at_s(self, now: float) -> float | None:
        """When a held request may go although nothing happens before; None: no request waits."""
        times = [when for gate in self.gates.values() if (when := gate.wake_at_s(now)) is not None]
        return min(times, default=None)

    def gate_for(self, arrival: Arrival) -> FlowControlGate | None:
        """None if the request passes by the queue: to count tokens takes nothing that generations wait for."""
        if not arrival.request.uses_flow_control and arrival.pool.readiness.can_serve:
            return None
        return self.gates.get(arrival.pool.name)

    def make_held_effect(self, record: RequestRecord, now: float) -> RequestHeld:
        """The longest that the request is held from now on, for all that it may have to wait for.

        The gateway is sent this time when the request is first held. The request is answered by then (``answer_by_s``),
        whatever else it has to wait for meanwhile.
        """
        longest_s = record.answer_by_s - now
        if longest_s == math.inf:
            pool = record.arrival_before_dispatch.pool
            gate = self.gates.get(pool.name)
            waits = max_wait_by_field(pool.spec, None if gate is None else gate.control)
            if record.arrival_before_dispatch.adapter is None:
                waits.pop("adapterLoading", None)
            longest_s = sum(waits.values())
            record.answer_by_s = now + longest_s
        return RequestHeld(record.ticket, record.state, longest_s)

    def queue_entry(
        self,
        record: RequestRecord,
        gate: FlowControlGate,
        expectation: PromptExpectation,
        now: float,
        *,
        arrival: Arrival | None = None,
    ) -> QueuedRequest:
        """The request's entry for its server's queue. Time that it has waited elsewhere counts. ``arrival``: the
        request elsewhere.
        """
        arrival = arrival or record.arrival_before_dispatch
        pool, deadline_at_s = arrival.pool, now + _target_s(arrival)
        if record.answer_by_s < math.inf:
            deadline_at_s -= now - record.arrived_at_s
        cached = float(expectation.demand.cached_tokens[pool.table.is_active].max(initial=0.0))
        return QueuedRequest(
            ticket=record.ticket,
            flow=self._flow(arrival, gate.control, now),
            arrived_at_s=now,
            expires_at_s=min(now + gate.max_queue_wait_s(), record.answer_by_s, record.due_by_s),
            priority=arrival.priority,
            size_bytes=len(arrival.body),
            input_tokens=expectation.input_tokens,
            uncached_tokens=expectation.input_tokens - cached,
            output_tokens=pool.expected_output(arrival.request.max_output_tokens, arrival.request.answers),
            deadline_at_s=deadline_at_s,
            session=_session(arrival, gate.control),
            eligible=partial(pool.rows_that_may_serve, arrival.adapter, record.attachment.subset),
            holders=_holders(expectation.demand.cached_tokens) if cached else (),
        )

    def _flow(self, arrival: Arrival, control: FlowControl, now: float) -> FlowKey:
        """The tenant and the flow whose share the request uses."""
        caller, tenant = arrival.caller, arrival.tenant
        match control.flow_by:
            case "TenantAndModel":
                return FlowKey(tenant, arrival.destination.model)
            case "User":
                return FlowKey(tenant, part=caller.user)
            case "Header":
                value = read_name(arrival.head.headers, control.session_header)
                owner = f"flow/{arrival.pool.name}/{tenant}"
                return FlowKey(tenant, part=self._names.account_name(owner, value, now, idle_s=_FLOW_IDLE_S))
            case _:
                return FlowKey(tenant, part=self._named_flow(arrival, control, now) if control.flow_headers else "")

    def _named_flow(self, arrival: Arrival, control: FlowControl, now: float) -> str:
        """The account of the session that a header names; empty if none does, or if the request has a fairness ID."""
        headers = arrival.head.headers
        value = next((value for one in control.flow_headers if (value := read_name(headers, one))), "")
        if arrival.caller.flow or not value:
            return ""
        return self._names.account_name(f"flow/{arrival.pool.name}/{arrival.tenant}", value, now, idle_s=_FLOW_IDLE_S)

    def _new_gate(self, pool: Pool, control: FlowControl) -> FlowControlGate:
        def stages() -> PrefillDecodeMasks | None:
            found = pool.prefill_decode_rows()
            return None if found is None else PrefillDecodeMasks(*found)

        return FlowControlGate(control, pool.table, stages=stages, rng=self._rng)


def _holders(cached_tokens: Floats) -> tuple[tuple[int, float], ...]:
    """The rows that hold most of the prompt, with how many tokens."""
    rows = cached_tokens.argsort()[: -_MOST_HOLDERS - 1 : -1]
    return tuple((int(row), float(cached_tokens[row])) for row in rows if cached_tokens[row])


def _session(arrival: Arrival, control: FlowControl) -> str:
    """The session or program, within its tenant; empty if it names none."""
    name = read_name(arrival.head.headers, control.session_header)
    return f"{arrival.tenant}/{name}" if name else ""


def _target_s(arrival: Arrival) -> float:
    caller = arrival.caller
    targets = (caller.deadline_in_s, caller.ttft_target_s, arrival.destination.rule.ttft_s)
    return next((one for one in targets if one is not None), math.inf)


class QueueWaitStage:
    """Records in state QUEUED: they wait for room at their server's engines. The gates' queues hold their tickets."""

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        admission: AdmissionController,
        dispatcher: Dispatcher,
        proceed: Callable[[RequestRecord, Bools | None, float, list[Effect]], None],
    ) -> None:
        """``proceed``: takes on a request whose turn it is, with the rows that have room for it; None: all have."""
        self._records = records
        self._admission = admission
        self._dispatcher = dispatcher
        self._proceed = proceed
        # those of the last configuration
        self._gates: Mapping[str, FlowControlGate] = admission.gates
        # tickets whose gate is gone: they go at the next tick
        self._freed: deque[str] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no request waits here."""
        return not self._freed and not any(len(gate.queue) for gate in self._admission.gates.values())

    def may_hold(self, pool: Pool) -> bool:
        """Whether requests of the ModelServer may wait here."""
        return pool.name in self._admission.gates

    def admit(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestHeld | Decision | None:
        """Hold the request at its server's gate, or let it through; None without a gate. Raises a Refusal."""
        arrival = record.arrival_before_dispatch
        gate, pool = self._admission.gate_for(arrival), arrival.pool
        if gate is None:
            return None
        expectation = pool.estimate_prompt(prompt_of(arrival, record.tokens), now)
        queued = record.queued = self._admission.queue_entry(record, gate, expectation, now)
        # those that have waited for an engine are sent by priority at the next tick, however much room it has
        with_room = (
            None if record.state is RequestState.AWAITING_ENGINE else gate.rows_for_immediate_dispatch(queued, now)
        )
        if with_room is not None:
            return self._dispatcher.dispatch(record, now, out, gate=gate, with_room=with_room, expectation=expectation)
        self._enqueue(record, queued, gate, now, out)
        out.append(WakeAt(now))
        # its engines or its adapter may leave before it is its turn
        return self._admission.make_held_effect(record, now)

    def withdraw(self, record: RequestRecord, now: float) -> None:  # noqa: ARG002 - as other waits
        """The request does not wait here any more."""
        gate = self._admission.gates.get(record.arrival_before_dispatch.pool.name)
        if gate is not None:
            gate.withdraw(record.ticket)
        if record.ticket in self._freed:
            self._freed.remove(record.ticket)

    def on_config_change(self, builder: RequestBuilder, now: float, out: list[Effect]) -> None:
        """After a change of configuration: those whose gate is gone wait at the new one, or go, or are refused."""
        before, self._gates = self._gates, self._admission.gates
        for record in [one for one in self._records.values() if one.state is RequestState.QUEUED]:
            pool = record.arrival_before_dispatch.pool
            gate = self._gates.get(pool.name)
            if builder.pools.get(pool.name) is not pool:
                self.withdraw(record, now)
                self._dispatcher.refuse_held(record, server_removed_refusal(pool.name), now, out)
            elif gate is None and before.get(pool.name) is not None:
                self._freed.append(record.ticket)
            elif gate is not None and before.get(pool.name) is not gate:
                self._move_to(gate, record, now, out)

    def tick(self, now: float, out: list[Effect]) -> None:
        """Let go those that can go, and refuse those that have waited too long."""
        released, faults = 0, list[Effect]()
        while self._freed and released < MOST_AT_ONCE:
            self._release(self._freed.popleft(), None, now, out)
            released += 1
        for gate in self._admission.gates.values():
            if not len(gate.queue):
                continue
            for queued, refusal in gate.remove_expired(now):
                self._dispatcher.refuse_held(self._records[queued.ticket], refusal, now, out)
            # one after the other: each that goes changes who has room. If a policy fails, earlier decisions must still
            # reach their streams
            while released < MOST_AT_ONCE and (
                found := run_or_report_fault(faults, _QUEUE_FAILED, partial(gate.pop_next, now))
            ):
                self._release(found[0].ticket, found[1], now, out)
                released += 1
        out.extend(faults)
        at_s = now if released == MOST_AT_ONCE else self._admission.wake_at_s(now)
        if at_s is not None:
            # a queue that fails is not tried again at once
            out.append(WakeAt(max(at_s, now + RECHECK_S) if faults else at_s))

    def entry_at_other_server(
        self, record: RequestRecord, other: Arrival, now: float
    ) -> tuple[QueuedRequest | None, Bools | None] | None:
        """Its entry and the rows that have room for it at another ModelServer, if it need not wait there; else None."""
        gate, before = self._admission.gate_for(other), record.queued
        if gate is None:
            return before, None
        expectation = other.pool.estimate_prompt(prompt_of(other, None), now)
        entry = self._admission.queue_entry(record, gate, expectation, now, arrival=other)
        if before is not None:
            entry = msgspec.structs.replace(entry, arrived_at_s=before.arrived_at_s)
        try:
            with_room = gate.rows_for_immediate_dispatch(entry, now)
        except Refusal:
            return None
        return None if with_room is None else (entry, with_room)

    def _enqueue(
        self, record: RequestRecord, queued: QueuedRequest, gate: FlowControlGate, now: float, out: list[Effect]
    ) -> None:
        """Raises QueueFull. Those that must give way to the request are refused; it has a place already if it waits
        for an engine, and then none must.
        """
        for one in gate.enqueue(queued, may_evict=record.state is not RequestState.AWAITING_ENGINE):
            self._dispatcher.refuse_held(self._records[one.ticket], gate.eviction_refusal(now), now, out)
        if record.state is not RequestState.QUEUED:
            self._dispatcher.add_record(record, RequestState.QUEUED, now)

    def _move_to(self, gate: FlowControlGate, record: RequestRecord, now: float, out: list[Effect]) -> None:
        if record.ticket in self._freed:
            self._freed.remove(record.ticket)
        try:
            if record.queued is not None:
                self._enqueue(record, record.queued, gate, now, out)
        except Refusal as refusal:
            self._dispatcher.refuse_held(record, refusal, now, out)

    def _release(self, ticket: str, with_room: Bools | None, now: float, out: list[Effect]) -> None:
        record = self._records[ticket]
        record.begin_transition(RequestEvent.GRANTED)
        self._proceed(record, with_room, now, out)
