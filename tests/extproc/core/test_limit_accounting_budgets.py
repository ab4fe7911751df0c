# SPDX-License-Identifier: Apache-2.0
"""Budgets in the life of requests, in virtual time: reserved, settled, over month ends and set clocks, by workers."""

from __future__ import annotations

import json
import random
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission import budgets
from extproc.admission.budget_recovery import UsageRollupRow
from extproc.admission.limit_refusals import soft_budget_log_message
from extproc.admission.local_limits import MOST_LEVELS
from extproc.admission.rate_limits import NO_USAGE
from extproc.core import flow_control
from extproc.core.core import Core
from extproc.core.effects import (
    AskLimits,
    Broadcast,
    Decision,
    OutcomeJoined,
    RequestHeld,
    RequestRefused,
    SoftBudgetPassed,
)
from extproc.core.limit_accounting import NO_OTHERS
from extproc.core.peer_events import EventBatch, LimitSpent, decode_events, encode_events
from extproc.core.request_record import Outcome
from extproc.core.request_states import RequestState
from extproc.feeds.saved_limits import SavedLimits
from extproc.refusals import BudgetSpent
from tests.examples import examples
from tests.extproc.scenes import configuration, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from extproc.admission.token_buckets import BucketLevel
    from extproc.core.effects import Effect, RequestEffect
    from extproc.core.limit_accounting import MachineGrantLedger
    from extproc.scheduling.pool import Pool

SERVER = "endpoints: [{address: '10.0.0.1:8000'}]\nscrapeInterval: 0s\n"
# a micro-unit for each token of a prompt, ten for each of an answer
PRICING = "pricing: [{perMillion: {input: 1, output: 10, cachedInput: 0.5}}]\n"
TOKENS = 1000


def utc(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class Process:
    """A core whose wall clock is ``began_s`` at its time 0. What it says, all others of ``wire`` hear at once."""

    def __init__(  # noqa: PLR0913 - what differs between tests
        self,
        budgets: str,
        *,
        began_s: float = utc("2026-11-15T12:00:00+00:00"),
        gateway: str = "",
        servers: Mapping[str, str] | None = None,
        route: str = "",
        gateway_spec: str = "",
        name: str = "t",
        wire: list[Process] | None = None,
        recent: MachineGrantLedger = NO_OTHERS,
        has_readers: Callable[[], bool] = lambda: True,
    ) -> None:
        others = ""
        if gateway:
            spec = {"kind": "GatewayConfig", "apiVersion": "attache.dev/v1alpha1", "metadata": {"name": "g"}}
            others = json.dumps({**spec, "spec": {"clients": "Trusted"}}).replace("}}", f', "budgets": [{gateway}]}}}}')
        if gateway_spec:
            others = (
                "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\n"
                f"spec: {{clients: Trusted, {gateway_spec}}}\n"
            )
        self.snapshot = configuration(
            servers=servers or {"llama": SERVER + PRICING},
            routes={"chat": f"budgets: [{budgets}]\n{route}"},
            others=others,
        )
        machine = None if wire is None else "here"
        self.core = Core(
            self.snapshot,
            rng=random.Random(0),
            ticket_prefix=name,
            machine=machine,
            recent=recent,
            has_readers=has_readers,
        )
        self.name, self.began_s, self.wire = name, began_s, [] if wire is None else wire
        self.wire.append(self)
        self.core.align_with_wall_clock(began_s, 0.0)

    def perform(self, effects: Iterable[Effect], now: float) -> list[Effect]:
        done = list(effects)
        events = [one.event for one in done if isinstance(one, Broadcast)]
        if events:
            batch = decode_events(encode_events(EventBatch(self.name, events)))
            for other in [one for one in self.wire if one is not self]:
                other.perform(other.core.apply_peer_batch(batch, now), now)
        return done

    def ask(self, now: float, tenant: str = "a", *, user: str = "", tokens: int = 100) -> RequestEffect:
        headers = {"x-attache-tenant": tenant, "x-attache-user": user}
        arrival = request(self.core, headers=headers, max_tokens=tokens)
        own, effects = self.core.arrive(arrival, now)
        self.perform(effects, now)
        return own

    def ends(
        self, decision: RequestEffect, now: float, *, prompt: int = 10, output: int = 100, cached: int = 0
    ) -> OutcomeJoined:
        assert isinstance(decision, Decision)
        served = decision.assignment.endpoint.address
        outcome = Outcome(decision.ticket, 200, served, 1.0, 0.1, prompt, output, cached)
        (settled,) = (
            one for one in self.perform(self.core.on_outcome(outcome, now), now) if isinstance(one, OutcomeJoined)
        )
        self.perform(self.core.on_stream_closed(decision.ticket, now), now)
        return settled

    def rebuild(self, rows: Iterable[UsageRollupRow], now: float = 0.0) -> list[BucketLevel]:
        """By the answer to the only question."""
        admission = self.core.admission
        (query,) = admission.usage_queries(self.began_s + now)
        spent = admission.make_remaining_budgets(query, self.began_s + now)
        for row in rows:
            spent.add_row(row)
        return self.core.cap_budgets(spent, now)

    def left(self, now: float, tenant: str = "a") -> float:
        """Of the only Local budget."""
        caller = request(self.core, headers={"x-attache-tenant": tenant}).caller
        budgets = self.core.admission.budgets_of_route("default/chat")
        (charge,) = budgets.charges(caller, NO_USAGE, self.began_s + now)
        return self.core.admission.limits.level_of(charge)


def refusal(own: RequestEffect) -> BudgetSpent:
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, BudgetSpent)
    return own.refusal


