# SPDX-License-Identifier: Apache-2.0
"""Metrics of ``bundle --watch``: whether the directory is valid, and whether Envoy takes the bundle"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.uptake import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from controller.bundle import Follower


def serve_metrics(follower: Follower, address: tuple[str, int]) -> None:
    """Serve /metrics from a thread, until the process ends; raises OSError."""
    registry = CollectorRegistry()
    registry.register(FollowerSeries(follower))
    start_http_server(address[1], addr=address[0], registry=registry)


class FollowerSeries(Collector):
    """Read from the follower when Prometheus asks."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def describe(self) -> Iterator[Metric]:
        """Nothing to check for clashes."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All series."""
        follower = self._follower
        valid, written = "attache_bundle_config_valid", "attache_bundle_written_timestamp_seconds"
        yield GaugeMetricFamily(valid, "1 if the directory as it is now can be used.", value=follower.is_valid)
        yield GaugeMetricFamily(written, "When the bundle last changed.", value=follower.written_at_s)
        stale = "attache_bundle_stale_secrets"
        text = "Certificates and keys whose files cannot be used as they are now; what was there before stays."
        yield GaugeMetricFamily(stale, text, value=follower.secrets.stale)
        ends = GaugeMetricFamily(
            "attache_bundle_certificate_end_timestamp_seconds", "When a certificate, or a list, ends.", labels=["file"]
        )
        for file, ends_at in follower.secrets.ends_at.items():
            ends.add_metric([file], ends_at.timestamp())
        yield ends
        if follower.uptake is None:
            return
        verdict = follower.uptake.verdict
        status = GaugeMetricFamily("attache_bundle_uptake", "1 for what Envoy does with the bundle.", labels=["status"])
        for name in get_args(Status):
            status.add_metric([name], name == verdict.status)
        yield status
        refused = len(verdict.files) if verdict.status == "Refused" else 0
        yield GaugeMetricFamily("attache_bundle_refused_files", "Files that Envoy refused.", value=refused)
