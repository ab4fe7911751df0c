# SPDX-License-Identifier: Apache-2.0
"""The metrics of the translator, and the page that shows them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from extproc.browser_security import add_browser_protection
from extproc.page_server import PageServer

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from extproc.translate.directive import TranslationDirective

# How a translation ends: with an answer of the engine, with a refusal of the client's request, with an answer that is
# none of the engine's API, with a stream that was cut, at a time limit in the middle of an answer, without an engine,
# or as the client has left.
ENDS: Final = ("answered", "refused", "untranslatable", "cut", "timeout", "no_engine", "left")


class TranslatorMetrics:
    """Counted by Translator. Labels are names of APIs, of which there are three, and of ``ENDS``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "attache_translations",
            "Translated requests by the client's API, the engine's, and how they ended.",
            ["client", "engine", "ended"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "attache_translations_in_flight", "Requests that are being translated.", registry=self.registry
        )

    def on_request_ended(self, directive: TranslationDirective, ended: str) -> None:
        """One of ``ENDS``."""
        self._ended.labels(directive.client, directive.engine, ended).inc()


@contextlib.asynccontextmanager
async def serving_metrics(metrics: TranslatorMetrics, at: socket.socket, host: str) -> AsyncIterator[None]:
    """Serve /metrics."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", show)
    add_browser_protection(app, host)
    server = PageServer(app, end_s=1.0)
    await server.setup()
    try:
        await server.listen(at)
        yield
    finally:
        await server.cleanup()
