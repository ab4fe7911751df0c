# SPDX-License-Identifier: Apache-2.0
"""Priorities, weights and Kthena's order, with an independent restatement of the latter."""

from __future__ import annotations

import math
import random

import pytest

from controller.autoscaler.decision.allocation.allocate import allocate
from controller.autoscaler.decision.allocation.variants import (
    AllocationRules,
    Variant,
    expansion_sequence,
    largest_remainders,
)


def test_the_highest_priority_is_filled_first() -> None:
    first = Variant(name="z", most=2, capacity=2.0, priority=10)
    second = Variant(name="a", most=4)
    found = allocate(5.5, [second, first], AllocationRules(mode="Priority"))
    assert found.replicas == {"z": 2, "a": 2}
    assert found.missing == 0


def test_spot_first_keeps_the_share_on_demand() -> None:
    spot = Variant(name="spot", most=8, priority=10, spot=True)
    steady = Variant(name="steady", most=8)
    found = allocate(6.0, [spot, steady], AllocationRules(mode="Priority", min_on_demand=0.5))
    assert found.replicas == {"spot": 3, "steady": 3}


def test_what_priorities_cannot_have_is_told() -> None:
    found = allocate(
        6.0, [Variant(name="a", most=8, accelerator="h100")], AllocationRules(mode="Priority", free={"h100": 2})
    )
    assert found.replicas == {"a": 2}
    assert found.missing == pytest.approx(4.0)
    assert found.problems == ("what nodes have free of the kind h100 leaves no room for more",)


def test_weights_are_kept_by_largest_remainders() -> None:
    assert largest_remainders(10, [("a", 3), ("b", 3), ("c", 1)]) == {"a": 4, "b": 4, "c": 2}
    assert largest_remainders(3, [("a", 1), ("b", 1)]) == {"a": 2, "b": 1}
    variants = [Variant(name="a", most=20, weight=3), Variant(name="b", most=20, weight=1)]
    assert allocate(8.0, variants, AllocationRules(mode="Weights")).replicas == {"a": 6, "b": 2}


def test_what_a_target_cannot_have_goes_to_the_others() -> None:
    variants = [Variant(name="a", most=2, weight=3), Variant(name="b", most=20, weight=1)]
    assert allocate(8.0, variants, AllocationRules(mode="Weights")).replicas == {"a": 2, "b": 6}
    # a weight of zero gets its lower bound alone
    variants = [Variant(name="a", most=9, least=1, weight=0), Variant(name="b", most=20, weight=1)]
    assert allocate(3.0, variants, AllocationRules(mode="Weights")).replicas == {"a": 1, "b": 2}


def test_kthenas_order_worked_out_by_hand() -> None:
    # rate 200: batches of 1, 2, 4, and the rest
    dear, cheap = Variant(name="dear", most=7, cost=30), Variant(name="cheap", most=10, cost=10)
    order = expansion_sequence([dear, cheap], 200)
    # costs of batches: cheap 10, 20, 40, 30 (the last three); dear 30, 60, 120
    assert order == ["cheap"] * 3 + ["dear"] + ["cheap"] * 7 + ["dear"] * 6


def kthena(targets: list[tuple[int, int, int]], rate: int, replicas: int) -> list[int]:
    """Kthena's strategy restated: (least, most, cost) of each target; how many each has of ``replicas``."""
    blocks = []
    for index, (least, most, cost) in enumerate(targets):
        rest, length, exact = most - least, 0, 1.0
        while rest:
            length = min(rest, max(1, int(exact)))
            blocks.append((cost * length, index, len(blocks), length))
            rest, exact = rest - length, exact * rate / 100
    found = [least for least, _, _ in targets]
    left = max(0, min(replicas, sum(most for _, most, _ in targets)) - sum(found))
    for _, index, _, length in sorted(blocks):
        taken = min(left, length)
        found[index] += taken
        left -= taken
    return found


def test_the_order_is_that_of_kthena() -> None:
    rng = random.Random(7)
    for _ in range(500):
        targets = []
        for _ in range(rng.randint(1, 4)):
            least = rng.randint(0, 3)
            targets.append((least, least + rng.randint(1, 20), rng.randint(1, 50)))
        rate = rng.choice([101, 130, 150, 200, 333])
        replicas = rng.randint(0, 60)
        variants = [
            Variant(name=f"t{index}", least=least, most=most, cost=cost)
            for index, (least, most, cost) in enumerate(targets)
        ]
        found = allocate(replicas, variants, AllocationRules(mode="Expansion", expansion_rate_percent=rate))
        assert [found.replicas[one.name] for one in variants] == kthena(targets, rate, replicas)


def test_batches_skip_what_cannot_be_had() -> None:
    cheap = Variant(name="cheap", most=4, cost=1, headroom=1)
    dear = Variant(name="dear", most=4, cost=9)
    found = allocate(3.0, [cheap, dear], AllocationRules(mode="Expansion"))
    assert found.replicas == {"cheap": 1, "dear": 2}
    assert math.isclose(found.capacity, 3.0)
