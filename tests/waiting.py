# SPDX-License-Identifier: Apache-2.0
"""Waiting for something to come true, without sleeping longer than it takes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Final

import httpx

Condition = Callable[[], bool | Awaitable[bool]]

PATIENCE_S: Final = 120.0
"""Only what never comes true takes so long. What takes a second here may take twenty on a machine with other work."""


async def eventually(holds: Condition, *, timeout_s: float = PATIENCE_S, pause_s: float = 0.02) -> None:
    """Ask again and again until it holds; TimeoutError, with the place of the condition, if it never does."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await _ask(holds):  # noqa: ASYNC110  it happens elsewhere: there is no event to wait for
                await asyncio.sleep(pause_s)
    except TimeoutError as error:
        raise TimeoutError(f"not true within {timeout_s:g} s: {_place(holds)}") from error


async def until_served(http: httpx.AsyncClient, url: str = "", *, timeout_s: float = PATIENCE_S) -> None:
    """Until Envoy at ``url`` has its routes and answers ``GET /v1/models``; TimeoutError if it never does."""

    async def serves() -> bool:
        try:
            return (await http.get(f"{url}/v1/models", timeout=15)).status_code == 200
        except httpx.TransportError:
            return False

    await eventually(serves, timeout_s=timeout_s)


async def _ask(holds: Condition) -> bool:
    answer = holds()
    return await answer if inspect.isawaitable(answer) else answer


def _place(holds: Condition) -> str:
    code = getattr(holds, "__code__", None)
    return repr(holds) if code is None else f"{code.co_qualname} in {code.co_filename}:{code.co_firstlineno}"
