# SPDX-License-Identifier: Apache-2.0
"""Two hours of a busy ModelServer fit into little memory; windows that strategies look at stay exact."""

from __future__ import annotations

import gc
import random
import sys

from controller.autoscaler.decision.traffic import (
    COARSE,
    EACH,
    EACH_OLD_HISTOGRAM,
    FINE,
    RECENT,
    Traffic,
    TrafficCounters,
    TrafficHistory,
)

HOURS_S = 7800


def fed(history: TrafficHistory, ticks: int) -> tuple[TrafficCounters, list[tuple[float, int, int]]]:
    """The sums at last, and after each tick: arrivals, and requests in both histograms."""
    rng, sums, said = random.Random(1), TrafficCounters(), list[tuple[float, int, int]]()
    for number in range(1, ticks + 1):
        came = rng.randrange(1, 9)
        more = TrafficCounters([float(came)] * 7)
        for _ in range(came):
            more.ttft[rng.randrange(3, len(more.ttft))] += 1
            more.tpot[rng.randrange(3, len(more.tpot))] += 1
        sums.add(more)
        said.append((sums.counters[0], sum(sums.ttft), sum(sums.tpot)))
        history.add_point(number, float(number), sums)
    return sums, said


def size_of(thing: object) -> int:
    """Bytes of an object and all that it refers to, each once."""
    found, left = {id(thing): thing}, [thing]
    while left:
        for one in gc.get_referents(left.pop()):
            if id(one) not in found and not isinstance(one, type):
                found[id(one)] = one
                left.append(one)
    return sum(sys.getsizeof(one) for one in found.values())


def test_two_hours_of_a_busy_server_with_latencies_in_all_buckets_take_less_than_90_kib() -> None:
    history = TrafficHistory()
    fed(history, HOURS_S)
    assert 40 * 1024 < size_of(history) < 90 * 1024


def test_counters_of_all_points_and_histograms_of_the_newest_are_exact() -> None:
    history = TrafficHistory()
    sums, said = fed(history, HOURS_S)
    points = history.points(HOURS_S + 0.5, sums)
    assert len(points) == FINE + COARSE + 1
    for at, time in enumerate(points.times[:-1]):
        arrivals, ttft, tpot = said[int(time) - 1]
        found = points[at].totals
        assert found.arrivals == arrivals
        age = HOURS_S - time
        if age < RECENT:
            assert (sum(found.ttft), sum(found.tpot)) == (ttft, tpot)
        else:
            # of a point a little before
            late_s = EACH if age < FINE else EACH_OLD_HISTOGRAM
            assert said[max(0, int(time) - late_s)][1] <= sum(found.ttft) <= ttft
    requests = sum(points[-1].totals.ttft) - said[HOURS_S - 61][1]
    new, old = Traffic(points).totals_at(float(HOURS_S)), Traffic(points).totals_at(float(HOURS_S - 60))
    assert new is not None
    assert old is not None
    assert sum(new.ttft) - sum(old.ttft) == requests


def test_what_is_spread_over_the_past_reaches_thinned_points_too() -> None:
    history = TrafficHistory()
    sums, _ = fed(history, HOURS_S)
    before = history.points(HOURS_S + 0.5, sums)
    more = TrafficCounters([1000.0] * 7)
    more.ttft[5] = 1000
    history.spread_over(more, HOURS_S - 1000.0, float(HOURS_S))
    after = history.points(HOURS_S + 0.5, sums)
    for at, time in enumerate(before.times[:-1]):
        share = max(0.0, (time - HOURS_S + 1000.0) / 1000.0)
        old, new = before[at].totals, after[at].totals
        assert new.arrivals == old.arrivals + 1000.0 * share
        assert new.ttft[5] == old.ttft[5] + int(1000 * share)
