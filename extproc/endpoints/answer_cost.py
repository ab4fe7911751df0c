"""What a token of an answer costs beside others, learned from answers: the step itself, and reading what all of them hold in the KV cache.

    tpot = step + reading * tokens in flight there

The slope says how much one more request slows those that run, and they it, so it weighs decode load in seconds, as prefill load is. A step
takes longer, too, when it computes somebody's prompt, which is none of the batch's doing; so answers that were slower than expected count less.
Least squares of relative errors with forgetting, as for prompts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_FORGETTING: Final = 0.998
_SLOW: Final = 0.1
# An 8B model on an H100: 7.5 ms for a step, and 131,072 bytes a token at half of 3.35 TB/s.
_PRIOR_STEP_S: Final = 0.0075
_PRIOR_READING_S: Final = 8e-8
_PRIOR_LOADS: Final = (5_000.0, 50_000.0, 300_000.0)
_PRIOR_WEIGHT: Final = 2.0
_SOLVE_EVERY: Final = 8


class AnswerCost:
    """One pool's. ``step_s_per_token``: seconds that a token in flight adds to every step."""

    def __init__(self) -> None:
        self.step_s = _PRIOR_STEP_S
        self.step_s_per_token = _PRIOR_READING_S
        self._matrix = np.zeros((2, 2))
        self._vector = np.zeros(2)
        self._samples = 0
        for tokens in _PRIOR_LOADS:
            self._add(tokens, _PRIOR_STEP_S + _PRIOR_READING_S * tokens, _PRIOR_WEIGHT)

    def learn(self, *, tokens: float, tpot_s: float) -> None:
        """``tokens``: of prompts and answers in flight at the engine, the answer's own included, in the middle of its time."""
        if tokens <= 0 or tpot_s <= 0:
            return
        expected = self.step_s + self.step_s_per_token * tokens
        self._matrix *= _FORGETTING
        self._vector *= _FORGETTING
        self._add(tokens, tpot_s, 1.0 if tpot_s <= expected else _SLOW)
        self._samples += 1
        if self._samples % _SOLVE_EVERY == 0:
            step_s, reading = np.linalg.lstsq(self._matrix, self._vector, rcond=None)[0].tolist()
            self.step_s, self.step_s_per_token = max(0.0, step_s), max(0.0, reading / 1e6)

    def _add(self, tokens: float, tpot_s: float, weight: float) -> None:
        # in millions, so that the matrix stays well conditioned
        row = np.array([1.0, tokens / 1e6]) / tpot_s
        self._matrix += weight * np.outer(row, row)
        self._vector += weight * row
