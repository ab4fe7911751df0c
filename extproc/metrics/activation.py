# SPDX-License-Identifier: Apache-2.0
"""ModelServers without engines as Prometheus metrics: who waits, how long, and what starts took"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.metrics.collectors import DeferredHistograms
from extproc.metrics.exposition import Family, PiecewiseCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.core.awaiting import ZeroDemand
    from extproc.core.effects import Decision, EngineStarted

_BUCKETS: Final = (1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800, 3600)


_WAITING: Final = Family(
    "attache_activation_waiting", "Requests that wait because no engine can take them.", ("server",)
)


class ActivationMetrics:
    """No series before the first request has waited for an engine."""

    def __init__(self, registry: CollectorRegistry, at_zero: Callable[[], Mapping[str, ZeroDemand]]) -> None:
        self._waits = DeferredHistograms(
            "attache_engine_wait_seconds",
            "What requests waited while their ModelServer had no engine.",
            _BUCKETS,
            ["server"],
            registry,
        )
        self._starts = DeferredHistograms(
            "attache_engine_start_seconds",
            "From the first request that waited for an engine to the first engine.",
            _BUCKETS,
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

    families = (_WAITING,)

    def __init__(self, at_zero: Callable[[], Mapping[str, ZeroDemand]]) -> None:
        self._at_zero = at_zero

    def pieces(self) -> Iterator[str]:
        """Of ModelServers that requests wait for now."""
        return _WAITING.pieces(_WAITING.line((server,), one.requests) for server, one in list(self._at_zero().items()))
