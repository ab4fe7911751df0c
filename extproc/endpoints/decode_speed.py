# SPDX-License-Identifier: Apache-2.0
"""How fast a pool's engines decode, for autoscalers: learned as ``answer_cost`` does, on any hardware.

    tpot_s = step_s + step_s_per_token * tokens in flight at the endpoint

Picking weighs decode work against prefill work, and there the prior of ``answer_cost`` is also what keeps the first
answers, slowed down by each other's prompts, from counting too much. Autoscalers need the size of the figures, so here
the prior is scaled to the first answers.
"""

from __future__ import annotations

from typing import Final

from extproc.endpoints.least_squares import RelativeLeastSquares

# The weight of an answer that was slower than expected.
_SLOW: Final = 0.1
# An 8B model on an H100: 7.5 ms for a step, and 131,072 bytes a token at half of 3.35 TB/s.
_PRIOR_STEP_S: Final = 0.0075
_PRIOR_STEP_S_PER_TOKEN: Final = 8e-8
_PRIOR_LOADS: Final = (5_000.0, 50_000.0, 300_000.0)
_PRIOR_WEIGHT: Final = 2.0
# Other models and GPUs are slower or faster than that: after so many answers the prior is scaled to the fastest
# quarter. Fewer say too little: the shortest answers end first, and often beside the prompts of all others.
_SCALED_AFTER: Final = (16, 32)
_FASTEST: Final = 4


class DecodeSpeed:
    """The estimate for one pool.

    ``step_s``: seconds of a decode step in an idle engine. ``step_s_per_token``: seconds that each token in flight
    adds. ``is_learned``: answers have changed what was assumed of both.
    """

    def __init__(self) -> None:
        self.step_s = _PRIOR_STEP_S
        self.step_s_per_token = _PRIOR_STEP_S_PER_TOKEN
        self.is_learned = False
        self._fit = _prior(1.0)
        # the first answers: tokens in flight, and the time per token
        self._first: list[tuple[float, float]] = []

    def learn(self, *, tokens: float, tpot_s: float) -> None:
        """Update the estimate from one answer.

        ``tokens``: prompt and answer tokens in flight at its endpoint halfway through it, its own included.
        ``tpot_s``: its mean time per output token.
        """
        if tokens <= 0 or tpot_s <= 0:
            return
        if len(self._first) < _SCALED_AFTER[-1]:
            self._first.append((tokens, tpot_s))
            if len(self._first) in _SCALED_AFTER:
                self._begin_anew()
                return
        self._learn(tokens, tpot_s)

    def _begin_anew(self) -> None:
        """Scale the prior to the answers that there are, and learn from them again."""
        ratios = sorted(tpot_s / _prior_tpot_s(tokens) for tokens, tpot_s in self._first)
        scale = ratios[len(ratios) // _FASTEST - 1]
        self._fit = _prior(scale)
        self.step_s, self.step_s_per_token = scale * _PRIOR_STEP_S, scale * _PRIOR_STEP_S_PER_TOKEN
        self.is_learned = True
        for tokens, tpot_s in self._first:
            self._learn(tokens, tpot_s)

    def _learn(self, tokens: float, tpot_s: float) -> None:
        expected = self.step_s + self.step_s_per_token * tokens
        found = self._fit.learn(_features(tokens), tpot_s, weight=1.0 if tpot_s <= expected else _SLOW)
        if found is not None:
            step_s, step_s_per_million = found
            self.step_s, self.step_s_per_token = max(0.0, step_s), max(0.0, step_s_per_million / 1e6)


def _prior(scale: float) -> RelativeLeastSquares:
    fit = RelativeLeastSquares(2)
    for tokens in _PRIOR_LOADS:
        fit.assume(_features(tokens), scale * _prior_tpot_s(tokens), weight=_PRIOR_WEIGHT)
    return fit


def _prior_tpot_s(tokens: float) -> float:
    return _PRIOR_STEP_S + _PRIOR_STEP_S_PER_TOKEN * tokens


def _features(tokens: float) -> list[float]:
    return [1.0, tokens / 1e6]
