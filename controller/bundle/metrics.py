# SPDX-License-Identifier: Apache-2.0
"""Pages of ``bundle --watch``: metrics, what of the directory Envoy uses, and whether Envoy takes requests"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final, get_args

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.bundle.acknowledgements import Status
from controller.bundle.envoy_admin_client import why_not_ready
from extproc.api.addresses import join_host_port
from extproc.api.status_page_contents import REPORT_PATH
from extproc.browser_security import add_browser_protection
from extproc.listen_sockets import listen
from extproc.page_server import PageServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from controller.bundle.sync import BundleSync

READY_PATH: Final = "/readyz"


def serve_metrics(sync: BundleSync, address: tuple[str, int], registry: CollectorRegistry) -> None:
    """Serve /metrics, /config and /readyz from a thread, until the process ends; raises ListenFailed."""
    registry.register(BundleMetrics(sync))

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_readiness(_: web.Request) -> web.Response:
        why_not = await asyncio.to_thread(_why_not_ready, sync)
        return web.Response(text=why_not or "Envoy takes requests", status=503 if why_not else 200)

    async def show_report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(sync.report), content_type="application/json")

    app, listening = web.Application(), listen(join_host_port(*address))
    shown = {"/metrics": show_metrics, READY_PATH: show_readiness, REPORT_PATH: show_report}
    app.add_routes([web.get(path, handler) for path, handler in shown.items()])
    add_browser_protection(app, address[0])

    async def serve() -> None:
        server = PageServer(app)
        await server.setup()
        await server.listen(listening)
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), name="pages", daemon=True).start()


def _why_not_ready(sync: BundleSync) -> str:
    """Queries Envoy's admin interface, which listens on loopback alone; Envoy's other ports are those of Gateways, so
    no probe can be configured for them.
    """
    if sync.acknowledgements is None:
        return "nobody asks Envoy, because of --admin off"
    whys = [why_not_ready(one) for one in sync.acknowledgements.admin_addresses]
    return "" if "" in whys else next(iter(whys), "no bundle is written yet")


class BundleMetrics(Collector):
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
