# SPDX-License-Identifier: Apache-2.0
"""Sends broken requests, byte by byte as they are: HTTP/1.1 by hand, HTTP/2 by h2"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import h2.config
import h2.connection
import h2.events
import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from bench.fuzz.mutants import Case

_READ_BYTES: Final = 65_536
_ASIDE: Final = frozenset({"connection", "expect"})


class Answer(msgspec.Struct):
    """``status``: 0 if there was none. ``is_whole``: the answer was ended as its protocol ends one."""

    status: int = 0
    content_type: str = ""
    body: bytes = b""
    is_whole: bool = False


async def send(host: str, port: int, case: Case) -> Answer | None:
    """The answer; None if the client of this case leaves before it has one."""
    async with _connection(host, port) as (reader, writer):
        if case.transport == "http2":
            return await _Http2(reader, writer).exchange(f"{host}:{port}", case)
        return await _http1(reader, writer, f"{host}:{port}", case)


@contextlib.asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _http1(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str, case: Case
) -> Answer | None:
    lines = [f"{case.method} {case.path} HTTP/1.1", f"host: {authority}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in case.headers]
    if case.transport == "chunked":
        lines.append("transfer-encoding: chunked")
    elif case.body or case.method == "POST":
        lines.append(f"content-length: {len(case.body)}")
    # the gateway may answer, and close, before it has read all
    with contextlib.suppress(ConnectionError):
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        for piece in _pieces(case):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if case.transport == "chunked" else piece)
            await writer.drain()
            if case.leaves == "in the body":
                return None
        if case.transport == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
    if case.leaves == "after the body":
        return None
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(_READ_BYTES):
            received += piece
            if case.leaves == "in the answer":
                return None
    return _parsed(bytes(received), has_body=case.method != "HEAD")


def _pieces(case: Case) -> Iterator[bytes]:
    start = 0
    for length in case.pieces:
        yield case.body[start : start + length]
        start += length


def _parsed(received: bytes, *, has_body: bool) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) < 2 or not words[1].isdigit():
        return Answer(body=received)
    if words[1] == "100":
        return _parsed(body, has_body=has_body)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    answer = Answer(int(words[1]), headers.get("content-type", ""), body, is_whole=True)
    if headers.get("transfer-encoding") == "chunked" and has_body:
        answer.body, answer.is_whole = _joined(body)
    elif "content-length" in headers and has_body:
        answer.is_whole = len(body) == int(headers["content-length"])
    return answer


def _joined(chunked: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether its last chunk came."""
    parts: list[bytes] = []
    while True:
        size, found, rest = chunked.partition(b"\r\n")
        if not found:
            return b"".join(parts), False
        length = int(size.partition(b";")[0], 16)
        if not length:
            return b"".join(parts), True
        parts.append(rest[:length])
        chunked = rest[length + 2 :]


def _as_bytes(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class _Http2:
    """One connection with one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        # what is broken is to be sent as it is
        settings = h2.config.H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._connection = h2.connection.H2Connection(settings)

    async def exchange(self, authority: str, case: Case) -> Answer | None:
        http = self._connection
        http.initiate_connection()
        pseudo = [(":method", case.method), (":path", case.path), (":scheme", "http"), (":authority", authority)]
        http.send_headers(1, _as_bytes([*pseudo, *(one for one in case.headers if one[0] not in _ASIDE)]))
        for piece in _pieces(case):
            for start in range(0, len(piece), http.max_outbound_frame_size):
                http.send_data(1, piece[start : start + http.max_outbound_frame_size])
            await self._flush()
            if case.leaves == "in the body":
                return None
        if case.trailers:
            http.send_headers(1, _as_bytes(case.trailers), end_stream=True)
        else:
            http.end_stream(1)
        await self._flush()
        return None if case.leaves == "after the body" else await self._answer(case)

    async def _answer(self, case: Case) -> Answer | None:
        answer, body = Answer(), bytearray()
        with contextlib.suppress(ConnectionError):
            while received := await self._reader.read(_READ_BYTES):
                if case.leaves == "in the answer":
                    return None
                for event in self._connection.receive_data(received):
                    match event:
                        case h2.events.ResponseReceived():
                            headers = dict(event.headers)
                            answer.status = int(headers[b":status"])
                            answer.content_type = headers.get(b"content-type", b"").decode("latin-1")
                        case h2.events.DataReceived():
                            body += event.data
                            self._connection.acknowledge_received_data(event.flow_controlled_length, 1)
                        case h2.events.StreamEnded():
                            answer.is_whole = True
                        case h2.events.StreamReset() if not answer.is_whole:
                            answer.body = bytes(body)
                            return answer
                if answer.is_whole:
                    break
                await self._flush()
        answer.body = bytes(body)
        return answer

    async def _flush(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(self._connection.data_to_send())
            await self._writer.drain()
