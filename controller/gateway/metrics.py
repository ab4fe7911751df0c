# SPDX-License-Identifier: Apache-2.0
"""Metrics of the gateway role, and of its picker mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable


class GatewayMetrics:
    """In a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refused = Gauge(
            "attache_gateway_refused",
            "1 while nothing is changed, because the gateway's own configuration is missing or invalid",
            registry=self.registry,
        )
        self.failures = Counter(
            "attache_gateway_write_failures_total", "Failed writes of the directory", registry=self.registry
        )
        self._changes = Counter(
            "attache_gateway_changes_total", "Changed objects that were taken in", registry=self.registry
        )
        self._compile = Histogram(
            "attache_gateway_compile_seconds",
            "Time to compile what changed",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
            registry=self.registry,
        )
        self._written = Counter(
            "attache_gateway_files_written_total", "Files written, and removed", ("what",), registry=self.registry
        )
        self._files = Gauge("attache_gateway_files", "Files of the directory", registry=self.registry)

        self.graced = Gauge(
            "attache_gateway_graced_objects",
            "Deleted ModelRoutes and ModelServers that are still served, and ModelServers whose former pods are",
            registry=self.registry,
        )

    def observe_compile(self, changes: int, seconds: float) -> None:
        """``changes`` objects were taken in, and compiled in ``seconds``."""
        self._changes.inc(changes)
        self._compile.observe(seconds)

    def set_file_count(self, written: int, removed: int, files: int) -> None:
        """The directory has ``files`` files now."""
        self._written.labels("written").inc(written)
        self._written.labels("removed").inc(removed)
        self._files.set(files)


class PickerMetrics:
    """In ``registry``, in addition to those of the role. ``pool``: ``namespace/name``."""

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
        self.set_pool_size(0, 0)

    def set_problems(self, reasons: Iterable[str], gone: Iterable[str]) -> None:
        """What is wrong now, and what is not any more."""
        for reason in gone:
            self._problem.labels(self._pool, reason).set(0)
        for reason in reasons:
            self._problem.labels(self._pool, reason).set(1)

    def set_pool_size(self, endpoints: int, ready: int) -> None:
        """The pool has so many."""
        self._endpoints.labels(self._pool, "all").set(endpoints)
        self._endpoints.labels(self._pool, "ready").set(ready)
