# SPDX-License-Identifier: Apache-2.0
"""The pages of a process: /, which lists them, /metrics, /readyz, /config, /debug/explain and others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from extproc.api.status_pages import DEMAND_PATH, LOADS_PATH, REPORT_PATH
from extproc.core.record import BUNDLE, Attachment, Head
from extproc.core.running import add_part
from extproc.errors import Refusal, to_openai_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from extproc.api.status_pages import ConfigReport, EndpointLoad
    from extproc.core.core import Core
    from extproc.core.record import Arrival
    from extproc.metrics.exposition import Registry
    from extproc.runtime.demand_watch import DemandWatch
    from extproc.streams.context import GatewayOptions


class ExplainPage:
    """Reads what the running process knows, and changes nothing."""

    def __init__(
        self,
        core: Core,
        tokens_of: Callable[[Arrival], Awaitable[Sequence[int] | None]],
        clock: Callable[[], float],
        gateway: GatewayOptions,
    ) -> None:
        """``gateway``: the options of the process, which say how requests reach it."""
        self._core = core
        self._tokens_of = tokens_of
        self._clock = clock
        self._gateway = gateway

    async def show(self, http: web.Request) -> web.Response:
        """The explanation as JSON, or the refusal that the client would get."""
        headers = {name.lower(): value for name, value in http.headers.items()}
        # for trusted networks only: whoever asks here is the operator
        head = Head("POST", "/" + http.match_info["path"], headers, has_body=True, is_trusted=True)
        head = msgspec.structs.replace(head, listener=http.query.get("listener", ""))
        try:
            arrival, attachment = self._arrival(http, head, await http.read())
            tokens = await self._tokens_of(arrival) if arrival.wants_tokens else None
            explanation = self._core.explain(arrival, self._clock(), tokens=tokens, attachment=attachment)
        except Refusal as refusal:
            return web.Response(status=refusal.status, body=to_openai_body(refusal), content_type="application/json")
        return web.Response(body=msgspec.json.encode(explanation), content_type="application/json")

    def _arrival(self, http: web.Request, head: Head, body: bytes) -> tuple[Arrival, Attachment]:
        """The request as the process would get it: of our own bundle, or of a gateway with a pool; raises a Refusal."""
        intake, server = self._core.intake, http.query.get("server", "")
        pool = http.query.get("pool", "") or self._gateway.pool
        if server or not pool:
            return intake.take(head, body, server), BUNDLE
        return intake.receive_pooled(pool, head, body), Attachment(choices=self._gateway.duplex_choices)


_INDEX: Final = {
    "/metrics": "for Prometheus; attache top shows them",
    "/readyz": "200 if requests are served, 503 if not",
    REPORT_PATH: "digests of the configuration files in use, and what is wrong with newer ones",
    LOADS_PATH: "what each engine has to do",
    DEMAND_PATH: "what was asked for since the start; ?watch follows it",
}
_EXPLAIN: Final = "/debug/explain/PATH"
# Of /loads, between two turns of other work.
_POOLS_AT_ONCE: Final = 20
# Who has not read a line or a piece by then is let go.
_SLOWEST_S: Final = 5.0


async def serve_pages(
    address: tuple[str, int],
    registry: Registry,
    *,
    is_ready: Callable[[], bool],
    report: Callable[[], ConfigReport],
    loads: Callable[[], Iterator[dict[str, EndpointLoad]]],
    demand: DemandWatch,
    explain: ExplainPage | None,
) -> web.AppRunner:
    """Listen on ``address`` (host and port) until the result's ``cleanup``; raises OSError if it is taken."""

    async def show_metrics(request: web.Request) -> web.StreamResponse:
        return await _in_pieces(request, registry.pieces(), CONTENT_TYPE_LATEST)

    async def show_readiness(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if is_ready() else web.Response(text="not ready\n", status=503)

    async def show_report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(report()), content_type="application/json")

    async def show_loads(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(await _together(loads())), content_type="application/json")

    async def show_demand(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(body=await demand.line(), content_type="application/json")
        return await _stream(request, demand)

    async def end_streams(_: web.Application) -> None:
        demand.close()

    async def show_index(_: web.Request) -> web.Response:
        asked = "POST a request's body to know where it would go; attache explain --url does"
        pages = {**_INDEX, _EXPLAIN: asked if explain is not None else "only with the option --debug of extproc"}
        return web.Response(text="".join(f"{path:<20} {what}\n" for path, what in pages.items()))

    app = web.Application()
    app.on_shutdown.append(end_streams)
    shown = {
        "/": show_index,
        "/metrics": show_metrics,
        "/readyz": show_readiness,
        REPORT_PATH: show_report,
        LOADS_PATH: show_loads,
    }
    app.add_routes([web.get(path, handler) for path, handler in shown.items()])
    app.add_routes([web.get(DEMAND_PATH, show_demand)])
    if explain is not None:
        app.add_routes([web.post("/debug/explain/{path:.*}", explain.show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, *address).start()
    return runner


async def _together(parts: Iterator[dict[str, EndpointLoad]]) -> dict[str, EndpointLoad]:
    found: dict[str, EndpointLoad] = {}
    for number, part in enumerate(parts, start=1):
        add_part(found, part)
        if number % _POOLS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


async def _in_pieces(request: web.Request, pieces: Iterator[str], content_type: str) -> web.StreamResponse:
    """Each piece is made when the reader has taken those before it, and after other work has had its turn."""
    answer = web.StreamResponse(headers={"Content-Type": content_type})
    try:
        await answer.prepare(request)
    except ConnectionError:
        # the reader has left, which is nothing to log
        return answer
    for piece in pieces:
        if piece and not await _written(request, answer, piece.encode()):
            break
        await asyncio.sleep(0)
    return answer


async def _written(request: web.Request, answer: web.StreamResponse, content: bytes) -> bool:
    """Whether the reader takes it in time; one that does not is let go."""
    try:
        async with asyncio.timeout(_SLOWEST_S):
            await answer.write(content)
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
        return False
    return True


async def _stream(request: web.Request, demand: DemandWatch) -> web.StreamResponse:
    """Lines until the client or the process goes."""
    if not demand.has_room:
        return web.Response(text="too many follow this page already\n", status=503)
    answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    changes = request.query["watch"] == "changes"
    async with contextlib.aclosing(demand.lines(changes=changes)) as lines:
        await answer.prepare(request)
        async for line in lines:
            if not await _written(request, answer, line):
                break
    return answer
