# SPDX-License-Identifier: Apache-2.0
"""Virtual time: actions in the order of their instants."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class EventQueue:
    """A heap of actions. Those of the same instant run in the order in which they were planned."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def schedule_at(self, at_s: float, act: Callable[[float], None]) -> None:
        """Plan ``act`` for the instant ``at_s``; it is called with that instant."""
        heapq.heappush(self._heap, (at_s, next(self._order), act))

    @property
    def next_at_s(self) -> float | None:
        """When the next action is due; None if nothing is planned."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> float:
        """Run the next action; its instant."""
        now, _, act = heapq.heappop(self._heap)
        act(now)
        return now

    def run(self) -> None:
        """Act until nothing is planned any more."""
        heap = self._heap
        while heap:
            now, _, act = heapq.heappop(heap)
            act(now)
