# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between a manager and the API server."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Fate = Literal["done", "refused", "lost"]
"""Of a call: done, refused before it had an effect, or done while its answer was lost."""


class Faults(msgspec.Struct):
    """``refused`` and ``lost``: fractions of calls. ``lags``: by plural, at most how many seconds a watch is behind;
    the rest is behind by ``lag_s`` at most.
    """

    rng: random.Random
    refused: float = 0.0
    lost: float = 0.0
    lag_s: float = 0.05
    lags: dict[str, float] = {}

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.refused = self.lost = 0.0
        self.lags = {}

    def fate(self) -> Fate:
        """Of the next call."""
        drawn = self.rng.random()
        if drawn < self.refused:
            return "refused"
        return "lost" if drawn < self.refused + self.lost else "done"

    def lag(self, plural: str) -> float:
        """Until the next change of a kind is seen."""
        return self.rng.uniform(0.0, self.lags.get(plural, self.lag_s))
