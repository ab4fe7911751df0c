# SPDX-License-Identifier: Apache-2.0
"""Pages of a role for the cluster: /metrics, /healthz, /readyz; /loads and /demand where there is an extproc to ask."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from controller.kube.exposition import page_of
from controller.kube.gateway_reports import DemandRelay, read_loads
from extproc.api.status_pages import DEMAND_PATH, LOADS_PATH

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from aiohttp.typedefs import Middleware

# As many as an extproc has itself.
_MOST_WATCHERS: Final = 8
# Who has not read a line by then is let go.
_SLOWEST_S: Final = 5.0
_NO_WEIGHT: Final = re.compile(r"q[ \t]*=[ \t]*0(\.0{0,3})?")


@contextlib.asynccontextmanager
async def pages(
    address: str,
    registry: CollectorRegistry,
    is_ready: Callable[[], bool],
    *,
    extprocs: Sequence[str] = (),
    more: Sequence[web.RouteDef] = (),
    tls: ssl.SSLContext | None = None,
    guard: Middleware | None = None,
) -> AsyncIterator[None]:
    """Served at ``address`` (``ip:port``) inside the context; raises OSError if the port is taken.

    ``extprocs``: where the processes beside us have their pages; /loads has the sum of theirs, and /demand
    what each of them says. ``more``: further pages. ``tls``: None for plain HTTP. ``guard``: decides who sees what.
    """

    async def metrics(request: web.Request) -> web.Response:
        gzipped = _takes_gzip(request.headers.get("accept-encoding", ""))
        # thousands of series take longer than anybody should wait for the loop
        body = await asyncio.to_thread(page_of, registry, gzipped=gzipped)
        encoding = {"content-encoding": "gzip"} if gzipped else {}
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST, **encoding})

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

    app = web.Application(middlewares=[] if guard is None else [guard])
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthy), web.get("/readyz", ready)])
    app.add_routes(more)
    if extprocs:
        app.add_routes([web.get(LOADS_PATH, loads), web.get(DEMAND_PATH, _DemandPage(app, extprocs).show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


def _takes_gzip(accept_encoding: str) -> bool:
    """Whether a client takes compressed answers: with a weight of 0 it says that it does not (RFC 9110, 12.5.3)."""
    for one in accept_encoding.split(","):
        name, _, weight = one.partition(";")
        if name.strip().lower() in {"gzip", "x-gzip"}:
            return _NO_WEIGHT.fullmatch(weight.strip().lower()) is None
    return False


class _DemandPage:
    """What the extprocs of a pod say of their demand: a line of each, or with ``?watch`` all their lines as they
    come.
    """

    def __init__(self, app: web.Application, extprocs: Sequence[str]) -> None:
        self._extprocs = extprocs
        # streams that are open
        self._streams: set[asyncio.Task[None]] = set()
        app.on_shutdown.append(self._end)

    async def show(self, request: web.Request) -> web.StreamResponse:
        """One request of the page."""
        if "watch" in request.query and len(self._streams) >= _MOST_WATCHERS:
            return web.Response(status=503, text="too many follow this page already\n")
        async with aiohttp.ClientSession() as http:
            relay = DemandRelay(http, self._extprocs)
            if "watch" not in request.query:
                return web.Response(body=await relay.once(), content_type="application/x-ndjson")
            answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
            await answer.prepare(request)
            lines = relay.lines(changes=request.query["watch"] == "changes")
            stream = asyncio.create_task(_write(answer, lines), name="demand for a follower")
            self._streams.add(stream)
            try:
                await asyncio.wait([stream])
            finally:
                stream.cancel()
                self._streams.discard(stream)
        if request.transport is not None:
            request.transport.abort()
        return answer

    async def _end(self, _: web.Application) -> None:
        for stream in self._streams:
            stream.cancel()


async def _write(answer: web.StreamResponse, lines: AsyncGenerator[bytes]) -> None:
    """Until the follower has gone or does not read them."""
    async with contextlib.aclosing(lines):
        async for line in lines:
            try:
                async with asyncio.timeout(_SLOWEST_S):
                    await answer.write(line)
            except (TimeoutError, ConnectionError):
                return
