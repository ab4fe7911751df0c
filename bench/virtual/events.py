"""What is going to happen, in the order in which it does."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Events:
    """A heap of things to do, each at its time; equal times in the order in which they were planned."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, when: float, act: Callable[[float], None]) -> None:
        """Plan ``act``, which is told the time."""
        heapq.heappush(self._heap, (when, next(self._order), act))

    def run(self) -> None:
        """Until nothing more is planned."""
        heap = self._heap
        while heap:
            now, _, act = heapq.heappop(heap)
            act(now)