def test_what_was_reserved_and_not_used_comes_back_at_the_end() -> None:
    process = Process("{name: b, window: Month, max: {outputTokens: 200}}")
    first, second = process.ask(0.0), process.ask(0.0)
    refusal(process.ask(1.0))
    process.ends(first, 2.0, output=30)
    assert process.left(2.0) == 70.0
    process.ends(second, 3.0, output=100)
    assert isinstance(process.ask(4.0, tokens=70), Decision)
    refusal(process.ask(5.0, tokens=1))


def test_an_outcome_that_comes_twice_is_settled_once() -> None:
    process = Process("{name: b, window: Month, max: {outputTokens: 200}}")
    first = process.ask(0.0)
    assert isinstance(first, Decision)
    outcome = Outcome(first.ticket, 200, first.assignment.endpoint.address, 1.0, 0.1, 10, 30, None)
    process.core.on_outcome(outcome, 1.0)
    process.core.on_outcome(outcome, 1.5)
    process.core.on_stream_closed(first.ticket, 2.0)
    process.core.on_outcome(outcome, 3.0)
    assert process.left(3.0) == 170.0


def test_money_is_reserved_by_the_price_and_settled_by_what_was_cached() -> None:
    process = Process("{name: b, window: Month, max: {money: '0.002'}}")
    first = process.ask(0.0)
    # the prompt's estimate and a hundred tokens at ten
    assert 900.0 < process.left(0.0) < 1000.0
    settled = process.ends(first, 1.0, prompt=40, cached=20, output=50)
    assert settled.used.cost_micros == 20 + 10 + 500
    assert settled.currency == "USD"
    assert process.left(1.0) == 2000 - 530


def test_a_price_changes_with_the_wall_clock_and_not_for_what_has_arrived() -> None:
    pricing = "pricing: [{perMillion: {output: 10}}, {from: '2026-12-01T00:00:00Z', perMillion: {output: 20}}]\n"
    process = Process("", began_s=utc("2026-11-30T23:59:59+00:00"), servers={"llama": SERVER + pricing})
    before, after = process.ask(0.5), process.ask(1.5)
    assert process.ends(before, 9.0).used.cost_micros == 1000
    assert process.ends(after, 9.0).used.cost_micros == 2000


@pytest.mark.parametrize(
    ("window", "zone", "ends"),
    [
        ("Month", "UTC", "2026-12-01T00:00:00+00:00"),
        ("Month", "Europe/Berlin", "2026-12-01T00:00:00+01:00"),
        ("Month", "UTC", "2028-03-01T00:00:00+00:00"),
        ("Week", "America/New_York", "2027-01-04T00:00:00-05:00"),
        ("Day", "Europe/Berlin", "2026-10-26T00:00:00+01:00"),
        ("Day", "America/Sao_Paulo", "2018-11-04T01:00:00-02:00"),
        ("Hour", "Europe/Berlin", "2026-10-25T02:00:00+01:00"),
    ],
)
def test_a_budget_begins_anew_at_the_instant_at_which_its_window_ends(window: str, zone: str, ends: str) -> None:
    budget = f"{{name: b, window: {window}, timeZone: {zone}, max: {{requests: 1}}}}"
    process = Process(budget, began_s=utc(ends) - 10)
    first = process.ask(0.0)
    refused = refusal(process.ask(9.5))
    assert refused.retry_after_s == 1
    assert isinstance(process.ask(10.0), Decision)
    refusal(process.ask(10.5))
    # what began before is settled there, and changes nothing here
    process.ends(first, 11.0)
    refusal(process.ask(12.0))


