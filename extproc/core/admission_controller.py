# SPDX-License-Identifier: Apache-2.0
"""Limits and gates: what a request must pass before an engine gets it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.admission.chosen_names import ChosenNames
from extproc.admission.estimates import ASSUMED_BYTES_PER_TOKEN
from extproc.admission.gate import Gate
from extproc.admission.limits import RouteLimits, Usage
from extproc.admission.local_limits import LocalLimits
from extproc.admission.names import name_in
from extproc.admission.queued_request import FlowKey, QueuedRequest
from extproc.admission.saturation import Stages
from extproc.api.spec import namespace_of

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from extproc.api.admission import FlowControl
    from extproc.api.snapshot import Snapshot
    from extproc.core.types import Arrival, Attachment
    from extproc.endpoints.table import Floats
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
