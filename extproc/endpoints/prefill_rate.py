"""What outcomes teach about endpoints: how fast they prefill, and when to leave one alone for a while."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable

# The weight of one more answer: the mean of the first ones, then slowly forgetting.
_LEAST_WEIGHT: Final = 0.03
# Answers that were waited for in the same queue tell the same: so many count as one.
_CORRELATED: Final = 16.0
# Agreeing takes 20 µs, and one answer more changes little.
_AGREE_EVERY: Final = 4
# Below this, time to first token is overhead and says nothing about the rate of prefill.
_MIN_TOKENS: Final = 512.0
_RATE_BOUNDS: Final = (200.0, 1_000_000.0)
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


def learn_prefill_rate(table: EndpointTable, row: int, *, tokens_ahead: float, ttft_s: float) -> None:
    """``tokens_ahead``: prefill work of the request and of those before it at the pick, all done in ``ttft_s``."""
    if tokens_ahead < _MIN_TOKENS or ttft_s <= 0:
        return
    low, high = _RATE_BOUNDS
    sample = math.log(min(high, max(low, tokens_ahead / ttft_s)))
    # the first answer and what was assumed weigh the same; in the logarithm: twice too high is as wrong as twice too low
    weight = max(_LEAST_WEIGHT, 1 / (2 + int(table.rate_samples[row])))
    surprise = sample - float(table.own_log_rate[row])
    table.rate_noise += _LEAST_WEIGHT * (surprise * surprise - table.rate_noise)
    table.own_log_rate[row] += weight * surprise
    table.rate_samples[row] += 1
    if table.rate_samples[row] < _AGREE_EVERY or table.rate_samples.sum() % _AGREE_EVERY == 0:
        _agree_on_rates(table)


def _agree_on_rates(table: EndpointTable) -> None:
    """Believe differences between endpoints only as far as they exceed what chance makes of equal ones.

    The James-Stein estimator in its empirical Bayes form (Efron and Morris, 1973): with between-endpoint variance A and
    error D of one endpoint's mean, its rate is the typical one plus A / (A + D) of its deviation. Without it, the engine
    that met a long queue first looks slow, gets little to do, and hardly ever shows that it is not. Endpoints of which
    nothing is known are taken to be typical.
    """
    measured = table.is_active & (table.rate_samples > 0)
    own = table.own_log_rate[measured]
    typical = float(own.mean())
    answers = np.minimum(table.rate_samples[measured] + 1, 2 / _LEAST_WEIGHT)
    error = _CORRELATED * table.rate_noise / answers
    variance = max(0.0, float(own.var()) - float(error.mean()))
    trust = variance / (variance + error) if variance else 0.0
    table.prefill_rate[measured] = np.exp(typical + trust * (own - typical))
    table.prefill_rate[table.is_active & ~measured] = np.exp(typical)


def typical_rate(table: EndpointTable) -> float:
    """Of the endpoints there are."""
    return float(np.exp(np.log(table.prefill_rate[table.is_active]).mean()))


def record_failure(table: EndpointTable, row: int, now: float) -> None:
    """The endpoint did not serve what it was given: avoid it, twice as long each time.

    A dead engine has no load, so it would look like the best choice for every request. Failures while it is avoided
    already are those of requests that were on their way: one event, told many times.
    """
    if now < table.retry_at_s[row]:
        return
    table.has_failures = True
    table.retry_at_s[row] = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(int(table.failures[row]), 10))
    table.failures[row] += 1


def record_success(table: EndpointTable, row: int) -> None:
    """The endpoint serves."""
    if table.failures[row]:
        table.failures[row] = 0
        table.retry_at_s[row] = 0.0
        table.has_failures = bool(table.failures.any())