def test_hours_of_a_day_with_twenty_five() -> None:
    process = Process(
        "{name: b, window: Hour, timeZone: Europe/Berlin, max: {requests: 2}}",
        began_s=utc("2026-10-25T00:00:00+02:00"),
    )
    granted = sum(isinstance(process.ask(minute * 60.0), Decision) for minute in range(25 * 60))
    assert granted == 50


def test_the_wall_clock_may_be_set_back_and_nothing_is_refilled() -> None:
    process = Process("{name: b, window: Day, max: {requests: 1}}", began_s=utc("2026-11-15T23:59:50+00:00"))
    assert isinstance(process.ask(0.0), Decision)
    assert isinstance(process.ask(20.0), Decision)
    process.core.align_with_wall_clock(utc("2026-11-15T23:59:00+00:00"), 30.0)
    refusal(process.ask(30.0))


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy"), st.integers(-200, 200), st.sampled_from([1, 2])),
        min_size=2,
        max_size=40,
    )
)
def test_accounts_are_those_of_the_caller_the_clock_and_the_configuration(
    steps: list[tuple[str, str, int, int]],
) -> None:
    """Though those of the last callers are kept."""
    budgets = "{name: day, per: User, window: Day, max: {requests: %d}}, {name: hour, window: Hour, max: {tokens: %d}}"
    process, most = Process(budgets % (1, 1)), 1
    admission = process.core.admission
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow_control, "_MOST_CALLERS", 3)
        for tenant, user, quarters, wanted in steps:
            if wanted != most:
                most = wanted
                process.core.apply(Process(budgets % (most, most)).snapshot, 0.0)
            wall_s = process.began_s + quarters * 900.0
            arrival = request(process.core, headers={"x-attache-tenant": tenant, "x-attache-user": user})
            found = admission.charges(arrival, NO_USAGE, now=0.0, wall_s=wall_s)
            assert found == admission.budgets_of_route("default/chat").charges(arrival.caller, NO_USAGE, wall_s)
            assert [one.limit.capacity for one in found] == [most, most]
            assert all(0 < one.ends_in_s <= 86_400 for one in found)
            assert f"/{tenant}/{user}" in found[0].key
            assert len(admission._accounts) <= 3


def test_route_and_gateway_must_both_have_room() -> None:
    process = Process(
        "{name: own, per: User, window: Day, max: {requests: 2}}",
        gateway='{"name": "all", "per": "Route", "window": "Day", "max": {"requests": 3}}',
    )
    assert [isinstance(process.ask(0.0, user="x"), Decision) for _ in range(3)] == [True, True, False]
    assert isinstance(process.ask(0.0, user="y"), Decision)
    assert "'all' of all callers" in refusal(process.ask(0.0, user="y")).message


def test_an_unreadable_body_gets_round_no_budget_of_the_gateway() -> None:
    process = Process("", gateway='{"name": "all", "window": "Day", "max": {"tokens": 3}}')
    assert process.core.builder.has_limits
    assert process.core.asks_who


@pytest.mark.parametrize("has_readers", [True, False])
def test_what_is_spent_is_told_where_anybody_reads_it(*, has_readers: bool) -> None:
    process = Process("{name: b, window: Month, max: {requests: 3}}", wire=[], has_readers=lambda: has_readers)
    own, effects = process.core.arrive(request(process.core, headers={"x-attache-tenant": "a"}), 0.0)
    effects += process.core.on_outcome(Outcome(own.ticket, 200, "10.0.0.1:8000", 1.0, 0.1, 10, 10, None), 1.0)
    told = [one.event.reserved for one in effects if isinstance(one, Broadcast) and isinstance(one.event, LimitSpent)]
    assert told == ([1.0, -1.0] if has_readers else [])
    assert process.left(1.0) == 2.0


