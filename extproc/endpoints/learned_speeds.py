# SPDX-License-Identifier: Apache-2.0
"""What prompts and answers cost, learned from requests: prefill rates by endpoint; prompts and decode steps by pool."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from extproc.endpoints.table import INITIAL_PREFILL_RATE, Floats

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable

# The weight of all earlier samples after one more.
_FORGETTING: Final = 0.998
# Solving costs more than a sample changes, so it is done after every few.
_SOLVE_EVERY: Final = 8
# The weight of one more answer: first as in a plain mean, later at least this.
_MIN_WEIGHT: Final = 0.03
# Answers that waited in the same queue are correlated: this many count as one.
_CORRELATED: Final = 16.0
# Shrinkage takes 20 µs, and a single answer changes little.
_SHRINK_EVERY: Final = 4
# With less work than this, the time to first token is mostly overhead.
_MIN_TOKENS: Final = 512.0
_SERVICE_WEIGHT: Final = 0.1
_SERVICE_HALF_LIFE_S: Final = 10.0
_RATE_BOUNDS: Final = (200.0, 1_000_000.0)
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
# The weight of an answer that was slower than expected.
_SLOW: Final = 0.1
# An 8B model on an H100: 7.5 ms for a step, and 131,072 bytes a token at half of 3.35 TB/s.
_PRIOR_STEP_S: Final = 0.0075
_PRIOR_STEP_S_PER_TOKEN: Final = 8e-8
_PRIOR_LOADS: Final = (5_000.0, 50_000.0, 300_000.0)
_PRIOR_WEIGHT: Final = 2.0
# Other models and GPUs are slower or faster than that: after so many answers the prior is scaled to the fastest
# quarter. Fewer are not representative: the shortest answers end first, and often beside the prompts of all others.
_SCALED_AFTER: Final = (16, 32)
_FASTEST: Final = 4
_BEYOND_SPREAD: Final = 0.1
_SPREAD_STEP: Final = 0.05
_SPREAD_BOUNDS: Final = (1.0, 4.0)


class RelativeLeastSquares:
    """Least squares of relative errors with exponential forgetting: a fit of as many coefficients as ``features``.

    Fits ``seconds ~ sum(coefficient * feature)`` so that an error counts relative to the measured seconds, and old
    samples lose weight (Haykin, Adaptive Filter Theory, chapter 10). Features should be scaled to similar sizes, which
    keeps the matrix well conditioned.
    """

    def __init__(self, features: int) -> None:
        self._matrix = np.zeros((features, features))
        self._vector = np.zeros(features)
        self._samples = 0

    def add_prior(self, features: list[float], seconds: float, *, weight: float) -> None:
        """Add a sample of prior knowledge, without forgetting others."""
        row = np.array(features) / seconds
        self._matrix += weight * np.outer(row, row)
        self._vector += weight * row

    def learn(self, features: list[float], seconds: float, *, weight: float) -> list[float] | None:
        """Add a measured sample; returns new coefficients after every few samples, else None."""
        self._matrix *= _FORGETTING
        self._vector *= _FORGETTING
        self.add_prior(features, seconds, weight=weight)
        self._samples += 1
        if self._samples % _SOLVE_EVERY:
            return None
        coefficients: list[float] = np.linalg.lstsq(self._matrix, self._vector, rcond=None)[0].tolist()
        return coefficients


def learn_prefill_rate(table: EndpointTable, row: int, *, tokens_ahead: float, ttft_s: float) -> None:
    """Update the rates from one first token.

    ``tokens_ahead``: prefill work of the request and of those before it at the pick. ``ttft_s``: the time that it
    took.
    """
    if tokens_ahead < _MIN_TOKENS or ttft_s <= 0:
        return
    low, high = _RATE_BOUNDS
    sample = math.log(min(high, max(low, tokens_ahead / ttft_s)))
    # the initial value has the weight of one answer; in logarithms, twice too high is as wrong as twice too low
    weight = max(_MIN_WEIGHT, 1 / (2 + int(table.rate_samples[row])))
    error = sample - float(table.own_log_rate[row])
    table.rate_noise += _MIN_WEIGHT * (error * error - table.rate_noise)
    table.own_log_rate[row] += weight * error
    table.rate_samples[row] += 1
    if table.rate_samples[row] < _SHRINK_EVERY or table.rate_samples.sum() % _SHRINK_EVERY == 0:
        _shrink_rates(table)


def _shrink_rates(table: EndpointTable) -> None:
    """Shrink the rates of endpoints towards the typical rate.

    Differences between endpoints count only as far as they exceed what chance produces among equal ones. This is the
    James-Stein estimator in its empirical Bayes form (Efron and Morris, 1973): with the variance A between endpoints
    and the error D of one endpoint's mean, its rate is the typical one plus A / (A + D) of its deviation. Without
    shrinkage, an engine that had a long queue first looks slow, receives few requests, and so hardly ever proves
    otherwise. Endpoints without samples have the typical rate.
    """
    measured = table.is_active & (table.rate_samples > 0)
    own = table.own_log_rate[measured]
    typical = float(own.mean())
    answers = np.minimum(table.rate_samples[measured] + 1, 2 / _MIN_WEIGHT)
    error = _CORRELATED * table.rate_noise / answers
    variance = max(0.0, float(own.var()) - float(error.mean()))
    trust = variance / (variance + error) if variance else 0.0
    table.prefill_rate[measured] = np.exp(typical + trust * (own - typical))
    table.prefill_rate[table.is_active & ~measured] = np.exp(typical)


def learn_service_time(table: EndpointTable, row: int, *, engine_s: float, in_flight: float, now: float) -> None:
    """Update an endpoint's time for one request. ``engine_s``: how long it took, beside ``in_flight`` requests, itself
    included.

    An engine that serves one after the other takes so much longer the more it has. One that serves many at once seems
    faster for having many, which is what it is.
    """
    sample, known = engine_s / max(1.0, in_flight), float(table.service_s[row])
    table.service_s[row] = known + _SERVICE_WEIGHT * (sample - known) if known else sample
    table.service_at_s[row] = now


def service_times(table: EndpointTable, now: float) -> Floats:
    """The times by row; 1 for all while none is known.

    What is known of one endpoint becomes that of a typical one while nothing new is learned. Otherwise an engine that
    was slow once, with its first request, would get none by which it could prove otherwise.
    """
    known = table.is_active & (table.service_s > 0)
    if not known.any():
        return np.ones(len(table.addresses))
    typical = float(np.median(table.service_s[known]))
    trust = np.where(known, np.exp2((table.service_at_s - now) / _SERVICE_HALF_LIFE_S), 0.0)
    found: Floats = typical + np.minimum(trust, 1.0) * (table.service_s - typical)
    return found


def typical_prefill_rate(table: EndpointTable) -> float:
    """The geometric mean of the endpoints' rates, in tokens of work a second."""
    return float(np.exp(np.log(table.prefill_rate[table.is_active]).mean()))


