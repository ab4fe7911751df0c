# SPDX-License-Identifier: Apache-2.0
"""Budgets: what a request is charged, and that no bucket is ever full again before its window ends."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission import budgets as module
from extproc.admission.budgets import (
    GATEWAY,
    BudgetAccountAllocator,
    BudgetKey,
    BudgetSet,
    CompiledBudget,
    compile_key_budgets,
)
from extproc.admission.identity import Caller
from extproc.admission.limit_refusals import soft_budget_log_message
from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import NO_USAGE, Grant, RequestUsage
from extproc.admission.token_buckets import BucketLevel
from extproc.api.authentication import ApiKey
from extproc.api.budgets import Budget, BudgetMax, KeyBudget
from extproc.api.pricing import Price, Rates
from extproc.api.quantities import Money, decode_quantity
from extproc.core.explanation import _budget_line, budget_states
from extproc.refusals import BudgetSpent
from tests.examples import examples

if TYPE_CHECKING:
    from extproc.admission.rate_limits import Charge

NOON = datetime.fromisoformat("2026-11-15T12:00:00+00:00").timestamp()
PRICE = Price("p", "USD", Rates(input=1_000_000, output=2_000_000))


def budget(**fields: object) -> Budget:
    usual: dict[str, object] = {"name": "team", "window": "Month", "max": {"tokens": 100}}
    return msgspec.convert({**usual, **fields}, Budget, dec_hook=decode_quantity)


def compiled(*given: Budget, owner: str = "default/chat", accounts: BudgetAccountAllocator | None = None) -> BudgetSet:
    known = accounts or BudgetAccountAllocator()
    return BudgetSet([CompiledBudget(owner, one, known) for one in given])


def charge(budgets: BudgetSet, tenant: str = "a", amount: float = 10.0, user: str = "", at_s: float = NOON) -> Charge:
    (found,) = budgets.charges(Caller(tenant, user), RequestUsage(0.0, amount), at_s)
    return found


def test_each_amount_of_a_budget_is_a_charge() -> None:
    most = {"tokens": 1000, "inputTokens": 100, "outputTokens": 200, "requests": 5, "money": "1.00"}
    charges = compiled(budget(max=most)).charges(Caller("a"), RequestUsage(30.0, 40.0).with_cost(PRICE), NOON)
    assert {one.resource: one.amount for one in charges} == {
        "total_tokens": 70.0,
        "input_tokens": 30.0,
        "output_tokens": 40.0,
        "requests": 1.0,
        "cost_micros": 110.0,
    }
    assert {one.limit.capacity for one in charges} == {1000.0, 100.0, 200.0, 5.0, 1e6}
    assert {one.limit.rate for one in charges} == {0.0}


def test_a_window_that_ends_is_another_bucket_and_what_ran_is_settled_in_its_own() -> None:
    budgets, limits = compiled(budget()), LocalLimits()
    midnight = datetime.fromisoformat("2026-12-01T00:00:00+00:00").timestamp()
    before = charge(budgets, amount=100.0, at_s=midnight - 1)
    grant = limits.reserve([before], 0.0)
    after = charge(budgets, amount=100.0, at_s=midnight)
    limits.reserve([after], 1.0)
    limits.settle(grant, RequestUsage(0.0, 40.0), 2.0)
    assert limits.level_of(before) == 60.0
    assert limits.level_of(after) == 0.0


def test_a_refusal_names_the_level_and_the_end_of_the_window() -> None:
    budgets, limits = compiled(budget(per="User", window="Day", max={"money": "0.0001"}, soft=0.5)), LocalLimits()
    usage = RequestUsage(0.0, 30.0).with_cost(PRICE)
    limits.reserve(budgets.charges(Caller("a", "ann"), usage, NOON), 0.0)
    with pytest.raises(BudgetSpent) as refused:
        limits.reserve(budgets.charges(Caller("a", "ann"), usage, NOON), 0.0)
    assert refused.value.message == (
        "The daily budget 'team' of this user is not enough: the request needs up to 0.00006 USD, 0.00004 USD of"
        " 0.0001 USD are left; shorten the prompt or lower max_tokens. It resets in 12h0m0s, at 2026-11-16T00:00:00Z."
    )
    assert refused.value.retry_after_s == 12 * 3600
    assert refused.value.headers["x-attache-budget-remaining"] == '"team";r=0.00004;t=43200;unit="USD"'
    assert refused.value.headers["x-attache-budget-warning"] == '"team";used=0.60;unit="USD"'
    limits.reserve(budgets.charges(Caller("b", "ann"), usage, NOON), 0.0)


def test_a_refusal_by_a_budget_of_a_key_is_in_words() -> None:
    key = ApiKey("k", "a", budgets=(KeyBudget("Day", BudgetMax(requests=1), soft=0.5),))
    budgets, limits = BudgetSet(of_keys=compile_key_budgets([key], BudgetAccountAllocator())), LocalLimits()
    caller = Caller("a", "", "k")
    limits.reserve(budgets.charges(caller, NO_USAGE, NOON), 0.0)
    with pytest.raises(BudgetSpent) as refused:
        limits.reserve(budgets.charges(caller, NO_USAGE, NOON), 0.0)
    assert refused.value.message == (
        "The daily budget of this API key (1 requests) is used up. It resets in 12h0m0s, at 2026-11-16T00:00:00Z."
    )
    headers = refused.value.headers
    assert headers["x-attache-budget-remaining"] == '"daily budget of this API key";r=0;t=43200;unit="requests"'
    assert headers["x-attache-budget-warning"] == '"daily budget of this API key";used=1.00;unit="requests"'
    (one,) = budgets.charges(caller, NO_USAGE, NOON)
    assert soft_budget_log_message(one, 0.2) == (
        "daily budget of the key itself: the API key a/k has reserved or used 80% of 1 requests for this day"
    )
    (state,) = budget_states([one], lambda _: 0.0)
    assert _budget_line(state).startswith("  the daily budget of the API key itself has 0 requests of 1 requests left")


def test_all_budgets_must_have_room_and_nothing_is_taken_if_one_has_none() -> None:
    accounts, limits = BudgetAccountAllocator(), LocalLimits()
    budgets = BudgetSet(
        [CompiledBudget("default/chat", budget(per="User", max={"tokens": 50}), accounts)],
        [CompiledBudget(GATEWAY, budget(name="all", per="Route", max={"tokens": 70}), accounts)],
    )
    limits.reserve(budgets.charges(Caller("a", "one"), RequestUsage(0.0, 40.0), NOON), 0.0)
    with pytest.raises(BudgetSpent, match="'all' of all callers"):
        limits.reserve(budgets.charges(Caller("a", "two"), RequestUsage(0.0, 40.0), NOON), 0.0)
    own, _ = budgets.charges(Caller("a", "two"), RequestUsage(0.0, 40.0), NOON)
    assert limits.level_of(own) == 50.0


def test_named_callers_have_their_own_budgets_and_others_the_rest() -> None:
    budgets = compiled(
        budget(name="gold", tenants=["a"]), budget(name="rest", others=True), budget(name="every", max={"tokens": 9})
    )
    assert [one.budget.name for one in budgets.budgets_for(Caller("a"))] == ["gold", "every"]
    assert [one.budget.name for one in budgets.budgets_for(Caller("b"))] == ["rest", "every"]


HOSTILE = [
    "a/b",
    "a",
    "b",
    "a%2Fb",
    "~others",
    "others",
    "/",
    "//",
    "~",
    "%",
    "a/~others",
    "",
    "$budget",
    "x" * 128,
    "ü",
]


def test_no_name_is_anothers_account() -> None:
    budgets = compiled(budget(per="User"))
    pairs = [(tenant, user) for tenant in HOSTILE for user in HOSTILE]
    keys = {charge(budgets, tenant, user=user).key: (tenant, user) for tenant, user in pairs}
    assert len(keys) == len(pairs)
    for key, (tenant, user) in keys.items():
        read = BudgetKey.parse(key)
        assert read is not None
        assert (read.budget, read.tenant, read.name) == ("default/chat/team", tenant, user)
        assert read.to_text() == key
        # no tenant has an empty name
        assert not tenant or read.wider_account.to_text() not in keys


def test_one_tenant_takes_no_account_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 400)
    accounts, limits = BudgetAccountAllocator(), LocalLimits()
    budgets = BudgetSet(
        [CompiledBudget(owner, budget(per="User", window=window), accounts)
         for owner in ("default/chat", "default/code") for window in ("Day", "Month")]
    )  # fmt: skip
    for number in range(1000):
        budgets.charges(Caller("hostile", f"u{number}"), NO_USAGE, NOON)
    assert accounts.count <= 200 + 4
    ann, bob, eve = (budgets.charges(Caller(*one), RequestUsage(0.0, 100.0), NOON)
                     for one in (("good", "ann"), ("good", "bob"), ("other", "eve")))  # fmt: skip
    for one in (ann, bob, eve):
        limits.reserve(one, 0.0)
    with pytest.raises(BudgetSpent):
        limits.reserve(ann, 0.0)
    # beyond the bound, each tenant's users share its own account
    late = [one for user in ("x", "y") for one in budgets.charges(Caller("hostile", user), NO_USAGE, NOON)]
    assert len({one.key for one in late}) == 4
    assert all(one.key.endswith("/hostile/~others") for one in late)


def test_tenants_beyond_the_bound_share_one_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 10)
    accounts = BudgetAccountAllocator()
    budgets = compiled(budget(), budget(name="person", per="User"), accounts=accounts)
    for number in range(500):
        budgets.charges(Caller(f"t{number}", "ann"), NO_USAGE, NOON)
    assert accounts.count <= 10 + 10 + 2
    team, person = (BudgetKey.parse(one.key) for one in budgets.charges(Caller("new", "ann"), NO_USAGE, NOON))
    assert team is not None
    assert person is not None
    assert (team.tenant, team.name, team.caller_text) == ("", None, "~others")
    assert (person.tenant, person.name) == (None, None)


def test_who_shares_an_account_gets_no_full_one_when_there_is_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 4)
    accounts = BudgetAccountAllocator()
    month = compiled(budget(per="User"), accounts=accounts)
    hour = compiled(budget(per="User", window="Hour", name="hour"), accounts=accounts)
    for number in range(3):
        charge(hour, user=f"u{number}")
    shared = charge(month, user="late").key
    accounts.forget_ended(NOON + 3600.0)
    assert charge(month, user="late").key == shared
    assert charge(month, "b", user="late").key != shared


def test_a_shared_account_is_settled_and_its_level_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 2)
    # what is charged was named by another process, whose bound was not reached
    limits, budgets = LocalLimits(), compiled(budget(per="User"))
    limits.reserve([charge(budgets, user="first")], 0.0)
    second = charge(compiled(budget(per="User")), user="second")
    grant = limits.reserve([msgspec.structs.replace(second, amount=40.0)], 0.0)
    assert [one.key for one in grant.charges] != [second.key]
    assert limits.level_of(second) == 60.0
    limits.settle(grant, None, 0.0)
    assert limits.level_of(second) == 100.0


def test_many_users_are_bounded_and_none_is_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 600)
    accounts = BudgetAccountAllocator()
    limits = LocalLimits(accounts)
    budgets = compiled(budget(per="User"), accounts=accounts)
    limits.reserve([charge(budgets, "kind", amount=100.0, user="first")], 0.0)
    granted = 0
    for number in range(2_000):
        try:
            limits.reserve([charge(budgets, "hostile", amount=100.0, user=f"u{number}")], 0.0)
            granted += 1
        except BudgetSpent:
            pass
    # half of what is free with accounts of their own, and one that all others of the tenant share
    assert granted == 301
    assert limits.bucket_count == 302
    assert accounts.count == 302
    # whoever had spent it has spent it still, and other tenants have theirs
    with pytest.raises(BudgetSpent):
        limits.reserve([charge(budgets, "kind", amount=1.0, user="first")], 0.0)
    with pytest.raises(BudgetSpent):
        limits.reserve([charge(budgets, "hostile", amount=1.0, user="u0")], 0.0)
    limits.reserve([charge(budgets, "kind", amount=100.0, user="second")], 0.0)


def test_what_other_processes_spend_is_bounded_and_refills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 20)
    budgets, limits = compiled(budget(per="User")), LocalLimits()
    mine = charge(budgets, amount=100.0, user="mine")
    limits.reserve([mine], 0.0)
    for number in range(1000):
        one = charge(compiled(budget(per="User")), "b", user=f"u{number}")
        limits.spend_unreserved(one.key, one.limit, 60.0, 0.0)
    assert limits.bucket_count <= 12
    with pytest.raises(BudgetSpent):
        limits.reserve([mine], 0.0)
    # the users beyond the bound share one account, which is in debt
    with pytest.raises(BudgetSpent):
        limits.reserve([charge(compiled(budget(per="User")), "b", amount=1.0, user="u999")], 0.0)


def test_ended_windows_go_and_open_ones_stay() -> None:
    accounts, limits = BudgetAccountAllocator(), LocalLimits()
    budgets = compiled(budget(window="Hour"), accounts=accounts)
    for hour in range(48):
        limits.reserve([charge(budgets, at_s=NOON + hour * 3600.0)], 0.0)
        limits.forget_ended(NOON + hour * 3600.0)
        accounts.forget_ended(NOON + hour * 3600.0)
        # a day back, for what runs still
        assert limits.bucket_count <= 25
        assert accounts.count == 1


def test_a_larger_maximum_gives_more_and_a_smaller_one_takes_what_is_not_used() -> None:
    limits = LocalLimits()
    for most, left in ((100, 60.0), (200, 160.0), (50, 10.0), (20, -20.0), (100, 60.0)):
        one = charge(compiled(budget(max={"tokens": most})), amount=40.0)
        if most == 100 and left == 60.0 and limits.bucket_count == 0:
            limits.reserve([one], 0.0)
        limits.cap_levels([BucketLevel(one.key, one.limit, one.limit.capacity)], 0.0)
        assert limits.level_of(one) == left


def test_what_began_under_another_maximum_is_settled_under_the_newest() -> None:
    limits = LocalLimits()
    began = limits.reserve([charge(compiled(budget(max={"tokens": 100})), amount=40.0)], 0.0)
    limits.reserve([charge(compiled(budget(max={"tokens": 200})), amount=10.0)], 0.0)
    limits.settle(began, RequestUsage(0.0, 30.0), 1.0)
    (shown,) = limits.budget_levels()
    assert (shown.limit.capacity, shown.level) == (200.0, 160.0)


class Running(msgspec.Struct):
    grant: Grant
    used: float
    error: float


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.floats(0, 50), st.floats(0, 80)),
            st.tuples(st.just("end"), st.integers(0, 100), st.none()),
            st.tuples(st.just("leave"), st.integers(0, 100), st.none()),
        ),
        max_size=80,
    )
)
def test_never_more_is_used_than_the_budget_and_one_estimate_error_for_each_request(
    events: list[tuple[str, float, float | None]],
) -> None:
    budgets, limits = compiled(budget()), LocalLimits()
    running: list[Running] = []
    used = errors = 0.0
    for what, first, second in events:
        if what == "ask" and second is not None:
            try:
                grant = limits.reserve([charge(budgets, amount=first)], 0.0)
            except BudgetSpent:
                continue
            running.append(Running(grant, second, max(0.0, second - first)))
            used += second
            errors += running[-1].error
        elif running:
            one = running.pop(int(first) % len(running))
            if what == "leave":
                used -= one.used
                errors -= one.error
            limits.settle(one.grant, None if what == "leave" else RequestUsage(0.0, one.used), 0.0)
        assert used <= 100.0 + errors + 1e-3
    for one in running:
        limits.settle(one.grant, RequestUsage(0.0, one.used), 0.0)
    assert limits.level_of(charge(budgets)) == pytest.approx(100.0 - used, abs=1e-6)


def test_money_is_whole_micro_units() -> None:
    budgets, limits = compiled(budget(max={"money": Money("1000000000")})), LocalLimits()
    for _ in range(1000):
        usage = RequestUsage(333.0, 77.0).with_cost(PRICE)
        grant = limits.reserve(budgets.charges(Caller("a"), usage, NOON), 0.0)
        limits.settle(grant, RequestUsage(332.0, 76.0).with_cost(PRICE), 0.0)
    (one,) = budgets.charges(Caller("a"), RequestUsage(0.0, 0.0), NOON)
    assert limits.level_of(one) == 10**15 - 1000 * (332 + 152)
