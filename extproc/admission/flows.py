# SPDX-License-Identifier: Apache-2.0
"""The flows of one band, and what waits in each.

A flow has a row from its first request until it is forgotten, so its account with the fairness policy outlives its
requests. When there are too many flows, the rows of idle ones (nothing waiting, nothing running) are reused.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np

from extproc.admission.deficit_locality import DeficitLocality
from extproc.admission.locality import CacheLocality
from extproc.admission.policy import FairnessPolicy, FlowHeads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.admission.order import OrderingPolicy
    from extproc.admission.queued_request import FlowKey, QueuedRequest
    from extproc.admission.tenants import TenantShares
    from extproc.endpoints.table import Bools, Floats, Ints

# Flows beyond which idle ones are forgotten; about 10 MB.
MAX_IDLE_FLOWS: Final = 10_000
_FIRST_ROWS: Final = 8
# How often to look for overdue requests, and so about the most by which one can be late.
_OVERDUE_CHECK_S: Final = 0.05

# (order key, sequence number, request)
_Entry = tuple[float, int, "QueuedRequest"]


class _Flow:
    """The requests of one flow: a heap by order key, and a dict by ticket in order of arrival."""

    __slots__ = ("heap", "members")

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.members: dict[str, QueuedRequest] = {}

    def add(self, key: float, number: int, queued: QueuedRequest) -> None:
        self.members[queued.ticket] = queued
        heapq.heappush(self.heap, (key, number, queued))

    def remove(self, ticket: str) -> None:
        """Heap entries of removed requests are skipped when they reach the top, or swept when they are the majority."""
        del self.members[ticket]
        if len(self.heap) > 2 * len(self.members) + 8:
            self.heap = [entry for entry in self.heap if entry[2].ticket in self.members]
            heapq.heapify(self.heap)

    def head(self) -> _Entry | None:
        heap, members = self.heap, self.members
        while heap and heap[0][2].ticket not in members:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def in_order(self) -> Iterator[QueuedRequest]:
        """Iterate in order from the head, best first through the heap's tree, without sorting it."""
        heap = self.heap
        reached: list[tuple[_Entry, int]] = [(heap[0], 0)] if heap else []
        while reached:
            entry, index = heapq.heappop(reached)
            if entry[2].ticket in self.members:
                yield entry[2]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(reached, (heap[child], child))


