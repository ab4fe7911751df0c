# SPDX-License-Identifier: Apache-2.0
"""The pages of a process: /, which lists them, /metrics, /readyz, /config, /debug/explain and others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from extproc.api.status_page_contents import CONSOLE_PATH, DEMAND_PATH, LOADS_PATH, REPORT_PATH, RESET_PATH, SLO_PATH
from extproc.browser_security import add_browser_protection, is_from_loopback
from extproc.core.effects import BreakerChanged
from extproc.core.request_record import BUNDLE, GatewayProperties, RequestHead
from extproc.core.running_requests import merge_loads
from extproc.page_server import PageServer
from extproc.refusals import Refusal, to_openai_body
from extproc.scheduling.model_check import quoted_names

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from aiohttp.typedefs import Middleware

    from extproc.api.status_page_contents import ConfigReport, EndpointLoad, SloObjectiveCounts
    from extproc.core.core import Core
    from extproc.core.effects import AskGuard, Effect
    from extproc.core.guard_decisions import GuardFailed, GuardReply
    from extproc.core.request_record import Arrival
    from extproc.metrics.exposition import Registry
    from extproc.runtime.demand_watch import DemandWatchServer
    from extproc.streams.stream_dependencies import GatewayOptions

_INDEX: Final = {
    "/metrics": "for Prometheus; attache top shows them",
    "/readyz": "200 if requests are served, 503 if not",
    REPORT_PATH: "digests of the configuration files in use, and what is wrong with newer ones",
    LOADS_PATH: "what each engine has to do",
    SLO_PATH: "how well objectives are kept, by the hour; attache slo shows them",
    RESET_PATH: "POST ?server=NAMESPACE/NAME[&engine=IP:PORT] closes breakers; attache reset does",
    DEMAND_PATH: "what was asked for since the start; ?watch follows it",
    CONSOLE_PATH: "for people: engines, queues, tenants, models and requests, live",
}
_EXPLAIN: Final = "/debug/explain/PATH"
# Of /loads, between two turns of other work.
_POOLS_AT_ONCE: Final = 20
# A client that has not read a line or a piece by then is disconnected.
_SLOWEST_S: Final = 5.0


class ExplainPage:
    """Explains decisions by the running process's state, and changes nothing."""

    def __init__(
        self,
        core: Core,
        tokens_of: Callable[[Arrival], Awaitable[Sequence[int] | None]],
        clock: Callable[[], float],
        gateway: GatewayOptions,
        guard_says: Callable[[AskGuard], Awaitable[GuardReply | GuardFailed]] | None = None,
    ) -> None:
        """``gateway``: options of the process with how requests reach it. ``guard_says``: asks a guard; None: no guard
        is asked.
        """
        self._core = core
        self._tokens_of = tokens_of
        self._clock = clock
        self._gateway = gateway
        self._guard_says = guard_says

    async def handle(self, http: web.Request) -> web.Response:
        """The explanation as JSON, or the refusal that the client would get."""
        headers = {name.lower(): value for name, value in http.headers.items()}
        # of whoever asks, not of the request
        headers.pop("authorization", None)
        # for trusted networks only: every caller counts as the operator
        head = RequestHead("POST", "/" + http.match_info["path"], headers, has_body=True, is_trusted=True)
        head = msgspec.structs.replace(head, listener=http.query.get("listener", ""))
        try:
            arrival, attachment = self._arrival(http, head, await http.read())
            arrival, guarded = await self._after_guard(arrival)
            tokens = await self._tokens_of(arrival) if arrival.wants_tokens else None
            explanation = self._core.explain(
                arrival, self._clock(), tokens=tokens, attachment=attachment, guarded=guarded
            )
        except Refusal as refusal:
            return web.Response(status=refusal.status, body=to_openai_body(refusal), content_type="application/json")
        return web.Response(body=msgspec.json.encode(explanation), content_type="application/json")

    async def _after_guard(self, arrival: Arrival) -> tuple[Arrival, str]:
        """The request as its guard lets it go on, and what that said; raises a Refusal."""
        ask = None if self._guard_says is None else self._core.guard_ask_for(arrival)
        if ask is None or self._guard_says is None:
            return arrival, ""
        return self._core.preview_guard_reply(ask, await self._guard_says(ask))

    def _arrival(self, http: web.Request, head: RequestHead, body: bytes) -> tuple[Arrival, GatewayProperties]:
        """The request as the process would get it: of our own bundle, or of a gateway with a pool; raises a Refusal."""
        builder, server = self._core.builder, http.query.get("server", "")
        pool = http.query.get("pool", "") or self._gateway.pool
        arrival = builder.arrival_builder(server=server, pool=pool)(head, body)
        is_foreign = pool is not None and not server
        return arrival, GatewayProperties(self._gateway.duplex_choices, is_bundle=False) if is_foreign else BUNDLE


