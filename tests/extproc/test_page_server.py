# SPDX-License-Identifier: Apache-2.0
"""What clients may take that send or read nothing: over real sockets, with short limits."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from bench.stack.processes import free_ports
from extproc.metrics.request_metrics import TlsMetrics
from extproc.page_server import PageLimits, PageServer
from extproc.streams.tls import ReloadingCertificate
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

NOW = dt.datetime.now(dt.UTC)
HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
ASKS = HEAD + b"\r\n"
# only what never comes takes so long
PATIENT_S = 60.0
SHORT = PageLimits(begin_s=0.3, idle_s=PATIENT_S)


def context() -> ssl.SSLContext:
    return ReloadingCertificate(None, TlsMetrics(CollectorRegistry()), lambda: NOW).context


@asynccontextmanager
async def served(limits: PageLimits, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of pages: / answers at once, /stream a line each 0.1 s, /large 64 MB, and a POST its body."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def stream(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for number in range(15):
            await answer.write(b"%d\n" % number)
            await asyncio.sleep(0.1)
        return answer

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(64_000_000))

    app, port = web.Application(), free_ports(1)[0]
    app.add_routes([web.route("*", "/", answer), web.get("/stream", stream), web.get("/large", large)])
    server = PageServer(app, end_s=0.1, limits=limits)
    await server.setup()
    await server.listen(("127.0.0.1", port), tls)
    try:
        yield port
    finally:
        await server.cleanup()


@asynccontextmanager
async def connected(
    port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def closes(reader: asyncio.StreamReader) -> None:
    """Until the server has closed the connection."""
    with suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(65_536), PATIENT_S):
            pass


async def is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a request is, rather than its connection closed."""
    try:
        writer.write(ASKS)
        return b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENT_S)
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


async def has_capacity(port: int, tls: ssl.SSLContext | None = None) -> bool:
    try:
        async with connected(port, tls) as (reader, writer):
            return await is_answered(reader, writer)
    except ConnectionError:
        # in the handshake
        return False


@pytest.mark.parametrize("sent", [b"", HEAD])
@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_connection_without_whole_headers_in_time_is_closed(sent: bytes, *, has_tls: bool) -> None:
    shown = ssl._create_unverified_context() if has_tls else None  # noqa: S323 - the certificate is the test's own
    async with served(SHORT, context() if has_tls else None) as port, connected(port, shown) as (reader, writer):
        writer.write(sent)
        await closes(reader)


async def test_headers_that_come_byte_by_byte_are_late_all_the_same() -> None:
    async with served(SHORT) as port, connected(port) as (reader, writer):
        closed = asyncio.create_task(closes(reader))
        for byte in HEAD + b"x: " + b"x" * 4000:
            writer.write(bytes([byte]))
            if (await asyncio.wait({closed}, timeout=0.02))[0]:
                break
        assert closed.done()


async def test_a_handshake_of_tls_has_its_time() -> None:
    async with served(SHORT, context()) as port, connected(port) as (reader, _):
        await closes(reader)


async def test_a_body_has_its_time() -> None:
    async with served(PageLimits(begin_s=1.0)) as port, connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nhalf")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), PATIENT_S)


async def test_a_connection_may_be_asked_on_again_until_it_was_idle_for_long() -> None:
    async with served(PageLimits(begin_s=1.0, idle_s=4.0)) as port, connected(port) as (reader, writer):
        assert await is_answered(reader, writer)
        await asyncio.sleep(1.2)
        assert await is_answered(reader, writer)
        await closes(reader)


async def test_an_answer_that_is_read_may_take_longer_than_all_limits() -> None:
    async with served(PageLimits(begin_s=1.0, idle_s=1.0)) as port, connected(port) as (reader, writer):
        writer.write(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"14\n"), PATIENT_S)


async def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    async with served(PageLimits(connections=1, idle_s=1.0)) as port:
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await eventually(partial(has_capacity, port))


async def test_connections_beyond_the_bound_are_closed_and_there_is_room_once_one_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(PageLimits(connections=2)) as port, connected(port) as (reader, writer):
        assert await is_answered(reader, writer)
        async with connected(port) as (other, other_writer):
            assert await is_answered(other, other_writer)
            assert [await has_capacity(port) for _ in range(3)] == [False] * 3
            assert await is_answered(reader, writer)
        await eventually(partial(has_capacity, port))
    assert caplog.text.count(f"2 connections to 127.0.0.1:{port} are open") == 1


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_count_before_their_handshake_of_tls(run: Callable[[Coroutine[None, None, None]], None]) -> None:
    async def fill() -> None:
        shown = ssl._create_unverified_context()  # noqa: S323 - the certificate is the test's own
        limits = PageLimits(connections=3, begin_s=PATIENT_S)
        async with served(limits, context()) as port, connected(port, shown) as honest:
            async with connected(port), connected(port):
                assert not await has_capacity(port, shown)
                assert await is_answered(*honest)
            await eventually(partial(has_capacity, port, shown))
            assert await is_answered(*honest)

    run(fill())


async def test_a_late_handshake_of_tls_makes_way_for_other_connections() -> None:
    shown = ssl._create_unverified_context()  # noqa: S323 - the certificate is the test's own
    async with served(PageLimits(connections=1, begin_s=1.0), context()) as port, connected(port):
        await eventually(partial(has_capacity, port, shown))


async def test_the_end_of_the_server_ends_connections_that_have_not_begun() -> None:
    async with AsyncExitStack() as opened:
        async with served(PageLimits()) as port:
            silent, _ = await opened.enter_async_context(connected(port))
            assert await has_capacity(port)
        await closes(silent)
