# SPDX-License-Identifier: Apache-2.0
"""The persistent connection against all kinds of servers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.feeds.http_get import MOST_BYTES, BadResponse, PersistentConnection, ResponseParser, encode_get_request
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OK = b"HTTP/1.1 200 OK\r\n"


class GetFailed(Exception):
    """A request that failed, with the message."""


class Getter:
    """Requests as coroutines."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: PersistentConnection | None = None
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def get(self, path: str, *, within_s: float = 120.0) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        if self._connection is None or not self._connection.is_open:
            self._connection = PersistentConnection(self._succeeded, self._failed)
            made = self._connection
            await asyncio.get_running_loop().create_connection(lambda: made, "127.0.0.1", self._port)
        self._connection.send_request(encode_get_request("127.0.0.1", self._port, path))
        done, _ = await asyncio.wait([self._answer], timeout=within_s)
        if not done:
            self._connection.abort("no answer in time")
        return await self._answer

    def _succeeded(self, body: bytes) -> None:
        self._answer.set_result(body)

    def _failed(self, message: str) -> None:
        self._answer.set_exception(GetFailed(message))

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()


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
            await getter.get("/", within_s=0.5 if message == "no answer in time" else 120.0)
        assert await getter.get("/") == b"good"


async def test_a_closed_connection_is_replaced() -> None:
    async with serving([*whole(b"one"), b""], whole(b"two")) as (getter, _):
        assert await getter.get("/") == b"one"
        await eventually(lambda: not getter.is_open)
        assert await getter.get("/") == b"two"


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def parsed(*pieces: bytes) -> bytes | str | None:
    """The body, why there is none, or None if more must come."""
    parser = ResponseParser()
    try:
        return next((body for piece in pieces if (body := parser.receive(piece)) is not None), None)
    except BadResponse as error:
        return str(error)


@pytest.mark.parametrize("size", ["-6", "0x5", "+5", "1_0", " 5", "5 ", "", "g", "123456789", "5\t;a", "\u0665", "--5"])
def test_a_chunks_size_is_hexadecimal_digits_and_nothing_else(size: str) -> None:
    answer = CHUNKED + size.encode() + b"\r\nabcde\r\n0\r\n\r\n"
    assert "a chunk's size is" in str(parsed(answer))
    assert "a chunk's size is" in str(parsed(*(answer[at : at + 1] for at in range(len(answer)))))


@pytest.mark.parametrize("size", ["5", "05", "5;name=value", "5;a"])
def test_chunks_may_have_extensions_and_an_answer_trailers(size: str) -> None:
    answer = CHUNKED + size.encode() + b"\r\nabcde\r\nA\r\n0123456789\r\n0\r\nexpires: never\r\n\r\n"
    assert parsed(answer) == b"abcde0123456789"


def test_an_end_within_a_chunk_is_not_the_end_of_the_answer() -> None:
    inner = b"0\r\n\r\n"
    answer = CHUNKED + b"5\r\n" + inner + b"\r\n"
    assert parsed(answer) is None
    assert parsed(answer, b"0\r\n\r\n") == inner


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (OK + b"content-length: %d\r\n\r\n" % (MOST_BYTES + 1), f"more than {MOST_BYTES} bytes"),
        (OK + b"content-length: " + b"9" * 5000 + b"\r\n\r\n", "without content-length"),
        (OK + b"content-length: -1\r\n\r\n", "without content-length"),
        (OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", "several"),
        (OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "several"),
        (CHUNKED + b"%x\r\n" % (MOST_BYTES + 1), f"more than {MOST_BYTES} bytes"),
        (CHUNKED + b"1\r\na\r\n" * 20_000, "more than 16384 chunks"),
        (CHUNKED + b"1;" + b"x" * 2000, "no end of a line"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 10_000, "bytes of trailers"),
        (CHUNKED + b"1\r\nab\r\n", "longer than its size"),
        (OK + b"a: b\r\n" * 10_000, "no end of a line or of the head"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n", "answered HTTP/1.1 302"),
        (b"HTTP/1.1 404 is 200 here\r\ncontent-length: 0\r\n\r\n", "answered HTTP/1.1 404"),
        (b"HTTP/1.1 500 \x1b[2J\n\r\ncontent-length: 0\r\n\r\n", "answered HTTP/1.1 500 \N{REPLACEMENT CHARACTER}[2J"),
    ],
)
def test_what_is_too_long_or_unclear_is_refused_as_soon_as_it_is_announced(answer: bytes, why: str) -> None:
    assert why in str(parsed(answer))


# What answers are made of, and what looks like it.
FRAGMENTS = st.lists(
    st.sampled_from(
        [OK, CHUNKED, b"content-length: 3\r\n", b"\r\n", b"0\r\n\r\n", b"3\r\nabc\r\n", b"-6\r\n", b"a;b\r\n"]
    )
    | st.binary(max_size=12),
    max_size=12,
).map(b"".join)


@given(FRAGMENTS | FRAGMENTS.map(CHUNKED.__add__) | st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=60))
def test_any_bytes_have_one_result_however_they_are_cut(answer: bytes, sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(answer[at : at + size])
        at += size
    assert parsed(*pieces, answer[at:]) == parsed(answer)


class CountingBuffer(bytearray):
    """Counts the bytes that are searched in it."""

    searched = 0

    def find(self, mark: object, start: object = 0, end: object = None) -> int:
        assert isinstance(mark, bytes)
        assert isinstance(start, int)
        assert isinstance(end, int)
        found = super().find(mark, start, end)
        self.searched += (found + len(mark) if found >= 0 else min(end, len(self))) - start
        return found


def test_a_page_in_many_chunks_and_pieces_is_searched_once() -> None:
    answer = CHUNKED + b"c8\r\n" + b"x" * 200 + b"\r\n"
    parser, pieces = ResponseParser(), [answer, *[b"c8\r\n" + b"y" * 200 + b"\r\n"] * 5000, b"0\r\n\r\n"]
    whole = b"".join(pieces)
    buffer = parser._data = CountingBuffer()
    *bodies, body = [parser.receive(whole[at : at + 7]) for at in range(0, len(whole), 7)]
    assert bodies == [None] * len(bodies)
    assert len(body or b"") == 1_000_200
    # of each chunk its size, and the bytes of a piece that may be half of a mark
    assert buffer.searched < len(whole) / 10


@given(st.binary(max_size=200))
def test_no_bytes_of_a_server_raise_in_a_connection(noise: bytes) -> None:
    ends: list[object] = []
    connection = PersistentConnection(ends.append, ends.append)
    for data in (noise, CHUNKED + noise, OK + b"content-length: " + noise):
        ends.clear()
        connection.send_request(b"")
        connection.data_received(data)
        connection.abort()
        assert len(ends) == 1, "each request ends once"
