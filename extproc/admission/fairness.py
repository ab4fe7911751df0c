# SPDX-License-Identifier: Apache-2.0
"""Fairness policies: whose request is dispatched next, first among tenants, then among the flows of one.

A policy keeps a column or two with one row for each flow. Service is counted in weighted tokens (an output token
costs more than an input token), divided by the flow's own weight. A flow is charged the expected service when a
request is dispatched; the charge is settled when the engine has reported the actual usage.

A tenant's users, sessions, models and adapters are flows. Were flows alone treated fairly, 200 users would have 200
parts. So the policy of the band first chooses among tenants, with an account of each tenant's service, and then among
the chosen tenant's flows. Its bound between two flows (see each policy) thus holds between two tenants.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from extproc.endpoints.table import Bools, Floats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.endpoints.table import Ints

_EXCLUDED: Final = np.inf


class FlowHeads(msgspec.Struct, frozen=True):
    """The first waiting request of each flow, by row.

    ``waiting``: whether the flow has one. ``keys``: its order key. ``cached``: its prompt tokens cached at the
    endpoint that holds most.
    """

    waiting: Bools
    keys: Floats
    cached: Floats


class FairnessPolicy(Protocol):
    """Chooses which flow sends its next request. A flow is identified by its row."""

    def grow(self, rows: int) -> None:
        """Extend the columns to ``rows`` flows; new ones start at 0."""
        ...

    def activate(self, row: int, waiting: Bools) -> None:
        """A flow without waiting requests is about to get one; ``waiting``: the flows that have some."""
        ...

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The row of the flow whose head is dispatched next; at least one of ``candidates`` is set."""
        ...

    def charge(self, row: int, service: float, now: float) -> None:
        """A request of the flow is dispatched. ``service``: expected, in weighted tokens over the flow's weight."""
        ...

    def settle(self, row: int, service: float, now: float) -> None:
        """A request of the flow has ended. ``service``: actual minus expected service; negative is a refund."""
        ...

    def forget(self, row: int) -> None:
        """The row will be given to another flow."""
        ...

    def debt(self, row: int) -> float:
        """The service that the flow received beyond others; idle flows with the least debt are forgotten first."""
        ...


def grow_column(column: Floats, rows: int) -> Floats:
    """``column`` extended with zeros to ``rows`` entries."""
    return np.pad(column, (0, rows - column.size))


