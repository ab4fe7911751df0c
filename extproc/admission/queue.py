"""Requests that wait for the engines of one ModelServer: bands by priority, flows in a band, an order in a flow.

Between bands: guaranteed shares, by a virtual token counter whose weights are the shares, so that what one band leaves the
others borrow; or strictly the higher first. A band that has nothing waiting, whose ceiling is reached or whose requests find
no room is passed over: it never holds up those below it.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Final

from extproc.admission.fairness import BandShares, make_policy
from extproc.admission.flows import Flows
from extproc.admission.order import ORDERS
from extproc.errors import QueueFull

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.admission.queued_request import FlowKey, QueuedRequest
    from extproc.admission.saturation import Room
    from extproc.config.admission import Band, FlowControl
    from extproc.endpoints.table import Bools

# How far behind blocked requests to look for one that may pass them: flows, and requests of a flow.
_FLOWS_LOOKED_AT: Final = 8
_REQUESTS_LOOKED_AT: Final = 4


class BandState:
    """One band with its flows."""

    def __init__(self, index: int, spec: Band, control: FlowControl) -> None:
        self.index = index
        self.spec = spec
        self.bytes = 0
        self.most_bytes = spec.max_bytes
        policy = make_policy(spec.fairness or control.fairness, quantum=control.quantum, window_s=control.window)
        ageing_s = control.ageing
        self.flows = Flows(policy, ORDERS[spec.order or control.order](ageing_s), ageing_s)

    @property
    def requests(self) -> int:
        """How many wait."""
        return self.flows.requests


class FairQueue:
    """Who waits, and who goes next. Bounded in requests and bytes, by band and in all."""

    def __init__(self, control: FlowControl) -> None:
        self._control = control
        specs = sorted(control.bands, key=lambda one: one.priority, reverse=True)
        self.bands = [BandState(index, spec, control) for index, spec in enumerate(specs)]
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
        """Of all bodies that wait."""
        return self._bytes

    def band_of(self, priority: int) -> BandState:
        """The highest band that the priority reaches; below all of them, the lowest."""
        return next((band for band in self.bands if priority >= band.spec.priority), self.bands[-1])

    def fill(self, priority: int) -> float:
        """How full it is for a request of this priority, 0 to 1."""
        band = self.band_of(priority)
        return max(
            len(self) / self._control.max_requests,
            self._bytes / self._most_bytes,
            band.requests / band.spec.max_requests,
        )

    def enter(self, queued: QueuedRequest) -> list[QueuedRequest]:
        """It waits. Returns those of lower bands that had to give way; raises QueueFull if it finds no place itself."""
        band = self.band_of(queued.priority)
        spec = band.spec
        if band.requests >= spec.max_requests or band.bytes + queued.size_bytes > band.most_bytes:
            raise QueueFull(f"The queue for {spec.name} requests is full; try again later, or ask for less.")
        evicted = self._make_place(band, queued)
        if not band.requests:
            self._shares.begin(band.index, self._bands_waiting())
        band.flows.add(queued)
        band.bytes += queued.size_bytes
        self._bytes += queued.size_bytes
        self._waiting[queued.ticket] = queued, band
        heapq.heappush(self._expiries, (queued.expires_s, next(self._numbers), queued.ticket))
        self._sweep_expiries()
        return evicted

    def next(self, room: Room, now: float) -> tuple[QueuedRequest, Bools] | None:
        """Who goes now, and the endpoints that have room for it; it waits no more."""
        found = self._find(room, now)
        if found is not None:
            self.leave(found[0].ticket)
        return found

    def leave(self, ticket: str) -> QueuedRequest | None:
        """It waits no more, for whatever reason; None if it did not."""
        queued, band = self._waiting.pop(ticket, (None, None))
        if queued is None or band is None:
            return None
        band.flows.remove(queued)
        band.bytes -= queued.size_bytes
        self._bytes -= queued.size_bytes
        return queued

    def expire(self, now: float) -> Iterator[QueuedRequest]:
        """Those that have waited as long as they may."""
        while self._expiries and self._expiries[0][0] <= now:
            queued = self.leave(heapq.heappop(self._expiries)[2])
            if queued is not None:
                yield queued

    def next_expiry_s(self) -> float | None:
        """When the first of those that wait will have waited too long."""
        while self._expiries and self._expiries[0][2] not in self._waiting:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _sweep_expiries(self) -> None:
        """Those that have gone leave theirs behind; let go of them when they are the most."""
        if len(self._expiries) > 2 * len(self._waiting) + 1000:
            self._expiries = [entry for entry in self._expiries if entry[2] in self._waiting]
            heapq.heapify(self._expiries)

    def begin_service(self, queued: QueuedRequest, service: float, now: float) -> None:
        """It goes, and is expected to take so much of the engines, in weighted tokens."""
        band = self.band_of(queued.priority)
        band.flows.begin_service(queued.flow, service / self._weight(queued.flow), now)
        self._shares.charge(band.index, service)

    def end_service(self, queued: QueuedRequest, correction: float, now: float) -> None:
        """It is over, and took so much more than was expected, or less."""
        band = self.band_of(queued.priority)
        band.flows.end_service(queued.flow, correction / self._weight(queued.flow), now)
        self._shares.correct(band.index, correction)

    def _find(self, room: Room, now: float) -> tuple[QueuedRequest, Bools] | None:
        waiting = self._bands_waiting()
        for index in waiting if self._control.sharing == "Strict" else self._shares.order(waiting):
            band = self.bands[index]
            if room.saturation < band.spec.ceiling:
                found = self._find_in(band, room, now)
                if found is not None:
                    return found
        return None

    def _find_in(self, band: BandState, room: Room, now: float) -> tuple[QueuedRequest, Bools] | None:
        """The head of the flow whose turn it is, or, behind a head that finds no room, one that takes nothing from it."""
        among = band.flows.waiting
        for _ in range(_FLOWS_LOOKED_AT):
            if not room.open.any() or not among.any():
                return None
            row, near = band.flows.choose(among, room.open, now)
            first = itertools.islice(band.flows.in_order(row), _REQUESTS_LOOKED_AT)
            for queued in first if near is None else (near,):
                rows = room.rows_for(queued)
                if rows is not None:
                    return queued, rows
                room.reserve(queued)
            among = among.copy()
            among[row] = False
        return None

    def _make_place(self, band: BandState, queued: QueuedRequest) -> list[QueuedRequest]:
        evicted: list[QueuedRequest] = []
        while not self._has_place(queued):
            lower = next((one for one in reversed(self.bands) if one.requests), band)
            if lower is band or lower.spec.priority > band.spec.priority:
                for one in evicted:
                    self.enter(one)
                raise QueueFull("The queue is full; try again later, or ask for less.")
            gone = self.leave(lower.flows.newest_of_largest().ticket)
            if gone is not None:
                evicted.append(gone)
        return evicted

    def _has_place(self, queued: QueuedRequest) -> bool:
        return len(self) < self._control.max_requests and self._bytes + queued.size_bytes <= self._most_bytes

    def _bands_waiting(self) -> list[int]:
        """From the highest down."""
        return [band.index for band in self.bands if band.flows.requests]

    def _weight(self, flow: FlowKey) -> float:
        return self._control.weights.get(flow.tenant, 1.0)
