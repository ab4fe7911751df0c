# SPDX-License-Identifier: Apache-2.0
"""The numbers, worked out by hand."""

from __future__ import annotations

import pytest

from bench.reporting.request_results import RequestResult, distribution, summarize


def result(
    due: float, first: float, last: float, *, prompt: int = 100, cached: int = 0, out: int = 11
) -> RequestResult:
    return RequestResult(due, first, last, prompt, cached, out)


def test_times_are_engine_time_and_errors_are_kept_apart() -> None:
    results = [
        result(0.0, 0.5, 1.5, cached=50),
        result(1.0, 1.1, 1.1, out=1),
        RequestResult(2.0, 0.0, 0.0, 0, 0, 0, error="503"),
    ]
    summary = summarize(results, speed=2.0)
    assert (summary.requests, summary.errors) == (3, ("503",))
    assert summary.ttft_s.mean == pytest.approx((1.0 + 0.2) / 2)
    # one request has more than one token: 1 s over 10 gaps, twice as long in engine time
    assert summary.tpot_s.mean == pytest.approx(0.2)
    assert summary.cached_token_ratio == 0.25
    assert summary.duration_s == 3.0
    assert summary.output_tokens_per_s == 4.0


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    found = distribution(values)
    assert (found.mean, found.p50, found.p90, found.p95, found.p99) == (50.5, 50.0, 90.0, 95.0, 99.0)
    assert distribution([3.0]).p99 == 3.0
    assert distribution([]).mean == 0.0
