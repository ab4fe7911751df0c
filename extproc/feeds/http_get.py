# SPDX-License-Identifier: Apache-2.0
"""A minimal HTTP GET client over a persistent connection, for scraping engines.

It uses callbacks instead of coroutines: for a hundred engines scraped five times a second, tasks, futures and
timeouts would cost more than reading the pages (``bench/micro/scraping.py`` compares it with aiohttp's client). It
supports what engines' servers send: a content length or chunks. Anything else closes the connection with a failure.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_BYTES: Final = 16 * 1024 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"


def get_request(host: str, port: int, path: str, authorization: str = "") -> bytes:
    """The bytes of a GET request for ``path``. ``authorization``: the header's value, if any."""
    name = f"[{host}]" if ":" in host else host
    more = f"authorization: {authorization}\r\n" if authorization else ""
    return f"GET {path} HTTP/1.1\r\nhost: {name}:{port}\r\naccept: text/plain, application/json\r\n{more}\r\n".encode()


class KeptConnection(asyncio.Protocol):
    """Sends one request at a time. Each ends with the body of a 200, or with a failure and a closed connection."""

    def __init__(self, on_body: Callable[[bytes], None], on_failure: Callable[[str], None]) -> None:
        """``on_body``: called with each body. ``on_failure``: called with a message if a request fails."""
        self.is_open = False
        self.is_busy = False
        self._on_body = on_body
        self._on_failure = on_failure
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._length: int | None = None
        self._body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ready for requests."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """A request in progress fails."""
        self.is_open = False
        self._fail(f"the connection ended: {exc or 'closed by the server'}")

    def ask(self, request: bytes) -> None:
        """Send ``request``; the connection must be open and not busy."""
        self.is_busy = True
        self._body_at, self._length = 0, None
        self._received.clear()
        if self._transport is not None:
            self._transport.write(request)

    def give_up(self, message: str = "given up") -> None:
        """Close the connection; a request in progress fails with ``message``."""
        self._fail(message)
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive a response, usually in one piece."""
        if not self.is_busy:
            self.give_up()  # no request in progress
            return
        if not self._received and self._take_whole(data):
            return
        self._received += data
        if len(self._received) > _MAX_BYTES:
            self._fail(f"an answer of more than {_MAX_BYTES} bytes")
        elif self._body_at or self._read_head():
            self._read_body()

    def _take_whole(self, data: bytes) -> bool:
        """Handle a response in one piece with a content length; returns False for any other."""
        end = data.find(_END_OF_HEAD)
        if end < 0 or not data.startswith(b"HTTP/1.1 200"):
            return False
        length = _header(data[:end], b"content-length")
        if length is None or not length.isdigit() or len(data) - end - 4 != int(length):
            return False
        self._succeed(data[end + 4 :])
        return True

    def _read_head(self) -> bool:
        end = self._received.find(_END_OF_HEAD)
        if end < 0:
            return False
        head = bytes(self._received[:end])
        status = head.split(b"\r\n", 1)[0]
        if b" 200 " not in status + b" ":
            self._fail(f"answered {status[:80].decode(errors='replace')}")
            return False
        length = _header(head, b"content-length")
        is_chunked = b"chunked" in (_header(head, b"transfer-encoding") or b"").lower()
        if not is_chunked and (length is None or not length.isdigit()):
            self._fail("an answer without content-length or chunks")
            return False
        self._length = int(length) if length is not None and not is_chunked else None
        self._body_at = end + 4
        return True

    def _read_body(self) -> None:
        if self._length is not None:
            if len(self._received) - self._body_at >= self._length:
                self._succeed(bytes(self._received[self._body_at : self._body_at + self._length]))
            return
        if self._received.endswith(b"0\r\n\r\n"):
            body = _dechunked(bytes(self._received), self._body_at)
            if body is not None:
                self._succeed(body)

    def _succeed(self, body: bytes) -> None:
        self.is_busy = False
        self._on_body(body)

    def _fail(self, message: str) -> None:
        if self.is_busy:
            self.is_busy = False
            self.give_up()
            self._on_failure(message)


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None


def _dechunked(data: bytes, start: int) -> bytes | None:
    """The body from its chunks; None if the last chunk has not arrived."""
    parts: list[bytes] = []
    while True:
        end = data.find(b"\r\n", start)
        if end < 0:
            return None
        try:
            size = int(data[start:end].split(b";", 1)[0], 16)
        except ValueError:
            return None
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
