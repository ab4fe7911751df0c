# SPDX-License-Identifier: Apache-2.0
"""A minimal HTTP GET client over a persistent connection, for scraping engines.

It uses callbacks instead of coroutines: for a hundred engines scraped five times a second, tasks, futures and
timeouts would cost more than reading the pages (docs/performance.md has the figures beside aiohttp's client). It
supports what engines' servers send: a content length or chunks. Anything else closes the connection with a failure,
redirects included.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, cast

from extproc.api.addresses import join_host_port
from extproc.api.config_errors import replace_unprintable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

# vLLM's pages have 30 to 200 KB.
MOST_BYTES: Final = 4 * 2**20
_MOST_HEAD_BYTES: Final = 16 * 1024
_MOST_LINE_BYTES: Final = 1024
_MOST_CHUNKS: Final = 16_384
_END_OF_HEAD: Final = b"\r\n\r\n"
_OK: Final = re.compile(rb"HTTP/1\.[0-9] 200(?![^ \r])")
# The fields that determine the length of an answer: a length, or a transfer coding.
_LENGTHS: Final = re.compile(
    rb"\r\n(?:content-length:[ \t]*([^\r\n]*)|transfer-encoding:[ \t]*([^\r\n]*))", re.IGNORECASE
)
_LENGTH: Final = re.compile(rb"[0-9]{1,10}[ \t]*")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,8})(;.*)?", re.DOTALL)
_SHOWN_BYTES: Final = 80


class BadResponse(Exception):
    """The answer is no page; the message has the reason."""


def encode_get_request(host: str, port: int, path: str, authorization: str = "", *, authority: str = "") -> bytes:
    """The bytes of a GET request for ``path``. ``authorization``: the header's value, if any. ``authority``: the
    server's name, if not its address.
    """
    place = authority or join_host_port(host, port)
    more = f"authorization: {authorization}\r\n" if authorization else ""
    return f"GET {path} HTTP/1.1\r\nhost: {place}\r\naccept: text/plain, application/json\r\n{more}\r\n".encode()


class ResponseParser:
    """Reads one answer: pieces in, the body of a 200 out. It does no I/O.

    The result is the same however the answer is cut, and no byte is searched twice. It never holds much more than
    ``MOST_BYTES``: an answer that announces more is refused before its body comes.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._steps = self._read()

    def receive(self, piece: bytes) -> bytes | None:
        """The body; None until it is whole. Raises BadResponse. After either end, the parser takes no more."""
        self._data += piece
        try:
            next(self._steps)
        except StopIteration as end:
            return cast("bytes", end.value)
        return None

    def _read(self) -> Generator[None, None, bytes]:
        head = yield from self._until(_END_OF_HEAD, _MOST_HEAD_BYTES)
        length = _length_in(head)
        return (yield from (self._chunks() if length is None else self._take(length)))

    def _chunks(self) -> Generator[None, None, bytes]:
        parts: list[bytes] = []
        for _ in range(_MOST_CHUNKS):
            line = yield from self._until(b"\r\n", _MOST_LINE_BYTES)
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise BadResponse(f"a chunk's size is {_shown(line)}")
            if not int(size[1], 16):
                yield from self._skip_trailers()
                return b"".join(parts)
            parts.append((yield from self._take(int(size[1], 16), b"\r\n")))
        raise BadResponse(f"an answer of more than {_MOST_CHUNKS} chunks")

    def _skip_trailers(self) -> Generator[None, None, None]:
        ends_at = self._at + _MOST_HEAD_BYTES
        while (yield from self._until(b"\r\n", _MOST_LINE_BYTES)):
            if self._at > ends_at:
                raise BadResponse(f"more than {_MOST_HEAD_BYTES} bytes of trailers")

    def _take(self, size: int, after: bytes = b"") -> Generator[None, None, bytes]:
        """So many bytes, which ``after`` must follow."""
        end = self._at + size
        if end > MOST_BYTES:
            raise BadResponse(f"an answer of more than {MOST_BYTES} bytes")
        next_at = end + len(after)
        while len(self._data) < next_at:
            yield
        with memoryview(self._data) as data:
            taken = bytes(data[self._at : end])
            if data[end:next_at] != after:
                raise BadResponse("a chunk is longer than its size")
        self._at = next_at
        return taken

    def _until(self, mark: bytes, most: int) -> Generator[None, None, bytes]:
        """The bytes before ``mark``, which must end within ``most`` bytes."""
        searched, ends_at = self._at, self._at + most
        while (found := self._data.find(mark, searched, ends_at)) < 0:
            if len(self._data) >= ends_at:
                raise BadResponse(f"no end of a line or of the head within {most} bytes")
            searched = max(self._at, len(self._data) - len(mark) + 1)
            yield
        before = bytes(self._data[self._at : found])
        self._at = found + len(mark)
        return before


