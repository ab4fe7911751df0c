# SPDX-License-Identifier: Apache-2.0
"""The persistent connection against all kinds of servers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from extproc.feeds.http_get import KeptConnection, get_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OK = b"HTTP/1.1 200 OK\r\n"


class GetFailed(Exception):
    """A request that failed, with the message."""


class Getter:
    """Requests as coroutines."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: KeptConnection | None = None
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def get(self, path: str) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        if self._connection is None or not self._connection.is_open:
            self._connection = KeptConnection(self._succeeded, self._failed)
            made = self._connection
            await asyncio.get_running_loop().create_connection(lambda: made, "127.0.0.1", self._port)
        self._connection.ask(get_request("127.0.0.1", self._port, path))
        done, _ = await asyncio.wait([self._answer], timeout=0.5)
        if not done:
            self._connection.give_up("no answer in time")
        return await self._answer

    def _succeeded(self, body: bytes) -> None:
        self._answer.set_result(body)

    def _failed(self, message: str) -> None:
        self._answer.set_exception(GetFailed(message))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.give_up()


@asynccontextmanager
async def serving(*answers: list[bytes]) -> AsyncIterator[tuple[Getter, list[bytes]]]:
    """A server whose n-th request gets the n-th list of pieces; an empty piece ends the connection."""
    asked: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in answers[len(asked) - 1]:
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    getter = Getter(server.sockets[0].getsockname()[1])
    try:
        yield getter, asked
    finally:
        getter.close()
        server.close()


def whole(body: bytes) -> list[bytes]:
    return [OK + b"Content-Length: %d\r\n\r\n" % len(body) + body]


async def test_pages_come_over_one_connection() -> None:
    async with serving(whole(b"one"), whole(b""), whole(b"three" * 50_000)) as (getter, asked):
        assert await getter.get("/metrics") == b"one"
        assert await getter.get("/v1/models") == b""
        assert await getter.get("/metrics") == b"three" * 50_000
        assert [request.split(b" ")[1] for request in asked] == [b"/metrics", b"/v1/models", b"/metrics"]


async def test_responses_in_pieces_and_in_chunks_are_assembled() -> None:
    pieces = [b"HTTP/1.1 200", b" OK\r\ncontent-length: 6\r", b"\n\r\nab", b"cdef"]
    chunks = [OK + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n2;x=y\r\nde", b"\r\n0\r", b"\n\r\n"]
    async with serving(pieces, chunks) as (getter, _):
        assert await getter.get("/") == b"abcdef"
        assert await getter.get("/") == b"abcde"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"], "503 Service Unavailable"),
        ([OK + b"\r\n"], "without content-length"),
        ([OK + b"content-length: 10\r\n\r\nabc", b""], "the connection ended"),
        ([b""], "the connection ended"),
        ([b"220 smtp.example ESMTP\r\n\r\n"], "answered 220"),
        ([OK + b"content-length: 10\r\n\r\nabc"], "no answer in time"),
    ],
)
async def test_an_invalid_response_is_a_failure_and_the_next_request_starts_anew(
    answer: list[bytes], message: str
) -> None:
    async with serving(answer, whole(b"good")) as (getter, _):
        with pytest.raises(GetFailed, match=message):
            await getter.get("/")
        assert await getter.get("/") == b"good"


async def test_a_closed_connection_is_replaced() -> None:
    async with serving([*whole(b"one"), b""], whole(b"two")) as (getter, _):
        assert await getter.get("/") == b"one"
        await asyncio.sleep(0.05)
        assert await getter.get("/") == b"two"
