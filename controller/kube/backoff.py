# SPDX-License-Identifier: Apache-2.0
"""How long to wait after failures that follow each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.kube.errors import ApiError

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Doubles from ``first_s`` to ``most_s``; each wait is drawn between half and all of it, so that clients spread.

    The API server's ``Retry-After`` is a lower bound.
    """

    def __init__(self, first_s: float, most_s: float, rng: Random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng
        self._next_s = first_s

    def failed(self, error: BaseException | None = None) -> float:
        """Count a failure; how long to wait before the next attempt."""
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._most_s, self._next_s * 2)
        asked_s = error.retry_after_s if isinstance(error, ApiError) else None
        # everybody was told the same: not all at the same instant
        return wait_s if asked_s is None else max(wait_s, asked_s + self._rng.uniform(0.0, self._first_s))

    def succeeded(self) -> None:
        """The next failure is the first of its row."""
        self._next_s = self._first_s
