# SPDX-License-Identifier: Apache-2.0
"""HPA v2: answers of the original, another way to write its rules, and what holds of all answers."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from controller.api.autoscaling import MetricTarget
from controller.autoscaler.decision.situation import Backlog, EngineState, MetricReading, Situation
from controller.autoscaler.decision.strategies.target import (
    MetricRecommendation,
    TargetStrategy,
    Tolerance,
    engine_pool,
    replicas_for_engine_metric,
    replicas_for_total_metric,
)
from tests.examples import examples
from tests.scaling_scenes import NOW_S, engine, pool, report, situation, some_report, steady, target

ORIGINAL = json.loads((Path(__file__).parent.parent / "upstream" / "hpa.json").read_text())["replicas"]
STATES = {"ready": EngineState.READY, "starting": EngineState.STARTING, "draining": EngineState.DRAINING}


def scene(states: list[EngineState], current: int) -> Situation:
    return situation(target((engine(f"p{at}", state=state) for at, state in enumerate(states)), current=current))


def proposed(case: dict[str, Any]) -> MetricRecommendation:
    pods = case["pods"] or []
    them = engine_pool(scene([STATES[pod["state"]] for pod in pods], case["current"]))
    tolerance = Tolerance(up=case["up"], down=case["down"])
    if case["kind"] == "pods":
        values = {f"p{at}": pod["milli"] for at, pod in enumerate(pods) if pod["milli"] is not None}
        return replicas_for_engine_metric(values, case["target"], them, tolerance)
    return replicas_for_total_metric(case["total"], case["target"], them, tolerance, for_all=case["kind"] == "value")


def has_draining(case: dict[str, Any]) -> bool:
    return any(pod["state"] == "draining" for pod in case["pods"] or ())


def test_answers_are_those_of_kubernetes_own_code() -> None:
    # for a target of all, Kubernetes counts a pod that drains as ready; here it is gone
    alike = [case for case in ORIGINAL if not (case["kind"] == "value" and has_draining(case))]
    assert [case for case in alike if proposed(case).replicas != case["desired"]] == []
    assert len(alike) >= 200
    assert {case["kind"] for case in alike} == {"pods", "average", "value"}


class Edge(Exception):
    """Exact arithmetic and floats may differ here."""


def ceil_of(value: Fraction) -> int:
    if value.denominator != 1 and abs(value - round(value)) < Fraction(1, 10**9):
        raise Edge
    return -(-value.numerator // value.denominator)


def is_tolerated(ratio: Fraction, up: float, down: float) -> bool:
    low, high = 1 - Fraction(str(down)), 1 + Fraction(str(up))
    if min(abs(ratio - low), abs(ratio - high)) < Fraction(1, 10**9):
        raise Edge
    return low < ratio < high


def restated(values: list[int | None], starting: int, goal: int, current: int, up: float, down: float) -> int | None:
    """Kubernetes' rule for one metric by engine, told by what each engine is taken to have."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    first = Fraction(sum(known) // len(known), goal)
    blanks = len(values) - len(known)
    if blanks == 0 and (first <= 1 or starting == 0):
        return current if is_tolerated(first, up, down) else ceil_of(first * len(known))
    assumed = list(known)
    if first < 1:
        assumed.extend([goal] * blanks)
    if first > 1:
        assumed.extend([0] * (blanks + starting))
    second = Fraction(sum(assumed) // len(assumed), goal)
    if is_tolerated(second, up, down) or (first - 1) * (second - 1) < 0:
        return current
    wanted = ceil_of(second * len(assumed))
    turned = (second < 1 and wanted > current) or (second > 1 and wanted < current)
    return current if turned else wanted


def test_a_metric_by_engine_agrees_with_its_restatement_in_many_cases() -> None:
    rng, compared = random.Random(1), 0
    for _ in range(examples(12_000)):
        goal = rng.choice((100, 750, 1000, 16_000))
        load = rng.choice((0.2, 0.8, 0.95, 1.0, 1.05, 1.5, 4.0))
        values = [
            None if rng.random() < 0.15 else int(goal * load * rng.uniform(0.6, 1.4)) for _ in range(rng.randrange(9))
        ]
        starting, current = rng.choice((0, 0, 1, 4)), rng.randrange(14)
        up, down = rng.choice((0.0, 0.1, 0.25)), rng.choice((0.0, 0.1, 0.25))
        states = [EngineState.READY] * len(values) + [EngineState.STARTING] * starting
        ours = replicas_for_engine_metric(
            {f"p{at}": value for at, value in enumerate(values) if value is not None},
            goal,
            engine_pool(scene(states, current)),
            Tolerance(up=up, down=down),
        )
        try:
            assert ours.replicas == restated(values, starting, goal, current, up, down)
        except Edge:
            continue
        compared += 1
    assert compared >= examples(10_000)


def test_a_total_agrees_with_its_restatement_in_many_cases() -> None:
    rng, compared = random.Random(2), 0
    for _ in range(examples(12_000)):
        total, goal, for_all = rng.randrange(200_000), rng.randrange(1, 30_000), rng.random() < 0.5
        ready, current = rng.randrange(1, 9), rng.randrange(9)
        up, down = rng.choice((0.0, 0.1, 0.25)), rng.choice((0.0, 0.1, 0.25))
        them = engine_pool(scene([EngineState.READY] * ready, current))
        ours = replicas_for_total_metric(total, goal, them, Tolerance(up=up, down=down), for_all=for_all).replicas
        share = Fraction(total, goal)
        try:
            if current and is_tolerated(share if for_all else share / current, up, down):
                expected = current
            else:
                expected = ceil_of(share * ready if for_all and current else share)
        except Edge:
            continue
        compared += 1
        assert ours == expected
    assert compared >= examples(10_000)


RUNNING = MetricTarget("requests_running", 16)
QUEUED = MetricTarget("requests_queued", 2)


def asked(seen: Situation, *metrics: MetricTarget, careful: bool = True) -> float | None:
    return TargetStrategy(metrics, careful=careful).recommend(seen, None)[0].replicas


def test_the_largest_of_several_metrics_counts() -> None:
    seen = pool(report(running=20, waiting=0), report(running=20, waiting=0), waiting=Backlog(requests=9))
    assert asked(seen, RUNNING) == 3
    assert asked(seen, QUEUED) == 5
    assert asked(seen, RUNNING, QUEUED) == 5


def test_an_unknown_metric_forbids_scaling_in_and_nothing_else() -> None:
    mystery = MetricTarget("mystery", 1, source="Engine")
    idle, busy = pool(*[report(running=1)] * 4), pool(*[report(running=30)] * 4)
    assert asked(idle, RUNNING) == 1
    assert asked(idle, RUNNING, mystery) is None
    assert asked(busy, RUNNING, mystery) == 8
    assert asked(busy, mystery) is None


def test_an_engine_without_a_value_forbids_scaling_in_unless_kubernetes_is_wanted_literally() -> None:
    usage = MetricTarget("kv_usage", 0.8)
    seen = pool(report(kv=0.1), report(kv=0.1), report(kv=0.1), None)
    assert asked(seen, usage) is None
    # the unknown one counts as 0.8: 1.1 in all, and 0.8 is the target
    assert asked(seen, usage, careful=False) == 2


def test_from_zero_there_is_no_tolerance() -> None:
    nobody = situation(target(current=0), waiting=Backlog(requests=1))
    assert asked(nobody, MetricTarget("requests_in_flight", 10)) == 1
    assert asked(nobody, MetricTarget("requests_in_flight", 1, total=True)) == 1


def test_replicas_that_have_no_pods_yet_are_no_reason_to_take_them_back() -> None:
    # two engines at one and a half times the target, and four more just ordered
    usage = MetricTarget("kv_usage", 0.5)
    seen = situation(target([engine(f"e{at}", report(kv=0.75)) for at in range(2)], current=6))
    assert asked(seen, usage) == 6
    assert asked(seen, usage, careful=False) == 3
    queue = MetricTarget("requests_in_flight", 10, total=True)
    seen = situation(target([engine("e", report(in_flight=20))], current=6))
    assert asked(seen, queue) is None
    assert asked(seen, queue, careful=False) == 2
    assert asked(situation(target([engine("e", report(in_flight=4))], current=6)), queue) == 1


def test_a_target_for_all_says_nothing_while_no_engine_is_ready() -> None:
    seen = situation(target([engine("s", state=EngineState.STARTING)]), waiting=Backlog(requests=50))
    assert asked(seen, MetricTarget("requests_in_flight", 10, total=True)) is None


def test_a_metric_that_is_not_a_number_is_unknown() -> None:
    weird = MetricTarget("weird", 10, source="Prometheus")
    for value in (math.nan, math.inf):
        assert asked(pool(report(), metrics={"weird": MetricReading(NOW_S, total=value)}), weird) is None
        assert asked(pool(report(), metrics={"weird": MetricReading(NOW_S, by_engine={"e0": value})}), weird) is None


def test_tolerance_differs_by_direction() -> None:
    strategy = TargetStrategy((RUNNING,), Tolerance(up=0.5, down=0.0))
    assert strategy.recommend(pool(report(running=20)), None)[0].replicas == 1
    assert strategy.recommend(pool(*[report(running=7.9)] * 2), None)[0].replicas == 1


def test_engines_of_another_kind_count_by_their_capacity() -> None:
    big = target([engine("b", report(kv=0.8))], name="b", capacity=2.0)
    small = target([engine("s", report(kv=0.8))])
    found = TargetStrategy((MetricTarget("requests_in_flight", 10),)).recommend(
        situation(small, big, waiting=Backlog(requests=55)), None
    )[0]
    assert found.replicas == pytest.approx(5.5)


def test_more_load_never_asks_for_less_and_no_answer_is_nan() -> None:
    rng = random.Random(3)
    metrics = (RUNNING, QUEUED, MetricTarget("requests_per_second", 3), MetricTarget("tokens_in_flight", 20_000))
    for _ in range(2_000):
        reports = [some_report(rng) for _ in range(rng.randrange(1, 7))]
        few, many = sorted((rng.randrange(100), rng.randrange(100)))
        less, more = (
            pool(*reports, waiting=Backlog(count, 100.0 * count), traffic=steady(requests=2)) for count in (few, many)
        )
        first, second = asked(less, *metrics), asked(more, *metrics)
        assert first is None or second is None or second >= first
        for found, seen in ((first, less), (second, more)):
            assert found is None or math.isfinite(found)
            if any(one is None for one in reports):
                assert found is None or found >= seen.current_replicas


def test_the_reason_tells_metric_value_and_target() -> None:
    found = TargetStrategy((RUNNING,)).recommend(pool(report(running=40)), None)[0]
    assert found.reason == "requests_running is 40 in all (target 16 a replica)"
    assert found.inputs == {"requests_running_ratio": 2.5}
