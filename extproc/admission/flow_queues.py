# SPDX-License-Identifier: Apache-2.0
"""The flows of one band, what waits in each, and in which order.

A flow has a row from its first request until it is forgotten, so its account with the fairness policy outlives its
requests. When there are too many flows, the rows of idle ones (nothing waiting, nothing running) are reused.

The waiting request of a flow with the smallest key goes first. A key is an instant, computed once on arrival: the
arrival time plus a delay that the policy chooses, at most the ageing bound. So a request is never overtaken by one that
arrived more than the ageing bound later.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from extproc.admission.fairness import DeficitLocality, FairnessPolicy, FlowHeads
from extproc.endpoints.table import Bools

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.admission.fairness import TenantShares
    from extproc.endpoints.table import Floats, Ints

# Most sessions and programs that are kept.
_MAX_SESSIONS: Final = 4096
# Delay for each uncached prompt token: a prompt of 10,000 tokens yields to requests that arrive within 10 s.
_SECONDS_A_TOKEN: Final = 1e-3
# Delay for each token of service that a program has received.
_SECONDS_A_SERVED_TOKEN: Final = 1e-4
# Entries examined in each heap: the root, which is the best, and its two children.
_EXAMINED: Final = 3
# (minus the cached tokens, sequence number, request)
_Place = tuple[float, int, "QueuedRequest"]
# Flows beyond which idle ones are forgotten; about 10 MB.
MAX_IDLE_FLOWS: Final = 10_000
_FIRST_ROWS: Final = 8
# Between two checks for overdue requests, and so about the most by which one can be late.
_OVERDUE_CHECK_S: Final = 0.05
# (order key, sequence number, request)
_Entry = tuple[float, int, "QueuedRequest"]


class FlowKey(msgspec.Struct, frozen=True):
    """Identifies a flow: requests that share one fair share.

    ``model``: empty unless flows are by tenant and model. ``part``: a user or session of the tenant, empty if the
    whole tenant is one flow.
    """

    tenant: str
    model: str = ""
    part: str = ""


class QueuedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that waits to be dispatched.

    ========================  ===========  =====================================================================
    field                     unit         meaning
    ========================  ===========  =====================================================================
    ``ticket``                             identifies the request
    ``flow``                               the flow whose share it uses
    ``arrived_at_s``          s            when it arrived
    ``expires_at_s``          s            when it has waited too long
    ``priority``                           larger is more important
    ``size_bytes``            bytes        of its body, which is kept in memory while it waits
    ``input_tokens``          tokens       of its prompt
    ``uncached_tokens``       tokens       of its prompt that no endpoint has cached
    ``output_tokens``         tokens       expected of its answer
    ``deadline_at_s``         s            when its first token is due
    ``session``                            the session or program to which it belongs, empty if none
    ``eligible``                           returns the endpoints that may serve it, None for all; called anew each
                                           time, as they change while it waits
    ``holders``               row, tokens  the endpoints that have most of its prompt cached
    ========================  ===========  =====================================================================
    """

    ticket: str
    flow: FlowKey
    arrived_at_s: float
    expires_at_s: float
    priority: int = 0
    size_bytes: int = 0
    input_tokens: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0
    deadline_at_s: float = math.inf
    session: str = ""
    eligible: Callable[[], Bools | None] | None = None
    holders: tuple[tuple[int, float], ...] = ()

    @property
    def eligible_rows(self) -> Bools | None:
        """The endpoints that may serve it now; None: all."""
        return None if self.eligible is None else self.eligible()

    @property
    def most_cached_tokens(self) -> float:
        """Prompt tokens cached at the endpoint that holds most."""
        return self.input_tokens - self.uncached_tokens

    @property
    def total_tokens(self) -> float:
        """Prompt tokens and expected output tokens."""
        return self.input_tokens + self.output_tokens


