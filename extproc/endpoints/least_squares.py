# SPDX-License-Identifier: Apache-2.0
"""Least squares of relative errors with exponential forgetting.

Fits ``seconds ~ sum(coefficient * feature)`` so that an error counts relative to the measured seconds, and old
samples lose weight (Haykin, Adaptive Filter Theory, chapter 10). Features should be scaled to similar sizes, which
keeps the matrix well conditioned.
"""

from __future__ import annotations

from typing import Final

import numpy as np

# The weight of all earlier samples after one more.
_FORGETTING: Final = 0.998
# Solving costs more than a sample changes, so it is done after every few.
_SOLVE_EVERY: Final = 8


class RelativeLeastSquares:
    """The sums of a fit with as many coefficients as ``features``."""

    def __init__(self, features: int) -> None:
        self._matrix = np.zeros((features, features))
        self._vector = np.zeros(features)
        self._samples = 0

    def assume(self, features: list[float], seconds: float, *, weight: float) -> None:
        """Add a sample of prior knowledge, without forgetting others."""
        row = np.array(features) / seconds
        self._matrix += weight * np.outer(row, row)
        self._vector += weight * row

    def learn(self, features: list[float], seconds: float, *, weight: float) -> list[float] | None:
        """Add a measured sample; returns new coefficients after every few samples, else None."""
        self._matrix *= _FORGETTING
        self._vector *= _FORGETTING
        self.assume(features, seconds, weight=weight)
        self._samples += 1
        if self._samples % _SOLVE_EVERY:
            return None
        coefficients: list[float] = np.linalg.lstsq(self._matrix, self._vector, rcond=None)[0].tolist()
        return coefficients
