# SPDX-License-Identifier: Apache-2.0
"""Round robin, the baseline: each endpoint in turn, whatever its cache and load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from extproc.scheduling.picker import Pick

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import View


class RoundRobin:
    """Takes endpoints in the order of their rows; those in back-off come last."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The next endpoint, then those after it as fallbacks."""
        del rng  # round robin ignores chance, load and caches
        table = view.table
        rows: list[int] = np.flatnonzero(view.candidates()).tolist()
        start = self._turn % len(rows)
        self._turn += 1
        turned = rows[start:] + rows[:start]
        turned.sort(key=lambda row: bool(table.retry_at_s[row] > view.now_s))
        return Pick(turned[: view.choices], 0.0)