class OrderingPolicy(Protocol):
    """Orders the waiting requests of a flow. ``ageing_s`` of each policy bounds the delay that it adds."""

    def order_key(self, queued: QueuedRequest) -> float:
        """The request's key; the smallest goes first."""
        ...

    def on_request_ended(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """A request has ended. ``tokens``: of its prompt and answer."""
        ...


class FirstCome:
    """First come, first served."""

    def __init__(self, ageing_s: float) -> None:
        """``ageing_s`` is not used: there is no delay to bound."""

    def order_key(self, queued: QueuedRequest) -> float:
        """The arrival time."""
        return queued.arrived_at_s

    def on_request_ended(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to record."""


class Deadline:
    """Earliest deadline first (Liu and Layland, 1973).

    A request without a deadline, or with one beyond the ageing bound, is due at the ageing bound.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def order_key(self, queued: QueuedRequest) -> float:
        """The time at which the first token is due."""
        return min(queued.deadline_at_s, queued.arrived_at_s + self._ageing_s)

    def on_request_ended(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to record."""


class ShortestFirst:
    """Shortest job first, by uncached prompt tokens, with ageing.

    Shortest job first minimizes the mean wait (Smith, 1956).
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def order_key(self, queued: QueuedRequest) -> float:
        """1 ms of delay for each uncached token."""
        return queued.arrived_at_s + min(self._ageing_s, _SECONDS_A_TOKEN * queued.uncached_tokens)

    def on_request_ended(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to record."""


class SessionBoost:
    """The session whose last request ended most recently goes first: its prefix is still in a cache (after Kthena)."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._ended_at_s: OrderedDict[str, float] = OrderedDict()

    def order_key(self, queued: QueuedRequest) -> float:
        """The delay grows with the session's silence before the request, up to the ageing bound."""
        ended_at_s = self._ended_at_s.get(queued.session)
        silent_s = self._ageing_s if ended_at_s is None else max(0.0, queued.arrived_at_s - ended_at_s)
        return queued.arrived_at_s + min(self._ageing_s, silent_s)

    def on_request_ended(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Record when the session's request ended."""
        if queued.session:
            self._ended_at_s[queued.session] = now
            _bound(self._ended_at_s, queued.session)


class LeastAttained:
    """The program that has received the least service goes first (Autellix, arXiv 2502.13965).

    All requests of one session, for example the calls of an agent, are one program.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._attained: OrderedDict[str, float] = OrderedDict()

    def order_key(self, queued: QueuedRequest) -> float:
        """0.1 ms of delay for each token that the program has received."""
        attained = self._attained.get(queued.session, 0.0)
        return queued.arrived_at_s + min(self._ageing_s, _SECONDS_A_SERVED_TOKEN * attained)

    def on_request_ended(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Add the tokens to the program's service."""
        if queued.session:
            self._attained[queued.session] = self._attained.get(queued.session, 0.0) + tokens
            _bound(self._attained, queued.session)


def _bound(remembered: OrderedDict[str, float], latest: str) -> None:
    remembered.move_to_end(latest)
    if len(remembered) > _MAX_SESSIONS:
        remembered.popitem(last=False)


ORDERS: Final[Mapping[str, Callable[[float], OrderingPolicy]]] = MappingProxyType(
    {one.__name__: one for one in (FirstCome, Deadline, ShortestFirst, SessionBoost, LeastAttained)}
)


class CachedPromptHeaps:
    """A heap of waiting requests for each endpoint, by the tokens that it had cached when they arrived."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        """``is_waiting``: whether the request with a ticket still waits."""
        self._is_waiting = is_waiting
        self._heaps: dict[int, list[_Place]] = {}
        self._entries = 0
        self._numbers = 0

    def add(self, queued: QueuedRequest) -> None:
        """Add a waiting request to the heap of each endpoint that holds part of its prompt."""
        self._numbers += 1
        for row, cached in queued.holders:
            heapq.heappush(self._heaps.setdefault(row, []), (-cached, self._numbers, queued))
            self._entries += 1

    def longest_match(self, rows: Bools, may_go: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """A request with a long match at one of ``rows`` for which ``may_go`` holds; None if none is found quickly.

        Only the top entries of each heap are examined, so the match may not be the longest.
        """
        heaps = []
        for row, heap in self._heaps.items():
            if row < rows.size and rows[row]:
                self._drop_gone(heap)
                if heap:
                    heaps.append(heap)
        heaps.sort(key=_best)
        for heap in heaps:
            for entry in heap[:_EXAMINED]:
                if self._is_waiting(entry[2].ticket) and may_go(entry[2]):
                    return entry[2]
        return None

    @property
    def entry_count(self) -> int:
        """Over all heaps, those of requests that have gone included."""
        return self._entries

    def drop_stale_entries(self, waiting: int) -> None:
        """Drop the entries of requests that no longer wait, if they are the majority; ``waiting``: how many wait."""
        if self._entries <= 64 + 8 * waiting:
            return
        for row, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if self._is_waiting(entry[2].ticket)]
            heapq.heapify(kept)
            self._heaps[row] = kept
        self._entries = sum(len(heap) for heap in self._heaps.values())

    def _drop_gone(self, heap: list[_Place]) -> None:
        while heap and not self._is_waiting(heap[0][2].ticket):
            heapq.heappop(heap)
            self._entries -= 1


def _best(heap: list[_Place]) -> float:
    return heap[0][0]


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
        self._locality = CachedPromptHeaps(self._is_waiting) if isinstance(policy, DeficitLocality) else None
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
    def waiting_rows(self) -> Bools:
        """The rows with a waiting request."""
        return self.heads.waiting

    def assign_row(self, key: FlowKey) -> int:
        """The row of a flow; a new flow is given one."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._new_row()
            if self.tenants is not None:
                self.tenants.add_flow(row, key.tenant)
        return row

    def add(self, queued: QueuedRequest) -> None:
        """Add a waiting request."""
        row = self.assign_row(queued.flow)
        if not self.heads.waiting[row]:
            self._begin_waiting(row)
        self._numbers += 1
        self.requests += 1
        self._flows[row].add(self.order.order_key(queued), self._numbers, queued)
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
            self._locality.drop_stale_entries(self.requests)
        self._refresh_head(row)

    def choose_flow(self, candidates: Bools, rows: Bools, now: float) -> tuple[int, QueuedRequest | None]:
        """Choose the flow whose request goes next.

        Returns its row, and the request if it is not the flow's head. Under DeficitLocality that is a request with a
        long prefix match at one of ``rows`` (the endpoints with room), unless a request is overdue: older than
        ``ageing_s``.
        """
        policy, heads = self.policy, self.heads
        if self.tenants is not None:
            turn = self.tenants.flows_on_turn(candidates, now)
            candidates, heads = candidates & turn, FlowHeads(heads.waiting & turn, heads.keys, heads.cached)
        if self._locality is None or not isinstance(policy, DeficitLocality):
            return policy.choose(candidates, heads, now), None
        payable = policy.next_payable(candidates, heads)
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

    def ordered_requests(self, row: int) -> Iterator[QueuedRequest]:
        """The waiting requests of the flow at ``row``, in order."""
        return self._flows[row].in_order()

    def eviction_candidate(self) -> QueuedRequest:
        """The request to evict when the queue is full: the newest of the largest flow of the tenant with most
        waiting.
        """
        sizes = (
            self._sizes
            if self.tenants is None
            else np.where(self.tenants.flows_of_largest_tenant(self._sizes), self._sizes, -1)
        )
        members = self._flows[int(sizes.argmax())].members
        return members[next(reversed(members))]

    def begin_service(self, key: FlowKey, service: float, now: float) -> None:
        """A request of the flow is dispatched. ``service``: its expected cost, over the flow's weight."""
        row = self.assign_row(key)
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
            self.tenants.on_waiting_started(row)
            waiting = waiting & self.tenants.flows_of_same_tenant(row)
        self.policy.activate(row, waiting)

    def _is_waiting(self, ticket: str) -> bool:
        return ticket in self._tickets

    def _refresh_head(self, row: int) -> None:
        heads, head = self.heads, self._flows[row].head()
        self._sizes[row] = len(self._flows[row].members)
        if self.tenants is not None and heads.waiting[row] and head is None:
            self.tenants.on_waiting_ended(row)
        heads.waiting[row] = head is not None
        if head is not None:
            heads.keys[row], heads.cached[row] = head[0], head[2].most_cached_tokens

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
                self.tenants.remove_flow(row)
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