def test_workers_of_a_machine_share_a_budget_and_a_new_one_is_told() -> None:
    wire: list[Process] = []
    budget = "{name: b, per: User, window: Month, max: {requests: 3}}"
    one, other = (Process(budget, name=name, wire=wire) for name in "xy")
    decisions = [process.ask(0.0) for process in (one, other, one, other)]
    assert [isinstance(one, Decision) for one in decisions] == [True] * 3 + [False]
    for decision in decisions[0:3:2]:
        one.ends(decision, 0.0)
    # more than one message holds
    users = [f"u{number}" for number in range(MOST_LEVELS + 1)]
    for user in (*users, users[-1]):
        other.ask(0.0, user=user)
    wire.remove(one)
    third = Process(budget, name="z", wire=wire)
    third.perform(third.core.heartbeat(0.5), 0.5)
    assert third.core.levels.is_told
    refusal(third.ask(1.0))
    assert isinstance(third.ask(1.0, user=users[-1]), Decision)
    refusal(third.ask(1.0, user=users[-1]))


def test_levels_are_rebuilt_from_rows() -> None:
    process = Process("{name: b, window: Month, max: {requests: 5}}")
    rows = [
        UsageRollupRow("a", route="default/chat", requests=2),
        UsageRollupRow("a", user="u", route="default/chat", requests=2),
        UsageRollupRow("a", route="default/other", requests=9),
    ]
    assert process.rebuild(rows) == []
    assert isinstance(process.ask(1.0), Decision)
    refusal(process.ask(1.0))
    # a late answer has our own request, too, and refills nothing
    process.rebuild([UsageRollupRow("a", route="default/chat", requests=3)], 2.0)
    refusal(process.ask(3.0))


