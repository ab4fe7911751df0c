# SPDX-License-Identifier: Apache-2.0
"""What a token of an answer costs, learned from answers.

    tpot_s = step_s + step_s_per_token * tokens in flight at the endpoint

``step_s`` is the time of a decode step; ``step_s_per_token`` the additional time to read one token's KV cache. The
slope says how much one more request slows the running ones down, so decode load can be weighed in seconds, as prefill
load is. A step also takes longer while it computes part of another request's prompt, which is not caused by the
batch; answers that were slower than expected therefore have less weight.
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


class AnswerCost:
    """The estimate for one pool.

    ``step_s``: seconds of a decode step in an idle engine. ``step_s_per_token``: seconds that each token in flight
    adds.
    """

    def __init__(self) -> None:
        self.step_s = _PRIOR_STEP_S
        self.step_s_per_token = _PRIOR_STEP_S_PER_TOKEN
        self._fit = RelativeLeastSquares(2)
        for tokens in _PRIOR_LOADS:
            tpot_s = _PRIOR_STEP_S + _PRIOR_STEP_S_PER_TOKEN * tokens
            self._fit.assume(_features(tokens), tpot_s, weight=_PRIOR_WEIGHT)

    def learn(self, *, tokens: float, tpot_s: float) -> None:
        """Update the estimate from one answer.

        ``tokens``: prompt and answer tokens in flight at its endpoint halfway through it, its own included.
        ``tpot_s``: its mean time per output token.
        """
        if tokens <= 0 or tpot_s <= 0:
            return
        expected = self.step_s + self.step_s_per_token * tokens
        found = self._fit.learn(_features(tokens), tpot_s, weight=1.0 if tpot_s <= expected else _SLOW)
        if found is not None:
            step_s, step_s_per_million = found
            self.step_s, self.step_s_per_token = max(0.0, step_s), max(0.0, step_s_per_million / 1e6)


def _features(tokens: float) -> list[float]:
    return [1.0, tokens / 1e6]
