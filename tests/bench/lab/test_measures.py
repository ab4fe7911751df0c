# SPDX-License-Identifier: Apache-2.0
"""Measures and intervals with numbers worked out by hand."""

from __future__ import annotations

import random

import pytest

from bench.lab.measures import LatencyObjective, compute_measures
from bench.lab.trial import RequestRow
from bench.reporting.request_results import distribution, mean_interval, ratio_interval, split_into_windows


def row(
    number: int, ttft_s: float, tpot_s: float = 0.05, *, engine: int = 0, error: str = "", label: str = ""
) -> RequestRow:
    return RequestRow((number, 0), 0.0, ttft_s, tpot_s, ttft_s + 1, 100, 40, 21, engine, 0.5, label, error)


def test_what_is_measured_of_good_answers_and_of_errors() -> None:
    rows = [
        row(0, 1.0),
        row(1, 3.0, engine=1),
        row(2, 8.0, engine=1),
        row(3, 0.4, 0.2, engine=1),
        row(4, 0.0, error="refused"),
    ]
    found = compute_measures(rows, 10.0, LatencyObjective(ttft_s=5.0, tpot_s=0.1))
    assert (found.requests, found.errors) == (5, 1)
    assert found.ttft_s.mean == pytest.approx(3.1)
    assert (found.ttft_s.p50, found.ttft_s.p99) == (1.0, 8.0)
    # over 0.5 s: 0.5, 2.5, 7.5, and 0 for what was faster than its ideal
    assert found.excess_ttft_s.mean == pytest.approx(10.5 / 4)
    assert found.cached_token_ratio == 0.4
    # one is late, one writes too slowly, one is an error
    assert (found.goodput, found.attainment) == (0.2, 0.4)
    assert found.imbalance == 1.5
    # a third engine that serves nothing lowers the mean
    assert compute_measures(rows, 10.0, LatencyObjective(), engines=3).imbalance == 2.25
    assert found.requests_per_s == 0.4


def test_fairness_is_one_where_all_labels_wait_alike_and_falls_with_one_that_waits_alone() -> None:
    alike = [row(0, 2.0, label="a"), row(1, 2.0, label="b")]
    apart = [row(0, 0.0, label="a"), row(1, 2.0, label="b")]
    assert compute_measures(alike, 1.0, LatencyObjective()).fairness == 1.0
    assert compute_measures(apart, 1.0, LatencyObjective()).fairness == 0.5


def test_nothing_measured_is_nothing_and_no_error() -> None:
    found = compute_measures([], 0.0, LatencyObjective())
    assert (found.requests, found.goodput, found.imbalance, found.ttft_s) == (0, 0.0, 0.0, distribution([]))


def test_windows_hold_all_values_in_their_order() -> None:
    values = [float(number) for number in range(100)]
    cut = split_into_windows(values, 7)
    assert [value for window in cut for value in window] == values
    assert len(cut) == 7
    assert split_into_windows([1.0, 2.0], 12) == [[1.0], [2.0]]
    assert split_into_windows([], 12) == []


def test_an_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng, hits = random.Random(0), 0
    for trial in range(200):
        blocks = [[rng.expovariate(1.0) for _ in range(40)] for _ in range(24)]
        found = mean_interval(blocks, seed=trial)
        hits += found.low <= 1.0 <= found.high
    assert 0.87 <= hits / 200 <= 0.99


def test_a_ratio_is_taken_over_pairs_so_that_common_ups_and_downs_do_not_widen_it() -> None:
    rng = random.Random(0)
    theirs = [[level * rng.uniform(0.9, 1.1) for _ in range(50)] for level in (1, 10, 2, 30, 5, 8, 1, 20)]
    ours = [[0.8 * value for value in block] for block in theirs]
    found = ratio_interval(ours, theirs)
    assert (found.low, found.value, found.high) == pytest.approx((-0.2, -0.2, -0.2))
    wide = mean_interval(theirs)
    assert wide.high > 1.5 * wide.low
