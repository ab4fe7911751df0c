# SPDX-License-Identifier: Apache-2.0
"""What was fetched last, by key: one fetch at a time, shared by all who ask, and nobody waits long for a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")

# What nobody has asked for so long is forgotten.
_FORGET_S: Final = 600.0


class _Entry(Generic[Found]):
    def __init__(self) -> None:
        self.found: Found | None = None
        self.begun_at_s = float("-inf")
        self.asked_at_s = 0.0
        self.is_quick = True
        self.task: asyncio.Task[None] | None = None


class Latest(Generic[Key, Found]):
    """``patience_s``: how long who asks waits for a fetch. One that took longer than that is waited for no more, until
    it has been quick again: what it brings is used the next time.
    """

    def __init__(self, patience_s: float = 0.3) -> None:
        self._patience_s = patience_s
        self._entries: dict[Key, _Entry[Found]] = {}
        self._pruned_at_s = 0.0

    async def get(self, key: Key, fetch: Callable[[], Awaitable[Found]], max_age_s: float) -> Found | None:
        """What was fetched at most ``max_age_s`` ago, or else is fetched now; meanwhile what was fetched before; None
        if nothing was yet. ``fetch`` must not raise.
        """
        now_s = asyncio.get_running_loop().time()
        entry = self._entries.setdefault(key, _Entry())
        entry.asked_at_s = now_s
        if entry.task is None and now_s - entry.begun_at_s >= max_age_s:
            entry.begun_at_s = now_s
            entry.task = asyncio.create_task(self._fetch(entry, fetch), name=f"metric {key}")
        if entry.task is not None and entry.is_quick:
            await asyncio.wait([entry.task], timeout=self._patience_s)
            entry.is_quick = entry.task is None
        self._prune(now_s)
        return entry.found

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [one.task for one in self._entries.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._entries.clear()

    async def _fetch(self, entry: _Entry[Found], fetch: Callable[[], Awaitable[Found]]) -> None:
        try:
            entry.found = await fetch()
            entry.is_quick = asyncio.get_running_loop().time() - entry.begun_at_s <= self._patience_s
        finally:
            entry.task = None

    def _prune(self, now_s: float) -> None:
        if now_s - self._pruned_at_s < _FORGET_S:
            return
        self._pruned_at_s = now_s
        old = [key for key, one in self._entries.items() if one.task is None and now_s - one.asked_at_s > _FORGET_S]
        for key in old:
            del self._entries[key]
