# SPDX-License-Identifier: Apache-2.0
"""Bindings with numbers that are allowed, and that nobody means: they are answered, and soon."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.api.autoscaling_binding import RatioConstraint
from controller.autoscaler.decision.allocation import solver
from controller.autoscaler.decision.allocation import variants as filling
from controller.autoscaler.decision.allocation.allocate import allocate, enforce_ratios
from controller.autoscaler.decision.allocation.variants import AllocationRules, Variant

MILLION = 1_000_000


@pytest.mark.parametrize("mode", ["Cheapest", "Priority", "Weights", "Expansion"])
@pytest.mark.parametrize("min_on_demand", [0.0, 0.5])
def test_millions_of_replicas_are_not_counted_one_by_one(
    mode: str, min_on_demand: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: Counter[str] = Counter()
    problem_of, bounds_of = filling._Assignment._problem, solver._Search._bounds

    def counted(self: filling._Assignment, one: Variant, more: int) -> str:
        looked["problems"] += 1
        return problem_of(self, one, more)

    def counting(self: solver._Search, *args: object) -> object:
        bounds = bounds_of(self, *args)  # type: ignore[arg-type]

        def bound(more: int) -> int:
            looked["bounds"] += 1
            return bounds(more)

        return bound

    monkeypatch.setattr(filling._Assignment, "_problem", counted)
    monkeypatch.setattr(solver._Search, "_bounds", counting)
    variants = [
        Variant(name=f"t{number}", most=MILLION, cost=1.0 + number, weight=1 + number, spot=number % 2 == 0)
        for number in range(4)
    ]
    rules = AllocationRules(mode=mode, min_on_demand=min_on_demand, cost_per_hour=1e7, expansion_rate_percent=101)  # type: ignore[arg-type]
    need = 3.5 * MILLION
    found = allocate(need, variants, rules)
    assert found.capacity + found.missing >= need
    assert sum(one.cost * found.replicas[one.name] for one in variants) <= 1e7
    # a million replicas, and a few thousand looks
    assert sum(looked.values()) < 100_000


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=3),
    st.floats(0, 30),
    st.sampled_from([None, 5.0, 17.0]),
    st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=200)
def test_giving_several_at_once_is_giving_one_after_the_other(
    sizes: list[tuple[int, int]], need: float, cost: float | None, min_on_demand: float
) -> None:
    variants = [
        Variant(name=f"t{place}", most=most, cost=1.5, least=min(least, most), spot=place > 0)
        for place, (least, most) in enumerate(sizes)
    ]
    rules = AllocationRules(mode="Priority", cost_per_hour=cost, min_on_demand=min_on_demand)
    one_by_one, together = filling._Assignment(variants, rules), filling._Assignment(variants, rules)
    most = math.ceil(need)
    for one in variants:
        given = 0
        while given < most and one_by_one.give(one.name, 1):
            given += 1
        assert together.give(one.name, most) == given
        assert together.refusals == one_by_one.refusals


def test_ratios_beyond_all_bounds_stop_at_the_upper_bounds() -> None:
    tiny = RatioConstraint(numerator="a", denominator="b", min=5e-324, max=5e-324)
    huge = RatioConstraint(numerator="a", denominator="b", min=1e12, max=1e12)
    for one in (tiny, huge):
        found, _ = enforce_ratios({"a": 3, "b": 2}, [one], {"a": 10, "b": 10})
        assert max(found.values()) <= 10
