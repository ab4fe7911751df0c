# SPDX-License-Identifier: Apache-2.0
"""Whether and when to try again, and when a server that still sends is too slow to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import random


class Patience(msgspec.Struct, frozen=True):
    """``attempts``: in a row without a byte of progress. ``first_s`` and ``longest_s``: of the waits between them."""

    attempts: int = 8
    first_s: float = 0.5
    longest_s: float = 30.0


def wait_s(patience: Patience, failures: int, asked_s: float | None, chance: random.Random) -> float | None:
    """How long to wait after so many ``failures`` in a row; None: give up.

    Full jitter: pods that failed together do not come back together. A server's own ``Retry-After`` is a lower bound,
    up to ten times the longest wait.
    """
    if failures >= patience.attempts:
        return None
    bound_s = min(patience.longest_s, patience.first_s * 2 ** (failures - 1))
    waited_s = chance.uniform(bound_s / 2, bound_s)
    return waited_s if asked_s is None else max(waited_s, min(asked_s, 10 * patience.longest_s))


class Pace:
    """Finds a server that sends just enough to pass for alive: less than ``least_bytes`` in each ``window_s``."""

    def __init__(self, window_s: float, least_bytes: int, now_s: float) -> None:
        self._window_s = window_s
        self._least_bytes = least_bytes
        self._since_s = now_s
        self._bytes = 0

    def is_too_slow(self, count: int, now_s: float) -> bool:
        """Take ``count`` more bytes into account."""
        self._bytes += count
        if now_s - self._since_s < self._window_s:
            return False
        slow = self._bytes < self._least_bytes
        self._since_s, self._bytes = now_s, 0
        return slow
