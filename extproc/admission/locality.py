"""Of those that wait, who has most of its prompt in the cache of an engine that has room: a heap for each engine."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.admission.queued_request import QueuedRequest
    from extproc.endpoints.table import Bools

# Of each heap: the root and its children, which are its best and two of its next.
_LOOKED_AT: Final = 3

_Entry = tuple[float, int, "QueuedRequest"]


class CacheLocality:
    """By what each engine held when the request came. ``is_waiting``: whether a ticket waits still."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        self._is_waiting = is_waiting
        self._heaps: dict[int, list[_Entry]] = {}
        self._entries = 0
        self._numbers = 0

    def add(self, queued: QueuedRequest) -> None:
        """It waits."""
        self._numbers += 1
        for row, cached in queued.holders:
            heapq.heappush(self._heaps.setdefault(row, []), (-cached, self._numbers, queued))
            self._entries += 1

    def nearest(self, rows: Bools, may_go: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """One with a long match at any of ``rows``: the longest of those that may go, as far as it is quick to find."""
        heaps = []
        for row, heap in self._heaps.items():
            if row < rows.size and rows[row]:
                self._drop_gone(heap)
                if heap:
                    heaps.append(heap)
        heaps.sort(key=_best)
        for heap in heaps:
            for entry in heap[:_LOOKED_AT]:
                if self._is_waiting(entry[2].ticket) and may_go(entry[2]):
                    return entry[2]
        return None

    @property
    def entries(self) -> int:
        """Over all heaps, those of requests that have gone included."""
        return self._entries

    def sweep(self, waiting: int) -> None:
        """Let go of those that wait no more, when they are the most."""
        if self._entries <= 64 + 8 * waiting:
            return
        for row, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if self._is_waiting(entry[2].ticket)]
            heapq.heapify(kept)
            self._heaps[row] = kept
        self._entries = sum(len(heap) for heap in self._heaps.values())

    def _drop_gone(self, heap: list[_Entry]) -> None:
        while heap and not self._is_waiting(heap[0][2].ticket):
            heapq.heappop(heap)
            self._entries -= 1


def _best(heap: list[_Entry]) -> float:
    return heap[0][0]