class PersistentConnection(asyncio.Protocol):
    """Sends one request at a time. Each ends with the body of a 200, or with a failure and a closed connection."""

    def __init__(self, on_body: Callable[[bytes], None], on_failure: Callable[[str], None]) -> None:
        """``on_body``: called with each body. ``on_failure``: called with a message if a request fails."""
        self.is_open = False
        self.is_busy = False
        self._on_body = on_body
        self._on_failure = on_failure
        self._transport: asyncio.Transport | None = None
        # of an answer that comes in pieces
        self._parser: ResponseParser | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ready for requests."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """A request in progress fails."""
        self.is_open, self._transport = False, None
        self._fail(f"the connection ended: {exc or 'closed by the server'}")

    def send_request(self, request: bytes) -> None:
        """Send ``request``; the connection must be open and not busy."""
        self.is_busy = True
        self._parser = None
        if self._transport is not None:
            self._transport.write(request)

    def abort(self, message: str = "given up") -> None:
        """Close the connection; a request in progress fails with ``message``."""
        self._fail(message)
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive a response, usually in one piece."""
        if not self.is_busy:
            self.abort()  # no request in progress
            return
        if self._parser is None:
            body = _whole_body(data)
            if body is not None:
                self._succeed(body)
                return
            self._parser = ResponseParser()
        try:
            body = self._parser.receive(data)
        except BadResponse as error:
            self._fail(str(error))
        else:
            if body is not None:
                self._succeed(body)

    def _succeed(self, body: bytes) -> None:
        self.is_busy = False
        self._parser = None
        self._on_body(body)

    def _fail(self, message: str) -> None:
        if self.is_busy:
            self.is_busy = False
            self._parser = None
            self.abort()
            self._on_failure(message)


def _whole_body(data: bytes) -> bytes | None:
    """The body of an answer in one piece with a content length, without a copy of its head; None for any other."""
    end = data.find(_END_OF_HEAD, 0, _MOST_HEAD_BYTES)
    if end < 0:
        return None
    try:
        length = _length_in(data[:end])
    except BadResponse:
        return None
    return data[end + 4 :] if length == len(data) - end - 4 else None


def _length_in(head: bytes) -> int | None:
    """The content length; None for chunks. Raises BadResponse unless it is the head of a 200 that can be read."""
    if _OK.match(head) is None:
        status, _, _ = head.partition(b"\r\n")
        raise BadResponse(f"answered {_shown(status)}")
    fields = _LENGTHS.findall(head)
    if len(fields) == 1:
        ((length, coding),) = fields
        if coding.lower() == b"chunked":
            return None
        if _LENGTH.fullmatch(length):
            return int(length)
    raise BadResponse("an answer without content-length or chunks, or with several of them")


def _shown(text: bytes) -> str:
    """As a line of a log may have it: a server has chosen it."""
    return replace_unprintable(text[:_SHOWN_BYTES].decode(errors="replace"))