class PromptCost:
    """What a prompt costs in one pool, learned from first tokens: overhead, tokens, and attention.

        ttft_s = (overhead + tokens + pairs / attention) / rate,   pairs = uncached * (cached + uncached / 2)

    All terms in parentheses are in tokens of a short prompt. ``tokens`` are uncached. ``pairs`` counts each uncached
    token with every token before it. ``attention`` is the context length at which the attention of a token costs as
    much as everything else. It follows from the model's shape and the GPU's kernels (19,000 tokens for an 8B model on
    an H100, 33,000 for a 70B one), so all endpoints of a pool share it, and no engine has to be profiled.
    """

    def __init__(self) -> None:
        self.attention = INITIAL_ATTENTION
        self.overhead = _PRIOR_OVERHEAD
        self._seconds_per_token = 1 / INITIAL_PREFILL_RATE
        self._fit = RelativeLeastSquares(3)
        for tokens in _PRIOR_PROMPTS:
            pairs = tokens * tokens / 2
            seconds = (_PRIOR_OVERHEAD + tokens + pairs / INITIAL_ATTENTION) / INITIAL_PREFILL_RATE
            self._fit.add_prior(_prompt_features(tokens, pairs), seconds, weight=_PRIOR_ANSWERS / len(_PRIOR_PROMPTS))

    def prefill_work(self, uncached: Number, cached: Number) -> Number:
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
        found = self._fit.learn(_prompt_features(uncached, pairs), seconds, weight=trust * share)
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


def _prompt_features(tokens: float, pairs: float) -> list[float]:
    return [1.0, tokens / 1e3, pairs / 1e6]


