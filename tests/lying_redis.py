# SPDX-License-Identifier: Apache-2.0
"""A Redis whose answers have no end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# By name: how an answer begins, and what follows again and again. In turns RESP2 and RESP3 have them.
LIES = {
    "a bulk": (b"$1000000000\r\n", b"x" * 4096),
    "an array": (b"*1000000000\r\n", b"$1\r\nx\r\n" * 512),
    "an array in arrays": (b"*1000000000\r\n", b"*2\r\n*0\r\n:1\r\n" * 512),
    "bulks in an array": (b"*1000000000\r\n", b"$4096\r\n" + b"x" * 4096 + b"\r\n"),
}
RESP3_LIES = {
    "an error": (b"!1000000000\r\n", b"x" * 4096),
    "a text": (b"=1000000000\r\n", b"x" * 4096),
    "a set": (b"~1000000000\r\n", b"_\r\n" * 512),
    "pushes": (b"", b">1\r\n$1\r\nx\r\n" * 512),
}
# More than any bound, so that a client that has none is seen, and does no harm.
_MOST_SENT = 64 << 20


class LyingRedis:
    """Answers requests with ``word`` by a lie, and everything else well. ``sent``: bytes of lies that were read by
    clients, or are in buffers of the system. ``connections``: that have begun.
    """

    def __init__(self, word: bytes, lie: tuple[bytes, bytes]) -> None:
        self.port = 0
        self.sent = self.connections = 0
        self._word, self._lie = word, lie

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        first, more = self._lie
        try:
            while request := await reader.read(1 << 16):
                if b"HELLO" in request:
                    writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                elif self._word not in request:
                    writer.write(b"+OK\r\n" * request.count(b"*"))
                else:
                    writer.write(first)
                    while more and self.sent < _MOST_SENT:
                        writer.write(more)
                        await writer.drain()
                        self.sent += len(more)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def lying_redis(word: bytes, lie: tuple[bytes, bytes]) -> AsyncIterator[LyingRedis]:
    """Until the end of the block."""
    redis = LyingRedis(word, lie)
    async with await asyncio.start_server(redis.serve, "127.0.0.1", 0) as server:
        redis.port = server.sockets[0].getsockname()[1]
        yield redis
        server.close()
