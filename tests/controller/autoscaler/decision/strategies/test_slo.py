# SPDX-License-Identifier: Apache-2.0
"""Latency as a share of its objective: numbers worked out by hand, another way to write the rule, what always holds."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.api.autoscaling import LatencyObjective
from controller.autoscaler.decision.situation import Backlog, EngineState, Situation
from controller.autoscaler.decision.strategies.slo import SloMemory, SloParameters, SloStrategy, slo_ratio
from extproc.api.quantities import Duration
from tests.examples import examples
from tests.scaling_scenes import engine, latencies, pool, report, situation, steady, target

if TYPE_CHECKING:
    from controller.autoscaler.decision.traffic import Traffic

PROMISED = LatencyObjective(Duration("1s"), Duration("100ms"))
STRATEGY = SloStrategy(objective=PROMISED)


def fleet(ready: int, starting: int = 0, traffic: Traffic | None = None, **kwargs: object) -> Situation:
    them = [engine(f"r{at}", report(in_flight=1)) for at in range(ready)]
    them += [engine(f"s{at}", state=EngineState.STARTING) for at in range(starting)]
    return situation(target(them), traffic=traffic, **kwargs)  # type: ignore[arg-type]


def after(share: float, ready: int, starting: int = 0) -> float:
    return STRATEGY.desired(share, float(ready + starting), float(ready), fleet(ready, starting))


def test_more_in_proportion_to_the_excess_and_fewer_to_the_room() -> None:
    assert after(1.1, 4) == 8
    assert after(0.6, 10) == 11
    assert after(0.55, 10) == 10
    assert after(0.4, 10) == 10
    assert after(0.2, 10) == 5
    assert after(0.39, 10) == 10


def test_what_is_starting_is_not_ordered_again() -> None:
    assert after(1.1, 4, 4) == 8
    assert SloStrategy(SloParameters(credit=False), PROMISED).desired(1.1, 8.0, 4.0, fleet(4, 4)) == 16


def test_credit_never_scales_in() -> None:
    # the original's formula gives 10 + ceil(10 * (0.6 * 0.5 / 0.55 - 1)) = 6
    assert after(0.6, 5, 5) == 10


def test_the_last_replica_stays() -> None:
    assert after(0.0, 3) == 1


def test_the_worse_of_both_latencies_counts() -> None:
    ttft = slo_ratio(fleet(1, traffic=latencies(ttft_s=0.9, tpot_s=0.02)), PROMISED)
    tpot = slo_ratio(fleet(1, traffic=latencies(ttft_s=0.1, tpot_s=0.2)), PROMISED)
    assert ttft == pytest.approx(0.9, rel=0.4)
    assert tpot == pytest.approx(2.0, rel=0.3)
    assert tpot > ttft > 0.5  # type: ignore[operator]


def test_unknown_latency_is_not_zero() -> None:
    assert slo_ratio(fleet(2), PROMISED) is None
    assert STRATEGY.recommend(fleet(2), None)[0].replicas is None
    # requests are on their way, and none has been answered
    assert STRATEGY.recommend(fleet(2, traffic=steady(requests=1)), None)[0].replicas is None


def test_an_idle_fleet_is_known_to_be_idle() -> None:
    idle = pool(report(), report(), report(), traffic=steady())
    assert slo_ratio(idle, PROMISED) == 0.0
    assert STRATEGY.recommend(idle, None)[0].replicas == 1
    assert slo_ratio(pool(report(), None, traffic=steady()), PROMISED) is None
    assert slo_ratio(pool(report(in_flight=1), traffic=steady()), PROMISED) is None
    assert slo_ratio(pool(report(), traffic=steady(), waiting=Backlog(requests=1)), PROMISED) is None
    assert slo_ratio(pool(report(), traffic=steady(), silent=["extproc-1"]), PROMISED) is None


def test_spikes_are_cut_and_smoothed() -> None:
    memory: SloMemory | None = None
    for step in range(10):
        slow = latencies(ttft_s=100.0 if step == 9 else 0.4, now_s=step * 5.0)
        seen = msgspec.structs.replace(fleet(4, traffic=slow), now_s=step * 5.0)
        found, memory = STRATEGY.recommend(seen, memory)
    assert memory is not None
    assert max(one.value for one in memory.shares) == 2.0
    # eight calm samples and one spike of the last 45 s
    calm = memory.shares[0].value
    assert found.inputs["share_of_objective"] == pytest.approx((8 * calm + 2.0) / 9)


def test_when_latencies_stop_being_known_replicas_stay() -> None:
    fast = msgspec.structs.replace(fleet(6, traffic=latencies(ttft_s=0.02, now_s=0.0)), now_s=0.0)
    found, memory = STRATEGY.recommend(fast, None)
    assert found.replicas == 1
    assert STRATEGY.recommend(msgspec.structs.replace(fleet(6), now_s=10.0), memory)[0].replicas is None
    assert STRATEGY.recommend(msgspec.structs.replace(fleet(6), now_s=100.0), memory)[0].replicas is None


def test_a_silent_gateway_forbids_scaling_in() -> None:
    fast, slow = latencies(ttft_s=0.02), latencies(ttft_s=5.0)
    assert STRATEGY.recommend(fleet(4, traffic=fast, silent=["extproc-1"]), None)[0].replicas is None
    assert STRATEGY.recommend(fleet(4, traffic=slow, silent=["extproc-1"]), None)[0].replicas == 15


def restated(share: Fraction, ready: int, starting: int, up: Fraction, down: Fraction) -> int:
    """Replicas are put in or taken out one by one until the formula's share is reached."""
    replicas = ready + starting
    if share > up:
        load = share * (ready if ready > 0 else replicas)
        wanted = replicas
        while wanted * up < load:
            wanted += 1
        return wanted
    if share < down:
        wanted = replicas
        while wanted > 1 and (wanted - 1) * down >= replicas * share:
            wanted -= 1
        return wanted
    return replicas


def test_many_cases_agree_with_the_restatement() -> None:
    rng, compared = random.Random(13), 0
    while compared < examples(10_000):
        up, down = rng.choice((Fraction(55, 100), Fraction(8, 10))), rng.choice((Fraction(4, 10), Fraction(1, 10)))
        share, ready, starting = Fraction(rng.randrange(200), 100), rng.randrange(9), rng.choice((0, 0, 1, 5))
        strategy = SloStrategy(SloParameters(float(up), float(down)), PROMISED)
        replicas = ready + starting
        exact = share * (ready or replicas) / up, replicas * share / down
        if replicas == 0 or any(value.denominator == 1 for value in exact):
            continue
        ours = strategy.desired(float(share), float(replicas), float(ready), fleet(ready, starting))
        assert ours == restated(share, ready, starting, up, down)
        compared += 1


def test_more_latency_never_asks_for_less() -> None:
    rng = random.Random(14)
    for _ in range(3000):
        low, high = sorted((rng.random() * 2, rng.random() * 2))
        ready, starting = rng.randrange(8), rng.randrange(4)
        assert after(low, ready, starting) <= after(high, ready, starting)
