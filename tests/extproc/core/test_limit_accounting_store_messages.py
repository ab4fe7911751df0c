# SPDX-License-Identifier: Apache-2.0
"""Messages to the shared store arrive in any order, late or never, and it comes back empty: one process grants nothing
twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import Charge, Grant, RequestUsage
from extproc.admission.token_buckets import BucketReportToStore, Limit, SharedStoreCopy
from extproc.core.effects import ChargeSharedStore, Effect, SettleGrant
from extproc.core.limit_accounting import LimitAccounting
from extproc.refusals import RateLimited
from tests.examples import examples
from tests.store_model import Store

if TYPE_CHECKING:
    from collections.abc import Sequence


CAPACITY = 40.0
ROUNDING = 0.01


class Message(msgspec.Struct, eq=False):
    """On its way to the store, or back: ``level`` and ``found`` are its answer, ``store_at_s`` when it was given."""

    charge: Charge
    stated: BucketReportToStore
    settles: tuple[Grant, RequestUsage | None] | None = None
    # a request waits for the answer
    is_awaited: bool = False
    # nobody asks for anything: only the statement matters
    is_payment: bool = False
    level: float | None = None
    found: Grant | RateLimited | None = None
    store_at_s: float = 0.0
    # when the store granted what this gives back: its answer came too late
    given_at_s: float = math.inf


class Taken(msgspec.Struct):
    """What a request has used; until it ends, what it has reserved."""

    at_s: float
    used: float


class World:
    """One process, the store, and the messages between them; the process waits for nothing but its requests'
    answers.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.now = 0.0
        self.store = Store()
        self.memory = SharedStoreCopy()
        self.accounts = LimitAccounting(LocalLimits(), machine=None)
        self.sent: list[Message] = []
        self.is_asking = True
        self.running: list[tuple[Grant, Taken]] = []
        self.taken: list[Taken] = []
        # of the last answer that was read, and grants that are in a level that was read later, but were never told, or
        # told too late and never given back
        self.read_at_s = 0.0
        self.untold = 0

    def ask(self, amount: float) -> None:
        """Ask the store, or, after a failure, grant alone."""
        charge = Charge("k", self.limit, "output_tokens", amount, is_global=True)
        if self.is_asking:
            self.sent.append(Message(charge, self._state(), is_awaited=True))
        else:
            self._grant_alone(charge)

    def pay(self) -> None:
        for key, limit in self.memory.buckets_in_debt(10):
            charge = Charge(key, limit, "requests", 0.0)
            self.sent.append(Message(charge, self._state(), is_payment=True))

    def end(self, number: int, share: float) -> None:
        """A request has used a share of what it reserved, or more."""
        grant, taken = self.running.pop(number % len(self.running))
        taken.used *= share
        out: list[Effect] = []
        self.accounts.settle_grants((grant,), RequestUsage(0.0, taken.used), self.now, out)
        self._perform(out)

    def arrive(self, number: int) -> None:
        """One message arrives at the store."""
        coming = [one for one in self.sent if one.level is None]
        if not coming or not self.store.is_there:
            return
        one = coming[number % len(coming)]
        if one.settles is None:
            one.found, one.level = self.store.reserve("p", one.charge, one.stated, self.now)
        else:
            grant, used = one.settles
            one.level = self.store.settle("p", grant, used, one.stated, self.now)
        # no two at the same time
        self.now += 1e-6
        one.store_at_s = self.now

    def answer(self, number: int) -> None:
        """One answer arrives at the process."""
        answered = [one for one in self.sent if one.level is not None]
        if not answered:
            return
        one = answered[number % len(answered)]
        self.sent.remove(one)
        is_late = one.settles is None and not one.is_awaited and not one.is_payment
        if not is_late and one.level is not None:
            self.memory.on_store_answer("k", one.stated, one.level, store_at_s=one.store_at_s, now=self.now)
            self.read_at_s = max(self.read_at_s, one.store_at_s)
        if isinstance(one.found, Grant) and one.is_awaited:
            # the limit counts from when the store granted it, and its bucket has filled since
            self._take(one.found, one.charge, one.store_at_s)
        elif isinstance(one.found, Grant) and is_late:
            self._settle(one.found, None, given_at_s=one.store_at_s)

    def time_out(self) -> None:
        """The store is not asked any more; those who wait are granted without it."""
        self.is_asking = False
        waiting = [one for one in self.sent if one.is_awaited]
        for one in waiting:
            one.is_awaited = False
        for one in waiting:
            self._grant_alone(one.charge)

    def crash(self, *, is_empty: bool) -> None:
        """The store ends, and with it all that is on its way."""
        self.store.is_there = False
        if is_empty:
            self.store.forget()
        lost = self.sent
        granted = [one.store_at_s for one in lost if isinstance(one.found, Grant)] + [one.given_at_s for one in lost]
        self.untold += sum(at_s < self.read_at_s for at_s in granted)
        self.time_out()
        self.sent = []
        for one in lost:
            if one.settles is not None and one.settles[1] is not None:
                self.memory.record_overdraft(
                    "k", self.limit, max(0.0, one.settles[1].output_tokens - one.charge.amount), self.now
                )

    def _grant_alone(self, charge: Charge) -> None:
        out: list[Effect] = []
        most_left = self.memory.level_before_debts("k", self.limit, self.now)
        try:
            grant = self.accounts.reserve_without_store([charge], [most_left], self.now, out)
        except RateLimited:
            return
        self._perform(out)
        self._take(grant, charge, self.now)

    def _take(self, grant: Grant, charge: Charge, at_s: float) -> None:
        taken = Taken(at_s, charge.amount)
        self.taken.append(taken)
        self.running.append((grant, taken))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case ChargeSharedStore():
                    self.memory.record_overdraft("k", self.limit, effect.amount, self.now)
                case SettleGrant():
                    self._settle(effect.grant, effect.used)

    def _settle(self, grant: Grant, used: RequestUsage | None, given_at_s: float = math.inf) -> None:
        self.sent.append(Message(grant.charges[0], self._state(), settles=(grant, used), given_at_s=given_at_s))

    def _state(self) -> BucketReportToStore:
        return self.memory.make_bucket_report("k", self.limit, self.now)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "arrive", "arrive", "answer", "answer", "end", "pay", "late", "crash", "lose", "back"]
        ),
        st.floats(0, 1),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=150,
)


