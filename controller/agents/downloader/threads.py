# SPDX-License-Identifier: Apache-2.0
"""Calls that block, in threads that are always waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


async def in_thread(
    function: Callable[..., _T], *arguments: object, on_cancel: Callable[[], object] = lambda: None
) -> _T:
    """Run ``function`` in a thread. If we are cancelled, it is waited for: nothing writes to a file that we close.

    ``on_cancel`` asks the thread to end early.
    """
    running = asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({running})
        raise
