# SPDX-License-Identifier: Apache-2.0
"""The cheapest of 8 variants with 256 replicas: as targets mostly are, and with limits that bind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from controller.autoscaler.decision.allocation.allocate import allocate
from controller.autoscaler.decision.allocation.variants import AllocationRules, Variant

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

KINDS = ("a100", "h100")
RULES = {
    "cost": AllocationRules(),
    "spot": AllocationRules(min_on_demand=0.5),
    "accelerators": AllocationRules(accelerators={"a100": 100, "h100": 200}),
    "everything": AllocationRules(min_on_demand=0.3, cost_per_hour=300.0, free={"a100": 16, "h100": 32}),
}


def variants(seed: int) -> list[Variant]:
    rng = random.Random(seed)
    return [
        Variant(
            name=f"v{index}",
            most=32,
            least=rng.randint(0, 2),
            capacity=round(rng.uniform(0.2, 3), 3),
            cost=round(rng.uniform(0.5, 8), 2),
            running=rng.randint(0, 32),
            start_s=rng.choice([60, 300, 1200]),
            spot=index % 2 == 0,
            accelerator=rng.choice(KINDS),
            accelerators=rng.choice([1, 2, 4, 8]),
        )
        for index in range(8)
    ]


@pytest.mark.parametrize("rules", RULES)
def test_the_cheapest_of_eight_variants(benchmark: BenchmarkFixture, rules: str) -> None:
    cases = [(variants(seed), 10.0 + 12 * seed) for seed in range(20)]

    def all_of_them() -> int:
        return sum(allocate(need, those, RULES[rules]).is_proven for those, need in cases)

    # one round is 20 allocations
    benchmark.extra_info["proven"] = benchmark(all_of_them)
