# SPDX-License-Identifier: Apache-2.0
"""Metrics of the gateway role in picker mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry


class PickerMetrics:
    """In ``registry``, beside those of the role. ``pool``: ``namespace/name``."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self._pool = pool
        self._problem = Gauge(
            "attache_pool_problem",
            "1 while something is wrong with the InferencePool, by reason",
            ("pool", "reason"),
            registry=registry,
        )
        self._endpoints = Gauge(
            "attache_pool_endpoints",
            "Endpoints of the InferencePool's pods: all, and those that get new requests",
            ("pool", "state"),
            registry=registry,
        )
        # both are there from the start, so that alert rules find them
        self.counted(0, 0)

    def wrong(self, reasons: Iterable[str], gone: Iterable[str]) -> None:
        """What is wrong now, and what is not any more."""
        for reason in gone:
            self._problem.labels(self._pool, reason).set(0)
        for reason in reasons:
            self._problem.labels(self._pool, reason).set(1)

    def counted(self, endpoints: int, ready: int) -> None:
        """The pool has so many."""
        self._endpoints.labels(self._pool, "all").set(endpoints)
        self._endpoints.labels(self._pool, "ready").set(ready)
