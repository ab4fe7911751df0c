# SPDX-License-Identifier: Apache-2.0
"""Pages of ``bundle --watch``: metrics, what of the directory Envoy uses, and whether Envoy takes requests"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Final, get_args
from wsgiref.simple_server import WSGIRequestHandler, make_server

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from controller.bundle.acknowledgements import Status
from controller.bundle.admin import why_not_ready
from extproc.api.status_pages import REPORT_PATH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.metrics_core import Metric

    from controller.bundle.sync import BundleSync

READY_PATH: Final = "/readyz"


def serve_metrics(sync: BundleSync, address: tuple[str, int], registry: CollectorRegistry) -> None:
    """Serve /metrics, /config and /readyz from a thread, until the process ends; raises OSError."""
    registry.register(BundleSeries(sync))
    show_metrics: WSGIApplication = make_wsgi_app(registry)

    def show(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == READY_PATH:
            why_not = _why_not_ready(sync)
            start_response("503 Service Unavailable" if why_not else "200 OK", [("content-type", "text/plain")])
            return [(why_not or "Envoy takes requests").encode()]
        if environ["PATH_INFO"] != REPORT_PATH:
            return show_metrics(environ, start_response)
        start_response("200 OK", [("content-type", "application/json")])
        return [msgspec.json.encode(sync.report)]

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    server = make_server(*address, show, Server, handler_class=_Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _why_not_ready(sync: BundleSync) -> str:
    """Queries Envoy's admin interface, which listens on loopback alone; Envoy's other ports are those of Gateways, so
    no probe can be configured for them.
    """
    if sync.acknowledgements is None:
        return "nobody asks Envoy, because of --admin off"
    whys = [why_not_ready(one) for one in sync.acknowledgements.addresses]
    return "" if "" in whys else next(iter(whys), "no bundle is written yet")


class _Silent(WSGIRequestHandler):
    """Requests for these pages are nothing to log."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class BundleSeries(Collector):
    """Series of a ``BundleSync``, read at each scrape."""

    def __init__(self, sync: BundleSync) -> None:
        self._sync = sync

    def describe(self) -> Iterator[Metric]:
        """Nothing to check for clashes."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All series."""
        sync = self._sync
        valid, written = "attache_bundle_config_valid", "attache_bundle_written_timestamp_seconds"
        yield GaugeMetricFamily(valid, "1 if the directory as it is now can be used.", value=sync.is_valid)
        yield GaugeMetricFamily(written, "When the bundle last changed.", value=sync.written_at_s)
        missing = "attache_bundle_missing_keys"
        yield GaugeMetricFamily(missing, "Keys and key sets that cannot be had.", value=len(sync.missing_keys))
        stale = "attache_bundle_stale_secrets"
        text = "Certificates and keys whose files cannot be used as they are now."
        yield GaugeMetricFamily(stale, text, value=sync.secrets.stale)
        ends = GaugeMetricFamily(
            "attache_bundle_certificate_end_timestamp_seconds", "When a certificate, or a list, ends.", labels=["file"]
        )
        for file, ends_at in sync.secrets.ends_at.items():
            ends.add_metric([file], ends_at.timestamp())
        yield ends
        if sync.acknowledgements is None:
            return
        verdict = sync.acknowledgements.verdict
        status = GaugeMetricFamily(
            "attache_bundle_acknowledgement", "1 for what Envoy does with the bundle.", labels=["status"]
        )
        for name in get_args(Status):
            status.add_metric([name], name == verdict.status)
        yield status
        refused = len(verdict.files) if verdict.status == "Refused" else 0
        yield GaugeMetricFamily("attache_bundle_refused_files", "Files that Envoy refused.", value=refused)