def play(events: Sequence[tuple[str, float, int]], *, rate: float, amount: float | None) -> World:
    """What happens to one process. ``amount``: each request's, and all of it is used; None: any, and any part of it."""
    world = World(Limit(rate, CAPACITY))
    for event, share, number in events:
        world.now += share * 4
        match event:
            case "ask":
                world.ask(share * CAPACITY if amount is None else amount)
            case "arrive":
                world.arrive(number)
            case "answer":
                world.answer(number)
            case "end" if world.running:
                world.end(number, share if amount is None else 1.0)
            case "pay":
                world.pay()
            case "late":
                world.time_out()
            case "crash" | "lose" if world.store.is_there:
                world.crash(is_empty=event == "lose")
            case "back":
                world.store.is_there = world.is_asking = True
    return world


def drain(world: World, *, amount: float) -> None:
    """The store is back, everything arrives, and a client asks for all that is left."""
    world.store.is_there = world.is_asking = True
    for _ in range(200):
        world.pay()
        while world.sent:
            world.arrive(0)
            world.answer(0)
        while world.running:
            world.end(0, 1.0)
        world.ask(amount)


def most_over(taken: Sequence[Taken], rate: float) -> float:
    """By how much the worst window exceeded rate and burst."""
    worst, ordered = -CAPACITY, sorted(taken, key=lambda one: one.at_s)
    for first, begin in enumerate(ordered):
        used = 0.0
        for end in ordered[first:]:
            used += end.used
            worst = max(worst, used - rate * (end.at_s - begin.at_s) - CAPACITY)
    return worst


@settings(max_examples=examples(1500), deadline=None)
@example(
    events=[
        *[("ask", 0.6875, 0), ("ask", 0.0625, 0), ("arrive", 0.0, 0), ("ask", 0.125, 0), ("ask", 0.140625, 0)],
        *[("arrive", 0.0, 0), ("answer", 0.0, 0), ("answer", 0.0, 0), ("late", 0.0, 0)],
    ]
)
@given(events=EVENTS)
def test_no_window_sees_more_than_rate_and_burst(events: list[tuple[str, float, int]]) -> None:
    assert most_over(play(events, rate=1.0, amount=None).taken, 1.0) <= ROUNDING


