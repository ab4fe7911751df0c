# SPDX-License-Identifier: Apache-2.0
"""What a prompt costs, learned from first tokens: overhead, tokens, and attention.

    ttft_s = (overhead + tokens + pairs / attention) / rate,   pairs = uncached * (cached + uncached / 2)

All terms in parentheses are in tokens of a short prompt. ``tokens`` are uncached. ``pairs`` counts each uncached
token with every token before it. ``attention`` is the context length at which the attention of a token costs as much
as everything else. It follows from the model's shape and the GPU's kernels (19,000 tokens for an 8B model on an H100,
33,000 for a 70B one), so all endpoints of a pool share it, and nobody has to profile an engine.
"""

from __future__ import annotations

from typing import Final, TypeVar

from extproc.endpoints.least_squares import RelativeLeastSquares
from extproc.endpoints.table import INITIAL_PREFILL_RATE, Floats

INITIAL_ATTENTION: Final = 20_000.0
_ATTENTION_BOUNDS: Final = (4_000.0, 400_000.0)
_OVERHEAD_BOUNDS: Final = (0.0, 2_000.0)
# The initial values have the weight of this many answers.
_PRIOR_ANSWERS: Final = 8.0
_PRIOR_PROMPTS: Final = (500.0, 5_000.0, 50_000.0)
_PRIOR_OVERHEAD: Final = 200.0
# The weight of an answer that was later than expected, times expected / measured.
_LATE: Final = 0.3
_MIN_SHARE: Final = 0.7

Number = TypeVar("Number", float, Floats)


class PromptCost:
    """The estimate for one pool; ``attention`` and ``overhead`` are in tokens."""

    def __init__(self) -> None:
        self.attention = INITIAL_ATTENTION
        self.overhead = _PRIOR_OVERHEAD
        self._seconds_per_token = 1 / INITIAL_PREFILL_RATE
        self._fit = RelativeLeastSquares(3)
        for tokens in _PRIOR_PROMPTS:
            pairs = tokens * tokens / 2
            seconds = (_PRIOR_OVERHEAD + tokens + pairs / INITIAL_ATTENTION) / INITIAL_PREFILL_RATE
            self._fit.assume(_features(tokens, pairs), seconds, weight=_PRIOR_ANSWERS / len(_PRIOR_PROMPTS))

    def work(self, uncached: Number, cached: Number) -> Number:
        """The prefill work of a prompt, in tokens of a short prompt.

        With the initial ``attention``, a prompt of 100,000 tokens is as much work as 350,000 tokens of short prompts.
        """
        return uncached * (1 + (cached + uncached / 2) / self.attention)

    def learn(self, *, uncached: float, cached: float, seconds: float, share: float) -> None:
        """Update the estimate from one first token.

        ``uncached``, ``cached``: tokens of the prompt. ``seconds``: from the pick to the first token, without the
        work that was ahead, scaled to a typical endpoint. ``share``: this prompt's fraction of the work before its
        first token, 0 to 1.
        """
        if uncached < 1 or share < _MIN_SHARE or seconds <= 0:
            return
        pairs = uncached * (cached + uncached / 2)
        expected = self._seconds_per_token * (self.overhead + uncached + pairs / self.attention)
        # a late first token may have waited for something else
        trust = 1.0 if seconds <= expected else _LATE * expected / seconds
        found = self._fit.learn(_features(uncached, pairs), seconds, weight=trust * share)
        if found is not None:
            self._apply(found)

    def _apply(self, coefficients: list[float]) -> None:
        """Take over coefficients in seconds, within bounds."""
        overhead, per_thousand_tokens, per_million_pairs = coefficients
        low, high = _ATTENTION_BOUNDS
        if per_thousand_tokens <= 0:
            return
        attention = 1000 * per_thousand_tokens / per_million_pairs if per_million_pairs > 0 else high
        self.attention = min(high, max(low, attention))
        low, high = _OVERHEAD_BOUNDS
        self.overhead = min(high, max(low, 1000 * overhead / per_thousand_tokens))
        self._seconds_per_token = per_thousand_tokens / 1000


def _features(tokens: float, pairs: float) -> list[float]:
    return [1.0, tokens / 1e3, pairs / 1e6]