class DeficitLocality:
    """Of the flows with a positive deficit, choose the one whose head has the longest prefix match.

    This is DLPM (Cao et al., arXiv 2501.14312). Each flow receives ``quantum`` tokens a round and spends them on
    uncached input and on output. A new round begins when no waiting flow has tokens left, so a flow is never ahead of
    another by more than one quantum and one request.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._round = 0
        self.deficits: Floats = np.zeros(0)
        self._rounds: Ints = np.zeros(0, np.int64)

    def grow(self, rows: int) -> None:
        """Make room for flows up to that number; a new flow has not taken part in any round."""
        more = rows - self._rounds.size
        self.deficits = grow_column(self.deficits, rows)
        self._rounds = np.pad(self._rounds, (0, more), constant_values=-1)

    def activate(self, row: int, waiting: Bools) -> None:
        """Give the flow its quantum for this round, once. Tokens left from earlier rounds do not accumulate."""
        if self._rounds[row] != self._round:
            self.deficits[row] = min(float(self.deficits[row]) + self._quantum, self._quantum)
            self._rounds[row] = self._round

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """Of the flows that can pay, the one with the longest match; ties go to the smallest order key."""
        return self.longest_match(self.next_payable(candidates, heads), heads)

    def longest_match(self, payable: Bools, heads: FlowHeads) -> int:
        """Of the flows in ``payable``, the one whose head has the longest match; ties go to the smallest order key."""
        rows = payable.nonzero()[0]
        cached = heads.cached[rows]
        longest = rows[cached >= cached.max()]
        return int(longest[heads.keys[longest].argmin()])

    def next_payable(self, candidates: Bools, heads: FlowHeads) -> Bools:
        """The flows in ``candidates`` with tokens to spend; starts as many rounds as it takes to have one."""
        best = float(np.where(candidates, self.deficits, -np.inf).max())
        if best <= 0:
            rounds = math.floor(-best / self._quantum) + 1
            self.deficits[heads.waiting] += rounds * self._quantum
            self._round += rounds
            self._rounds[heads.waiting] = self._round
        return candidates & (self.deficits > 0)

    def charge(self, row: int, service: float, now: float) -> None:
        """Spend the expected service."""
        self.deficits[row] -= service

    def settle(self, row: int, service: float, now: float) -> None:
        """Spend or refund the difference to the actual service."""
        self.deficits[row] -= service

    def forget(self, row: int) -> None:
        """Reset the row for another flow."""
        self.deficits[row] = 0.0
        self._rounds[row] = -1

    def debt(self, row: int) -> float:
        """Tokens overdrawn; negative if some are left."""
        return -float(self.deficits[row])


class TenantShares:
    """The accounts of the tenants of one band. A tenant has a row while any of its flows has one."""

    def __init__(self, policy: FairnessPolicy) -> None:
        self.policy = policy
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._free: list[int] = []
        # by row of the tenant: its flows, and those of them that have a waiting request
        self._flows: Ints = np.zeros(0, np.int64)
        self._waiting: Ints = np.zeros(0, np.int64)
        # by row of the flow: the row of its tenant, -1 if there is no such flow
        self._tenants: Ints = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def grow(self, flows: int) -> None:
        """Extend the columns to rows for so many flows."""
        self._tenants = np.pad(self._tenants, (0, flows - self._tenants.size), constant_values=-1)

    def add_flow(self, flow: int, tenant: str) -> None:
        """The row ``flow`` was given to a flow of ``tenant``."""
        row = self._rows.get(tenant)
        if row is None:
            row = self._rows[tenant] = self._new_row(tenant)
        self._flows[row] += 1
        self._tenants[flow] = row

    def remove_flow(self, flow: int) -> None:
        """The flow is forgotten; with its last flow its tenant is."""
        row = int(self._tenants[flow])
        self._tenants[flow] = -1
        self._flows[row] -= 1
        if not self._flows[row]:
            del self._rows[self._names[row]]
            self.policy.forget(row)
            self._free.append(row)

    def flows_of_same_tenant(self, flow: int) -> Bools:
        """By row, the flows of the same tenant."""
        return np.equal(self._tenants, int(self._tenants[flow]))

    def on_waiting_started(self, flow: int) -> None:
        """A flow without waiting requests is about to get one."""
        row = int(self._tenants[flow])
        if not self._waiting[row]:
            self.policy.activate(row, self._waiting > 0)
        self._waiting[row] += 1

    def on_waiting_ended(self, flow: int) -> None:
        """The flow's last waiting request is gone."""
        self._waiting[self._tenants[flow]] -= 1

    def flows_on_turn(self, candidates: Bools, now: float) -> Bools:
        """By row, the flows of the tenants whose turn it is; at least one of ``candidates`` is among them."""
        policy, count = self.policy, self._flows.size
        asking = np.zeros(count, np.bool_)
        asking[self._tenants[candidates]] = True
        heads = FlowHeads(self._waiting > 0, np.zeros(count), np.zeros(count))
        if isinstance(policy, DeficitLocality):
            # among all that can pay, the longest match goes first
            payable = policy.next_payable(asking, heads)
            return np.where(self._tenants >= 0, payable[self._tenants], False)
        return np.equal(self._tenants, policy.choose(asking, heads, now))

    def charge(self, flow: int, service: float, now: float) -> None:
        """A request of the flow is dispatched."""
        self.policy.charge(int(self._tenants[flow]), service, now)

    def settle(self, flow: int, service: float, now: float) -> None:
        """A request of the flow has ended. ``service``: actual minus expected service."""
        self.policy.settle(int(self._tenants[flow]), service, now)

    def flows_of_largest_tenant(self, sizes: Ints) -> Bools:
        """By row, the flows of the tenant that has most by ``sizes``, of which there is one for each flow."""
        present = self._tenants >= 0
        totals = np.bincount(self._tenants[present], weights=sizes[present])
        return np.equal(self._tenants, totals.argmax())

    def _new_row(self, tenant: str) -> int:
        if self._free:
            row = self._free.pop()
            self._names[row] = tenant
            return row
        self._names.append(tenant)
        rows = len(self._names)
        if rows > self._flows.size:
            more = max(8, 2 * self._flows.size) - self._flows.size
            self._flows, self._waiting = (np.pad(one, (0, more)) for one in (self._flows, self._waiting))
            self.policy.grow(self._flows.size)
        return rows - 1


class VirtualTokenCounter:
    """The flow that has received the least service goes first.

    This is VTC (Sheng et al., OSDI 2024, algorithm 2). A flow that becomes active again is lifted to the smallest
    counter of the waiting flows; otherwise it could claim all the service that others received while it was idle. The
    counters of two flows that both wait all the time differ by at most twice the largest request or batch (theorem
    4.4).
    """

    def __init__(self) -> None:
        self.counters: Floats = np.zeros(0)
        self._last_served = 0.0

    def grow(self, rows: int) -> None:
        """Add counters at 0."""
        self.counters = grow_column(self.counters, rows)

    def activate(self, row: int, waiting: Bools) -> None:
        """Lift the counter; if no flow waits, to that of the flow that was served last."""
        others = self.counters[waiting]
        floor = float(others.min()) if others.size else self._last_served
        self.counters[row] = max(float(self.counters[row]), floor)

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The smallest counter."""
        return _least(self.counters, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Add the expected service."""
        self._last_served = float(self.counters[row])
        self.counters[row] += service

    def settle(self, row: int, service: float, now: float) -> None:
        """Add the difference to the actual service."""
        self.counters[row] += service

    def forget(self, row: int) -> None:
        """Reset the row; its next flow is lifted when it becomes active."""
        self.counters[row] = 0.0

    def debt(self, row: int) -> float:
        """The flow's counter."""
        return float(self.counters[row])


