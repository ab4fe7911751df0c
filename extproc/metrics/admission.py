# SPDX-License-Identifier: Apache-2.0
"""What queues and limits do, by server, band and tenant, as Prometheus metrics.

Tenants are named by those that a trusted hop has authenticated; beyond so many, the rest are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from extproc.metrics.collectors import Counters, DeferredHistogram, DeferredHistograms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from extproc.admission.gate import Gate
    from extproc.admission.queued_request import QueuedRequest
    from extproc.core.awaiting import ZeroDemand
    from extproc.core.effects import Decision, Left, Refused, Settled

MOST_TENANTS: Final = 500
OTHERS: Final = "(others)"
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REDIS_BUCKETS: Final = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 1e-2, 0.05, 0.25)


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


class _QueueSeries(Collector):
    """Read from the queues when Prometheus asks."""

    def __init__(
        self, gates: Callable[[], Mapping[str, Gate]], at_zero: Callable[[], Mapping[str, ZeroDemand]]
    ) -> None:
        self._gates = gates
        self._at_zero = at_zero

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for clashes; asking would need the gates."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """By server, and by band."""
        one, two = ["server"], ["server", "band"]
        waiting = GaugeMetricFamily("attache_queue_waiting", "Requests that wait for an engine.", labels=two)
        held = GaugeMetricFamily("attache_queue_bytes", "Bytes of requests that wait.", labels=two)
        flows = GaugeMetricFamily("attache_queue_flows", "Flows that are remembered.", labels=two)
        full = GaugeMetricFamily(
            "attache_saturation", "How full the engines are, 0 to 1, when last looked at.", labels=one
        )
        stale = GaugeMetricFamily(
            "attache_stale_endpoints", "Engines judged by our own counts, for want of reports.", labels=one
        )
        wanted = GaugeMetricFamily(
            "attache_wanted_engines", "Requests that wait while there is no engine: start one.", labels=one
        )
        for name, gate in self._gates().items():
            for band in gate.queue.bands:
                waiting.add_metric([name, band.spec.name], band.requests)
                held.add_metric([name, band.spec.name], band.bytes)
                flows.add_metric([name, band.spec.name], len(band.flows))
            full.add_metric([name], gate.saturation)
            stale.add_metric([name], gate.stale_endpoints)
        at_zero = {name: one.requests for name, one in self._at_zero().items()}
        queued = {name: len(gate.queue) if gate.wants_engines else 0 for name, gate in self._gates().items()}
        for name in dict.fromkeys((*queued, *at_zero)):
            wanted.add_metric([name], queued.get(name, 0) + at_zero.get(name, 0))
        yield from (waiting, held, flows, full, stale, wanted)