class Flows:
    """All flows of a band.

    ``policy``: between the flows of a tenant. ``tenants``: between tenants; None: all flows are ordered as one.
    ``requests``: how many wait. ``running``: dispatched and unfinished requests, by row. ``heads``: the first waiting
    request of each flow, by row.
    """

    def __init__(
        self, policy: FairnessPolicy, order: OrderingPolicy, ageing_s: float, tenants: TenantShares | None = None
    ) -> None:
        self.policy = policy
        self.tenants = tenants
        self.order = order
        self._ageing_s = ageing_s
        self._overdue_check_at_s = 0.0
        self._locality = CacheLocality(self._is_waiting) if isinstance(policy, DeficitLocality) else None
        self.requests = 0
        self.running: Ints = np.zeros(0, np.int64)
        self._sizes: Ints = np.zeros(0, np.int64)
        self.heads = FlowHeads(np.zeros(0, np.bool_), np.zeros(0), np.zeros(0))
        self._flows: list[_Flow] = []
        self._rows: dict[FlowKey, int] = {}
        self._free: list[int] = []
        self._tickets: dict[str, int] = {}
        self._numbers = 0
        self._next_sweep = MAX_IDLE_FLOWS

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> Bools:
        """The rows with a waiting request."""
        return self.heads.waiting

    def row_of(self, key: FlowKey) -> int:
        """The row of a flow; a new flow is given one."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._new_row()
            if self.tenants is not None:
                self.tenants.join(row, key.tenant)
        return row

    def add(self, queued: QueuedRequest) -> None:
        """Add a waiting request."""
        row = self.row_of(queued.flow)
        if not self.heads.waiting[row]:
            self._begin_waiting(row)
        self._numbers += 1
        self.requests += 1
        self._flows[row].add(self.order.key(queued), self._numbers, queued)
        self._tickets[queued.ticket] = row
        if self._locality is not None:
            self._locality.add(queued)
        self._refresh_head(row)

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a waiting request."""
        row = self._tickets.pop(queued.ticket)
        self._flows[row].remove(queued.ticket)
        self.requests -= 1
        if self._locality is not None:
            self._locality.sweep(self.requests)
        self._refresh_head(row)

    def choose(self, candidates: Bools, rows: Bools, now: float) -> tuple[int, QueuedRequest | None]:
        """Choose the flow whose request goes next.

        Returns its row, and the request if it is not the flow's head. Under DeficitLocality that is a request with a
        long prefix match at one of ``rows`` (the endpoints with room), unless a request is overdue: older than
        ``ageing_s``.
        """
        policy, heads = self.policy, self.heads
        if self.tenants is not None:
            turn = self.tenants.next(candidates, now)
            candidates, heads = candidates & turn, FlowHeads(heads.waiting & turn, heads.keys, heads.cached)
        if self._locality is None or not isinstance(policy, DeficitLocality):
            return policy.choose(candidates, heads, now), None
        payable = policy.able_to_pay(candidates, heads)
        if now >= self._overdue_check_at_s:
            oldest = int(np.where(payable, heads.keys, np.inf).argmin())
            if heads.keys[oldest] < now - self._ageing_s:
                return oldest, None
            self._overdue_check_at_s = now + _OVERDUE_CHECK_S
        tickets, can_pay = self._tickets, payable.item
        match = self._locality.longest_match(rows, lambda one: bool(can_pay(tickets[one.ticket])))
        if match is not None:
            return tickets[match.ticket], match
        return policy.longest_match(payable, heads), None

    def in_order(self, row: int) -> Iterator[QueuedRequest]:
        """The waiting requests of the flow at ``row``, in order."""
        return self._flows[row].in_order()

    def newest_of_largest(self) -> QueuedRequest:
        """The request to evict when the queue is full: the newest of the largest flow of the tenant with most
        waiting.
        """
        sizes = self._sizes if self.tenants is None else np.where(self.tenants.largest(self._sizes), self._sizes, -1)
        members = self._flows[int(sizes.argmax())].members
        return members[next(reversed(members))]

    def begin_service(self, key: FlowKey, service: float, now: float) -> None:
        """A request of the flow is dispatched. ``service``: its expected cost, over the flow's weight."""
        row = self.row_of(key)
        self.running[row] += 1
        self.policy.charge(row, service, now)
        if self.tenants is not None:
            self.tenants.charge(row, service, now)

    def end_service(self, key: FlowKey, correction: float, now: float) -> None:
        """A request of the flow has ended. ``correction``: actual minus expected cost, over the flow's weight."""
        row = self._rows.get(key)
        if row is not None:
            self.running[row] -= 1
            self.policy.settle(row, correction, now)
            if self.tenants is not None:
                self.tenants.settle(row, correction, now)

    def _begin_waiting(self, row: int) -> None:
        waiting = self.heads.waiting
        if self.tenants is not None:
            self.tenants.begins_waiting(row)
            waiting = waiting & self.tenants.siblings(row)
        self.policy.activate(row, waiting)

    def _is_waiting(self, ticket: str) -> bool:
        return ticket in self._tickets

    def _refresh_head(self, row: int) -> None:
        heads, head = self.heads, self._flows[row].head()
        self._sizes[row] = len(self._flows[row].members)
        if self.tenants is not None and heads.waiting[row] and head is None:
            self.tenants.ends_waiting(row)
        heads.waiting[row] = head is not None
        if head is not None:
            heads.keys[row], heads.cached[row] = head[0], head[2].cached_tokens

    def _new_row(self) -> int:
        if len(self._rows) >= self._next_sweep:
            self._forget_idle()
            # if all flows are busy, sweeping at every new one would not help
            self._next_sweep = max(MAX_IDLE_FLOWS, len(self._rows) * 5 // 4)
        if not self._free:
            self._grow(max(_FIRST_ROWS, 2 * len(self._flows)))
        return self._free.pop()

    def _forget_idle(self) -> None:
        """Forget the half of the idle flows with the least debt: forgetting erases the least for them."""
        idle = [(self.policy.debt(row), key, row) for key, row in self._rows.items() if self._is_idle(row)]
        for _, key, row in sorted(idle, key=lambda one: one[0])[: (len(idle) + 1) // 2]:
            del self._rows[key]
            self.policy.forget(row)
            if self.tenants is not None:
                self.tenants.leave(row)
            self._free.append(row)

    def _is_idle(self, row: int) -> bool:
        return not self._flows[row].members and not self.running[row]

    def _grow(self, rows: int) -> None:
        old = len(self._flows)
        self._free.extend(range(rows - 1, old - 1, -1))
        self._flows += [_Flow() for _ in range(rows - old)]
        self.running, self._sizes = (np.pad(one, (0, rows - old)) for one in (self.running, self._sizes))

        def grown(column: Floats) -> Floats:
            return np.pad(column, (0, rows - old))

        heads = self.heads
        self.heads = FlowHeads(np.pad(heads.waiting, (0, rows - old)), grown(heads.keys), grown(heads.cached))
        self.policy.grow(rows)
        if self.tenants is not None:
            self.tenants.grow(rows)