class SlidingWindow:
    """The flow with the least service in the last ``window_s`` seconds goes first (Kthena's fairness)."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.used: Floats = np.zeros(0)
        self._epochs: Ints = np.zeros(0, np.int64)
        # (time, row, epoch of the row, service), oldest first.
        self._recent: deque[tuple[float, int, int, float]] = deque()

    def grow(self, rows: int) -> None:
        """Add sums at 0."""
        self.used = grow_column(self.used, rows)
        self._epochs = np.pad(self._epochs, (0, rows - self._epochs.size))

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to do: old service leaves the window by itself."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The smallest sum."""
        self._expire(now)
        return _least(self.used, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Add the expected service for the length of the window."""
        self._expire(now)
        self.used[row] += service
        self._recent.append((now, row, int(self._epochs[row]), service))

    def settle(self, row: int, service: float, now: float) -> None:
        """Add the difference to the actual service, from now on."""
        self.charge(row, service, now)

    def forget(self, row: int) -> None:
        """Reset the row; service still in the window will not be subtracted from its next flow."""
        self.used[row] = 0.0
        self._epochs[row] += 1

    def debt(self, row: int) -> float:
        """The service within the window."""
        return float(self.used[row])

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - self._window_s:
            _, row, epoch, service = self._recent.popleft()
            if epoch == self._epochs[row]:
                self.used[row] -= service


class RoundRobin:
    """Flows take turns, whatever their requests cost."""

    def __init__(self) -> None:
        self._turns: Floats = np.zeros(0)
        self._turn = 0

    def grow(self, rows: int) -> None:
        """Add flows that have had no turn."""
        self._turns = grow_column(self._turns, rows)

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to do: the flow keeps the time of its last turn."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The flow whose last turn is longest ago."""
        return _least(self._turns, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Record the turn."""
        self._turn += 1
        self._turns[row] = self._turn

    def settle(self, row: int, service: float, now: float) -> None:
        """Nothing to do: service does not count."""

    def forget(self, row: int) -> None:
        """Reset the row to a flow that has had no turn."""
        self._turns[row] = 0.0

    def debt(self, row: int) -> float:
        """The number of the flow's last turn."""
        return float(self._turns[row])


class GlobalStrict:
    """No fairness: all requests are ordered as if they were one flow."""

    def grow(self, rows: int) -> None:
        """Nothing to do: no state."""

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to do: no state."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The head with the smallest order key."""
        return _least(heads.keys, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Nothing to do: no state."""

    def settle(self, row: int, service: float, now: float) -> None:
        """Nothing to do: no state."""

    def forget(self, row: int) -> None:
        """Nothing to do: no state."""

    def debt(self, row: int) -> float:
        """Always 0."""
        return 0.0


def _least(values: Floats, candidates: Bools) -> int:
    return int(np.where(candidates, values, _EXCLUDED).argmin())


class BandShares:
    """Shares between priority bands: a virtual token counter, weighted by each band's configured share."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._counters = [0.0] * len(shares)
        self._last_served = 0.0

    def activate(self, band: int, waiting: Iterable[int]) -> None:
        """Lift the counter of a band that had no waiting request; ``waiting``: the bands that have."""
        floor = min((self._counters[other] for other in waiting), default=self._last_served)
        self._counters[band] = max(self._counters[band], floor)

    def order_bands(self, candidates: Iterable[int]) -> list[int]:
        """``candidates``, the band furthest below its share first."""
        return sorted(candidates, key=self._counters.__getitem__)

    def charge(self, band: int, service: float) -> None:
        """Add the expected service of a request of ``band``."""
        self._last_served = self._counters[band]
        self.settle(band, service)

    def settle(self, band: int, service: float) -> None:
        """Add the difference to the actual service."""
        self._counters[band] += service / self._shares[band]


def make_policy(name: str, *, quantum: float, window_s: float) -> FairnessPolicy:
    """The policy with this name in the configuration.

    ``quantum``: tokens a round, for DeficitLocality. ``window_s``: for SlidingWindow.
    """
    match name:
        case "DeficitLocality":
            return DeficitLocality(quantum)
        case "SlidingWindow":
            return SlidingWindow(window_s)
        case "RoundRobin":
            return RoundRobin()
        case "GlobalStrict":
            return GlobalStrict()
        case _:
            return VirtualTokenCounter()
