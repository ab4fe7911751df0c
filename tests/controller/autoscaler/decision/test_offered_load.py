# SPDX-License-Identifier: Apache-2.0
"""Rates follow changes at once, and noise not at all."""

from __future__ import annotations

import random

import msgspec
import pytest

from controller.autoscaler.decision.offered_load import OfferedLoad, estimate_offered_load
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from tests.controller.autoscaler.decision.fluid import poisson
from tests.controller.autoscaler.decision.situations import NOW_S, traffic_of


def load(traffic: Traffic) -> OfferedLoad:
    """With the strategy's defaults."""
    found = estimate_offered_load(traffic, window_s=30.0, now_s=NOW_S)
    assert found is not None
    return found


def noisy(rate: float, seed: int, growth: float = 0.0) -> Traffic:
    """Poisson's arrivals."""
    chance = random.Random(seed)
    return traffic_of(lambda second: poisson(chance, rate + growth * second))


def test_constant_load_is_measured_over_the_longest_window() -> None:
    found = load(traffic_of(5.0))
    assert found.arrivals_per_s == pytest.approx(5.0)
    assert found.window_s == pytest.approx(480.0)
    assert found.slope == 0
    assert found.dispersion == 1.0


def test_a_step_counts_as_soon_as_it_fills_the_shortest_window() -> None:
    found = load(traffic_of(lambda second: 24.0 if second > -30 else 4.0))
    assert found.arrivals_per_s == pytest.approx(24.0)
    assert found.window_s == pytest.approx(30.0)


def test_a_step_is_no_trend() -> None:
    assert load(traffic_of(lambda second: 24.0 if second > -50 else 4.0)).slope == 0


def test_a_steady_rise_is_continued_from_the_middle_of_its_window() -> None:
    found = load(traffic_of(lambda second: 40.0 + second * 0.05))
    # a rise of 0.05 a second, less what noise of such counts could be
    assert found.slope == pytest.approx(0.05, rel=0.05)
    # from the middle of the window to now as it is, and from now on damped
    ahead = found.mean_per_s + found.slope * (found.window_s / 2 + 0.7 * 60)
    assert found.predicted_arrivals_per_s(60.0) == pytest.approx(ahead)
    assert found.mean_per_s < found.arrivals_per_s < found.predicted_arrivals_per_s(60.0)


def test_a_trend_begins_no_higher_than_the_newest_arrivals() -> None:
    found = load(traffic_of(lambda second: 40.0 + second * 0.05))
    flat = msgspec.structs.replace(found, newest_per_s=30.0, newest_error=1.0)
    assert flat.predicted_arrivals_per_s(0.0) == flat.arrivals_per_s
    assert flat.predicted_arrivals_per_s(600.0) == pytest.approx(31.0 + 0.7 * 600 * found.slope)


def test_a_rise_that_has_ended_is_not_continued() -> None:
    assert load(traffic_of(lambda second: 40.0 + min(second, -100) * 0.08)).slope == 0


def test_noise_of_a_constant_rate_has_hardly_ever_a_trend() -> None:
    slopes = [load(noisy(10.0, seed)).slope for seed in range(200)]
    # three standard errors: 1 in 370 for each side together
    assert sum(slope != 0 for slope in slopes) <= 4


def test_a_constant_noisy_rate_is_known_to_a_few_per_cent() -> None:
    rates = [load(noisy(10.0, seed)).arrivals_per_s for seed in range(200)]
    # over 480 s: 4,800 requests, 1.4 % of standard error; few shorter windows by chance
    assert sum(abs(rate - 10.0) > 0.6 for rate in rates) <= 6


def test_a_fall_to_nothing_is_seen_within_the_shortest_window() -> None:
    assert load(traffic_of(lambda second: 0.0 if second > -30 else 5.0)).arrivals_per_s == 0


def test_requests_mean_what_the_finished_ones_had() -> None:
    found = load(traffic_of(3.0)).per_request
    assert found is not None
    assert (found.prefill_work, found.prompt_tokens, found.output_tokens) == pytest.approx((1000, 1000, 200))


def test_refused_requests_are_no_load_but_their_known_work_is() -> None:
    points = [
        TrafficPoint(
            NOW_S - 60 + second,
            TrafficTotals(arrivals=2.0 * second, refused=second, finished=second, prefill_work=900.0 * second),
        )
        for second in range(61)
    ]
    found = load(Traffic(tuple(points)))
    assert found.arrivals_per_s == pytest.approx(1.0)
    assert found.per_request is not None
    assert found.per_request.prefill_work == pytest.approx(900.0)


def test_nothing_is_known_from_a_single_point() -> None:
    assert estimate_offered_load(Traffic((TrafficPoint(NOW_S, TrafficTotals()),)), window_s=30.0, now_s=NOW_S) is None


def test_burstier_arrivals_than_poissons_count_as_noise() -> None:
    # every tenth second brings all of ten seconds, twice as many in every other one
    found = load(traffic_of(lambda second: (150.0 if second % 20 else 50.0) if second % 10 == 0 else 0.0))
    assert found.dispersion > 10
    assert found.window_s > 200


def test_a_steep_rise_is_seen_within_two_seconds() -> None:
    found = load(traffic_of(lambda second: 24.0 if second > -2 else 4.0))
    # 52 in the last three seconds, 12 expected: 52 less one standard error of 7.2
    assert found.arrivals_per_s == pytest.approx((52 - 52**0.5) / 3)


def test_noise_is_hardly_ever_a_burst() -> None:
    windows = [load(noisy(5.0, seed)).window_s for seed in range(300)]
    assert sum(window < 30 for window in windows) <= 2


def test_points_that_are_further_apart_are_no_bursts() -> None:
    every = noisy(10.0, seed=5).points
    # as histories are kept: all points of five minutes, before that one of thirty
    thinned = Traffic(tuple(point for index, point in enumerate(every) if index % 30 == 0 or index >= 300))
    found, whole = load(thinned), load(Traffic(every))
    assert found.arrivals_per_s == pytest.approx(whole.arrivals_per_s)
    assert found.dispersion == 1.0
    assert found.slope == 0
