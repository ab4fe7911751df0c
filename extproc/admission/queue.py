# SPDX-License-Identifier: Apache-2.0
"""The queue of one ModelServer: priority bands, flows in a band, an order in a flow.

Bands either have guaranteed shares (a virtual token counter weighted by share: a share that one band does not use is
lent to the others), or the higher band always goes first. A band with nothing waiting, at its saturation ceiling, or
whose requests find no room is skipped: it never blocks the bands below it.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Final

from extproc.admission.ceilings import ceilings_of
from extproc.admission.fairness import BandShares, make_policy
from extproc.admission.flows import Flows
from extproc.admission.order import ORDERS
from extproc.admission.tenants import TenantShares
from extproc.errors import QueueFull

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.admission.queued_request import FlowKey, QueuedRequest
    from extproc.admission.saturation import Capacity
    from extproc.api.admission import Band, FlowControl
    from extproc.endpoints.table import Bools

# How far to search behind blocked requests for one that fits: flows, and requests in each flow.
_FLOWS_EXAMINED: Final = 8
_REQUESTS_EXAMINED: Final = 4


class BandState:
    """A priority band: its configuration (``spec``), its flows, and the ``bytes`` of its waiting bodies."""

    def __init__(self, index: int, spec: Band, control: FlowControl) -> None:
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
    def requests(self) -> int:
        """The number of waiting requests."""
        return self.flows.requests


class FairQueue:
    """All waiting requests, bounded in number and in bytes, for each band and in total."""

    def __init__(self, control: FlowControl) -> None:
        self._control = control
        specs = sorted(control.bands, key=lambda one: one.priority, reverse=True)
        self.bands = [BandState(index, spec, control) for index, spec in enumerate(specs)]
        self.ceilings = ceilings_of(control, [band.spec.ceiling for band in self.bands])
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
    def bytes(self) -> int:
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
            band.requests / band.spec.max_requests,
        )

    def takes(self, queued: QueuedRequest) -> bool:
        """Whether there is room for it and nobody has to give way."""
        band = self.band_of(queued.priority)
        is_full = band.requests >= band.spec.max_requests or band.bytes + queued.size_bytes > band.most_bytes
        return not is_full and self._has_room(queued)

    def enqueue(self, queued: QueuedRequest) -> list[QueuedRequest]:
        """Add a request. Returns the requests of lower bands evicted for it; raises QueueFull if there is no room."""
        band = self.band_of(queued.priority)
        spec = band.spec
        if band.requests >= spec.max_requests or band.bytes + queued.size_bytes > band.most_bytes:
            raise QueueFull(f"The queue for {spec.name} requests is full; try again later, or ask for less.")
        evicted = self._make_room(band, queued)
        if not band.requests:
            self._shares.activate(band.index, self._bands_waiting())
        band.flows.add(queued)
        band.bytes += queued.size_bytes
        self._bytes += queued.size_bytes
        self._waiting[queued.ticket] = queued, band
        heapq.heappush(self._expiries, (queued.expires_at_s, next(self._numbers), queued.ticket))
        self._sweep_expiries()
        return evicted

    def next(self, capacity: Capacity, now: float) -> tuple[QueuedRequest, Bools] | None:
        """Remove and return the next request that can be dispatched, with the endpoints that have room for it."""
        found = self._find(capacity, now)
        if found is not None:
            self.withdraw(found[0].ticket)
            self.ceilings.sent(self.band_of(found[0].priority).index, capacity.saturation, now)
        return found

    def opens_at_s(self, now: float) -> float:
        """When a band with waiting requests that is closed for a time opens; infinite if there is none."""
        return self.ceilings.opens_at_s(self._bands_waiting(), now)

    def withdraw(self, ticket: str) -> QueuedRequest | None:
        """Remove a request from the queue; None if it is not in it."""
        queued, band = self._waiting.pop(ticket, (None, None))
        if queued is None or band is None:
            return None
        band.flows.remove(queued)
        band.bytes -= queued.size_bytes
        self._bytes -= queued.size_bytes
        return queued

    def expire(self, now: float) -> Iterator[QueuedRequest]:
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

    def _find(self, capacity: Capacity, now: float) -> tuple[QueuedRequest, Bools] | None:
        waiting = self._bands_waiting()
        for index in waiting if self._control.sharing == "Strict" else self._shares.order(waiting):
            band = self.bands[index]
            if self.ceilings.is_open(index, capacity.saturation, now):
                found = self._find_in(band, capacity, now)
                if found is not None:
                    return found
        return None

    def _find_in(self, band: BandState, capacity: Capacity, now: float) -> tuple[QueuedRequest, Bools] | None:
        """The next request of a band that finds room.

        Requests behind one that finds none may go if they do not use the endpoint set aside for it.
        """
        candidates = band.flows.waiting
        for _ in range(_FLOWS_EXAMINED):
            if not capacity.open.any() or not candidates.any():
                return None
            row, match = band.flows.choose(candidates, capacity.open, now)
            first = itertools.islice(band.flows.in_order(row), _REQUESTS_EXAMINED)
            for queued in first if match is None else (match,):
                rows = capacity.rows_for(queued)
                if rows is not None:
                    return queued, rows
                capacity.set_aside(queued)
            candidates = candidates.copy()
            candidates[row] = False
        return None

    def _make_room(self, band: BandState, queued: QueuedRequest) -> list[QueuedRequest]:
        evicted: list[QueuedRequest] = []
        while not self._has_room(queued):
            lower = next((one for one in reversed(self.bands) if one.requests), band)
            if lower is band or lower.spec.priority > band.spec.priority:
                for one in evicted:
                    self.enqueue(one)
                raise QueueFull("The queue is full; try again later, or ask for less.")
            gone = self.withdraw(lower.flows.newest_of_largest().ticket)
            if gone is not None:
                evicted.append(gone)
        return evicted

    def _has_room(self, queued: QueuedRequest) -> bool:
        return len(self) < self._control.max_requests and self._bytes + queued.size_bytes <= self._most_bytes

    def _bands_waiting(self) -> list[int]:
        """The indices of bands with waiting requests, highest first."""
        return [band.index for band in self.bands if band.flows.requests]

    def _weight(self, flow: FlowKey) -> float:
        return self._control.weights.get(flow.tenant, 1.0)
