# SPDX-License-Identifier: Apache-2.0
"""Flow control of a ModelServer: requests wait while its engines have no room."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from extproc.admission.queue import FairQueue
from extproc.admission.saturation import RECHECK_S, Capacity, Stages
from extproc.errors import NoEndpoint, QueueFull, QueueTimeout, Shed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from extproc.admission.limits import Usage
    from extproc.admission.queued_request import QueuedRequest
    from extproc.api.admission import FlowControl
    from extproc.endpoints.table import Bools, EndpointTable
    from extproc.errors import Refusal

# Time constant of the dispatch rate, from which retry-after is estimated.
_RATE_WINDOW_S: Final = 10.0
_MAX_RETRY_S: Final = 300.0


class Gate:
    """Decides when each request is dispatched."""

    def __init__(
        self,
        control: FlowControl,
        table: EndpointTable,
        *,
        stages: Callable[[], Stages | None],
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
        self._latest: Capacity | None = None
        self._rate = 0.0
        self._rate_at_s = 0.0

    @property
    def wants_engines(self) -> bool:
        """Whether requests wait and there is no endpoint at all: the signal to start an engine."""
        return len(self.queue) > 0 and not len(self._table)

    def longest_wait_s(self) -> float:
        """How long a request that arrives now may wait: for room, or, without any endpoint, for the first one."""
        return self._timeout_s if len(self._table) else self._no_endpoint_timeout_s

    def pass_through(self, queued: QueuedRequest, now: float) -> Bools | None:
        """The endpoints that can take the request at once; None: it must wait. Raises Shed."""
        capacity = self._capacity(now)
        self._shed(queued, capacity, now)
        band, ceilings = self.queue.band_of(queued.priority).index, self.queue.ceilings
        ceilings.asked(band)
        if len(self.queue) or not ceilings.is_open(band, capacity.saturation, now):
            return None
        rows = capacity.rows_for(queued)
        if rows is not None:
            ceilings.sent(band, capacity.saturation, now)
        return rows

    def enqueue(self, queued: QueuedRequest) -> list[QueuedRequest]:
        """Queue the request. Returns the requests of lower priority evicted for it; raises QueueFull."""
        try:
            return self.queue.enqueue(queued)
        except QueueFull as full:
            full.retry_after_s = self.retry_after_s(queued.arrived_at_s)
            raise

    def next(self, now: float) -> tuple[QueuedRequest, Bools] | None:
        """Take the next request that can be dispatched, and the endpoints with room for it; None: no request can."""
        return self.queue.next(self._capacity(now), now) if len(self.queue) else None

    def withdraw(self, ticket: str) -> QueuedRequest | None:
        """Remove a waiting request whose client has disconnected; None if it did not wait."""
        return self.queue.withdraw(ticket)

    def expired(self, now: float) -> Iterator[tuple[QueuedRequest, Refusal]]:
        """Remove the requests that have waited too long, each with the error for its client."""
        for queued in self.queue.expire(now):
            yield queued, self._timeout_refusal(queued, now)

    def eviction_refusal(self, now: float) -> QueueFull:
        """The error for an evicted request."""
        message = "The queue is full, and the place was given to a request of higher priority; try again later."
        return QueueFull(message, retry_after_s=self.retry_after_s(now))

    def dispatched(self, queued: QueuedRequest, service: float, now: float) -> None:
        """A request is sent to an engine. ``service``: its expected cost in weighted tokens."""
        self.queue.begin_service(queued, service, now)
        self._rate = self._decayed(now) + 1 / _RATE_WINDOW_S
        self._rate_at_s = now

    def ended(self, queued: QueuedRequest, correction: float, *, tokens: float, now: float) -> None:
        """A dispatched request has ended.

        ``correction``: actual minus charged cost in weighted tokens. ``tokens``: of its prompt and answer,
        unweighted.
        """
        self.queue.end_service(queued, correction, now)
        self.queue.band_of(queued.priority).flows.order.served(queued, tokens, now)

    def service(self, usage: Usage, cached_tokens: float) -> float:
        """The cost of a request in weighted tokens. ``cached_tokens``: input tokens that came from the cache."""
        control = self.control
        cached = min(cached_tokens, usage.input_tokens)
        uncached = usage.input_tokens - cached
        return (
            control.input_weight * uncached
            + control.cached_weight * cached
            + control.output_weight * usage.output_tokens
        )

    def wake_at_s(self, now: float) -> float | None:
        """When to call ``next`` and ``expired`` again if no event comes first; None: no request waits."""
        expiry_s = self.queue.next_expiry_at_s()
        if expiry_s is None:
            return None
        # the latest capacity is current: any dispatch since would have replaced it
        opens_s = self._latest.opens_at_s() if self._latest is not None and len(self._table) else now + RECHECK_S
        return min(expiry_s, opens_s, self.queue.opens_at_s(now))

    def retry_after_s(self, now: float) -> int:
        """Seconds until the queue of now is dispatched, at the recent rate."""
        rate = self._decayed(now)
        seconds = len(self.queue) / rate if rate > 0 else _RATE_WINDOW_S
        return math.ceil(min(_MAX_RETRY_S, max(1.0, seconds)))

    def _capacity(self, now: float) -> Capacity:
        capacity = self._latest = Capacity(self._table, self._limits, now, self._stages())
        self.saturation, self.stale_endpoints = capacity.saturation, capacity.stale_endpoints
        return capacity

    def _shed(self, queued: QueuedRequest, capacity: Capacity, now: float) -> None:
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
