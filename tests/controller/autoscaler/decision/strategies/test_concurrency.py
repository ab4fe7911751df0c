# SPDX-License-Identifier: Apache-2.0
"""Knative's KPA: answers of the original, another way to write its rule, and stories of load over time."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from controller.api.autoscaling import Panic
from controller.autoscaler.decision.behavior import PanicState
from controller.autoscaler.decision.situation import Backlog, Situation
from controller.autoscaler.decision.strategies.concurrency import (
    ConcurrencyMemory,
    ConcurrencyParameters,
    ConcurrencyStrategy,
    InFlightSample,
    time_weighted_mean,
)
from extproc.api.quantities import Duration
from tests.examples import examples
from tests.scaling_scenes import engine, pool, report, situation, target

ORIGINAL = json.loads((Path(__file__).parent.parent / "upstream" / "kpa.json").read_text())


def strategy_of(
    *, goal: float, up: float = 1000.0, down: float = 2.0, threshold: float = 2.0, window_s: int = 60
) -> ConcurrencyStrategy:
    parameters = ConcurrencyParameters(goal, 1.0, Duration(f"{window_s}s"), up, down)
    # a hold of the same length: a panic of Knative lasts one stable window
    return ConcurrencyStrategy(parameters, Panic(threshold_percent=threshold * 100, hold=Duration(f"{window_s}s")))


def at(ready: int, now_s: float) -> Situation:
    return situation(target(engine(f"e{number}", report()) for number in range(ready)), now_s=now_s)


def test_answers_are_those_of_knatives_own_code() -> None:
    for run in ORIGINAL:
        strategy = strategy_of(
            goal=run["target"], up=run["up"], down=run["down"], threshold=run["threshold"], window_s=int(run["windowS"])
        )
        panic = PanicState(0.0, run["firstReady"]) if run["firstReady"] > 1 else None
        for step in run["steps"]:
            desired, panic = strategy.desired(
                panic, stable=step["stable"], short=step["panic"], ready=step["ready"], situation=at(0, step["atS"])
            )
            assert desired == step["desired"], step
    assert sum(len(run["steps"]) for run in ORIGINAL) >= 1000


class Restated:
    """Knative's rule as a small machine that counts in whole replicas."""

    def __init__(self, goal: int, up: int, down: int, threshold: int, window_s: float) -> None:
        self.goal, self.up, self.down, self.threshold, self.window_s = goal, up, down, threshold, window_s
        self.until_s: float | None = None
        self.record = 0

    def clipped(self, load: int, there: int) -> int:
        wanted = -(-load // self.goal)
        while wanted < there // self.down:
            wanted += 1
        while wanted > there * self.up:
            wanted -= 1
        return wanted

    def step(self, stable: int, short: int, ready: int, now_s: float) -> int:
        there = ready or 1
        if Fraction(-(-short // self.goal), there) >= self.threshold:
            self.until_s = now_s + self.window_s
        elif self.until_s is not None and now_s > self.until_s:
            self.until_s, self.record = None, 0
        answer = self.clipped(stable, there)
        if self.until_s is None:
            return answer
        self.record = max(self.record, answer, self.clipped(short, there))
        return self.record


def test_many_steps_agree_with_the_restatement() -> None:
    rng = random.Random(7)
    for _ in range(examples(400)):
        goal, up, down, threshold, window_s = (
            rng.choice(of) for of in ((1, 7, 50), (2, 5, 1000), (2, 3), (2, 4), (6, 60))
        )
        strategy, machine = strategy_of(goal=goal, up=up, down=down, threshold=threshold, window_s=window_s), None
        machine = Restated(goal, up, down, threshold, window_s)
        panic, now_s = None, 0.0
        for _ in range(25):
            now_s += rng.choice((1, 2, 10, 40))
            stable, short, ready = rng.randrange(300), rng.randrange(600), rng.randrange(9)
            desired, panic = strategy.desired(panic, stable=stable, short=short, ready=ready, situation=at(0, now_s))
            assert desired == machine.step(stable, short, ready, now_s)


def played(strategy: ConcurrencyStrategy, story: list[tuple[float, Situation]]) -> list[float | None]:
    memory: ConcurrencyMemory | None = None
    answers = []
    for now_s, seen in story:
        found, memory = strategy.recommend(msgspec.structs.replace(seen, now_s=now_s), memory)
        answers.append(found.replicas)
    return answers


def test_waiting_requests_count_and_a_steep_rise_counts_at_once() -> None:
    strategy = ConcurrencyStrategy(ConcurrencyParameters(target=10, target_utilization=1.0))
    calm = pool(report(in_flight=8))
    storm = pool(report(in_flight=8), waiting=Backlog(requests=92))
    answers = played(strategy, [(float(step), calm) for step in range(0, 60, 2)] + [(60.0, storm), (62.0, storm)])
    assert answers[:30] == [1.0] * 30
    # two of six seconds are at 100 already
    assert answers[30] == math.ceil((8 * 4 + 100 * 2) / 6 / 10)
    assert answers[31] == math.ceil((8 * 2 + 100 * 4) / 6 / 10)


def test_a_panic_never_shrinks_and_ends_a_hold_after_its_last_cause() -> None:
    strategy = ConcurrencyStrategy(
        ConcurrencyParameters(target=10, target_utilization=1.0), Panic(hold=Duration("20s"))
    )
    story = [(0.0, pool(report(in_flight=50)))]
    story += [(2.0 * step, pool(*[report(in_flight=1)] * 5)) for step in range(1, 60)]
    answers = played(strategy, story)
    assert answers[0] == 5
    assert set(answers[:10]) == {5.0}
    assert answers[-1] == 2  # half of five at most, rounded down


def test_after_a_restart_replicas_stay_until_the_window_is_known() -> None:
    strategy = ConcurrencyStrategy(ConcurrencyParameters(target=10, target_utilization=1.0))
    story = [(2.0 * step, pool(*[report(in_flight=1)] * 6)) for step in range(40)]
    answers = played(strategy, story)
    assert set(answers[:31]) == {6.0}
    assert answers[-1] == 3


def test_an_unknown_engine_forbids_fewer_until_it_has_left_the_window() -> None:
    strategy = ConcurrencyStrategy(ConcurrencyParameters(target=10, target_utilization=1.0))
    known, unknown = pool(report(in_flight=9), report(in_flight=0)), pool(report(in_flight=9), None)
    story = [(2.0 * step, known) for step in range(40)] + [(80.0, unknown)]
    story += [(82.0 + 2.0 * step, known) for step in range(40)]
    answers = played(strategy, story)
    assert answers[39] == 1
    assert set(answers[40:70]) == {None}
    assert answers[-1] == 1


def test_an_unknown_engine_does_not_forbid_more() -> None:
    strategy = ConcurrencyStrategy(ConcurrencyParameters(target=10, target_utilization=1.0))
    assert played(strategy, [(0.0, pool(report(in_flight=70), None))]) == [7.0]


def test_the_mean_of_a_window_is_by_time() -> None:
    samples = (InFlightSample(0.0, 100.0), InFlightSample(10.0, 10.0), InFlightSample(14.0, 20.0))
    assert time_weighted_mean(samples, 60.0, 14.0) == pytest.approx((10 * 10 + 20 * 4) / 14)
    assert time_weighted_mean(samples, 8.0, 14.0) == pytest.approx((10 * 4 + 20 * 4) / 8)
    assert time_weighted_mean(samples[:1], 8.0, 14.0) == 100.0


def test_decisions_in_quick_succession_neither_fill_the_memory_nor_empty_it() -> None:
    strategy, memory = ConcurrencyStrategy(), None
    for step in range(3000):
        seen = msgspec.structs.replace(pool(report(in_flight=step % 7)), now_s=step * 0.1)
        _, memory = strategy.recommend(seen, memory)
    assert memory is not None
    assert 60 <= len(memory.samples) <= 62


def test_more_load_never_asks_for_less() -> None:
    rng, strategy = random.Random(8), ConcurrencyStrategy(ConcurrencyParameters(target=10))
    for _ in range(2000):
        few, many = sorted((rng.randrange(200), rng.randrange(200)))
        ready, panic = rng.randrange(6), rng.choice((None, PanicState(-5.0, 3.0), PanicState(-90.0, 30.0)))
        answers = [
            strategy.desired(panic, stable=load, short=load, ready=ready, situation=at(0, 0.0))[0]
            for load in (few, many)
        ]
        assert answers[0] <= answers[1]
