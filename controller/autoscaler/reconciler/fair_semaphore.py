# SPDX-License-Identifier: Apache-2.0
"""Fair shares of a bounded number of turns: one namespace with many slow servers holds up no other namespace."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FairSemaphore:
    """At most ``most`` turns at a time. With n namespaces that hold or wait for turns, each may hold ``most / (n +
    1)``: one share stays free, so that the next namespace begins at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = Counter[str]()
        # waiting namespaces, the longest wait first
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def acquire(self, namespace: str) -> AsyncIterator[None]:
        """Waits until it is this namespace's turn."""
        await self._take(namespace)
        try:
            yield
        finally:
            self._give_back(namespace)

    async def _take(self, namespace: str) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(mine)
        self._grant()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._leave(namespace, mine)
            else:
                self._give_back(namespace)
            raise

    def _leave(self, namespace: str, mine: asyncio.Future[None]) -> None:
        """It waits no more: with one namespace less, the others may have more."""
        line = self._waiting.get(namespace)
        if line is not None and mine in line:
            line.remove(mine)
            if not line:
                del self._waiting[namespace]
        self._grant()

    def _give_back(self, namespace: str) -> None:
        self._taken[namespace] -= 1
        if not self._taken[namespace]:
            del self._taken[namespace]
        self._grant()

    def _grant(self) -> None:
        """Turns to namespaces in their order, while there are any and one may have more."""
        share = max(1, self._most // (len(self._taken.keys() | self._waiting.keys()) + 1))
        while self._taken.total() < self._most:
            namespace = next((one for one in self._waiting if self._taken[one] < share), None)
            if namespace is None:
                return
            line = self._waiting[namespace]
            first = line.popleft()
            # one that was cancelled just now has not yet left
            if not first.done():
                first.set_result(None)
                self._taken[namespace] += 1
                self._waiting.move_to_end(namespace)
            if not line:
                del self._waiting[namespace]