async def serve_pages(  # noqa: PLR0913 - the parts of a process that have pages
    listening: socket.socket,
    registry: Registry,
    *,
    is_ready: Callable[[], bool],
    report: Callable[[], ConfigReport],
    loads: Callable[[], Iterator[dict[str, EndpointLoad]]],
    demand: DemandWatchServer,
    explain: ExplainPage | None,
    others: Iterable[web.RouteDef] = (),
    guard: Middleware | None = None,
) -> web.AppRunner:
    """Take the connections of a socket until the result's ``cleanup``. ``others``: further pages. ``guard``: who may
    see which.
    """

    async def show_metrics(request: web.Request) -> web.StreamResponse:
        return await _in_pieces(request, registry.exposition_chunks(), CONTENT_TYPE_LATEST)

    async def show_readiness(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if is_ready() else web.Response(text="not ready\n", status=503)

    async def show_report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(report()), content_type="application/json")

    async def show_loads(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(await _together(loads())), content_type="application/json")

    async def show_demand(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(body=await demand.current_line(), content_type="application/json")
        return await _stream(request, demand)

    async def end_streams(_: web.Application) -> None:
        demand.close_streams()

    async def show_index(request: web.Request) -> web.Response:
        message = "POST a request's body to know where it would go; attache explain --url does"
        there = {one.canonical for one in request.app.router.resources()}
        pages = {path: what for path, what in _INDEX.items() if path in there}
        pages |= {_EXPLAIN: message if explain is not None else "only with the option --debug of extproc"}
        return web.Response(text="".join(f"{path:<20} {what}\n" for path, what in pages.items()))

    app = web.Application(middlewares=[] if guard is None else [guard])
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
        app.add_routes([web.post("/debug/explain/{path:.*}", explain.handle)])
    app.add_routes(others)
    return await _take(listening, app)


async def _take(listening: socket.socket, app: web.Application) -> web.AppRunner:
    name = listening.getsockname()
    # a socket's path is no address
    if isinstance(name, tuple):
        add_browser_protection(app, name[0])
    runner = PageServer(app)
    await runner.setup()
    await runner.listen(listening)
    return runner


def objectives_page(report: Callable[[], Iterator[SloObjectiveCounts]]) -> web.RouteDef:
    """The page SLO_PATH: a line for each objective."""

    async def show(request: web.Request) -> web.StreamResponse:
        lines = (msgspec.json.encode(one).decode() + "\n" for one in report())
        return await _in_pieces(request, lines, "application/x-ndjson")

    return web.get(SLO_PATH, show)


def breaker_reset_page(core: Core, clock: Callable[[], float], perform: Callable[[list[Effect]], None]) -> web.RouteDef:
    """The page RESET_PATH: a POST closes the breakers of a ModelServer, or that of one of its engines. It changes what
    requests get, so it is for this machine alone, wherever the other pages are served.
    """

    async def reset(request: web.Request) -> web.Response:
        if not is_from_loopback(request):
            text = "breakers are reset from the machine or the pod of extproc alone; run attache reset there\n"
            return web.Response(text=text, status=403)
        server, engine = request.query.get("server", ""), request.query.get("engine", "")
        pool = core.pools.get(server)
        if pool is None:
            others = f"there are: {quoted_names(core.pools)}" if core.pools else "there is none"
            return web.Response(text=f"there is no ModelServer {quoted_names([server])}; {others}\n", status=404)
        if engine and pool.table.row_of(engine) is None:
            addresses = pool.table.active_addresses
            others = f"it has: {quoted_names(addresses)}" if addresses else "it has none"
            return web.Response(text=f"{server} has no engine {quoted_names([engine])}; {others}\n", status=404)
        effects = core.reset_breakers(server, engine, clock())
        perform(effects)
        closed = [one.address for one in effects if isinstance(one, BreakerChanged)]
        return web.Response(body=msgspec.json.encode(closed), content_type="application/json")

    return web.post(RESET_PATH, reset)


async def _together(parts: Iterator[dict[str, EndpointLoad]]) -> dict[str, EndpointLoad]:
    found: dict[str, EndpointLoad] = {}
    for number, part in enumerate(parts, start=1):
        merge_loads(found, part)
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
    if request.method == hdrs.METH_HEAD:
        return answer
    for piece in pieces:
        if piece and not await _written(request, answer, piece.encode()):
            break
        await asyncio.sleep(0)
    return answer


async def _written(request: web.Request, answer: web.StreamResponse, content: bytes) -> bool:
    """Whether the reader takes it in time; one that does not is disconnected."""
    try:
        async with asyncio.timeout(_SLOWEST_S):
            await answer.write(content)
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
        return False
    return True


async def _stream(request: web.Request, demand: DemandWatchServer) -> web.StreamResponse:
    """Lines until the client or the process goes."""
    if request.method == hdrs.METH_HEAD:
        return web.Response(content_type="application/x-ndjson")
    if not demand.may_accept_follower:
        return web.Response(text="too many follow this page already\n", status=503)
    answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    changes = request.query["watch"] == "changes"
    async with contextlib.aclosing(demand.stream_lines(changes=changes)) as lines:
        await answer.prepare(request)
        async for line in lines:
            if not await _written(request, answer, line):
                break
    return answer
