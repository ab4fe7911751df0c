# SPDX-License-Identifier: Apache-2.0
"""A body of HTTP from a program that anybody may run: read up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import StreamReader


async def read_at_most(content: StreamReader, most_bytes: int) -> bytes | None:
    """All of it; None if it is longer, of which not much more than ``most_bytes`` is read."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > most_bytes:
            return None
    return bytes(body)
