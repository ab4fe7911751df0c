# SPDX-License-Identifier: Apache-2.0
"""What requests wait for, as Prometheus metrics: a first engine, an adapter, a turn in a queue; and limits by tenant.

Tenants are named by those that a trusted hop has authenticated; beyond a number of them, the rest are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.metrics.exposition import Counters, DeferredHistogram, DeferredHistograms, Family, PiecewiseCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.admission.flows import QueuedRequest
    from extproc.admission.queue import Gate
    from extproc.core.activation import ZeroDemand
    from extproc.core.effects import Decision, EngineStarted, Left, Refused, Settled
    from extproc.core.record import LoadResult
    from extproc.scheduling.pool import Pool

_START_BUCKETS: Final = (1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800, 3600)
_WAITING_FOR_ENGINE: Final = Family(
    "attache_activation_waiting", "Requests that wait because no engine can take them.", ("server",)
)


class ActivationMetrics:
    """No series before the first request has waited for an engine."""

    def __init__(self, registry: CollectorRegistry, at_zero: Callable[[], Mapping[str, ZeroDemand]]) -> None:
        self._waits = DeferredHistograms(
            "attache_engine_wait_seconds",
            "What requests waited while their ModelServer had no engine.",
            _START_BUCKETS,
            ["server"],
            registry,
        )
        self._starts = DeferredHistograms(
            "attache_engine_start_seconds",
            "From the first request that waited for an engine to the first engine.",
            _START_BUCKETS,
            ["server"],
            registry,
        )
        registry.register(_WaitingSeries(at_zero))

    def waited(self, decision: Decision) -> None:
        """A request goes to an engine after a wait for the first one."""
        self._waits.observe(decision.engine_wait_s, decision.server)

    def started(self, effect: EngineStarted) -> None:
        """A ModelServer has an engine again."""
        self._starts.observe(effect.after_s, effect.server)


class _WaitingSeries(PiecewiseCollector):
    """Read from the core when Prometheus asks."""

    families = (_WAITING_FOR_ENGINE,)

    def __init__(self, at_zero: Callable[[], Mapping[str, ZeroDemand]]) -> None:
        self._at_zero = at_zero

    def pieces(self) -> Iterator[str]:
        """Of ModelServers that requests wait for now."""
        return _WAITING_FOR_ENGINE.pieces(
            _WAITING_FOR_ENGINE.line((server,), one.requests) for server, one in list(self._at_zero().items())
        )


_LOAD_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
_WAITING_FOR_ADAPTER: Final = Family("attache_adapter_waiting", "Requests that wait for an adapter.", ("server",))
_ADAPTERS_HELD: Final = Family(
    "attache_adapters_held", "Adapters that take a slot of the engine.", ("server", "endpoint")
)


class AdapterMetrics:
    """One sample a ModelServer and family, and no series before the first load."""

    def __init__(self, registry: CollectorRegistry, pools: Callable[[], Iterable[Pool]]) -> None:
        self._loads = Counters(
            "attache_adapter_loads",
            "Loads of adapters by result: loaded, was_there, busy, broken, unreachable.",
            ["server", "result"],
            registry,
        )
        self._unloads = Counters(
            "attache_adapter_unloads", "Adapters unloaded to make room for others.", ["server"], registry
        )
        self._seconds = DeferredHistograms(
            "attache_adapter_load_seconds",
            "Of loads that succeeded, unloads included.",
            _LOAD_BUCKETS,
            ["server"],
            registry,
        )
        self._waits = DeferredHistograms(
            "attache_adapter_wait_seconds",
            "What requests waited for their adapter.",
            _LOAD_BUCKETS,
            ["server"],
            registry,
        )
        registry.register(_AdapterSeries(pools))

    def ended(self, result: LoadResult) -> None:
        """A load is over."""
        if result.problem is not None:
            self._loads.add(result.server, result.problem.value)
        else:
            self._loads.add(result.server, "was_there" if result.was_there else "loaded")
            self._seconds.observe(result.duration_s, result.server)
        if result.unloaded:
            self._unloads.add_amount(len(result.unloaded), result.server)

    def waited(self, decision: Decision) -> None:
        """A request goes to an engine after a wait for its adapter."""
        self._waits.observe(decision.adapter_wait_s, decision.server)


class _AdapterSeries(PiecewiseCollector):
    """Read from the pools when Prometheus asks."""

    families = (_WAITING_FOR_ADAPTER, _ADAPTERS_HELD)

    def __init__(self, pools: Callable[[], Iterable[Pool]]) -> None:
        self._pools = pools

    def pieces(self) -> Iterator[str]:
        """Of ModelServers with adapters on demand."""
        pools = [(pool, slots) for pool in self._pools() if (slots := pool.slots) is not None]
        yield from _WAITING_FOR_ADAPTER.pieces(
            _WAITING_FOR_ADAPTER.line((pool.name,), slots.waiting) for pool, slots in pools
        )
        yield from _ADAPTERS_HELD.pieces(
            _ADAPTERS_HELD.line((pool.name, address), len(slots.held(row)))
            for pool, slots in pools
            for address, row in zip(pool.table.active_addresses, pool.table.active_rows, strict=True)
        )


MOST_TENANTS: Final = 500
OTHERS: Final = "(others)"
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REDIS_BUCKETS: Final = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 1e-2, 0.05, 0.25)
_BANDS: Final = ("server", "band")
_QUEUED: Final = Family("attache_queue_waiting", "Requests that wait for an engine.", _BANDS)
_QUEUED_BYTES: Final = Family("attache_queue_bytes", "Bytes of requests that wait.", _BANDS)
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

    families = (_QUEUED, _QUEUED_BYTES, _FLOWS, _FULL, _STALE, _WANTED)

    def __init__(
        self, gates: Callable[[], Mapping[str, Gate]], at_zero: Callable[[], Mapping[str, ZeroDemand]]
    ) -> None:
        self._gates = gates
        self._at_zero = at_zero

    def pieces(self) -> Iterator[str]:
        """By server, and by band."""
        gates = list(self._gates().items())
        bands = [(name, band) for name, gate in gates for band in gate.queue.bands]
        yield from _QUEUED.pieces(_QUEUED.line((name, band.spec.name), band.requests) for name, band in bands)
        yield from _QUEUED_BYTES.pieces(_QUEUED_BYTES.line((name, band.spec.name), band.bytes) for name, band in bands)
        yield from _FLOWS.pieces(_FLOWS.line((name, band.spec.name), len(band.flows)) for name, band in bands)
        yield from _FULL.pieces(_FULL.line((name,), gate.saturation) for name, gate in gates)
        yield from _STALE.pieces(_STALE.line((name,), gate.stale_endpoints) for name, gate in gates)
        wanted = {name: len(gate.queue) if gate.wants_engines else 0 for name, gate in gates}
        for name, one in self._at_zero().items():
            wanted[name] = wanted.get(name, 0) + one.requests
        yield from _WANTED.pieces(_WANTED.line((name,), count) for name, count in wanted.items())
