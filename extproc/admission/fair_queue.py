# SPDX-License-Identifier: Apache-2.0
"""Flow control of a ModelServer: requests wait while its engines have no room, in bands, and in flows of a band.

Bands either have guaranteed shares (a virtual token counter weighted by share: a share that one band does not use is
lent to the others), or the higher band always goes first. A band with nothing waiting, at its saturation ceiling, or
whose requests find no room is skipped: it never blocks the bands below it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING, Final

from extproc.admission.fairness import BandShares, TenantShares, make_policy
from extproc.admission.flow_queues import ORDERS, Flows
from extproc.admission.saturation import RECHECK_S, EndpointHeadroom, PrefillDecodeMasks, make_ceilings
from extproc.refusals import NoEndpoint, QueueFull, QueueTimeout, Shed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from extproc.admission.flow_queues import FlowKey, QueuedRequest
    from extproc.admission.rate_limits import RequestUsage
    from extproc.api.admission import FlowControl, PriorityBand
    from extproc.endpoints.table import Bools, EndpointTable
    from extproc.refusals import Refusal

# How far to search behind blocked requests for one that fits: flows, and requests in each flow.
_FLOWS_EXAMINED: Final = 8
_REQUESTS_EXAMINED: Final = 4
# Time constant of the dispatch rate, from which retry-after is estimated.
_RATE_WINDOW_S: Final = 10.0
_MAX_RETRY_S: Final = 300.0


class BandState:
    """A priority band: its configuration (``spec``), its flows, and the ``total_bytes`` of its waiting bodies."""

    def __init__(self, index: int, spec: PriorityBand, control: FlowControl) -> None:
        self.index = index
        self.spec = spec
        self.bytes = 0
        self.most_bytes = spec.max_bytes
        fairness, ageing_s = spec.fairness or control.fairness, control.ageing
        of_flows, of_tenants = (
            make_policy(fairness, quantum=control.quantum, window_s=control.window) for _ in range(2)
        )
        tenants = None if fairness == "GlobalStrict" else TenantShares(of_tenants)
        self.flows = Flows(of_flows, ORDERS[spec.order or control.order](ageing_s), ageing_s, tenants)

    @property
    def request_count(self) -> int:
        """The number of waiting requests."""
        return self.flows.requests


class FairQueue:
    """All waiting requests, bounded in number and in bytes, for each band and in total."""

    def __init__(self, control: FlowControl) -> None:
        self._control = control
        specs = sorted(control.bands, key=lambda one: one.priority, reverse=True)
        self.bands = [BandState(index, spec, control) for index, spec in enumerate(specs)]
        self.ceilings = make_ceilings(control, [band.spec.ceiling for band in self.bands])
        self._shares = BandShares([band.spec.share for band in self.bands])
        self._waiting: dict[str, tuple[QueuedRequest, BandState]] = {}
        self._bytes = 0
        self._most_bytes = control.max_bytes
        self._expiries: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._waiting

    @property
    def total_bytes(self) -> int:
        """The size of all waiting bodies."""
        return self._bytes

    def band_of(self, priority: int) -> BandState:
        """The highest band whose priority is at most ``priority``; the lowest band if there is none."""
        return next((band for band in self.bands if priority >= band.spec.priority), self.bands[-1])

    def fullness(self, priority: int) -> float:
        """How full the queue is for a request of this priority, from 0 to 1."""
        band = self.band_of(priority)
        return max(
            len(self) / self._control.max_requests,
            self._bytes / self._most_bytes,
            band.request_count / band.spec.max_requests,
        )

    def enqueue(self, queued: QueuedRequest, *, may_evict: bool = True) -> list[QueuedRequest]:
        """Add a request. Returns the requests of lower bands evicted for it; raises QueueFull if there is no room."""
        band = self.band_of(queued.priority)
        spec = band.spec
        if band.request_count >= spec.max_requests or band.bytes + queued.size_bytes > band.most_bytes:
            raise QueueFull(f"The queue for {spec.name} requests is full; try again later, or ask for less.")
        evicted = self._evict_for(band, queued, may_evict=may_evict)
        if not band.request_count:
            self._shares.activate(band.index, self._bands_waiting())
        band.flows.add(queued)
        band.bytes += queued.size_bytes
        self._bytes += queued.size_bytes
        self._waiting[queued.ticket] = queued, band
        heapq.heappush(self._expiries, (queued.expires_at_s, next(self._numbers), queued.ticket))
        self._sweep_expiries()
        return evicted

    def pop_next(self, capacity: EndpointHeadroom, now: float) -> tuple[QueuedRequest, Bools] | None:
        """Remove and return the next request that can be dispatched, with the endpoints that have room for it."""
        found = self._find(capacity, now)
        if found is not None:
            self.withdraw(found[0].ticket)
            self.ceilings.on_dispatch(self.band_of(found[0].priority).index, capacity.saturation, now)
        return found

    def next_band_opens_at_s(self, now: float) -> float:
        """When a band with waiting requests that is closed for a time opens; infinite if there is none."""
        return self.ceilings.next_open_at_s(self._bands_waiting(), now)

    def withdraw(self, ticket: str) -> QueuedRequest | None:
        """Remove a request from the queue; None if it is not in it."""
        queued, band = self._waiting.pop(ticket, (None, None))
        if queued is None or band is None:
            return None
        band.flows.remove(queued)
        band.bytes -= queued.size_bytes
        self._bytes -= queued.size_bytes
        return queued

    def pop_expired(self, now: float) -> Iterator[QueuedRequest]:
        """Remove the requests whose waiting time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            queued = self.withdraw(heapq.heappop(self._expiries)[2])
            if queued is not None:
                yield queued

    def next_expiry_at_s(self) -> float | None:
        """When the next waiting request expires; None: no request waits."""
        while self._expiries and self._expiries[0][2] not in self._waiting:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _sweep_expiries(self) -> None:
        """Drop the expiries of requests that no longer wait, if they are the majority."""
        if len(self._expiries) > 2 * len(self._waiting) + 1000:
            self._expiries = [entry for entry in self._expiries if entry[2] in self._waiting]
            heapq.heapify(self._expiries)

    def begin_service(self, queued: QueuedRequest, service: float, now: float) -> None:
        """A request is dispatched. ``service``: its expected cost in weighted tokens."""
        band = self.band_of(queued.priority)
        band.flows.begin_service(queued.flow, service / self._weight(queued.flow), now)
        self._shares.charge(band.index, service)

    def end_service(self, queued: QueuedRequest, correction: float, now: float) -> None:
        """A dispatched request has ended. ``correction``: actual minus expected cost in weighted tokens."""
        band = self.band_of(queued.priority)
        band.flows.end_service(queued.flow, correction / self._weight(queued.flow), now)
        self._shares.settle(band.index, correction)

    def _find(self, capacity: EndpointHeadroom, now: float) -> tuple[QueuedRequest, Bools] | None:
        waiting = self._bands_waiting()
        for index in waiting if self._control.sharing == "Strict" else self._shares.order_bands(waiting):
            band = self.bands[index]
            if self.ceilings.is_open(index, capacity.saturation, now):
                found = self._find_in(band, capacity, now)
                if found is not None:
                    return found
        return None

    def _find_in(self, band: BandState, capacity: EndpointHeadroom, now: float) -> tuple[QueuedRequest, Bools] | None:
        """The next request of a band that finds room.

        Requests behind one that finds none may go if they do not use the endpoint set aside for it.
        """
        candidates = band.flows.waiting_rows
        for _ in range(_FLOWS_EXAMINED):
            if not capacity.open.any() or not candidates.any():
                return None
            row, match = band.flows.choose_flow(candidates, capacity.open, now)
            first = itertools.islice(band.flows.ordered_requests(row), _REQUESTS_EXAMINED)
            for queued in first if match is None else (match,):
                rows = capacity.rows_with_headroom_for(queued)
                if rows is not None:
                    return queued, rows
                capacity.reserve_for(queued)
            candidates = candidates.copy()
            candidates[row] = False
        return None

    def _evict_for(self, band: BandState, queued: QueuedRequest, *, may_evict: bool) -> list[QueuedRequest]:
        evicted: list[QueuedRequest] = []
        while not self._fits(queued):
            lower = next((one for one in reversed(self.bands) if one.request_count), band)
            if not may_evict or lower is band or lower.spec.priority > band.spec.priority:
                for one in evicted:
                    self.enqueue(one)
                raise QueueFull("The queue is full; try again later, or ask for less.")
            gone = self.withdraw(lower.flows.eviction_candidate().ticket)
            if gone is not None:
                evicted.append(gone)
        return evicted

    def _fits(self, queued: QueuedRequest) -> bool:
        return len(self) < self._control.max_requests and self._bytes + queued.size_bytes <= self._most_bytes

    def _bands_waiting(self) -> list[int]:
        """The indices of bands with waiting requests, highest first."""
        return [band.index for band in self.bands if band.flows.requests]

    def _weight(self, flow: FlowKey) -> float:
        return self._control.weights.get(flow.tenant, 1.0)


