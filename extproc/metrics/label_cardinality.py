# SPDX-License-Identifier: Apache-2.0
"""Which of many names have series of their own: a bounded number, those with the most requests of late.

Requests are counted by name, and counts are halved each minute. Each minute the names with the highest counts get the
places; of equal ones, those that have a place keep it. All other names are one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PERIOD_S: Final = 60.0
_KEPT: Final = 0.5
# A name that is counted less is forgotten.
_LEAST: Final = 0.1


class BusiestNames:
    """``most``: places. ``others``: in place of a name without one. ``forget``: gets the names that have lost theirs.
    ``most_counted``: names that are counted; while there are so many, new ones are not.
    """

    def __init__(
        self, most: int, *, others: str, forget: Callable[[frozenset[str]], None], most_counted: int = 20_000
    ) -> None:
        self._most = most
        self._others = others
        self._forget = forget
        self._most_counted = most_counted
        self._counts: dict[str, float] = {}
        self._placed: set[str] = set()
        self._began_s = -math.inf

    def shown_name(self, name: str) -> str:
        """The name, or the one of all that have no place."""
        return name if name in self._placed else self._others

    def count_request(self, name: str, now: float) -> str:
        """One more request. Returns as ``shown_name``; the first names get places at once."""
        if now - self._began_s >= _PERIOD_S:
            self._review(now)
        if name in self._counts or len(self._counts) < self._most_counted:
            self._counts[name] = self._counts.get(name, 0.0) + 1.0
            if len(self._placed) < self._most:
                self._placed.add(name)
        return name if name in self._placed else self._others

    def _review(self, now: float) -> None:
        """Give places anew."""
        passed, self._began_s = now - self._began_s, now
        largest = _largest(self._counts, self._placed, self._most)
        lost = frozenset(self._placed - largest)
        self._placed = largest
        share = _KEPT ** min(passed / _PERIOD_S, 64.0)
        left = {name: count * share for name, count in self._counts.items() if count * share >= _LEAST}
        # half of the room is for those that come
        room = max(self._most, self._most_counted // 2)
        kept = left if len(left) <= room else _largest(left, self._placed, room)
        self._counts = {name: left[name] for name in kept if name in left}
        if lost:
            self._forget(lost)


def _largest(counts: Mapping[str, float], placed: set[str], most: int) -> set[str]:
    """A place that nobody else wants is not lost."""
    names = counts.keys() | placed
    if len(names) <= most:
        return set(names)
    ordered = sorted(names, key=lambda name: (-counts.get(name, 0.0), name not in placed, name))
    return set(ordered[:most])
