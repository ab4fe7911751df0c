# SPDX-License-Identifier: Apache-2.0
"""Each tenant's part of a fallback's budget: the rule, whoever comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.fallback_budget import MOST_TENANTS, WANTED_S, FallbackBudget

if TYPE_CHECKING:
    import random

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 40)), max_size=100)


def ask(budget: FallbackBudget, tenant: str, most: float, now: float = 0.0) -> bool:
    """Whether it is sent there."""
    is_in = budget.may_admit(tenant, most, now)
    budget.sent[tenant] += is_in
    budget.sent += {}
    return is_in


def leave(budget: FallbackBudget, tenant: str) -> None:
    budget.sent[tenant] -= 1
    budget.sent += {}


@settings(max_examples=50, deadline=None)
@given(STEPS, st.integers(1, 20))
def test_the_rule(steps: list[tuple[bool, int, int]], most: int) -> None:
    budget = FallbackBudget()
    for asks, who, which in steps:
        tenant, there = f"tenant {who}", sorted(budget.sent)
        if not asks and there:
            leave(budget, there[which % len(there)])
        if not asks:
            continue
        has, left, others = budget.sent[tenant], most - budget.sent.total(), set(there) - {tenant}
        is_in = ask(budget, tenant, most)
        assert budget.sent.total() <= most
        assert is_in == (left > 0) or has, "who has nothing gets one while something is left"
        if is_in and others:
            assert not has or has + 1 <= 2 * (left - 1)
            assert has + 1 <= max(1, 2 * most // 3)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(6, 12), st.randoms(use_true_random=False))
def test_of_tenants_that_all_want_more_each_gets_its_part(count: int, most: int, rng: random.Random) -> None:
    budget, names = FallbackBudget(), [f"tenant {number}" for number in range(count)]
    # the first one has all of it before the others come
    while ask(budget, names[0], most):
        pass
    assert budget.sent == {names[0]: most}
    for _ in range(3 * most):
        for tenant in rng.sample(names, count):
            fewer = [one for one in names if budget.sent[one] < budget.sent[tenant]]
            before = FallbackBudget()
            before.sent.update(budget.sent)
            if ask(budget, tenant, most):
                assert all(before.may_admit(one, most, 0.0) for one in fewer)
        leave(budget, rng.choice(sorted(budget.sent.elements())))
    for tenant in names:
        ask(budget, tenant, most)
    assert all(budget.sent[one] for one in names)
    assert max(budget.sent.values()) <= 2 * most // 3


def test_a_tenant_that_is_alone_has_all_of_it() -> None:
    budget = FallbackBudget()
    assert [ask(budget, "one", 3) for _ in range(5)] == [True, True, True, False, False]


def test_one_that_was_refused_may_want_it_for_a_while() -> None:
    budget = FallbackBudget()
    for _ in range(9):
        ask(budget, "one", 9)
    assert not ask(budget, "two", 9, 1.0)
    leave(budget, "one")
    # the last two names that were refused are kept
    assert not any(ask(budget, "one", 9, 1.0) for _ in range(100))
    assert not ask(budget, "one", 9, 0.9 + WANTED_S)
    assert ask(budget, "one", 9, 1.0 + WANTED_S)


def test_one_whose_requests_would_be_tried_there_may_want_it() -> None:
    budget = FallbackBudget()
    budget.listed["two"] = 1
    assert sum(ask(budget, "one", 9) for _ in range(20)) == 6


def test_what_is_known_of_tenants_is_bounded_and_forgotten() -> None:
    budget = FallbackBudget()
    for number in range(3 * MOST_TENANTS):
        budget.learn(f"tenant {number}", 1.0)
    assert len(budget._means) == MOST_TENANTS
    for _ in range(40):
        for number in range(3 * MOST_TENANTS):
            budget.learn(f"tenant {number}", 0.0)
    assert not budget._means
