# SPDX-License-Identifier: Apache-2.0
"""The cheapest mixes of kinds of engine, and plans of them over time."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from bench.autoscale.load_profiles import LOADS, VariantMixes, cheapest_plan, relative_capacities, variant_mixes
from bench.autoscale.policies import POLICIES, SECONDS, with_second_variant_policies
from bench.autoscale.simulated_fleet import Variant
from bench.autoscale.trial import with_first_variant

SMALL = (Variant("a", "a100x2", cost=1.0, max_replicas=3), Variant("b", "h100x2", cost=2.2, max_replicas=2))


def small() -> VariantMixes:
    counts = np.array(list(itertools.product(range(4), range(3))))
    return VariantMixes(SMALL, counts, counts @ np.array([1.0, 2.5]), counts @ np.array([1.0, 2.2]))


@pytest.mark.parametrize(
    ("units", "a", "b"), [(0, 0, 0), (2, 2, 0), (2.5, 0, 1), (3.0, 3, 0), (3.2, 1, 1), (5, 0, 2), (99, 3, 2)]
)
def test_the_cheapest_mix_carries_the_work_or_all_that_can_be_carried(units: float, a: int, b: int) -> None:
    assert small().cheapest_mix(units) == {"a": a, "b": b}


def cost_of(plan: list[dict[str, int]], initial: dict[str, int], leads_s: dict[str, float]) -> float:
    prices = {one.name: one.cost for one in SMALL}
    total = 0.0
    for before, after in itertools.pairwise([initial, *plan]):
        total += sum(prices[name] * after[name] for name in prices)
        total += sum(prices[name] * leads_s[name] * max(0, after[name] - before[name]) for name in prices)
    return total


def test_a_plan_is_as_cheap_as_the_cheapest_of_all_plans() -> None:
    rng, mixes = random.Random(5), small()
    leads_s, initial = {"a": 2.0, "b": 3.0}, {"a": 1, "b": 0}
    for _ in range(5):
        needs = [rng.choice((0.5, 1.0, 2.4, 3.0)) for _ in range(4)]
        plan = cheapest_plan(mixes, needs, leads_s, initial)
        rows = [[row for row in range(len(mixes.counts)) if mixes.units[row] >= one] for one in needs]
        least = min(
            cost_of([mixes.replicas_by_variant(row) for row in chosen], initial, leads_s)
            for chosen in itertools.product(*rows)
        )
        assert cost_of(plan, initial, leads_s) == pytest.approx(least)


def test_a_plan_keeps_a_replica_over_a_gap_that_is_shorter_than_a_start() -> None:
    needs = [2.0] * 5 + [1.0] * 3 + [2.0] * 5 + [1.0] * 9 + [2.0] * 5
    plan = cheapest_plan(small(), needs, {"a": 6.0, "b": 6.0}, {"a": 2, "b": 0})
    assert [one["a"] for one in plan] == [2] * 13 + [1] * 9 + [2] * 5
    assert not any(one["b"] for one in plan)


def test_the_second_kind_carries_more_and_can_come_first() -> None:
    load = LOADS["kinds"]
    assert relative_capacities(load)["h100"] == pytest.approx(2.7, abs=0.1)
    turned = with_first_variant(load, 1)
    assert [one.name for one in turned.variants] == ["h100", "a100"]
    assert variant_mixes(turned, 1).counts[:, 0].min() == 1
    assert with_first_variant(load, 0) == load


def test_only_loads_with_several_kinds_have_the_second_forms() -> None:
    assert with_second_variant_policies(["kpa", "attache", "wva-v2"], 1) == ["kpa", "attache", "wva-v2"]
    assert with_second_variant_policies(["kpa", "attache", "wva-v2"], 2) == ["kpa", "attache", "wva-v2", "kpa-second"]
    assert not set(SECONDS) & set(POLICIES)
    assert all(one.kind == 1 and len(one.grid) == 5 for one in SECONDS.values())
