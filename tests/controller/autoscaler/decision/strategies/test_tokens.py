# SPDX-License-Identifier: Apache-2.0
"""Tokens over capacity: numbers worked out by hand, another way to write the rule, and what always holds."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from controller.api.autoscaling_binding import EngineCapacity, ScaleTarget
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.situation import Backlog, EngineReport, Situation
from controller.autoscaler.decision.strategies.tokens import (
    MeanTokenLengths,
    TokensMemory,
    TokensParameters,
    TokensStrategy,
    steady_tokens,
)
from tests.examples import examples
from tests.scaling_scenes import engine, pool, report, situation, some_report, steady, target

STRATEGY = TokensStrategy()
# a cache of 100,000 tokens counts as 80,000
EMPTY = report(kv=0.0, waiting=0, cache=100_000)


def holding(tokens: float, waiting: float = 0) -> EngineReport:
    return report(kv=tokens / 100_000, waiting=waiting, cache=100_000)


def asked(seen: Situation, memory: TokensMemory | None = None) -> float | None:
    return STRATEGY.recommend(seen, memory)[0].replicas


def test_demand_over_the_upper_share_asks_for_all_that_is_missing_at_once() -> None:
    # 140,000 / 0.85 - 80,000 = 84,706: two replicas
    assert asked(pool(holding(60_000), waiting=Backlog(requests=0, tokens=80_000))) == 3
    assert asked(pool(holding(60_000))) == 1
    assert asked(pool(holding(68_000), waiting=Backlog(tokens=2.0))) == 2


def test_whole_replicas_that_are_spare_go_at_once() -> None:
    # 4 * 80,000 - 100,000 / 0.7 = 177,143: two
    assert asked(pool(*[holding(25_000)] * 4)) == 2
    assert asked(pool(*[EMPTY] * 4)) == 1
    # 1 * 80,000 - 5,000 / 0.7: not a whole replica
    assert asked(pool(holding(5_000))) == 1


def test_replicas_that_are_starting_are_not_ordered_again() -> None:
    engines = [engine("e", holding(60_000))]
    queue = Backlog(tokens=80_000)
    assert asked(situation(target(engines), waiting=queue)) == 3
    assert asked(situation(target(engines, current=3), waiting=queue)) == 3


def test_waiting_requests_count_with_prompt_at_engines_and_answer_at_gateways() -> None:
    seen = pool(
        holding(0, waiting=3),
        waiting=Backlog(requests=10, tokens=4_000.0),
        traffic=steady(requests=1, prompt=1000, answer=200),
    )
    found = STRATEGY.recommend(seen, None)[0]
    assert found.inputs["demand_tokens"] == pytest.approx(3 * 1000 + 4_000 + 10 * 200)
    prefill = ScaleTarget("a", ObjectReference("ModelInfer", "a"), 10, stage="Prefill")
    alone = situation(
        target([engine("e", EMPTY)], spec=prefill),
        waiting=Backlog(requests=10, tokens=4_000.0),
        traffic=steady(requests=1, prompt=1000, answer=200),
    )
    assert STRATEGY.recommend(alone, None)[0].inputs["demand_tokens"] == 4_000


def test_a_full_queue_tells_what_an_engine_can_hold_and_that_is_remembered() -> None:
    busy = steady(requests=1, prompt=1000, answer=200)
    found, memory = STRATEGY.recommend(pool(holding(30_000, waiting=9), traffic=busy), None)
    assert found.inputs["replica_capacity_tokens"] == pytest.approx(30_000)
    found, memory = STRATEGY.recommend(pool(holding(20_000, waiting=9), traffic=busy), memory)
    assert found.inputs["replica_capacity_tokens"] == pytest.approx(20_000)
    found, memory = STRATEGY.recommend(pool(holding(10_000), traffic=busy), memory)
    assert found.inputs["replica_capacity_tokens"] == pytest.approx(25_000)
    # longer answers are another class, of which nothing was seen: 8192 * 600 / 1600 = 3072 sequences, at most 256
    found, _ = STRATEGY.recommend(pool(EMPTY, traffic=steady(requests=1, prompt=1000, answer=600)), memory)
    assert found.inputs["replica_capacity_tokens"] == pytest.approx(80_000)


def test_ten_observations_are_kept() -> None:
    memory: TokensMemory | None = None
    for tokens in range(30):
        _, memory = STRATEGY.recommend(pool(holding(1000.0 + tokens, waiting=9)), memory)
    assert memory is not None
    assert [len(observed) for observed in memory.observed.values()] == [10]


def test_the_scheduler_bounds_what_an_engine_can_hold() -> None:
    # 2048 * 100 / 1100 = 186 sequences of 1050 tokens
    assert steady_tokens(MeanTokenLengths(1000, 100), 2048, 256) == pytest.approx(2048 * 100 / 1100 * 1050)
    assert steady_tokens(MeanTokenLengths(10, 1000), 8192, 256) == pytest.approx(256 * 510)
    assert steady_tokens(MeanTokenLengths(10, 0), 8192, 256) == 0.0


def test_an_unknown_engine_changes_nothing_by_itself_and_forbids_scaling_in() -> None:
    assert asked(pool(holding(10_000), holding(10_000), EMPTY)) == 1
    assert asked(pool(holding(10_000), holding(10_000), None)) is None
    assert asked(pool(holding(70_000), None)) == 3
    assert asked(pool(holding(60_000), None)) == 2


def test_nothing_known_of_any_cache_is_no_answer() -> None:
    assert asked(pool(report(in_flight=5, tokens=9_000.0))) is None
    assert asked(situation(target(current=0))) is None


def test_a_declared_cache_counts_where_engines_do_not_tell() -> None:
    spec = ScaleTarget("a", ObjectReference("ModelInfer", "a"), 10, capacity=EngineCapacity(kv_tokens=50_000))
    seen = situation(target([engine("e", report(in_flight=9, tokens=60_000.0))], spec=spec))
    found = STRATEGY.recommend(seen, None)[0]
    assert found.inputs["replica_capacity_tokens"] == 40_000
    assert found.replicas == 2


def test_a_target_without_engines_has_what_it_had_or_what_another_has() -> None:
    _, memory = STRATEGY.recommend(pool(holding(60_000)), None)
    empty = situation(target(current=0), waiting=Backlog(tokens=100_000))
    assert asked(empty, memory) == math.ceil(100_000 / 0.85 / 80_000)
    first, other = target(current=0), target([engine("b", EMPTY)], name="b", capacity=2.0)
    found = STRATEGY.recommend(situation(first, other, waiting=Backlog(tokens=170_000)), None)[0]
    assert found.inputs["replica_capacity_tokens"] == 40_000
    # 200,000 are wanted and 80,000 there: three more units, beside the two of the other target
    assert found.replicas == pytest.approx(5.0)


def restated(parts: dict[str, Any], given: TokensParameters) -> int:
    """The strategy in whole replicas, tried one by one."""
    demand = Fraction(parts["queued"])
    capacities, observed = [], []
    for used, waiting in parts["engines"]:
        demand += used
        if waiting >= given.queue_length_threshold and used:
            observed.append(used)
            compute = Fraction(used)
        else:
            compute = Fraction(sum(observed), len(observed)) if observed else Fraction(80_000)
        capacities.append(min(Fraction(80_000), compute))
    capacities.sort()
    middle = len(capacities) // 2
    one = capacities[middle] if len(capacities) % 2 else (capacities[middle - 1] + capacities[middle]) / 2
    replicas = len(capacities) + parts["coming"]
    wanted = replicas
    while demand > Fraction(str(given.scale_up_utilization)) * one * wanted:
        wanted += 1
    if wanted > replicas:
        return wanted
    fewer = 0
    while demand <= Fraction(str(given.scale_down_utilization)) * one * (len(capacities) - fewer - 1):
        fewer += 1
    return max(replicas - fewer, 1)


def test_many_cases_agree_with_the_restatement() -> None:
    rng, compared = random.Random(15), 0
    given = TokensParameters(max_batched_tokens=10**6, max_sequences=10**6)
    strategy = TokensStrategy(given)
    while compared < examples(10_000):
        parts = {
            "engines": [
                (rng.randrange(0, 101) * 1000, rng.choice((0, 0, 0, 2, 7))) for _ in range(rng.randrange(1, 7))
            ],
            "queued": rng.choice((0, 0, 5_000, 300_000)),
            "coming": rng.choice((0, 0, 1, 4)),
        }
        them = target(
            (engine(f"e{at}", holding(used, waiting)) for at, (used, waiting) in enumerate(parts["engines"])),
            current=len(parts["engines"]) + parts["coming"],
        )
        found = strategy.recommend(situation(them, waiting=Backlog(tokens=parts["queued"])), None)[0]
        unit, ready = found.inputs["replica_capacity_tokens"], found.inputs["ready_capacity_tokens"]
        demand = found.inputs["demand_tokens"]
        steps = (demand / 0.85 - ready) / unit, (ready - demand / 0.7) / unit
        if any(abs(step - round(step)) < 1e-6 for step in steps):
            continue
        assert found.replicas == restated(parts, given)
        compared += 1


def test_more_waiting_never_asks_for_less_and_unknown_never_either() -> None:
    rng = random.Random(16)
    for _ in range(2000):
        reports = [some_report(rng) for _ in range(rng.randrange(1, 7))]
        few, many = sorted((rng.randrange(400_000), rng.randrange(400_000)))
        less, more = (
            asked(pool(*reports, waiting=Backlog(tokens=few))),
            asked(pool(*reports, waiting=Backlog(tokens=many))),
        )
        assert less is None or more is None or more >= less
        if None in reports:
            assert less is None or less >= len(reports)