class FlowControlGate:
    """Decides when each request is dispatched."""

    def __init__(
        self,
        control: FlowControl,
        table: EndpointTable,
        *,
        stages: Callable[[], PrefillDecodeMasks | None],
        rng: random.Random,
    ) -> None:
        """``stages``: returns which endpoints prefill and which decode; None if each does both."""
        self.control = control
        self.queue = FairQueue(control)
        self.saturation = 0.0
        self.stale_endpoints = 0
        self._table = table
        self._stages = stages
        self._rng = rng
        self._limits = control.saturation.limits()
        self._timeout_s = control.timeout
        self._no_endpoint_timeout_s = control.no_endpoint_timeout
        self._latest: EndpointHeadroom | None = None
        self._rate = 0.0
        self._rate_at_s = 0.0

    @property
    def needs_engine(self) -> bool:
        """Whether requests wait and there is no endpoint at all: the signal to start an engine."""
        return len(self.queue) > 0 and not len(self._table)

    def max_queue_wait_s(self) -> float:
        """How long a request that arrives now may wait: for room, or, without any endpoint, for the first one."""
        return self._timeout_s if len(self._table) else self._no_endpoint_timeout_s

    def rows_for_immediate_dispatch(self, queued: QueuedRequest, now: float) -> Bools | None:
        """The endpoints that can take the request at once; None: it must wait. Raises Shed."""
        capacity = self._capacity(now)
        self._shed(queued, capacity, now)
        band, ceilings = self.queue.band_of(queued.priority).index, self.queue.ceilings
        ceilings.on_arrival(band)
        if len(self.queue) or not ceilings.is_open(band, capacity.saturation, now):
            return None
        rows = capacity.rows_with_headroom_for(queued)
        if rows is not None:
            ceilings.on_dispatch(band, capacity.saturation, now)
        return rows

    def enqueue(self, queued: QueuedRequest, *, may_evict: bool = True) -> list[QueuedRequest]:
        """Queue the request. Returns the requests of lower priority evicted for it; raises QueueFull."""
        try:
            return self.queue.enqueue(queued, may_evict=may_evict)
        except QueueFull as full:
            full.retry_after_s = self.retry_after_s(queued.arrived_at_s)
            raise

    def pop_next(self, now: float) -> tuple[QueuedRequest, Bools] | None:
        """Take the next request that can be dispatched, and the endpoints with room for it; None: no request can."""
        return self.queue.pop_next(self._capacity(now), now) if len(self.queue) else None

    def withdraw(self, ticket: str) -> QueuedRequest | None:
        """Remove a waiting request whose client has disconnected; None if it did not wait."""
        return self.queue.withdraw(ticket)

    def remove_expired(self, now: float) -> Iterator[tuple[QueuedRequest, Refusal]]:
        """Remove the requests that have waited too long, each with the error for its client."""
        for queued in self.queue.pop_expired(now):
            yield queued, self._timeout_refusal(queued, now)

    def eviction_refusal(self, now: float) -> QueueFull:
        """The error for an evicted request."""
        message = "The queue is full, and the place was given to a request of higher priority; try again later."
        return QueueFull(message, retry_after_s=self.retry_after_s(now))

    def on_dispatch(self, queued: QueuedRequest, service: float, now: float) -> None:
        """A request is sent to an engine. ``service``: its expected cost in weighted tokens."""
        self.queue.begin_service(queued, service, now)
        self._rate = self._decayed(now) + 1 / _RATE_WINDOW_S
        self._rate_at_s = now

    def on_request_ended(self, queued: QueuedRequest, correction: float, *, tokens: float, now: float) -> None:
        """A dispatched request has ended.

        ``correction``: actual minus charged cost in weighted tokens. ``tokens``: of its prompt and answer,
        unweighted.
        """
        self.queue.end_service(queued, correction, now)
        self.queue.band_of(queued.priority).flows.order.on_request_ended(queued, tokens, now)

    def wake_at_s(self, now: float) -> float | None:
        """When to call ``pop_next`` and ``expired`` again if no event comes first; None: no request waits."""
        expiry_s = self.queue.next_expiry_at_s()
        if expiry_s is None:
            return None
        # the latest capacity is current: any dispatch since would have replaced it
        opens_s = (
            self._latest.next_headroom_at_s() if self._latest is not None and len(self._table) else now + RECHECK_S
        )
        return min(expiry_s, opens_s, self.queue.next_band_opens_at_s(now))

    def retry_after_s(self, now: float) -> int:
        """Seconds until the queue of now is dispatched, at the recent rate."""
        rate = self._decayed(now)
        seconds = len(self.queue) / rate if rate > 0 else _RATE_WINDOW_S
        return math.ceil(min(_MAX_RETRY_S, max(1.0, seconds)))

    def expected_wait_s(self, now: float) -> float:
        """What a request that comes now would wait for its turn, at the recent rate; 0 if an engine has capacity."""
        self.update_saturation(now)
        if not len(self.queue) and self.saturation < 1:
            return 0.0
        rate = self._decayed(now)
        return min(_MAX_RETRY_S, (len(self.queue) + 1) / rate) if rate > 0 else _RATE_WINDOW_S

    def update_saturation(self, now: float) -> None:
        """Bring ``saturation`` and ``stale_endpoints`` up to date: without requests, nothing else does."""
        self._capacity(now)

    def _capacity(self, now: float) -> EndpointHeadroom:
        capacity = self._latest = EndpointHeadroom(self._table, self._limits, now, self._stages())
        self.saturation, self.stale_endpoints = capacity.saturation, capacity.stale_endpoints
        return capacity

    def _shed(self, queued: QueuedRequest, capacity: EndpointHeadroom, now: float) -> None:
        """Raise Shed with a probability that rises from 0 at ``shed_from`` to 1 when the queue is full."""
        if queued.priority >= 0 or not capacity.has_endpoints:
            return
        fullness = capacity.saturation if capacity.saturation < 1 else 1 + self.queue.fullness(queued.priority)
        if self._rng.random() < (fullness - self.control.shed_from) / (2 - self.control.shed_from):
            message = "The engines are busy with more important requests; try again later."
            raise Shed(message, retry_after_s=self.retry_after_s(now))

    def _timeout_refusal(self, queued: QueuedRequest, now: float) -> Refusal:
        waited = f"{now - queued.arrived_at_s:.0f} s"
        if not len(self._table):
            message = f"No engine of this model became ready within {waited}; try again later."
            return NoEndpoint(message, retry_after_s=math.ceil(_RATE_WINDOW_S))
        message = f"The engines had no room for this request within {waited}; try again later."
        return QueueTimeout(message, retry_after_s=self.retry_after_s(now))

    def _decayed(self, now: float) -> float:
        return self._rate * math.exp(-max(0.0, now - self._rate_at_s) / _RATE_WINDOW_S)


def weighted_tokens(control: FlowControl, usage: RequestUsage, cached_tokens: float) -> float:
    """The cost of a request in weighted tokens. ``cached_tokens``: input tokens that came from the cache."""
    cached = min(cached_tokens, usage.input_tokens)
    uncached = usage.input_tokens - cached
    return (
        control.input_weight * uncached + control.cached_weight * cached + control.output_weight * usage.output_tokens
    )
