# SPDX-License-Identifier: Apache-2.0
"""Saturation between two thresholds: numbers worked out by hand, another way to write the rule, and what always
holds.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from controller.autoscaler.decision.situation import EngineReport, EngineState, Situation
from controller.autoscaler.decision.strategies.saturation import (
    SaturationParameters,
    SaturationStrategy,
    engine_saturation,
)
from tests.examples import examples
from tests.scaling_scenes import engine, pool, report, situation, some_report, target


def asked(seen: Situation, **parameters: float) -> float | None:
    strategy = SaturationStrategy(SaturationParameters(**parameters))  # type: ignore[arg-type]
    return strategy.recommend(seen, None)[0].replicas


def test_saturation_is_the_larger_of_cache_and_queue() -> None:
    assert engine_saturation(report(kv=0.3, waiting=4), 5) == 0.8
    assert engine_saturation(report(kv=0.9, waiting=4), 5) == 0.9
    assert engine_saturation(report(kv=0.1, waiting=99), 5) == 1.0


@pytest.mark.parametrize("unknown", [None, report(waiting=0), report(kv=0.1), report(kv=float("nan"), waiting=0)])
def test_what_is_unknown_counts_as_full(unknown: EngineReport | None) -> None:
    assert engine_saturation(unknown, 5) == 1.0


def test_increments_beyond_the_thresholds_and_nothing_on_them() -> None:
    def two(saturation: float) -> Situation:
        return pool(report(kv=saturation, waiting=0), report(kv=saturation, waiting=0))

    assert asked(two(0.76), scale_up_increment=3) == 5
    assert asked(two(0.75)) == 2
    assert asked(two(0.40)) == 2
    assert asked(two(0.39)) == 1


def test_the_last_replica_stays() -> None:
    assert asked(pool(report(kv=0.0, waiting=0))) == 1
    assert asked(pool(*[report(kv=0.0, waiting=0)] * 3), scale_down_increment=5) == 1


def test_replicas_that_are_starting_are_not_ordered_again() -> None:
    full = [engine(f"e{number}", report(kv=1.0, waiting=9)) for number in range(2)]
    starting = engine("s", state=EngineState.STARTING)
    assert asked(situation(target(full))) == 3
    assert asked(situation(target([*full, starting]))) == 3
    # asked for, and not even created yet
    assert asked(situation(target(full, current=3))) == 3
    # of a target for which there is no place, nothing will come
    assert asked(situation(target([*full, starting], blocked="no GPUs"))) == 4


def test_one_silent_engine_forbids_scaling_in_and_all_silent_ones_everything() -> None:
    idle = report(kv=0.0, waiting=0)
    assert asked(pool(idle, idle, idle, idle)) == 3
    assert asked(pool(idle, idle, idle, None)) is None
    assert asked(pool(idle, idle, idle, idle, unreported=["e2"])) is None
    assert asked(pool(None, None)) is None
    assert asked(situation(target())) is None


def restated(reports: list[EngineReport | None], coming: int, given: SaturationParameters) -> int | None:
    scores = []
    for one in reports:
        if one is None or one.kv_usage is None:
            scores.append(None)
        else:
            queue = min(Fraction(str(one.waiting)) / given.max_queue, 1)
            scores.append(max(Fraction(str(one.kv_usage)), queue))
    if all(score is None for score in scores):
        return None
    total = sum(Fraction(1) if score is None else score for score in scores)
    replicas = len(reports) + coming
    if total > Fraction(str(given.scale_up_threshold)) * replicas:
        return replicas + given.scale_up_increment
    if total < Fraction(str(given.scale_down_threshold)) * len(reports):
        return None if None in scores else max(replicas - given.scale_down_increment, 1)
    return replicas


def known_or_not(rng: random.Random) -> EngineReport | None:
    kv, waiting = rng.randrange(101) / 100, rng.choice((0, 1, 2, 5, 9))
    return rng.choice((None, report(waiting=waiting), *[report(kv=kv, waiting=waiting)] * 8))


def test_many_cases_agree_with_the_restatement() -> None:
    rng, compared = random.Random(9), 0
    while compared < examples(10_000):
        given = SaturationParameters(
            rng.choice((2, 5, 8)),
            rng.choice((0.6, 0.75)),
            rng.choice((0.2, 0.4)),
            rng.choice((1, 3)),
            rng.choice((1, 2)),
        )
        reports = [known_or_not(rng) for _ in range(rng.randrange(1, 8))]
        coming = rng.choice((0, 0, 1, 3))
        them = target((engine(f"e{at}", one) for at, one in enumerate(reports)), current=len(reports) + coming)
        found = SaturationStrategy(given).recommend(situation(them), None)[0]
        if any(
            abs(value - edge) < 1e-9
            for value in (found.inputs.get("mean_saturation", 9.0), found.inputs.get("with_pending", 9.0))
            for edge in (given.scale_up_threshold, given.scale_down_threshold)
        ):
            continue
        assert found.replicas == restated(reports, coming, given)
        compared += 1


def test_unknown_loads_never_ask_for_less_than_known_ones() -> None:
    rng = random.Random(10)
    for _ in range(2000):
        reports = [some_report(rng) for _ in range(rng.randrange(2, 7))]
        forgotten = rng.randrange(len(reports))
        less_known = [None if number == forgotten else one for number, one in enumerate(reports)]
        before, after = asked(pool(*reports)), asked(pool(*less_known))
        assert after is None or after >= len(reports)
        assert before is None or after is None or after >= before
