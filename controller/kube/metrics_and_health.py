# SPDX-License-Identifier: Apache-2.0
"""Pages of a role for the cluster: /metrics, /healthz, /readyz; /loads and /demand where there is an extproc.

Metrics of thousands of series are written as text, in the format of prometheus_client but faster: that checks and
escapes each label of each sample, some 30 µs; 60,000 samples take seconds. A ``MetricFamily`` has its labels as text,
made once for all families that share them. To other collectors and registries it is an ordinary metric.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
import msgspec
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from controller.kube.gateway_reports import DemandStreamMerger, read_loads
from extproc.api.addresses import parse_address
from extproc.api.status_page_contents import DEMAND_PATH, LOADS_PATH
from extproc.browser_security import add_browser_protection
from extproc.page_server import PageServer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from aiohttp.typedefs import Middleware

# Series whose text is made at once.
_AT_ONCE: Final = 1000
# A window of 15 bits with a head and an end as of a file of gzip.
_GZIP: Final = 31
# From there on Go's text of a number differs from Python's.
_PLAIN_BELOW: Final = 1e6
# As many as an extproc has itself.
_MOST_WATCHERS: Final = 8
# A client that has not read a line by then is disconnected.
_SLOWEST_S: Final = 5.0
_NO_WEIGHT: Final = re.compile(r"q[ \t]*=[ \t]*0(\.0{0,3})?")
# Between two lines of a stream any time may pass.
_RELAY_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_RELAYED: Final = ("content-type", "content-encoding")
_END_STREAMS_S: Final = 1.0


class EscapedLabels(NamedTuple):
    """``names`` and ``values``: in this order; ``text``: as the page has them."""

    names: tuple[str, ...]
    values: tuple[str, ...]
    text: str


def encode_labels(names: tuple[str, ...], values: tuple[str, ...]) -> EscapedLabels:
    """``names``: valid ones, in any order."""
    pairs = sorted(zip(names, values, strict=True))
    return EscapedLabels(names, values, ",".join([f'{name}="{_escaped(value)}"' for name, value in pairs]))


class MetricFamily(Metric):
    """Gauges (``gauge``) or counters (``counter``). ``rows``: labels and value of each series."""

    def __init__(self, name: str, documentation: str, typ: str, rows: Sequence[tuple[EscapedLabels, float]]) -> None:
        self._rows = rows
        super().__init__(name, documentation, typ)

    @property
    def _series(self) -> str:
        return f"{self.name}_total" if self.type == "counter" else self.name

    @property
    def samples(self) -> list[Sample]:
        """For readers other than this module's writer."""
        name = self._series
        return [
            Sample(name, dict(zip(labels.names, labels.values, strict=True)), value) for labels, value in self._rows
        ]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """What a metric begins with: none."""

    def text_chunks(self) -> Iterator[bytes]:
        """Its text with its head, as on the page, some thousand series at a time."""
        name = self._series
        documentation = self.documentation.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {name} {documentation}\n# TYPE {name} {self.type}\n".encode()
        for first in range(0, len(self._rows), _AT_ONCE):
            rows = self._rows[first : first + _AT_ONCE]
            yield "".join([f"{name}{{{labels.text}}} {_number(value)}\n" for labels, value in rows]).encode()


def render_page(registry: CollectorRegistry, *, gzipped: bool = False) -> bytes:
    """All metrics in Prometheus' text format.

    A page of thousands of series is some MiB, of which compression leaves a twentieth. It is compressed part by part:
    the whole text is never in memory.
    """
    if not gzipped:
        return b"".join(_parts(registry))
    made = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=_GZIP)
    return b"".join([*[made.compress(part) for part in _parts(registry)], made.flush()])


