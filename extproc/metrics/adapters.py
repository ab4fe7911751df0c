# SPDX-License-Identifier: Apache-2.0
"""Adapters on demand as Prometheus metrics: loads, unloads, and who waits for them"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.metrics.collectors import Counters, DeferredHistograms
from extproc.metrics.exposition import Family, PiecewiseCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry

    from extproc.core.effects import Decision
    from extproc.core.types import LoadResult
    from extproc.scheduling.pool import Pool

_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)


_WAITING: Final = Family("attache_adapter_waiting", "Requests that wait for an adapter.", ("server",))
_HELD: Final = Family("attache_adapters_held", "Adapters that take a slot of the engine.", ("server", "endpoint"))


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
            "attache_adapter_load_seconds", "Of loads that succeeded, unloads included.", _BUCKETS, ["server"], registry
        )
        self._waits = DeferredHistograms(
            "attache_adapter_wait_seconds", "What requests waited for their adapter.", _BUCKETS, ["server"], registry
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

    families = (_WAITING, _HELD)

    def __init__(self, pools: Callable[[], Iterable[Pool]]) -> None:
        self._pools = pools

    def pieces(self) -> Iterator[str]:
        """Of ModelServers with adapters on demand."""
        pools = [(pool, slots) for pool in self._pools() if (slots := pool.slots) is not None]
        yield from _WAITING.pieces(_WAITING.line((pool.name,), slots.waiting) for pool, slots in pools)
        yield from _HELD.pieces(
            _HELD.line((pool.name, address), len(slots.held(row)))
            for pool, slots in pools
            for address, row in zip(pool.table.active_addresses, pool.table.active_rows, strict=True)
        )