@settings(max_examples=examples(1500), deadline=None)
@example(events=[*[("ask", 0.0, 0)] * 2, *[("arrive", 0.0, 0)] * 2, ("answer", 0.0, 1), ("lose", 0.0, 0)])
@example(
    events=[
        *[("ask", 0.0, 0)] * 6,
        *[("arrive", 0.0, 0), ("arrive", 0.0, 0), ("late", 0.0, 0), ("answer", 0.0, 0), ("arrive", 0.0, 4)],
        *[("answer", 0.0, 0), ("answer", 0.0, 0), ("lose", 0.0, 0)],
    ]
)
@given(events=EVENTS)
def test_requests_are_granted_as_often_as_the_limit_says_and_not_less(events: list[tuple[str, float, int]]) -> None:
    world = play(events, rate=1e-9, amount=2.0)
    drain(world, amount=2.0)
    granted = sum(one.used for one in world.taken)
    assert granted <= CAPACITY
    # What the store granted, and could not tell before the connection broke, is gone if the store was not; and if it
    # was, where a later answer overtook the one that was lost: its level was without that grant already.
    if "crash" not in {event for event, *_ in events}:
        assert granted >= CAPACITY - 2.0 * world.untold


def steps(*names: str) -> list[tuple[str, float, int]]:
    return [(name, 0.0, 0) for name in names]


ASKED = ("ask", "arrive", "answer")


@pytest.mark.parametrize("overtaking", ["ask", "end"])
def test_a_payment_that_is_overtaken_is_not_overlooked(overtaking: str) -> None:
    """An empty store hears first of a request, or of the end of one, and then of what was granted without it."""
    world = play(steps(*ASKED, "lose", *["ask"] * 19), rate=1e-9, amount=2.0)
    assert len(world.taken) == 20
    world.store.is_there = world.is_asking = True
    world.pay()
    world.end(0, 1.0) if overtaking == "end" else world.ask(2.0)
    # the last that was sent arrives first
    world.arrive(len(world.sent) - 1)
    world.ask(2.0)
    drain(world, amount=2.0)
    assert len(world.taken) == 20


def test_a_settlement_does_not_fill_a_store_that_comes_back_empty() -> None:
    world = play(steps(*ASKED, *ASKED, *ASKED, "lose", "back", "end", "arrive"), rate=1e-9, amount=10.0)
    assert world.store.buckets["k"].level == pytest.approx(10.0)


def test_an_answer_that_another_one_overtook_says_nothing_new() -> None:
    world = play(steps("ask", "ask", "arrive", "arrive"), rate=1e-9, amount=10.0)
    world.answer(1)
    world.answer(0)
    assert world.memory.level_before_debts("k", world.limit, world.now) == pytest.approx(20.0)


def test_what_was_charged_without_an_answer_is_charged_once() -> None:
    world = play(steps(*ASKED, "late", "ask", "ask", "pay", "arrive", "back"), rate=1e-9, amount=10.0)
    # the answer to the payment is still on its way
    world.pay()
    world.arrive(0)
    assert world.store.buckets["k"].level == pytest.approx(10.0)
    assert world.memory.has_debts
    world.answer(0)
    assert not world.memory.has_debts


def test_what_went_beyond_its_reservation_is_not_forgotten_by_an_empty_store() -> None:
    world = play(steps(*ASKED), rate=1e-9, amount=10.0)
    world.end(0, 2.0)
    for event, _, _ in steps("arrive", "answer"):
        getattr(world, event)(0)
    world.crash(is_empty=True)
    world.store.is_there = world.is_asking = True
    world.ask(21.0)
    world.arrive(0)
    assert isinstance(world.sent[0].found, RateLimited)


def test_what_was_reserved_in_a_lost_bucket_does_not_come_back_in_another() -> None:
    world = World(Limit(1.0, CAPACITY))

    def ask(amount: float) -> None:
        world.ask(amount)
        world.arrive(0)
        world.answer(0)

    ask(30.0)
    world.crash(is_empty=True)
    world.store.is_there = world.is_asking = True
    # full by now: the inflow would have been lost, had the first one reserved nothing
    world.now += 30.0
    ask(40.0)
    assert len(world.taken) == 2
    world.end(0, 0.0)
    world.arrive(0)
    assert world.store.buckets["k"].level == pytest.approx(0.0, abs=ROUNDING)


def test_a_refund_of_what_the_store_may_have_taken_does_not_hide_later_debts() -> None:
    world = play(steps("late", "ask", "pay", "arrive"), rate=1e-9, amount=10.0)
    world.memory.record_overdraft("k", world.limit, -4.0, world.now)
    world.memory.record_overdraft("k", world.limit, 4.0, world.now)
    assert world.memory.make_bucket_report("k", world.limit, world.now).owed == 14.0
