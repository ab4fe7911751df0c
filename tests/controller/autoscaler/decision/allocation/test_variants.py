# SPDX-License-Identifier: Apache-2.0
"""The cheapest variants, against trying everything, and cases worked out by hand."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from controller.autoscaler.decision.allocation.allocate import allocate, allocate_stages, cheapest_allocation
from controller.autoscaler.decision.allocation.variants import Allocation, AllocationRules, Mode, Variant
from tests.examples import examples

CASES = examples(10_000)
CHUNKS = 4
KINDS = ("a100", "h100")


def random_case(rng: random.Random) -> tuple[float, list[Variant], AllocationRules]:
    variants = []
    for index in range(rng.randint(1, 4)):
        most = rng.randint(1, 5)
        capacity = rng.choice([1.0, 2.0, 0.5, round(rng.uniform(0.2, 3), 2), round(rng.uniform(0.2, 3), 3)])
        variants.append(
            Variant(
                name=f"v{index}",
                most=most,
                least=rng.randint(0, min(most, 2)),
                capacity=capacity,
                cost=rng.choice([1.0, 2.5, 10.0, round(rng.uniform(0.5, 8), 2), capacity]),
                running=rng.randint(0, most),
                start_s=rng.choice([0, 60, 300, 1200]),
                headroom=rng.choice([None, None, rng.randint(0, 5)]),
                blocked=rng.choice([""] * 6 + ["no node"]),
                spot=rng.random() < 0.4,
                accelerator=rng.choice([None, *KINDS]),
                accelerators=rng.choice([1, 2, 4, 8]),
            )
        )
    replicas = sum(one.most for one in variants)
    rules = AllocationRules(
        min_on_demand=rng.choice([0.0, 0.0, 0.3, 0.5, 1.0]),
        cost_per_hour=rng.choice([None, None, round(rng.uniform(1, sum(one.cost * one.most for one in variants)), 2)]),
        accelerators={kind: rng.randint(0, 4 * replicas) for kind in KINDS if rng.random() < 0.3},
        free={kind: rng.randint(0, 2 * replicas) for kind in KINDS if rng.random() < 0.3},
        payback_s=rng.choice([1, 600, 3600]),
    )
    need = round(rng.uniform(0, 1.1 * sum(one.capacity * one.most for one in variants)), 3)
    return need, variants, rules


def possible(variants: list[Variant]) -> list[range]:
    """What each may have: independent of the code under test."""
    found = []
    for one in variants:
        high = one.most
        if one.blocked:
            high = min(high, one.running)
        elif one.headroom is not None:
            high = min(high, one.running + one.headroom)
        found.append(range(min(one.least, high), high + 1))
    return found


def keeps_limits(
    counts: tuple[int, ...], variants: list[Variant], rules: AllocationRules, lows: tuple[int, ...]
) -> bool:
    """Lower bounds hold before limits: what they take alone is never too much."""

    def too_much(limit: float, of: list[float], at_least: list[float]) -> bool:
        return sum(of) > max(limit, sum(at_least)) + 1e-6

    if rules.cost_per_hour is not None and too_much(
        rules.cost_per_hour,
        [one.cost * n for one, n in zip(variants, counts, strict=True)],
        [one.cost * n for one, n in zip(variants, lows, strict=True)],
    ):
        return False
    for kind in KINDS:
        mine = [(one, n, low) for one, n, low in zip(variants, counts, lows, strict=True) if one.accelerator == kind]
        if kind in rules.accelerators and too_much(
            rules.accelerators[kind],
            [one.accelerators * n for one, n, _ in mine],
            [one.accelerators * low for one, _, low in mine],
        ):
            return False
        if kind in rules.free and too_much(
            rules.free[kind],
            [one.accelerators * max(0, n - one.running) for one, n, _ in mine],
            [one.accelerators * max(0, low - one.running) for one, _, low in mine],
        ):
            return False
    return True


def has_enough_on_demand(counts: tuple[int, ...], variants: list[Variant], rules: AllocationRules) -> bool:
    total = sum(one.capacity * n for one, n in zip(variants, counts, strict=True))
    on_demand = sum(one.capacity * n for one, n in zip(variants, counts, strict=True) if not one.spot)
    return on_demand >= rules.min_on_demand * total - 1e-9


def price(counts: tuple[int, ...], need: float, variants: list[Variant], rules: AllocationRules) -> tuple[float, ...]:
    """What is compared, first things first: capacity that is missing, money, replicas, places of names."""
    capacity = sum(one.capacity * n for one, n in zip(variants, counts, strict=True))
    money = sum(
        one.cost * (n * rules.payback_s + max(0, n - one.running) * one.start_s)
        for one, n in zip(variants, counts, strict=True)
    )
    places = sum(index * n for index, n in enumerate(counts))
    return round(max(0.0, need - capacity), 6), round(money, 4), sum(counts), places


def best_price(need: float, variants: list[Variant], rules: AllocationRules) -> tuple[float, ...]:
    ranges = possible(variants)
    lows = tuple(one.start for one in ranges)
    allowed = [one for one in itertools.product(*ranges) if keeps_limits(one, variants, rules, lows)]
    balanced = [one for one in allowed if has_enough_on_demand(one, variants, rules)]
    return min(price(one, need, variants, rules) for one in balanced or allowed)


def carried(found: Allocation, variants: list[Variant]) -> tuple[int, ...]:
    """Without what is asked for only because of lower bounds."""
    return tuple(
        min(found.replicas[one.name], these.stop - 1) for one, these in zip(variants, possible(variants), strict=True)
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_other_choice_is_better(chunk: int) -> None:
    rng = random.Random(chunk)
    for _ in range(CASES // CHUNKS):
        need, variants, rules = random_case(rng)
        found = allocate(need, variants, rules)
        assert found.is_proven
        assert price(carried(found, variants), need, variants, rules) == best_price(need, variants, rules), (
            need,
            variants,
            rules,
        )


def test_two_small_ones_are_cheaper_than_one_large() -> None:
    small = Variant(name="small", most=8, capacity=1.0, cost=1.0)
    large = Variant(name="large", most=8, capacity=3.0, cost=2.8)
    assert allocate(2.0, [small, large], AllocationRules()).replicas == {"small": 2, "large": 0}
    # three units: 2.8 against 3.0
    assert allocate(3.0, [small, large], AllocationRules()).replicas == {"small": 0, "large": 1}
    # four: a large and a small one, 3.8 against 4.0
    assert allocate(4.0, [small, large], AllocationRules()).replicas == {"small": 1, "large": 1}


def test_a_running_replica_is_not_replaced_for_pennies() -> None:
    dear = Variant(name="dear", most=4, cost=1.1, running=1)
    cheap = Variant(name="cheap", most=4, cost=1.0, start_s=600)
    # in an hour the cheap one saves 0.1; its start costs 600 s of 1.0, which is 0.17
    assert allocate(1.0, [dear, cheap], AllocationRules(payback_s=3600)).replicas == {"dear": 1, "cheap": 0}
    # in two hours it saves 0.2
    assert allocate(1.0, [dear, cheap], AllocationRules(payback_s=7200)).replicas == {"dear": 0, "cheap": 1}


def test_a_share_on_demand_is_kept_when_spot_is_cheaper() -> None:
    spot = Variant(name="spot", most=8, cost=0.3, spot=True)
    steady = Variant(name="steady", most=8, cost=1.0)
    found = allocate(4.0, [spot, steady], AllocationRules(min_on_demand=0.5))
    assert found.replicas == {"spot": 2, "steady": 2}


def test_a_share_on_demand_that_cannot_hold_is_said_and_left_out() -> None:
    spot = Variant(name="spot", most=4, least=1, cost=0.3, spot=True)
    found = allocate(2.0, [spot], AllocationRules(min_on_demand=0.5))
    assert found.replicas == {"spot": 2}
    assert "on demand" in found.problems[0]


def test_a_budget_of_accelerators_is_shared_by_targets_of_one_kind() -> None:
    one = Variant(name="one", most=8, cost=1.0, accelerator="h100", accelerators=4)
    two = Variant(name="two", most=8, cost=2.0, capacity=2.1, accelerator="h100", accelerators=8)
    other = Variant(name="other", most=8, cost=3.0, accelerator="l40s")
    found = allocate(5.0, [one, two, other], AllocationRules(accelerators={"h100": 16}))
    # 16 accelerators carry 4.2 in two of the large; the rest is dear
    assert found.replicas == {"one": 0, "two": 2, "other": 1}


def test_what_cannot_be_carried_is_told_with_what_stands_in_the_way() -> None:
    one = Variant(name="one", most=8, cost=2.0)
    found = allocate(6.0, [one], AllocationRules(cost_per_hour=7.0))
    assert found.replicas == {"one": 3}
    assert found.missing == pytest.approx(3.0)
    assert found.problems == ("the budget of cost leaves no room for more",)
    assert allocate(9.0, [one], AllocationRules()).problems == ("every target has all replicas that can be had",)


def test_a_blocked_target_keeps_what_it_has_and_its_lower_bound() -> None:
    cheap = Variant(name="cheap", most=8, least=3, cost=1.0, running=2, blocked="3 replicas find no node")
    dear = Variant(name="dear", most=8, cost=5.0)
    found = allocate(4.0, [cheap, dear], AllocationRules())
    # two of the three that are asked for can be had
    assert found.replicas == {"cheap": 3, "dear": 2}
    assert "find no node" in found.reasons["cheap"] or "lower bound" in found.reasons["cheap"]


def test_between_equals_fewer_replicas_then_the_first_name() -> None:
    pair = Variant(name="b", most=8, capacity=2.0, cost=2.0, start_s=0)
    single = Variant(name="a", most=8, capacity=1.0, cost=1.0, start_s=0)
    assert allocate(2.0, [single, pair], AllocationRules()).replicas == {"a": 0, "b": 1}
    twin = Variant(name="c", most=8, capacity=1.0, cost=1.0, start_s=0)
    assert allocate(3.0, [twin, single], AllocationRules()).replicas == {"a": 3, "c": 0}


def test_nothing_needed_is_nothing_but_lower_bounds() -> None:
    found = allocate(0.0, [Variant(name="a", most=4, running=3), Variant(name="b", most=4, least=1)], AllocationRules())
    assert found.replicas == {"a": 0, "b": 1}


def test_an_answer_that_is_not_proven_is_near_the_best() -> None:
    """Eight targets of 32 replicas with limits that bind: ten times the effort finds little that is better."""
    rng = random.Random(1)
    unproven = 0
    for _ in range(20):
        variants = [
            Variant(
                name=f"v{index}",
                most=32,
                least=rng.randint(0, 2),
                capacity=round(rng.uniform(0.2, 3), 3),
                cost=round(rng.uniform(0.5, 8), 2),
                running=rng.randint(0, 32),
                start_s=300,
                spot=index % 2 == 0,
                accelerator=KINDS[index % 2],
                accelerators=rng.choice([1, 2, 4, 8]),
            )
            for index in range(8)
        ]
        need = rng.uniform(10, 150)
        rules = AllocationRules(min_on_demand=0.3, cost_per_hour=400.0, free={"a100": 40, "h100": 60})
        usual, thorough = (
            cheapest_allocation(need, variants, rules),
            cheapest_allocation(need, variants, rules, effort=12_000),
        )
        unproven += not usual.is_proven
        assert usual.missing <= thorough.missing + 0.05 * need
        if abs(usual.missing - thorough.missing) < 1e-9:
            money = [
                sum(
                    one.cost * (n * rules.payback_s + max(0, n - one.running) * one.start_s)
                    for one in variants
                    for n in (found.replicas[one.name],)
                )
                for found in (usual, thorough)
            ]
            assert money[0] <= 1.05 * money[1]
    # else this shows nothing
    assert unproven


def test_stages_share_a_budget_in_the_same_proportion() -> None:
    prefill = Variant(name="prefill", most=8, cost=1.0)
    decode = Variant(name="decode", most=16, cost=1.0)
    variants = {"Prefill": [prefill], "Decode": [decode]}
    whole = allocate_stages({"Prefill": 4.0, "Decode": 8.0}, variants, AllocationRules(cost_per_hour=12.0))
    assert (whole["Prefill"].replicas, whole["Decode"].replicas) == ({"prefill": 4}, {"decode": 8})
    half = allocate_stages({"Prefill": 4.0, "Decode": 8.0}, variants, AllocationRules(cost_per_hour=6.0))
    assert (half["Prefill"].replicas, half["Decode"].replicas) == ({"prefill": 2}, {"decode": 4})
    assert "50%" in half["Decode"].problems[-1]
    assert half["Decode"].missing == pytest.approx(4.0)


def test_a_stage_takes_another_kind_where_the_shared_one_is_short() -> None:
    variants = {
        "Prefill": [Variant(name="p-h100", most=8, cost=1.0, accelerator="h100")],
        "Decode": [
            Variant(name="d-h100", most=8, cost=1.0, accelerator="h100"),
            Variant(name="d-l40s", most=8, cost=1.5, accelerator="l40s"),
        ],
    }
    found = allocate_stages({"Prefill": 4.0, "Decode": 4.0}, variants, AllocationRules(accelerators={"h100": 6}))
    assert found["Prefill"].replicas == {"p-h100": 4}
    assert found["Decode"].replicas == {"d-h100": 2, "d-l40s": 2}
    # in whichever order the stages stand
    turned = allocate_stages({"Decode": 8.0, "Prefill": 4.0}, variants, AllocationRules(accelerators={"h100": 6}))
    assert turned["Prefill"].replicas == {"p-h100": 4}
    assert sum(turned["Decode"].replicas.values()) == 8


def test_stages_that_share_a_limit_are_not_proven_the_cheapest_if_there_was_a_choice() -> None:
    cheap, dear = Variant(name="a", most=8, cost=1.0, accelerators=4), Variant(name="b", most=8, cost=3.0)
    cheap, dear = (msgspec.structs.replace(one, accelerator="h100") for one in (cheap, dear))
    decode = Variant(name="d", most=8, accelerator="h100")
    needs, limits = {"Prefill": 2.0, "Decode": 4.0}, AllocationRules(accelerators={"h100": 9})
    found = allocate_stages(needs, {"Prefill": [cheap, dear], "Decode": [decode]}, limits)
    assert not any(one.is_proven for one in found.values())
    # enough for both, or nothing to choose
    for prefill, rules in (([cheap, dear], AllocationRules()), ([dear], AllocationRules(accelerators={"h100": 5}))):
        found = allocate_stages(needs, {"Prefill": prefill, "Decode": [decode]}, rules)
        assert all(one.is_proven for one in found.values())


@pytest.mark.parametrize("mode", ["Cheapest", "Priority", "Weights", "Expansion"])
def test_spellings_of_one_kind_share_its_budget_and_its_nodes(mode: Mode) -> None:
    one = Variant(name="one", most=8, cost=1.0, accelerator="nvidia-h100", pools=("h100s",))
    two = Variant(name="two", most=8, cost=1.0, accelerator="NVIDIA-H100-80GB-HBM3", pools=("h100s", "others"))
    for rules in (
        AllocationRules(mode=mode, accelerators={"H100": 5}),
        AllocationRules(mode=mode, free={"h100s": 5, "others": 4}),
    ):
        assert sum(allocate(9.0, [one, two], rules).replicas.values()) == 5


def test_stages_share_budgets_and_nodes_whatever_they_call_them() -> None:
    variants = {
        "Prefill": [Variant(name="p", most=8, accelerator="H100", pools=("H100 or h100",))],
        "Decode": [Variant(name="d", most=8, accelerator="h100", pools=("H100 or h100",))],
    }
    for rules in (AllocationRules(accelerators={"nvidia-h100": 6}), AllocationRules(free={"H100 or h100": 6})):
        found = allocate_stages({"Prefill": 4.0, "Decode": 4.0}, variants, rules)
        assert {stage: dict(one.replicas) for stage, one in found.items()} == {"Prefill": {"p": 3}, "Decode": {"d": 3}}
