# SPDX-License-Identifier: Apache-2.0
"""Learns how fast endpoints prefill, in tokens of work a second."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable

# The weight of one more answer: first as in a plain mean, later at least this.
_MIN_WEIGHT: Final = 0.03
# Answers that waited in the same queue are correlated: this many count as one.
_CORRELATED: Final = 16.0
# Shrinkage takes 20 µs, and a single answer changes little.
_SHRINK_EVERY: Final = 4
# With less work than this, the time to first token is mostly overhead.
_MIN_TOKENS: Final = 512.0
_RATE_BOUNDS: Final = (200.0, 1_000_000.0)


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


def typical_rate(table: EndpointTable) -> float:
    """The geometric mean of the endpoints' rates, in tokens of work a second."""
    return float(np.exp(np.log(table.prefill_rate[table.is_active]).mean()))
