# SPDX-License-Identifier: Apache-2.0
"""Pages of a role for the cluster: /metrics, /healthz, /readyz, and /loads where there is an extproc to ask."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from controller.cluster.loads import read_loads
from extproc.config.loads import LOADS_PATH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence


@contextlib.asynccontextmanager
async def pages(
    address: str,
    registry: CollectorRegistry,
    is_ready: Callable[[], bool],
    *,
    extprocs: Sequence[str] = (),
    more: Sequence[web.RouteDef] = (),
) -> AsyncIterator[None]:
    """Served at ``address`` (``ip:port``) inside the context; raises OSError if the port is taken.

    ``extprocs``: where the processes beside us have their pages; /loads has the sum of theirs. ``more``: further pages.
    """

    async def metrics(_: web.Request) -> web.Response:
        # thousands of series take longer than anybody should wait for the loop
        text = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if is_ready() else web.Response(status=503, text="not ready\n")

    async def loads(_: web.Request) -> web.Response:
        async with aiohttp.ClientSession() as http:
            known = await read_loads(http, extprocs)
        if known is None:
            return web.Response(status=503, text="an extproc does not answer\n")
        return web.Response(body=msgspec.json.encode(known), content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthy), web.get("/readyz", ready)])
    app.add_routes(more)
    if extprocs:
        app.add_routes([web.get(LOADS_PATH, loads)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        yield
    finally:
        await runner.cleanup()
