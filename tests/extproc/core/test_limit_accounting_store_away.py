# SPDX-License-Identifier: Apache-2.0
"""The shared store goes away and comes back, with its buckets or without: no window sees more than was promised.

One process grants exactly what the store would have granted. Several cannot hear of each other meanwhile: each grants
its part of what it last knew, so that all together grant at most the burst once more, and a request that is larger than
a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import Charge, Grant, RequestUsage
from extproc.admission.token_buckets import Limit, SharedStoreCopy
from extproc.core.effects import ChargeSharedStore, Effect, SettleGrant
from extproc.core.limit_accounting import LimitAccounting
from extproc.refusals import RateLimited
from tests.examples import examples
from tests.store_model import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = Limit(rate=10.0, capacity=100.0)
ROUNDING = 0.01


class Taken(msgspec.Struct):
    """What a request got, and what it has used; its reservation until then."""

    at_s: float
    used: float


class Process:
    """One process: its accounts, and the part of its Redis client that decides."""

    def __init__(self, store: Store, peers: int, name: str = "") -> None:
        self.store = store
        self.name = name
        self.accounts = LimitAccounting(LocalLimits(), machine="here", peers=lambda: peers)
        self.memory = SharedStoreCopy()
        self.running: list[tuple[Grant, Taken]] = []

    def ask(self, amount: float, now: float) -> Taken | None:
        charge = Charge("k", LIMIT, "output_tokens", amount, is_global=True)
        out: list[Effect] = []
        try:
            if self.store.is_there:
                stated = self.memory.make_bucket_report("k", LIMIT, now)
                found, level = self.store.reserve(self.name, charge, stated, now)
                self.memory.on_store_answer("k", stated, level, store_at_s=now, now=now)
                self.accounts.on_store_answer()
                if isinstance(found, RateLimited):
                    return None
                grant = found
            else:
                grant = self.accounts.reserve_without_store(
                    [charge], [self.memory.level_before_debts("k", LIMIT, now)], now, out
                )
        except RateLimited:
            return None
        finally:
            self.perform(out, now)
        taken = Taken(now, amount)
        self.running.append((grant, taken))
        return taken

    def end(self, index: int, share: float, now: float) -> None:
        grant, taken = self.running.pop(index)
        taken.used *= share
        out: list[Effect] = []
        self.accounts.settle_grants((grant,), RequestUsage(0.0, taken.used), now, out)
        self.perform(out, now)

    def perform(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case ChargeSharedStore():
                    self.memory.record_overdraft(effect.charge.key, effect.charge.limit, effect.amount, now)
                case SettleGrant() if self.store.is_there:
                    stated = self.memory.make_bucket_report("k", LIMIT, now)
                    level = self.store.settle(self.name, effect.grant, effect.used, stated, now)
                    self.memory.on_store_answer("k", stated, level, store_at_s=now, now=now)

    def pay(self, now: float) -> None:
        """As soon as the store is back."""
        for key, limit in self.memory.buckets_in_debt(10):
            stated = self.memory.make_bucket_report(key, limit, now)
            _, level = self.store.reserve(self.name, Charge(key, limit, "requests", 0.0), stated, now)
            self.memory.on_store_answer(key, stated, level, store_at_s=now, now=now)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "away", "back", "empty"]),
        st.floats(0, 8),
        st.floats(0, 1),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=120,
)


def play(events: Sequence[tuple[str, float, float, int]], processes: int) -> list[Taken]:
    """All that was granted. ``empty``: the store comes back without its buckets."""
    store, now, taken = Store(), 0.0, list[Taken]()
    made = [Process(store, processes - 1, str(number)) for number in range(processes)]
    for event, passes_s, share, number in events:
        now += passes_s
        process = made[number % processes]
        match event:
            case "ask":
                one = process.ask(share * LIMIT.capacity, now)
                taken.extend([] if one is None else [one])
            case "end" if process.running:
                process.end(number % len(process.running), share, now)
            case "away":
                store.is_there = False
            case "back" | "empty" if not store.is_there:
                store.is_there = True
                if event == "empty":
                    store.forget()
                for each in made:
                    each.pay(now)
    return taken


def most_over(taken: Sequence[Taken]) -> float:
    """By how much the worst window exceeded rate and burst."""
    worst = -LIMIT.capacity
    for first, begin in enumerate(taken):
        used = 0.0
        for end in taken[first:]:
            used += end.used
            worst = max(worst, used - LIMIT.rate * (end.at_s - begin.at_s) - LIMIT.capacity)
    return worst


@settings(max_examples=examples(500), deadline=None)
@given(events=EVENTS)
def test_one_process_grants_what_the_store_would_have_granted(events: list[tuple[str, float, float, int]]) -> None:
    assert most_over(play(events, 1)) <= ROUNDING


@settings(max_examples=examples(500), deadline=None)
@given(events=EVENTS)
def test_processes_that_do_not_hear_of_each_other_grant_at_most_the_burst_once_more(
    events: list[tuple[str, float, float, int]],
) -> None:
    outages = sum(event in {"back", "empty"} for event, *_ in events) + 1
    assert most_over(play(events, 3)) <= outages * 3 * LIMIT.capacity + ROUNDING


def outage(processes: int, *, is_empty: bool, ask: float) -> float:
    """Tokens granted without any inflow: all that the store has, an outage, and all that it has afterwards."""
    events: list[tuple[str, float, float, int]] = []
    for step in ("", "away", "empty" if is_empty else "back"):
        events += [(step, 0.0, 0.0, 0)] * bool(step)
        events += [("ask", 0.0, ask, number) for number in range(60)]
    return sum(one.used for one in play(events, processes))


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 5])
def test_an_outage_gives_nothing_that_is_gone(processes: int, *, is_empty: bool) -> None:
    assert outage(processes, is_empty=is_empty, ask=0.05) == pytest.approx(100)


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 5])
def test_after_a_long_outage_as_much_is_granted_as_before(processes: int, *, is_empty: bool) -> None:
    def asked(count: int) -> list[tuple[str, float, float, int]]:
        return [("ask", 0.1, 0.02, number) for number in range(count)]

    outage_s, back = 100.0, "empty" if is_empty else "back"
    events = [*asked(100), ("away", 0.0, 0.0, 0), *asked(round(outage_s * 10)), (back, 0.0, 0.0, 0)]
    began_s = outage_s + 10.0
    after = [one for one in play([*events, *asked(200)], processes) if one.at_s > began_s + ROUNDING]
    # 20 s of inflow, and what the bucket had
    granted = sum(one.used for one in after)
    assert 20 * LIMIT.rate - 4.0 <= granted <= 20 * LIMIT.rate + LIMIT.capacity


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_what_is_left_is_divided_while_the_store_is_away(processes: int) -> None:
    asked = [("ask", 0.0, 0.2, number) for number in range(processes)]
    # all know what is left
    asked += [("ask", 0.0, 0.0, number) for number in range(processes)]
    asked += [("away", 0.0, 0.0, 0), *[("ask", 0.0, 0.01, number) for number in range(200)]]
    assert 90 <= sum(one.used for one in play(asked, processes)) <= 100
    # and the inflow as well
    later = [("ask", 0.1, 0.01, number) for number in range(1000)]
    granted = sum(one.used for one in play([*asked, *later], processes))
    assert 0.9 * (100 + 100 * LIMIT.rate) < granted <= 100 + 100 * LIMIT.rate + ROUNDING


@pytest.mark.parametrize("knows", [True, False])
def test_a_process_that_speaks_first_to_an_empty_store_does_not_give_back_what_others_have_used(*, knows: bool) -> None:
    store = Store()
    first, busy = Process(store, 1, "first"), Process(store, 1, "busy")
    if knows:
        assert first.ask(10.0, 1.0) is not None
    assert busy.ask(60.0, 1.1) is not None
    store.forget()
    assert first.ask(20.0, 1.2) is not None
    left = busy.memory.level_before_debts("k", LIMIT, 1.3) - 20.0
    for now in (1.3, 1.4, 1.5):
        for one in (busy, first):
            # what the first knew is lowered once, however often both ask
            assert one.ask(left + 5.0, now) is None
            # a bucket that begins full loses no inflow as soon as something is taken from it
            more = store.buckets["k"].level - left - LIMIT.rate * (now - 1.3)
            assert -ROUNDING <= more <= LIMIT.rate * 0.1 + ROUNDING
    assert busy.ask(left, 1.5) is not None


def test_what_a_process_knows_of_a_store_that_was_not_lost_lowers_nothing() -> None:
    store = Store()
    idle, busy = Process(store, 1, "idle"), Process(store, 1, "busy")
    assert busy.ask(50.0, 1.0) is not None
    assert idle.ask(10.0, 1.1) is not None
    assert busy.ask(20.0, 1.2) is not None
    assert idle.ask(5.0, 1.3) is not None
    assert store.buckets["k"].level == pytest.approx(15.0 + LIMIT.rate * 0.3)


def test_a_budget_that_was_raised_since_the_last_answer_has_more_left() -> None:
    memory, before, now = SharedStoreCopy(), Limit(0.0, 100.0, 1000.0), Limit(0.0, 150.0, 1000.0)
    memory.on_store_answer(
        "k", memory.make_bucket_report("k", before, 1.0), 20.0, store_at_s=1.0, now=1.0, budget=before
    )
    assert memory.level_before_debts("k", now, 2.0) == 70.0


def test_a_request_that_is_larger_than_a_part_is_granted_and_paid_off() -> None:
    store = Store()
    one = Process(store, 3)
    store.is_there = False
    assert one.ask(60.0, 0.0) is not None
    # a part of 25 and a quarter of the inflow: 35 are owed for 14 s
    assert one.ask(1.0, 14.0) is None
    assert one.ask(1.0, 14.5) is not None
    assert one.ask(101.0, 1000.0) is None
