# SPDX-License-Identifier: Apache-2.0
"""What is cheap says the same as what it stands for: sums without histograms, idle servers, a single gateway."""

from __future__ import annotations

import random

import msgspec
import pytest

from controller.autoscaler.decision.gateway_reports import MOST, engine_signals_by_address, sanitize_gauges
from controller.autoscaler.decision.offered_load import estimate_offered_load
from controller.autoscaler.decision.traffic import (
    PackedPoints,
    Traffic,
    TrafficCounters,
    TrafficHistory,
    TrafficTotals,
    sum_traffic,
)
from extproc.api.status_page_contents import EngineDemand, ServerDemand

SECONDS = 700


def history_of(rng: random.Random, idle_from: int, ticks: int = SECONDS) -> PackedPoints:
    """Random arrivals until ``idle_from``, then none."""
    made, sums = TrafficHistory(), TrafficCounters()
    for tick in range(1, ticks + 1):
        number = rng.choice((0, 0, 1, 5, 40)) if tick < idle_from else 0
        more = TrafficCounters(
            [float(number), float(number // 5), float(number // 2), 1e3 * number, 5.0 * number, 2e2 * number, 9.0]
        )
        if number:
            more.ttft[rng.randrange(len(more.ttft))] = number
            sums.add(more)
        made.add_point(tick, float(tick), sums if number else None)
    return made.points(ticks + 0.5, sums)


def without_histograms(totals: TrafficTotals) -> TrafficTotals:
    return msgspec.structs.replace(totals, ttft=(), tpot=())


@pytest.mark.parametrize("seed", range(5))
def test_counters_are_those_of_the_points(seed: int) -> None:
    rng = random.Random(seed)
    one, other = history_of(rng, idle_from=600), history_of(rng, idle_from=100, ticks=SECONDS)
    for points in (one, sum_traffic([one, other])):
        assert [points.counters(at) for at in range(len(points))] == [
            without_histograms(each.totals) for each in points
        ]


@pytest.mark.parametrize("idle_from", [0, 1, 150, 300, 650, SECONDS])
@pytest.mark.parametrize("window_s", [6.0, 30.0, 90.0])
def test_load_is_that_of_all_points(idle_from: int, window_s: float) -> None:
    packed = history_of(random.Random(idle_from), idle_from)
    for now_s in (0.5, 1.0, 7.3, 200.0, 500.2, SECONDS + 0.5):
        found = estimate_offered_load(Traffic(packed), window_s=window_s, now_s=now_s)
        assert found == estimate_offered_load(Traffic(tuple(packed)), window_s=window_s, now_s=now_s)


def test_rates_and_latencies_are_those_of_all_points() -> None:
    packed = history_of(random.Random(3), 650)
    lazy, whole = Traffic(packed), Traffic(tuple(packed))
    for window_s in (10.0, 60.0, 600.0):
        assert lazy.rates(window_s, 690.0) == whole.rates(window_s, 690.0)
        assert lazy.ttft_s(90, window_s, 690.0) == whole.ttft_s(90, window_s, 690.0)


def test_what_one_gateway_says_is_what_it_says_beside_one_that_knows_no_engine() -> None:
    rng = random.Random(1)
    for _ in range(50):
        engine = EngineDemand(
            role=rng.choice(("", "prefill")),
            in_flight=rng.randrange(9),
            waiting=rng.choice((None, 2.0)),
            report_age_s=rng.choice((None, 0.4, 7.0)),
            prefill_tokens_per_s=rng.choice((None, 9000.0)),
            step_s=rng.choice((None, 0.01)),
        )
        said = ServerDemand(engines={"10.0.0.1:8000": engine})
        assert engine_signals_by_address([(said, 50.0)]) == engine_signals_by_address(
            [(said, 50.0), (ServerDemand(), 40.0)]
        )


@pytest.mark.parametrize(
    "bad",
    [
        {"role": "boss"},
        {"in_flight_tokens": float("inf")},
        {"in_flight": -1},
        {"waiting": float("nan")},
        {"kv_usage": 1.5},
        {"prefill_tokens_per_s": 0.0},
        {"step_s": 2 * MOST},
    ],
    ids=lambda one: next(iter(one)),
)
def test_an_engine_is_corrected_where_a_value_is_absurd_and_kept_as_it_is_otherwise(bad: dict[str, object]) -> None:
    good = EngineDemand(in_flight=1, waiting=0.0, kv_usage=1.0, step_s=0.01)
    assert sanitize_gauges(ServerDemand(engines={"a": good})).engines["a"] is good
    corrected = sanitize_gauges(ServerDemand(engines={"a": msgspec.structs.replace(good, **bad)})).engines["a"]
    assert corrected == msgspec.structs.replace(good, **{name: getattr(corrected, name) for name in bad})
    assert all(getattr(corrected, name) != value for name, value in bad.items())
