"""A client that costs next to nothing: prepared requests over keep-alive connections, the next when an answer is whole."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from bench.engine.text import BYTES_PER_TOKEN
from bench.stack import ALIAS
from bench.workload.text import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD: Final = "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"


def requests(prompt_bytes: int, *, count: int, model: str = ALIAS) -> list[bytes]:
    """Whole HTTP requests: a system prompt that a quarter of them share takes half, what differs takes the rest."""
    half = prompt_bytes // 2 // BYTES_PER_TOKEN
    made = []
    for number in range(count):
        messages = [
            {"role": "system", "content": text_of(f"system/{number % 4}", half)},
            {"role": "user", "content": text_of(f"user/{number}", half)},
        ]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"model": model, "messages": messages, **options}).encode()
        made.append(f"{_HEAD}content-length: {len(body)}\r\n\r\n".encode() + body)
    return made


class _Connection(asyncio.Protocol):
    def __init__(self, load: WireLoad, first: int) -> None:
        self._load = load
        self._next = first
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < _length(head):
            return
        self._received = b""
        if self._load.goes_on_after(head):
            self._send()
        elif self._transport is not None:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._load.closed()

    def _send(self) -> None:
        assert self._transport is not None
        self._transport.write(self._load.requests[self._next % len(self._load.requests)])
        self._next += 1


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line[15:])
    return 0


class WireLoad:
    """``connections`` of them, each with one request at a time."""

    def __init__(self, requests: Sequence[bytes], *, connections: int) -> None:
        self.requests = requests
        self.answered = 0
        self._is_over = False
        self._refused = b""
        self._connections = connections
        self._open = 0
        self._all_closed = asyncio.Event()

    async def run(self, host: str, port: int, *, seconds: float) -> float:
        """Answers a second, for about so long. Raises RuntimeError if an answer is not 200."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(self._connections):
            self._open += 1
            await loop.create_connection(partial(_Connection, self, number * 7), host, port)
        await asyncio.sleep(seconds)
        self._is_over = True
        async with asyncio.timeout(30):
            await self._all_closed.wait()
        if self._refused:
            msg = f"an answer was not 200: {self._refused!r}"
            raise RuntimeError(msg)
        return self.answered / (loop.time() - began)

    def goes_on_after(self, head: bytes) -> bool:
        """An answer is whole: whether its connection may ask again."""
        if not head.startswith(b"HTTP/1.1 200"):
            self._refused = head[:300]
        self.answered += 1
        return not self._is_over and not self._refused

    def closed(self) -> None:
        """A connection is closed."""
        self._open -= 1
        if not self._open:
            self._all_closed.set()
