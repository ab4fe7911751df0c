# SPDX-License-Identifier: Apache-2.0
"""Spare capacity: numbers worked out by hand, another way to write the rule, and what always holds."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING

from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityStrategy
from tests.examples import examples
from tests.scaling_scenes import engine, pool, report, situation, some_report, target

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import EngineReport, Situation

STRATEGY = SpareCapacityStrategy()


def asked(seen: Situation) -> float | None:
    return STRATEGY.recommend(seen, None)[0].replicas


def loaded(*loads: tuple[float, float]) -> Situation:
    return pool(*(report(kv=kv, waiting=waiting) for kv, waiting in loads))


def test_a_saturated_engine_beside_idle_ones_is_no_reason_to_take_one_away() -> None:
    # the original takes one away here: it looks at the first two alone
    assert asked(loaded((0.2, 0), (0.3, 0), (0.9, 7))) == 4
    assert asked(loaded((0.2, 0), (0.3, 0), (0.95, 0))) == 3


def test_one_more_when_room_runs_short() -> None:
    assert asked(loaded((0.75, 0), (0.7, 0))) == 3
    assert asked(loaded((0.1, 3), (0.1, 2))) == 3
    assert asked(loaded((0.6, 0), (0.6, 0))) == 2


def test_one_fewer_when_the_rest_keeps_enough() -> None:
    assert asked(loaded((0.3, 0), (0.3, 0))) == 1
    assert asked(loaded((0.4, 0), (0.4, 0))) == 2
    assert asked(loaded((0.1, 0))) == 1


def test_unknown_engines_count_as_full_and_forbid_scaling_in() -> None:
    idle = report(kv=0.0, waiting=0)
    assert asked(pool(*[idle] * 8, None)) is None
    assert asked(pool(*[idle] * 8, idle)) == 8
    assert asked(pool(None, idle)) == 3
    assert asked(pool(None)) is None


def test_replicas_that_are_starting_count_as_empty() -> None:
    full = [engine(f"e{number}", report(kv=0.9, waiting=0)) for number in range(2)]
    assert asked(situation(target(full))) == 3
    assert asked(situation(target(full, current=3))) == 3


def restated(reports: list[EngineReport | None], coming: int) -> int | None:
    """Room is counted out engine by engine."""
    room_kv, room_queue, unknown = Fraction(0), Fraction(0), 0
    for one in reports:
        if one is None or one.kv_usage is None:
            unknown += 1
        else:
            room_kv += Fraction(8, 10) - Fraction(str(one.kv_usage))
            room_queue += 5 - Fraction(str(one.waiting))
    if unknown == len(reports):
        return None
    ready, replicas = len(reports), len(reports) + coming
    if room_kv + coming * Fraction(8, 10) < Fraction(1, 10) * replicas or room_queue + coming * 5 < 3 * replicas:
        return replicas + 1
    if ready < 2:
        return replicas
    # without one engine its own room is gone: the whole of a threshold, whatever it was used for
    kv_left, queue_left = room_kv - Fraction(8, 10), room_queue - 5
    if kv_left < Fraction(1, 10) * (ready - 1) or queue_left < 3 * (ready - 1):
        return replicas
    return None if unknown else replicas - 1


def test_many_cases_agree_with_the_restatement() -> None:
    rng, compared = random.Random(11), 0
    while compared < examples(10_000):
        reports = [
            rng.choice((None, *[report(kv=rng.randrange(101) / 100, waiting=rng.choice((0, 0, 1, 2, 6)))] * 9))
            for _ in range(rng.randrange(1, 9))
        ]
        coming = rng.choice((0, 0, 1, 2))
        them = target((engine(f"e{at}", one) for at, one in enumerate(reports)), current=len(reports) + coming)
        found = STRATEGY.recommend(situation(them), None)[0]
        edges = [found.inputs.get(name, 9.0) - 0.1 for name in ("kv_spare", "kv_spare_after")]
        edges += [found.inputs.get(name, 9.0) - 3 for name in ("queue_spare", "queue_spare_after")]
        if any(abs(edge) < 1e-9 for edge in edges):
            continue
        assert found.replicas == restated(reports, coming)
        compared += 1


def test_more_load_never_asks_for_less_and_unknown_never_either() -> None:
    rng = random.Random(12)
    for _ in range(2000):
        reports = [some_report(rng) for _ in range(rng.randrange(2, 7))]
        number = rng.randrange(len(reports))
        unknown = [None if at == number else one for at, one in enumerate(reports)]
        busier = [report(kv=1.0, waiting=50) if at == number else one for at, one in enumerate(reports)]
        before, after, most = asked(pool(*reports)), asked(pool(*unknown)), asked(pool(*busier))
        assert after is None or after >= len(reports)
        assert before is None or most is None or most >= before