def _parts(registry: CollectorRegistry) -> Iterator[bytes]:
    others = list[Metric]()
    for metric in registry.collect():
        if isinstance(metric, MetricFamily):
            yield _by_client(others)
            yield from metric.text_chunks()
            others = []
        else:
            others.append(metric)
    yield _by_client(others)


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _by_client(metrics: list[Metric]) -> bytes:
    if not metrics:
        return b""
    only = CollectorRegistry()
    only.register(_Collected(metrics))
    return generate_latest(only)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if -_PLAIN_BELOW < value < _PLAIN_BELOW:
        return repr(float(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # theirs has no types


@contextlib.asynccontextmanager
async def serve_pages(
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

    ``extprocs``: addresses of the extproc processes' pages; /loads has their sum, and /demand the lines of each.
    ``more``: further pages. ``tls``: None for plain HTTP. ``guard``: authorises requests.
    """

    async def metrics(request: web.Request) -> web.Response:
        gzipped = _takes_gzip(request.headers.get("accept-encoding", ""))
        # thousands of series would block the event loop too long
        body = await asyncio.to_thread(render_page, registry, gzipped=gzipped)
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
    host, port = parse_address(address)
    add_browser_protection(app, host)
    runner = PageServer(app)
    await runner.setup()
    try:
        await runner.listen((host, port), tls)
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serve_relayed_pages(address: str, socket: Path, guard: Middleware) -> AsyncIterator[None]:
    """Serve the pages of the process behind ``socket`` at ``address`` inside the context, for requests that ``guard``
    authorises; raises OSError if the port is taken.
    """

    async def relay(request: web.Request) -> web.StreamResponse:
        headers = {"accept-encoding": request.headers.get("accept-encoding", "identity")}
        async with contextlib.AsyncExitStack() as opened:
            try:
                asked = http.request(request.method, request.rel_url, headers=headers, allow_redirects=False)
                found = await opened.enter_async_context(asked)
            except aiohttp.ClientError as error:
                return web.Response(status=503, text=f"extproc does not answer: {error}\n")
            passed = {name: found.headers[name] for name in _RELAYED if name in found.headers}
            answer = web.StreamResponse(status=found.status, headers=passed)
            await answer.prepare(request)
            if not await _write(answer, _content(found)) and request.transport is not None:
                # a page that was cut must not look whole
                request.transport.abort()
        return answer

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get("/{path:.*}", relay)])
    host, port = parse_address(address)
    add_browser_protection(app, host)
    runner = PageServer(app, end_s=_END_STREAMS_S)
    connector = aiohttp.UnixConnector(str(socket))
    async with aiohttp.ClientSession(
        "http://extproc", connector=connector, timeout=_RELAY_TIMEOUT, auto_decompress=False
    ) as http:
        await runner.setup()
        try:
            await runner.listen((host, port))
            yield
        finally:
            await runner.cleanup()


def _takes_gzip(accept_encoding: str) -> bool:
    """Whether the client accepts gzip; a weight of 0 excludes it (RFC 9110, 12.5.3)."""
    for one in accept_encoding.split(","):
        name, _, weight = one.partition(";")
        if name.strip().lower() in {"gzip", "x-gzip"}:
            return _NO_WEIGHT.fullmatch(weight.strip().lower()) is None
    return False


class _DemandPage:
    """Demand reports of a pod's extprocs: a line of each, or with ``?watch`` all their lines as they arrive."""

    def __init__(self, app: web.Application, extprocs: Sequence[str]) -> None:
        self._extprocs = extprocs
        # streams that are open
        self._streams: set[asyncio.Task[bool]] = set()
        app.on_shutdown.append(self._end)

    async def show(self, request: web.Request) -> web.StreamResponse:
        """One request of the page."""
        if request.method == hdrs.METH_HEAD:
            return web.Response(content_type="application/x-ndjson")
        if "watch" in request.query and len(self._streams) >= _MOST_WATCHERS:
            return web.Response(status=503, text="too many follow this page already\n")
        async with aiohttp.ClientSession() as http:
            relay = DemandStreamMerger(http, self._extprocs)
            if "watch" not in request.query:
                return web.Response(body=await relay.read_once(), content_type="application/x-ndjson")
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


async def _content(found: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """The body as it arrives; raises ConnectionError where it is cut."""
    try:
        async for piece in found.content.iter_any():
            yield piece
    except aiohttp.ClientError as error:
        raise ConnectionError(f"the page was cut: {error}") from error


async def _write(answer: web.StreamResponse, lines: AsyncGenerator[bytes]) -> bool:
    """Until the reader has gone or does not read them; whether all were written."""
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                async with asyncio.timeout(_SLOWEST_S):
                    await answer.write(line)
    except (TimeoutError, ConnectionError):
        return False
    return True