def test_rows_that_stand_for_many_count_for_the_account_that_many_share(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process("{name: b, per: User, window: Month, max: {requests: 5}}")
    process.rebuild([
        UsageRollupRow("a", user="(others)", route="default/chat", requests=5),
        UsageRollupRow("a", user="((others)", route="default/chat", requests=4),
    ])  # fmt: skip
    # a user of that name is somebody else
    assert isinstance(process.ask(0.0, user="(others)"), Decision)
    refusal(process.ask(0.0, user="(others)"))
    assert isinstance(process.ask(0.0, user="u"), Decision)
    monkeypatch.setattr(budgets, "MOST_ACCOUNTS", 3)
    refusal(process.ask(0.0, user="late"))


def test_requests_of_an_http_route_are_not_charged_to_the_model_route_of_its_name() -> None:
    process = Process("{name: b, window: Month, max: {requests: 5}}")
    process.rebuild([UsageRollupRow("a", route="http:default/chat", requests=5)])
    assert isinstance(process.ask(0.0), Decision)


def test_rows_of_a_key_whose_tenant_envoy_did_not_know_are_its_tenants() -> None:
    keys = "authentication: {apiKeys: [{name: k, tenant: a, key: sk-of-a-tenant}]}"
    process = Process("{name: b, window: Month, max: {requests: 5}}", gateway_spec=keys)
    (query,) = process.core.admission.usage_queries(process.began_s)
    assert [sorted(dimensions) for dimensions, _ in query.dimensions_and_tenants()] == [
        ["route", "tenant"],
        ["key", "route", "tenant"],
    ]
    spent = process.core.admission.make_remaining_budgets(query, process.began_s)
    for tenant in ("", "anonymous"):
        # of all callers without a tenant, once more by key
        spent.add_row(UsageRollupRow(tenant, route="default/chat", requests=9))
    spent.add_row(UsageRollupRow("a", route="default/chat", requests=2))
    spent.add_row(UsageRollupRow("", key="k", route="default/chat", requests=2), is_by_key=True)
    spent.add_row(UsageRollupRow("anonymous", key="gone", route="default/chat", requests=4), is_by_key=True)
    process.core.cap_budgets(spent, 0.0)
    assert (process.left(0.0), process.left(0.0, "anonymous")) == (1.0, 1.0)


def test_what_is_asked_is_no_more_than_budgets_need() -> None:
    process = Process(
        "{name: team, window: Month, max: {requests: 5}}, {name: all, per: Route, window: Month, max: {requests: 5}},"
        "{name: few, users: [ann], window: Month, max: {requests: 5}},"
        "{name: rest, others: true, per: Route, window: Month, max: {requests: 5}},"
        "{name: day, window: Day, max: {requests: 5}}",
        gateway='{"name": "every", "per": "Route", "window": "Day", "max": {"requests": 3}}',
    )
    asked = {
        frozenset(one.rpartition("/")[2] for one in query.budgets): query.dimensions
        for query in process.core.admission.usage_queries(process.began_s)
    }
    assert asked == {
        frozenset({"team"}): {"tenant", "route"},
        frozenset({"all"}): {"route"},
        frozenset({"few"}): {"tenant", "user", "route"},
        frozenset({"rest"}): {"user", "route"},
        frozenset({"day"}): {"tenant", "route"},
        frozenset({"every"}): frozenset(),
    }


def test_a_global_budget_is_asked_of_the_store_and_its_rows_are_for_the_store() -> None:
    process = Process("{name: b, window: Month, max: {requests: 5}, scope: Global}")
    asked = process.ask(0.0)
    assert isinstance(asked, AskLimits)
    (charge,) = asked.charges
    assert (charge.limit.rate, charge.limit.ends_at_s) == (0.0, utc("2026-12-01T00:00:00+00:00"))
    (level,) = process.rebuild([UsageRollupRow("a", route="default/chat", requests=2)])
    assert (level.key, level.level) == (charge.key, 3.0)


def test_without_the_store_a_process_grants_what_is_left() -> None:
    process = Process("{name: b, window: Month, max: {requests: 3}, scope: Global}")
    granted = []
    for _ in range(5):
        asked = process.ask(0.0)
        assert isinstance(asked, AskLimits)
        own, _ = process.core.resume(asked.ticket, None, 0.0)
        granted.append(isinstance(own, Decision))
    assert granted == [True, True, True, False, False]


def test_a_request_that_moves_is_settled_by_the_price_of_the_server_that_served() -> None:
    servers = {
        "dear": "endpoints: []\nactivation: {holdTimeout: 60s}\npricing: [{perMillion: {output: 100}}]\n",
        "cheap": SERVER + PRICING,
    }
    targets = "[{modelServerName: dear}, {modelServerName: cheap, weight: 0}]"
    process = Process(
        "{name: b, window: Month, max: {money: 1}}",
        servers=servers,
        route=f"rules: [{{targetModels: {targets}}}]",
    )
    own = process.ask(0.0)
    assert isinstance(own, RequestHeld)
    assert own.state is RequestState.AWAITING_ENGINE
    # reserved by the price of the server that the route has named
    assert process.left(0.0) == 10**6 - 10_000
    moved = configuration(
        servers=servers,
        routes={
            "chat": "budgets: [{name: b, window: Month, max: {money: 1}}]\n"
            "rules: [{targetModels: [{modelServerName: cheap}, {modelServerName: dear, weight: 0}]}]"
        },
    )
    (own,) = [one for one in process.core.apply(moved, 1.0) + process.core.tick(1.0) if isinstance(one, Decision)]
    settled = process.ends(own, 2.0, prompt=0, output=100)
    assert settled.used.cost_micros == 1000
    assert process.left(2.0) == 10**6 - 1000


def test_explain_shows_budgets_and_changes_nothing() -> None:
    process = Process("{name: b, window: Month, max: {money: '0.01', requests: 9}}")
    process.ends(process.ask(0.0), 1.0, prompt=0, output=100)
    arrival = request(process.core, headers={"x-attache-tenant": "a"}, max_tokens=10)
    for _ in range(2):
        requests, money = process.core.explain(arrival, 2.0).budgets
        assert (requests.left, requests.most, requests.holder) == ("8 requests", "9 requests", "tenant")
        assert (money.left, money.most, money.budget) == ("0.009 USD", "0.01 USD", "default/chat/b")
        assert msgspec.to_builtins(money)["level"] == "tenant"


def test_hourly_prices_are_derived_from_learned_speeds() -> None:
    process = Process("", servers={"llama": SERVER + "pricing: [{perHour: 3.6}]\n"})
    pool = process.core.pools["default/llama"]
    table = pool.table
    table.rate_samples[0], table.prefill_rate[0], table.tpot_s[0], table.in_flight[0] = 10, 10_000.0, 0.02, 4.0
    price = pool.price_at(1.0)
    assert price is not None
    assert price.is_derived
    # 0.001 a second: over 10,000 prompt tokens, or 4 answers of 50 tokens each
    assert (price.rates.input, price.rates.output, price.rates.cached) == (100_000, 5_000_000, 0)
    table.tpot_s[0] = 0.04
    assert pool.price_at(30.0) is price
    later = pool.price_at(62.0)
    assert later is not None
    assert (later.rates.output, later.id != price.id) == (10_000_000, True)


def test_a_money_budget_holds_before_an_engine_of_an_hourly_price_has_answered() -> None:
    # 0.001 USD a second, and 20 tokens in it
    process = Process(
        "{name: b, window: Month, max: {money: '0.02'}}", servers={"llama": SERVER + "pricing: [{perHour: 3.6}]\n"}
    )
    found = [process.ask(0.0, tokens=100) for _ in range(10)]
    assert [isinstance(one, Decision) for one in found] == [True] * 3 + [False] * 7
    settled = process.ends(found[0], 1.0, prompt=0, output=20)
    assert (settled.used.cost_micros, settled.currency) == (1000.0, "USD")


def test_the_price_that_was_derived_last_holds_until_there_is_another(tmp_path: Path) -> None:
    def begins(per_hour: str = "3.6") -> tuple[Pool, SavedLimits]:
        process = Process(
            "{name: b, window: Month, max: {money: 1}}",
            servers={"llama": SERVER + f"pricing: [{{perHour: {per_hour}}}]\n"},
        )
        core = process.core
        saved = SavedLimits(
            core.admission.limits,
            tmp_path,
            pools=lambda: core.pools,
            number=0,
            clock=lambda: 0.0,
            wall_clock=lambda: 1e9,
        )
        saved.load()
        return core.pools["default/llama"], saved

    def learns(pool: Pool, tpot_s: float) -> None:
        table = pool.table
        table.rate_samples[0], table.prefill_rate[0], table.tpot_s[0], table.in_flight[0] = 10, 10_000.0, tpot_s, 4.0

    pool, saved = begins()
    assumed = pool.price_at(0.0)
    learns(pool, 0.02)
    price = pool.price_at(1.0)
    assert price is not None
    assert price != assumed
    saved._limits.changes += 1
    saved.save()
    for _ in range(2):
        # also where nothing was learned in between
        pool, saved = begins()
        assert pool.price_at(2.0) == price
        saved._limits.changes += 1
        saved.save()
    learns(pool, 0.04)
    later = pool.price_at(3.0)
    assert later is not None
    assert later.rates.output == 2 * price.rates.output
    # another amount an hour is another price
    pool, saved = begins("7.2")
    other = pool.price_at(2.0)
    assert other is not None
    assert other != price
    # what is assumed is not saved for the next one
    saved._limits.changes += 1
    saved.save()
    assert begins()[0].price_at(2.0) == price


def test_who_passes_the_soft_share_of_a_budget_is_reported_once_in_each_window() -> None:
    wire: list[Process] = []
    budget = "{name: b, window: Day, max: {requests: 5}, soft: 0.6}"
    one, other = (Process(budget, name=name, wire=wire) for name in "xy")
    passed: list[SoftBudgetPassed] = []
    for now, process, tenant in (
        (0.0, one, "a"),
        (0.0, other, "a"),
        (1.0, one, "a"),
        (2.0, other, "a"),
        (3.0, one, "b"),
    ):
        arrival = request(process.core, headers={"x-attache-tenant": tenant})
        own, effects = process.core.arrive(arrival, now)
        passed += [effect for effect in process.perform(effects, now) if isinstance(effect, SoftBudgetPassed)]
        assert isinstance(own, Decision)
    (only,) = passed
    assert soft_budget_log_message(only.charge, only.level) == (
        "budget default/chat/b: the tenant a has reserved or used 60% of 5 requests for this day"
    )
    # a client that leaves and comes back does not fill the log
    for now in range(10, 20):
        arrival = request(one.core, headers={"x-attache-tenant": "b"})
        for _ in range(3):
            own, effects = one.core.arrive(arrival, float(now))
            passed += [effect for effect in one.perform(effects, float(now)) if isinstance(effect, SoftBudgetPassed)]
            one.core.on_outcome(Outcome(own.ticket, 503, "", 0.1, None, None, None, None), float(now))
            one.perform(one.core.on_stream_closed(own.ticket, float(now)), float(now))
    assert len(passed) <= 2
