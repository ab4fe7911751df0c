# SPDX-License-Identifier: Apache-2.0
"""The pages of a process: /metrics, /readyz and, for operators, /debug/explain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from extproc.runtime.explain_page import ExplainPage


async def serve_pages(
    address: tuple[str, int], registry: CollectorRegistry, *, is_ready: Callable[[], bool], explain: ExplainPage | None
) -> web.AppRunner:
    """Listen on ``address`` (host and port) until the result's ``cleanup``; raises OSError if it is taken."""

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_readiness(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if is_ready() else web.Response(text="not ready\n", status=503)

    app = web.Application()
    app.add_routes([web.get("/metrics", show_metrics), web.get("/readyz", show_readiness)])
    if explain is not None:
        app.add_routes([web.post("/debug/explain/{path:.*}", explain.show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, *address).start()
    return runner
