# SPDX-License-Identifier: Apache-2.0
"""The pages of a process: /metrics, /readyz, /config, /loads and, for operators, /debug/explain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from extproc.config.loads import LOADS_PATH
from extproc.config.report import REPORT_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.config.loads import EndpointLoad
    from extproc.config.report import ConfigReport
    from extproc.runtime.explain_page import ExplainPage


async def serve_pages(
    address: tuple[str, int],
    registry: CollectorRegistry,
    *,
    is_ready: Callable[[], bool],
    report: Callable[[], ConfigReport],
    loads: Callable[[], Mapping[str, EndpointLoad]],
    explain: ExplainPage | None,
) -> web.AppRunner:
    """Listen on ``address`` (host and port) until the result's ``cleanup``; raises OSError if it is taken."""

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_readiness(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if is_ready() else web.Response(text="not ready\n", status=503)

    async def show_report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(report()), content_type="application/json")

    async def show_loads(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(loads()), content_type="application/json")

    app = web.Application()
    shown = {"/metrics": show_metrics, "/readyz": show_readiness, REPORT_PATH: show_report, LOADS_PATH: show_loads}
    app.add_routes([web.get(path, handler) for path, handler in shown.items()])
    if explain is not None:
        app.add_routes([web.post("/debug/explain/{path:.*}", explain.show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, *address).start()
    return runner
