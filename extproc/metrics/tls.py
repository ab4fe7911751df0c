# SPDX-License-Identifier: Apache-2.0
"""Metrics of the certificate of the gRPC port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class TlsMetrics:
    """In ``registry``, where the gRPC port has TLS."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._expires = Gauge(
            "attache_tls_certificate_expires_timestamp_seconds",
            "When the certificate of the gRPC port ends to be valid.",
            registry=registry,
        )
        self._loads = Counter(
            "attache_tls_certificate_loads_total",
            "Certificates that were read, by result.",
            ["result"],
            registry=registry,
        )
        for result in ("used", "refused"):
            self._loads.labels(result)

    def loaded(self, expires_at_s: float) -> None:
        """A certificate is in use, until this Unix time."""
        self._loads.labels("used").inc()
        self._expires.set(expires_at_s)

    def refused(self) -> None:
        """One could not be used."""
        self._loads.labels("refused").inc()
