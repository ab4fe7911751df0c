"""The way to the engines of one ModelServer: a request goes at once while they have room, and waits its turn when they have not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from extproc.admission.queue import FairQueue
from extproc.admission.saturation import LOOK_AGAIN_S, Room, Stages
from extproc.errors import NoEndpoint, QueueFull, QueueTimeout, Shed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from extproc.admission.limits import Usage
    from extproc.admission.queued_request import QueuedRequest
    from extproc.config.admission import FlowControl
    from extproc.endpoints.table import Bools, EndpointTable
    from extproc.errors import Refusal

# Over which the rate of dispatch is measured, for who asks when to come back.
_RATE_WINDOW_S: Final = 10.0
_LONGEST_RETRY_S: Final = 300.0


class Gate:
    """Decides who goes when. ``stages``: the pool's roles, if it has any."""

    def __init__(
        self,
        control: FlowControl,
        table: EndpointTable,
        *,
        stages: Callable[[], Stages | None],
        rng: random.Random,
    ) -> None:
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
        self._latest: Room | None = None
        self._rate = 0.0
        self._rate_at_s = 0.0

    @property
    def wants_engines(self) -> bool:
        """Requests wait, and there is no engine at all: the signal to start one."""
        return len(self.queue) > 0 and not len(self._table)

    def longest_wait_s(self) -> float:
        """How long a request that comes now may wait: for an engine to have room, or for a first engine."""
        return self._timeout_s if len(self._table) else self._no_endpoint_timeout_s

    def pass_through(self, queued: QueuedRequest, now: float) -> Bools | None:
        """The endpoints that may take it at once; None: it has to wait. Raises Shed."""
        room = self._room(now)
        self._shed(queued, room, now)
        if len(self.queue):
            return None
        ceiling = self.queue.band_of(queued.priority).spec.ceiling
        return room.rows_for(queued) if room.saturation < ceiling else None

    def enter(self, queued: QueuedRequest) -> list[QueuedRequest]:
        """It waits. Returns those that gave way to it; raises QueueFull."""
        try:
            return self.queue.enter(queued)
        except QueueFull as full:
            full.retry_after_s = self.retry_after_s(queued.arrived_s)
            raise

    def next(self, now: float) -> tuple[QueuedRequest, Bools] | None:
        """Who goes now, and where there is room for it."""
        return self.queue.next(self._room(now), now) if len(self.queue) else None

    def leave(self, ticket: str) -> QueuedRequest | None:
        """Its client has gone."""
        return self.queue.leave(ticket)

    def expired(self, now: float) -> Iterator[tuple[QueuedRequest, Refusal]]:
        """Those that have waited as long as they may, and what they are told."""
        for queued in self.queue.expire(now):
            yield queued, self._too_late(queued, now)

    def gave_way(self, now: float) -> QueueFull:
        """What those are told who had to."""
        message = "The queue is full, and the place was given to a request of higher priority; try again later."
        return QueueFull(message, retry_after_s=self.retry_after_s(now))

    def sent(self, queued: QueuedRequest, service: float, now: float) -> None:
        """It goes to an engine; ``service``: what that is expected to cost, in weighted tokens."""
        self.queue.begin_service(queued, service, now)
        self._rate = self._decayed(now) + 1 / _RATE_WINDOW_S
        self._rate_at_s = now

    def over(self, queued: QueuedRequest, correction: float, *, tokens: float, now: float) -> None:
        """It has ended, after so many tokens; ``correction``: of what it was charged."""
        self.queue.end_service(queued, correction, now)
        self.queue.band_of(queued.priority).flows.order.served(queued, tokens, now)

    def service(self, usage: Usage, cached_tokens: float) -> float:
        """What tokens cost, weighted."""
        control = self.control
        cached = min(cached_tokens, usage.input_tokens)
        fresh = usage.input_tokens - cached
        return (
            control.input_weight * fresh + control.cached_weight * cached + control.output_weight * usage.output_tokens
        )

    def look_again_s(self, now: float) -> float | None:
        """When something may change by itself; None: nobody waits."""
        expiry_s = self.queue.next_expiry_s()
        if expiry_s is None:
            return None
        # nobody has gone since the room was last looked at: then it would have been looked at again
        opens_s = self._latest.opens_at_s() if self._latest is not None and len(self._table) else now + LOOK_AGAIN_S
        return min(expiry_s, opens_s)

    def retry_after_s(self, now: float) -> int:
        """Until those that wait now will have gone, at the rate of the last seconds."""
        rate = self._decayed(now)
        seconds = len(self.queue) / rate if rate > 0 else _RATE_WINDOW_S
        return math.ceil(min(_LONGEST_RETRY_S, max(1.0, seconds)))

    def _room(self, now: float) -> Room:
        room = self._latest = Room(self._table, self._limits, now, self._stages())
        self.saturation, self.stale_endpoints = room.saturation, room.stale_endpoints
        return room

    def _shed(self, queued: QueuedRequest, room: Room, now: float) -> None:
        """By chance, rising from none at ``shed_from`` to all when the queue is full."""
        if queued.priority >= 0 or not room.has_endpoints:
            return
        fullness = room.saturation if room.saturation < 1 else 1 + self.queue.fill(queued.priority)
        if self._rng.random() < (fullness - self.control.shed_from) / (2 - self.control.shed_from):
            message = "The engines are busy with more important requests; try again later."
            raise Shed(message, retry_after_s=self.retry_after_s(now))

    def _too_late(self, queued: QueuedRequest, now: float) -> Refusal:
        waited = f"{now - queued.arrived_s:.0f} s"
        if not len(self._table):
            message = f"No engine of this model became ready within {waited}; try again later."
            return NoEndpoint(message, retry_after_s=math.ceil(_RATE_WINDOW_S))
        message = f"The engines had no room for this request within {waited}; try again later."
        return QueueTimeout(message, retry_after_s=self.retry_after_s(now))

    def _decayed(self, now: float) -> float:
        return self._rate * math.exp(-max(0.0, now - self._rate_at_s) / _RATE_WINDOW_S)