class AnswerCost:
    """What a token of an answer costs in one pool, learned from answers.

        tpot_s = step_s + step_s_per_token * tokens in flight at the endpoint

    ``step_s``: seconds of a decode step in an idle engine. ``step_s_per_token``: seconds that each token in flight
    adds, to read its KV cache. The slope is how much one more request slows the running ones down, so decode load is
    weighed in seconds, as prefill load is. A step also takes longer while it computes part of another request's prompt,
    which is not caused by the batch; answers that were slower than expected therefore have less weight.
    """

    def __init__(self) -> None:
        self.step_s = _PRIOR_STEP_S
        self.step_s_per_token = _PRIOR_STEP_S_PER_TOKEN
        self._fit = _decode_prior(1.0)

    def learn(self, *, tokens: float, tpot_s: float) -> None:
        """Update the estimate from one answer.

        ``tokens``: prompt and answer tokens in flight at its endpoint halfway through it, its own included.
        ``tpot_s``: its mean time per output token.
        """
        if tokens <= 0 or tpot_s <= 0:
            return
        expected = self.step_s + self.step_s_per_token * tokens
        found = self._fit.learn(_decode_features(tokens), tpot_s, weight=1.0 if tpot_s <= expected else _SLOW)
        if found is not None:
            step_s, step_s_per_million = found
            self.step_s, self.step_s_per_token = max(0.0, step_s), max(0.0, step_s_per_million / 1e6)


class DecodeSpeed(AnswerCost):
    """The same for autoscalers and tiers, on any hardware. ``is_learned``: answers have changed what was assumed.
    ``spread``: nine of ten answers took at most so many times the seconds that followed from the load at their pick:
    prompts that come later slow them down, and loads grow.

    Picking weighs decode work against prefill work, and there the prior is also what keeps the first answers, slowed
    down by each other's prompts, from counting too much. Autoscalers need the size of the figures, so here the prior is
    scaled to the first answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_learned = False
        self.spread = 1.0
        # of the first answers: tokens in flight, and the time per token. Arrays: there is a pair for each ModelServer
        self._first_tokens, self._first_tpot_s = array("d"), array("d")

    def learn(self, *, tokens: float, tpot_s: float) -> None:
        """Update the estimate from one answer, and scale the prior after the first ones."""
        if tokens <= 0 or tpot_s <= 0:
            return
        if len(self._first_tokens) < _SCALED_AFTER[-1]:
            self._first_tokens.append(tokens)
            self._first_tpot_s.append(tpot_s)
            if len(self._first_tokens) in _SCALED_AFTER:
                self._begin_anew()
                return
        super().learn(tokens=tokens, tpot_s=tpot_s)

    def learn_spread(self, *, tokens: float, tpot_s: float) -> None:
        """Update the spread from one answer. ``tokens``: in flight at its endpoint at its pick, its own included.

        A step up for an answer beyond it, and a ninth of it down for one below: at rest, one of ten is beyond.
        """
        if not self.is_learned or tokens <= 0 or tpot_s <= 0:
            return
        is_beyond = tpot_s > self.spread * (self.step_s + self.step_s_per_token * tokens)
        low, high = _SPREAD_BOUNDS
        self.spread = min(high, max(low, self.spread * math.exp(_SPREAD_STEP * (is_beyond - _BEYOND_SPREAD))))

    def _begin_anew(self) -> None:
        """Scale the prior to the answers that there are, and learn from them again."""
        first = list(zip(self._first_tokens, self._first_tpot_s, strict=True))
        ratios = sorted(tpot_s / _prior_tpot_s(tokens) for tokens, tpot_s in first)
        scale = ratios[len(ratios) // _FASTEST - 1]
        self._fit = _decode_prior(scale)
        self.step_s, self.step_s_per_token = scale * _PRIOR_STEP_S, scale * _PRIOR_STEP_S_PER_TOKEN
        self.is_learned = True
        for tokens, tpot_s in first:
            super().learn(tokens=tokens, tpot_s=tpot_s)


def _decode_prior(scale: float) -> RelativeLeastSquares:
    fit = RelativeLeastSquares(2)
    for tokens in _PRIOR_LOADS:
        fit.add_prior(_decode_features(tokens), scale * _prior_tpot_s(tokens), weight=_PRIOR_WEIGHT)
    return fit


def _prior_tpot_s(tokens: float) -> float:
    return _PRIOR_STEP_S + _PRIOR_STEP_S_PER_TOKEN * tokens


def _decode_features(tokens: float) -> list[float]:
    return [1.0, tokens / 1e6]
