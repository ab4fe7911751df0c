"""What a prompt of some length costs, learned from first tokens: overhead, tokens, and attention of each token to all before it.

    ttft = (overhead + tokens + pairs / attention) / rate,   pairs = uncached * (cached + uncached / 2)

all in tokens of a short prompt; ``attention`` is the context at which a token's attention costs as much as all else. It follows from the model's
shape and the GPU's kernels (19,000 tokens for an 8B model on an H100, 33,000 for a 70B one), so all engines of a pool share it, and nobody
has to profile them. Least squares of relative errors with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 10).
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np

from extproc.endpoints.table import INITIAL_PREFILL_RATE, Floats

INITIAL_ATTENTION: Final = 20_000.0
_ATTENTION_BOUNDS: Final = (4_000.0, 400_000.0)
_OVERHEAD_BOUNDS: Final = (0.0, 2_000.0)
_FORGETTING: Final = 0.998
# What was assumed weighs as much as so many answers.
_PRIOR_ANSWERS: Final = 8.0
_PRIOR_PROMPTS: Final = (500.0, 5_000.0, 50_000.0)
_PRIOR_OVERHEAD: Final = 200.0
_SOLVE_EVERY: Final = 8
_LATE: Final = 0.3
_LEAST_SHARE: Final = 0.7

Number = TypeVar("Number", float, Floats)


class PromptCost:
    """One pool's. ``work`` is in tokens of a short prompt."""

    def __init__(self) -> None:
        self.attention = INITIAL_ATTENTION
        self.overhead = _PRIOR_OVERHEAD
        # seconds a token
        self._each = 1 / INITIAL_PREFILL_RATE
        self._matrix = np.zeros((3, 3))
        self._vector = np.zeros(3)
        self._samples = 0
        for tokens in _PRIOR_PROMPTS:
            pairs = tokens * tokens / 2
            seconds = (_PRIOR_OVERHEAD + tokens + pairs / INITIAL_ATTENTION) / INITIAL_PREFILL_RATE
            self._add(tokens, pairs, seconds, _PRIOR_ANSWERS / len(_PRIOR_PROMPTS))

    def work(self, uncached: Number, cached: Number) -> Number:
        """A prompt of 100,000 tokens costs as much as 35 of 10,000 would if only tokens counted, at the initial ``attention``."""
        return uncached * (1 + (cached + uncached / 2) / self.attention)

    def learn(self, *, uncached: float, cached: float, seconds: float, share: float) -> None:
        """``seconds``: from the pick to the first token, less what was ahead, on a typical engine; ``share``: of all, that."""
        if uncached < 1 or share < _LEAST_SHARE or seconds <= 0:
            return
        pairs = uncached * (cached + uncached / 2)
        expected = self._each * (self.overhead + uncached + pairs / self.attention)
        # late answers say that something else was waited for
        doubt = 1.0 if seconds <= expected else _LATE * expected / seconds
        self._matrix *= _FORGETTING
        self._vector *= _FORGETTING
        self._add(uncached, pairs, seconds, doubt * share)
        self._samples += 1
        if self._samples % _SOLVE_EVERY == 0:
            self._solve()

    def _add(self, tokens: float, pairs: float, seconds: float, weight: float) -> None:
        # in thousands and millions, so that the matrix stays well conditioned
        row = np.array([1.0, tokens / 1e3, pairs / 1e6]) / seconds
        self._matrix += weight * np.outer(row, row)
        self._vector += weight * row

    def _solve(self) -> None:
        overhead, each, pair = np.linalg.lstsq(self._matrix, self._vector, rcond=None)[0].tolist()
        low, high = _ATTENTION_BOUNDS
        if each <= 0:
            return
        self.attention = min(high, max(low, 1000 * each / pair)) if pair > 0 else high
        low, high = _OVERHEAD_BOUNDS
        self.overhead = min(high, max(low, 1000 * overhead / each))
        self._each = each / 1000
