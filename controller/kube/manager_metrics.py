# SPDX-License-Identifier: Apache-2.0
"""Metrics of the manager role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.kube.client import ApiCall


def observe_api_calls(registry: CollectorRegistry) -> Callable[[ApiCall, float], None]:
    """What ``connect`` calls: a histogram in ``registry``."""
    seconds = Histogram(
        "attache_api_call_seconds",
        "Calls to the Kubernetes API, by how they ended; of a watch, until it has begun",
        ("verb", "resource", "code_class"),
        buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        registry=registry,
    )
    return lambda call, took_s: seconds.labels(*call).observe(took_s)


class ManagerMetrics:
    """In a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "attache_admission_reviews_total", "Objects that were checked", ("kind", "outcome"), registry=self.registry
        )
        self.certificate_ends_at_s = Gauge(
            "attache_admission_certificate_end_timestamp_seconds",
            "When the certificate that the webhooks' server shows ends",
            registry=self.registry,
        )
        self.leader = Gauge("attache_manager_leader", "1 while this replica leads", registry=self.registry)
        self._looks = Counter(
            "attache_manager_reconciles_total",
            "Looks at objects: planned (something was to do), settled, early (our own writes were not seen yet), gone, "
            "refused (the API server takes something not), error",
            ("kind", "outcome"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "attache_manager_reconcile_seconds",
            "Time of a look with all its writes",
            ("kind",),
            buckets=(0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0),
            registry=self.registry,
        )
        self._writes = Counter(
            "attache_manager_writes_total", "Writes to the API server", ("kind", "verb"), registry=self.registry
        )
        self._lists = Counter(
            "attache_manager_late_lists_total",
            "Lists that were asked for because informers did not tell of our own writes in time",
            ("kind",),
            registry=self.registry,
        )
        self._depth = Gauge("attache_manager_queue_depth", "Objects that wait for a worker", registry=self.registry)
        self._failing = Gauge(
            "attache_manager_queue_failing",
            "Objects whose last look failed, which are tried again",
            registry=self.registry,
        )

    def set_queue(self, depth: Callable[[], int], failing: Callable[[], int]) -> None:
        """The queue of the present term."""
        self._depth.set_function(depth)
        self._failing.set_function(failing)

    def observe_reconcile(self, kind: str, outcome: str, seconds: float) -> None:
        """Count one reconcile."""
        self._looks.labels(kind, outcome).inc()
        self._seconds.labels(kind).observe(seconds)

    def count_write(self, kind: str, verb: str) -> None:
        """One write has been answered."""
        self._writes.labels(kind, verb).inc()

    def count_relist(self, kind: str) -> None:
        """Count a new list of the children of an object of ``kind``."""
        self._lists.labels(kind).inc()
