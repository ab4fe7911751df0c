"""Of those that wait, who has most of its prompt in the cache of an engine that has room: a heap for each engine."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.admission.waiting import Wanted
    from extproc.endpoints.table import Bools

# Requests that may not go now, behind which to look for one that may.
_LOOKED_AT: Final = 16

_Entry = tuple[float, int, "Wanted"]


class Nearness:
    """By what each engine held when the request came. ``is_waiting``: whether a ticket waits still."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        self._is_waiting = is_waiting
        self._heaps: dict[int, list[_Entry]] = {}
        self._entries = 0
        self._numbers = 0

    def add(self, wanted: Wanted) -> None:
        """It waits."""
        self._numbers += 1
        for row, cached in wanted.holders:
            heapq.heappush(self._heaps.setdefault(row, []), (-cached, self._numbers, wanted))
            self._entries += 1

    def nearest(self, rows: Bools, may_go: Callable[[Wanted], bool]) -> Wanted | None:
        """The one with the longest match at any of ``rows``."""
        best: _Entry | None = None
        for row, heap in self._heaps.items():
            if row < rows.size and rows[row]:
                found = self._first(heap, may_go)
                if found is not None and (best is None or found < best):
                    best = found
        return None if best is None else best[2]

    def sweep(self, waiting: int) -> None:
        """Let go of those that wait no more, when they are the most."""
        if self._entries <= 64 + 8 * waiting:
            return
        for row, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if self._is_waiting(entry[2].ticket)]
            heapq.heapify(kept)
            self._heaps[row] = kept
        self._entries = sum(len(heap) for heap in self._heaps.values())

    def _first(self, heap: list[_Entry], may_go: Callable[[Wanted], bool]) -> _Entry | None:
        passed: list[_Entry] = []
        found = None
        while heap and len(passed) < _LOOKED_AT:
            entry = heap[0]
            if not self._is_waiting(entry[2].ticket):
                heapq.heappop(heap)
                self._entries -= 1
            elif may_go(entry[2]):
                found = entry
                break
            else:
                passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        return found
