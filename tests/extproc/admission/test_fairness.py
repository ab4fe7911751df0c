# SPDX-License-Identifier: Apache-2.0
"""The choice of each fairness policy, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from extproc.admission.fairness import (
    DeficitLocality,
    FairnessPolicy,
    FlowHeads,
    GlobalStrict,
    RoundRobin,
    SlidingWindow,
    VirtualTokenCounter,
    make_policy,
)

ALL = np.ones(3, np.bool_)
NONE = np.zeros(3, np.bool_)


def heads(keys: tuple[float, ...] = (1, 2, 3), cached: tuple[float, ...] = (0, 0, 0)) -> FlowHeads:
    return FlowHeads(ALL, np.array(keys, float), np.array(cached, float))


def of_three(policy: FairnessPolicy) -> FairnessPolicy:
    policy.grow(3)
    for row in range(3):
        policy.activate(row, NONE)
    return policy


def take(policy: FairnessPolicy, service: float, now: float = 0.0, **heads_of: tuple[float, ...]) -> int:
    row = policy.choose(ALL, heads(**heads_of), now)
    policy.charge(row, service, now)
    return row


def test_virtual_token_counter_serves_the_flow_with_the_least_service() -> None:
    policy = of_three(VirtualTokenCounter())
    assert [take(policy, service) for service in (30, 10, 20, 15, 10)] == [0, 1, 2, 1, 2]


def test_virtual_token_counter_lifts_a_returning_flow_to_the_least_waiting_one() -> None:
    policy = VirtualTokenCounter()
    policy.grow(3)
    for row, service in ((0, 500.0), (1, 300.0)):
        policy.charge(row, service, 0.0)
    policy.activate(2, np.array([True, True, False]))
    assert policy.counters[2] == 300.0


def test_virtual_token_counter_lifts_to_the_last_served_flow_if_none_waits() -> None:
    policy = VirtualTokenCounter()
    policy.grow(3)
    policy.charge(0, 500.0, 0.0)
    policy.charge(0, 500.0, 0.0)
    policy.activate(1, NONE)
    assert policy.counters[1] == 500.0


def test_virtual_token_counter_settles_with_the_actual_service() -> None:
    policy = of_three(VirtualTokenCounter())
    assert take(policy, 10) == 0
    policy.settle(0, -8, 1.0)
    assert [take(policy, service) for service in (5, 5, 5)] == [1, 2, 0]


def test_deficit_locality_takes_the_longest_match_among_flows_that_can_pay() -> None:
    policy = of_three(DeficitLocality(quantum=100))
    longest = {"cached": (10.0, 30.0, 20.0)}
    # 100 each: the second spends 60 and 60, then 2, then 0; a new round begins when nobody has any left
    assert [take(policy, 60, **longest) for _ in range(7)] == [1, 1, 2, 2, 0, 0, 1]
    assert policy.deficits.tolist() == [80.0, 20.0, 80.0]  # type: ignore[attr-defined]


def test_deficit_locality_gives_a_flow_one_quantum_a_round_however_often_it_returns() -> None:
    policy = DeficitLocality(quantum=100)
    policy.grow(3)
    for _ in range(5):
        policy.activate(0, NONE)
        policy.charge(0, 60.0, 0.0)
    assert policy.deficits[0] == 100 - 300


def test_deficit_locality_needs_as_many_rounds_as_a_large_request_took() -> None:
    policy = of_three(DeficitLocality(quantum=100))
    for row in range(3):
        policy.charge(row, 1_000.0 + row, 0.0)
    assert policy.choose(ALL, heads(), 0.0) == 0
    assert policy.deficits.tolist() == [100.0, 99.0, 98.0]


def test_sliding_window_forgets_service_outside_it() -> None:
    policy = of_three(SlidingWindow(window_s=60))
    assert [take(policy, service, now) for service, now in ((50, 0), (10, 30), (20, 30))] == [0, 1, 2]
    assert policy.choose(ALL, heads(), 59) == 1
    assert policy.choose(ALL, heads(), 60) == 0


def test_sliding_window_does_not_charge_a_new_flow_for_the_previous_one_in_its_row() -> None:
    policy = SlidingWindow(window_s=60)
    policy.grow(3)
    policy.charge(0, 50.0, 0.0)
    policy.forget(0)
    policy.charge(0, 5.0, 10.0)
    policy.choose(ALL, heads(), 65.0)
    assert policy.used[0] == 5.0


def test_round_robin_takes_turns_whatever_requests_cost() -> None:
    policy = of_three(RoundRobin())
    assert [take(policy, service) for service in (1000, 1, 1, 1000, 1)] == [0, 1, 2, 0, 1]


def test_global_strict_ignores_flows() -> None:
    assert take(of_three(GlobalStrict()), 1, keys=(5.0, 4.0, 6.0)) == 1


def test_policies_are_made_by_the_names_of_the_configuration() -> None:
    names = ["VirtualTokenCounter", "DeficitLocality", "SlidingWindow", "RoundRobin", "GlobalStrict"]
    assert [type(make_policy(name, quantum=1, window_s=1)).__name__ for name in names] == names


@pytest.mark.parametrize("policy", [VirtualTokenCounter(), SlidingWindow(10.0), DeficitLocality(100.0), RoundRobin()])
def test_a_flow_that_was_served_is_in_debt_until_its_row_is_another_flows(policy: FairnessPolicy) -> None:
    of_three(policy)
    row = take(policy, 50.0)
    others = {policy.debt(other) for other in range(3) if other != row}
    assert policy.debt(row) > max(others)
    policy.forget(row)
    policy.activate(row, NONE)
    assert policy.debt(row) <= max(others)


def test_what_a_request_took_beyond_its_estimate_is_spent_too() -> None:
    deficits, window = of_three(DeficitLocality(100.0)), of_three(SlidingWindow(10.0))
    for policy in (deficits, window):
        policy.charge(0, 30.0, 0.0)
        policy.settle(0, 20.0, 1.0)
        policy.settle(0, -5.0, 2.0)
    assert deficits.debt(0) == -55.0
    assert window.debt(0) == 45.0


def test_without_fairness_nobody_is_in_debt() -> None:
    policy = of_three(GlobalStrict())
    take(policy, 50.0)
    policy.settle(0, 5.0, 0.0)
    policy.forget(0)
    assert [policy.debt(row) for row in range(3)] == [0.0, 0.0, 0.0]
