# SPDX-License-Identifier: Apache-2.0
"""Finds waiting requests with long prefix matches at given endpoints."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.admission.queued_request import QueuedRequest
    from extproc.endpoints.table import Bools

# Entries examined in each heap: the root, which is the best, and its two children.
_EXAMINED: Final = 3

# (minus the cached tokens, sequence number, request)
_Entry = tuple[float, int, "QueuedRequest"]


class CacheLocality:
    """A heap of waiting requests for each endpoint, by the tokens that it had cached when they arrived."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        """``is_waiting``: whether the request with a ticket still waits."""
        self._is_waiting = is_waiting
        self._heaps: dict[int, list[_Entry]] = {}
        self._entries = 0
        self._numbers = 0

    def add(self, queued: QueuedRequest) -> None:
        """Add a waiting request to the heap of each endpoint that holds part of its prompt."""
        self._numbers += 1
        for row, cached in queued.holders:
            heapq.heappush(self._heaps.setdefault(row, []), (-cached, self._numbers, queued))
            self._entries += 1

    def longest_match(self, rows: Bools, may_go: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """A request with a long match at one of ``rows`` for which ``may_go`` holds; None if none is found quickly.

        Only the top entries of each heap are examined, so the match may not be the longest.
        """
        heaps = []
        for row, heap in self._heaps.items():
            if row < rows.size and rows[row]:
                self._drop_gone(heap)
                if heap:
                    heaps.append(heap)
        heaps.sort(key=_best)
        for heap in heaps:
            for entry in heap[:_EXAMINED]:
                if self._is_waiting(entry[2].ticket) and may_go(entry[2]):
                    return entry[2]
        return None

    @property
    def entries(self) -> int:
        """Over all heaps, those of requests that have gone included."""
        return self._entries

    def sweep(self, waiting: int) -> None:
        """Drop the entries of requests that no longer wait, if they are the majority; ``waiting``: how many wait."""
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
