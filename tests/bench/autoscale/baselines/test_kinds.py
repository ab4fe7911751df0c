# SPDX-License-Identifier: Apache-2.0
"""Baselines that choose among kinds of engine, on cases worked out by hand from their code."""

from __future__ import annotations

import random

import msgspec
import pytest

from bench.autoscale.baselines.kthena import Kthena
from bench.autoscale.baselines.wva import V1State, VariantCapacity, WvaV1, WvaV2
from controller.api.autoscaling_binding import ScaleTarget
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.behavior import ScalingHistory
from controller.autoscaler.decision.situation import Backlog, EngineReport, EngineState, Situation, TargetSituation
from tests.scaling_scenes import engine, report, situation, steady, target

FULL, CALM = report(kv=0.9, waiting=9, in_flight=40), report(kv=0.1, waiting=0, in_flight=1)


def of_kind(name: str, cost: float, *reports: EngineReport, least: int = 0, most: int = 16) -> TargetSituation:
    spec = ScaleTarget(name, ObjectReference("ModelInfer", name), most, min_replicas=least, cost=cost)
    return target((engine(f"{name}{number}", one) for number, one in enumerate(reports)), name=name, spec=spec)


def test_wva_v1_adds_of_the_cheapest_kind_and_removes_of_the_most_expensive() -> None:
    full = situation(of_kind("a", 1.0, FULL, FULL), of_kind("b", 2.6, FULL))
    assert WvaV1().desired_replicas_by_kind(full, None)[0] == {"a": 3, "b": 1}
    calm = situation(of_kind("a", 1.0, CALM, CALM), of_kind("b", 2.6, CALM, CALM))
    assert WvaV1().desired_replicas_by_kind(calm, None)[0] == {"a": 2, "b": 1}


def test_wva_v1_keeps_the_last_replica_of_each_kind() -> None:
    calm = situation(of_kind("a", 1.0, CALM, CALM), of_kind("b", 2.6, CALM))
    assert WvaV1().desired_replicas_by_kind(calm, None)[0] == {"a": 1, "b": 1}


def test_wva_v1_changes_no_kind_while_one_is_in_transition() -> None:
    starting = of_kind("b", 2.6)
    starting = msgspec.structs.replace(starting, current=1, engines=(engine("s", state=EngineState.STARTING),))
    seen = situation(of_kind("a", 1.0, FULL, FULL), starting)
    assert WvaV1().desired_replicas_by_kind(seen, None)[0] == {"a": 2, "b": 1}
    before = {"a": V1State(ScalingHistory(), 3), "b": V1State(ScalingHistory(), 1)}
    ready = situation(of_kind("a", 1.0, FULL, FULL), of_kind("b", 2.6, FULL))
    _, after = WvaV1().desired_replicas_by_kind(ready, before)
    assert after is not None
    assert (after["a"].desired, after["b"].desired) == (3, 1)


def kinds(a: int, b: int, *, capacity_b: int = 250_000, most_b: int = 16) -> list[VariantCapacity]:
    return [VariantCapacity("a", 1.0, 100_000, a, a, 16), VariantCapacity("b", 2.0, capacity_b, b, b, most_b)]


@pytest.mark.parametrize(
    ("demand", "present", "wanted"),
    [
        # 850,000 / 0.85 - 300,000 = 700,000, of the kind with the least cost for its capacity: 3 of 250,000
        (850_000.0, kinds(3, 0), {"a": 3, "b": 3}),
        # but 2 of them at most; the rest, 200,000, of the other
        (850_000.0, kinds(3, 0, most_b=2), {"a": 5, "b": 2}),
        # as much as the first costs more for its capacity: 7 of the first
        (850_000.0, kinds(3, 0, capacity_b=150_000), {"a": 10, "b": 0}),
        # 800,000 - 140,000 / 0.7 = 600,000: two of the more expensive, and one
        (140_000.0, kinds(3, 2), {"a": 2, "b": 0}),
        # the last of all stays, and is of the cheapest kind
        (0.0, kinds(3, 2), {"a": 1, "b": 0}),
        # the cheapest may go while another has replicas that are too large to go
        (105_000.0, kinds(1, 1), {"a": 0, "b": 1}),
    ],
)
def test_wva_v2_is_its_optimiser(demand: float, present: list[VariantCapacity], wanted: dict[str, int]) -> None:
    assert WvaV2().optimised_replicas_by_kind(demand, present) == wanted


def test_wva_v2_takes_a_kind_without_replicas_for_what_its_arguments_promise() -> None:
    # (2 * 92,000 + 50,000) / 0.85 - 160,000 = 115,294; of the second kind: 256 requests of 1,100 tokens, 281,600
    busy = report(kv=0.9, waiting=2, cache=100_000)
    seen = situation(
        of_kind("a", 1.0, busy, busy, least=1),
        of_kind("b", 2.6),
        traffic=steady(requests=2.0, prompt=1000, answer=200),
        waiting=Backlog(tokens=50_000),
    )
    desired, memory = WvaV2().desired_replicas_by_kind(seen, None)
    assert desired == {"a": 2, "b": 1}
    assert memory is not None
    assert memory["a"].capacity > 0
    assert memory["b"].capacity == 0


def test_kthena_counts_all_kinds_alike_and_fills_them_in_batches() -> None:
    # 4 engines with 40 requests each and a target of 20: 8 replicas; from the lower bound of 1: one of the first (1),
    # two of it (2), one of the second (2.6), four of the first (4)
    seen = situation(of_kind("a", 1.0, *[FULL] * 4, least=1), of_kind("b", 2.6, most=3))
    assert Kthena(target=20.0).desired_replicas_by_kind(seen, None)[0] == {"a": 7, "b": 1}
    low = situation(of_kind("a", 1.0, *[CALM] * 3, least=1), of_kind("b", 2.6, CALM, most=3))
    assert Kthena(target=20.0).desired_replicas_by_kind(low, None)[0] == {"a": 1, "b": 0}


def test_of_one_kind_they_decide_as_their_simpler_forms_do() -> None:
    rng = random.Random(3)
    for _ in range(300):
        reports = [
            report(kv=rng.random(), waiting=rng.randrange(9), in_flight=rng.randrange(50), cache=100_000)
            for _ in range(rng.randrange(1, 9))
        ]
        seen = situation(
            of_kind("a", 1.0, *reports, least=1),
            traffic=steady(requests=2.0, prompt=1000, answer=200),
            waiting=Backlog(requests=rng.randrange(5), tokens=rng.randrange(90_000)),
        )
        assert_same_twice(seen)


def assert_same_twice(seen: Situation) -> None:
    """At first, and a period later with what was remembered."""
    later = msgspec.structs.replace(seen, now_s=seen.now_s + 30)
    for baseline in (WvaV1(), WvaV2(), Kthena(target=20.0)):
        one, memory = baseline.desired_replicas(seen, None)
        several, kinds_memory = baseline.desired_replicas_by_kind(seen, None)
        assert several == {"a": one}
        assert baseline.desired_replicas_by_kind(later, kinds_memory)[0] == {
            "a": baseline.desired_replicas(later, memory)[0]
        }
