# SPDX-License-Identifier: Apache-2.0
"""What queues and limits do, by server, band and tenant, as Prometheus metrics.

Tenants are named by those that a trusted hop has authenticated; beyond so many, the rest are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.metrics.collectors import Counters, DeferredHistogram, DeferredHistograms
from extproc.metrics.exposition import Family, PiecewiseCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.admission.gate import Gate
    from extproc.admission.queued_request import QueuedRequest
    from extproc.core.awaiting import ZeroDemand
    from extproc.core.effects import Decision, Left, Refused, Settled

MOST_TENANTS: Final = 500
OTHERS: Final = "(others)"
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REDIS_BUCKETS: Final = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 1e-2, 0.05, 0.25)


_BANDS: Final = ("server", "band")
_WAITING: Final = Family("attache_queue_waiting", "Requests that wait for an engine.", _BANDS)
_HELD: Final = Family("attache_queue_bytes", "Bytes of requests that wait.", _BANDS)
_FLOWS: Final = Family("attache_queue_flows", "Flows that are remembered.", _BANDS)
_FULL: Final = Family("attache_saturation", "How full the engines are, 0 to 1, when last looked at.", ("server",))
_STALE: Final = Family("attache_stale_endpoints", "Engines judged by our own counts, for want of reports.", ("server",))
_WANTED: Final = Family(
    "attache_wanted_engines", "Requests that wait while there is no engine: start one.", ("server",)
)


class AdmissionMetrics:
    """Series of one extproc process. ``gates``: by ModelServer. ``at_zero``: those that wait before them for
    engines.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        gates: Callable[[], Mapping[str, Gate]],
        at_zero: Callable[[], Mapping[str, ZeroDemand]],
    ) -> None:
        self._gates = gates
        self._tenants: set[str] = set()
        self._waits = DeferredHistograms(
            "attache_queue_wait_seconds", "From arrival to dispatch.", _WAIT_BUCKETS, ["server", "band"], registry
        )
        self._ends = Counters(
            "attache_queue_waits", "Waits by how they ended.", ["server", "band", "outcome"], registry
        )
        self._requests = Counters(
            "attache_tenant_requests", "Requests by tenant and what was decided.", ["tenant", "outcome"], registry
        )
        self._service = Counters(
            "attache_tenant_service_tokens", "Weighted tokens that engines gave.", ["server", "tenant"], registry
        )
        self._tenant_wait = Counters(
            "attache_tenant_wait_seconds", "Seconds that requests were held.", ["server", "tenant"], registry
        )
        self._redis = Counters("attache_limits_redis", "Questions to Redis about limits.", ["result"], registry)
        self._redis_seconds = DeferredHistogram(
            "attache_limits_redis_seconds", "Round trips to Redis for limits.", _REDIS_BUCKETS, registry
        )
        registry.register(_QueueSeries(gates, at_zero))

    def sent(self, decision: Decision, queued: QueuedRequest) -> None:
        """A request goes to an engine, at once or after a wait."""
        tenant = self._tenant(queued.flow.tenant)
        band = self._band(decision.server, queued)
        self._requests.add(tenant, "picked")
        self._waits.observe(decision.waited_s, decision.server, band)
        if decision.waited_s:
            self._tenant_wait.add_amount(decision.waited_s, decision.server, tenant)
        if decision.was_held:
            self._ends.add(decision.server, band, "sent")

    def refused(self, refused: Refused) -> None:
        """Limits, the queue or the pool did not take a request."""
        arrival, outcome = refused.arrival, refused.refusal.outcome
        self._requests.add(self._tenant(arrival.tenant), outcome)
        if refused.was_held and refused.queued is not None:
            self._ends.add(arrival.pool.name, self._band(arrival.pool.name, refused.queued), outcome)

    def left(self, left: Left) -> None:
        """A client did not wait for the end."""
        self._ends.add(left.server, self._band(left.server, left.queued), "left")

    def settled(self, settled: Settled) -> None:
        """What a request cost is known."""
        if settled.queued is not None and settled.service:
            self._service.add_amount(settled.service, settled.server, self._tenant(settled.queued.flow.tenant))

    def asked_redis(self, result: str, seconds: float) -> None:
        """Limits were to be granted by Redis."""
        self._redis.add(result)
        if seconds:
            self._redis_seconds.observe(seconds)

    def _tenant(self, name: str) -> str:
        if name not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                return OTHERS
            self._tenants.add(name)
        return name

    def _band(self, server: str, queued: QueuedRequest) -> str:
        gate = self._gates().get(server)
        return "" if gate is None else gate.queue.band_of(queued.priority).spec.name


class _QueueSeries(PiecewiseCollector):
    """Read from the queues when Prometheus asks."""

    families = (_WAITING, _HELD, _FLOWS, _FULL, _STALE, _WANTED)

    def __init__(
        self, gates: Callable[[], Mapping[str, Gate]], at_zero: Callable[[], Mapping[str, ZeroDemand]]
    ) -> None:
        self._gates = gates
        self._at_zero = at_zero

    def pieces(self) -> Iterator[str]:
        """By server, and by band."""
        gates = list(self._gates().items())
        bands = [(name, band) for name, gate in gates for band in gate.queue.bands]
        yield from _WAITING.pieces(_WAITING.line((name, band.spec.name), band.requests) for name, band in bands)
        yield from _HELD.pieces(_HELD.line((name, band.spec.name), band.bytes) for name, band in bands)
        yield from _FLOWS.pieces(_FLOWS.line((name, band.spec.name), len(band.flows)) for name, band in bands)
        yield from _FULL.pieces(_FULL.line((name,), gate.saturation) for name, gate in gates)
        yield from _STALE.pieces(_STALE.line((name,), gate.stale_endpoints) for name, gate in gates)
        wanted = {name: len(gate.queue) if gate.wants_engines else 0 for name, gate in gates}
        for name, one in self._at_zero().items():
            wanted[name] = wanted.get(name, 0) + one.requests
        yield from _WANTED.pieces(_WANTED.line((name,), count) for name, count in wanted.items())
