# SPDX-License-Identifier: Apache-2.0
"""Metrics of the usage process, read at each scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from controller.usage.ingest import IngestCounters


class UsageIngestMetrics(Collector):
    """Series of an Ingest."""

    def __init__(self, counts: IngestCounters, wall: Callable[[], float]) -> None:
        """``wall``: seconds since 1970."""
        self._counts = counts
        self._wall = wall

    def describe(self) -> Iterator[Metric]:
        """Nothing to check for clashes."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All series."""
        counts = self._counts
        for name, text, value in (
            ("lines", "Lines of the usage log that were read.", counts.lines),
            ("rows", "Rows of requests that were kept.", counts.rows),
            ("bad_lines", "Lines that cannot be read, and are left out.", counts.bad_lines),
            ("duplicate_lines", "Lines of requests whose rows were kept before.", counts.duplicates),
            ("late_lines", "Lines of requests that are older than --keep-requests; they are left out.", counts.late),
            ("store_failures", "Batches that could not be kept, and were tried again.", counts.failures),
        ):
            yield CounterMetricFamily(f"attache_usage_{name}", text, value=value)
        for name, text, level in (
            (
                "lag_seconds",
                "Age of the oldest finished request that is not stored yet; 0 if none.",
                counts.lag_s(self._wall()),
            ),
            ("bytes_behind", "Bytes of the usage log that wait to be read.", counts.bytes_behind),
            ("failing", "1 while rows cannot be kept.", bool(counts.error)),
            (
                "last_failure_timestamp_seconds",
                "Unix time of the last failed write; 0 if there was none.",
                counts.failed_at_s,
            ),
        ):
            yield GaugeMetricFamily(f"attache_usage_{name}", text, value=level)
