"""Waiting for what another process or task will do, bounded in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def eventually(holds: Callable[[], Awaitable[bool]], *, timeout_s: float = 10.0) -> None:
    """Ask again and again until it holds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110  the other side is another process: no event to wait for
            await asyncio.sleep(0.02)
