# SPDX-License-Identifier: Apache-2.0
"""Waiting for something to come true, without sleeping longer than it takes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import httpx

Condition = Callable[[], bool | Awaitable[bool]]


async def eventually(holds: Condition, *, timeout_s: float = 10.0, pause_s: float = 0.02) -> None:
    """Ask again and again until it holds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout_s):
        while not await _ask(holds):  # noqa: ASYNC110  it happens elsewhere: there is no event to wait for
            await asyncio.sleep(pause_s)


async def until_served(http: httpx.AsyncClient, url: str = "", *, timeout_s: float = 30.0) -> None:
    """Until Envoy at ``url`` has its routes and answers ``GET /v1/models``; TimeoutError if it never does."""

    async def serves() -> bool:
        try:
            return (await http.get(f"{url}/v1/models")).status_code == 200
        except httpx.TransportError:
            return False

    await eventually(serves, timeout_s=timeout_s)


async def _ask(holds: Condition) -> bool:
    answer = holds()
    return await answer if inspect.isawaitable(answer) else answer
