# SPDX-License-Identifier: Apache-2.0
"""A breaker, whatever happens to it, in all processes that repeat its changes."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from extproc.endpoints.breaker import CLOSED, Breaker, BreakerPass, BreakerState, ProbeTurns
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "default/llama/10.0.0.1:8000"
LATENCY_S = 0.1


def tripped(breaker: Breaker, now: float, *, needed: int = 1, is_costly: bool = False) -> Breaker:
    return breaker.after_opening(KEY, now, needed=needed, is_costly=is_costly)


def test_each_failure_of_a_probe_doubles_the_pause_up_to_a_bound_with_jitter() -> None:
    breaker, now, pauses = CLOSED, 100.0, []
    for number in range(8):
        breaker = tripped(breaker.with_probe_lease(f"t{number}", now), now)
        pauses.append(breaker.reopen_at_s - now)
        now = breaker.reopen_at_s
    for pause_s, without in zip(pauses, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.8 * without <= pause_s <= 1.2 * without
    assert len({round(pause_s, 3) for pause_s in pauses[5:]}) == 3, "the jitter is another one each time"
    other = CLOSED.after_opening("default/llama/10.0.0.2:8000", 100.0, needed=1)
    assert other.reopen_at_s != CLOSED.after_opening(KEY, 100.0, needed=1).reopen_at_s, "and for each endpoint"


def test_an_endpoint_that_answers_nothing_is_left_alone_for_8_s_before_a_client_is_risked_again() -> None:
    assert tripped(CLOSED, 100.0, is_costly=True).reopen_at_s == pytest.approx(108.0, abs=1.6)


def test_open_becomes_half_open_by_the_time_alone() -> None:
    breaker = tripped(CLOSED, 100.0)
    assert breaker.state(100.7) is BreakerState.OPEN
    assert breaker.state(101.2) is BreakerState.HALF_OPEN


def test_late_results_change_nothing() -> None:
    before = BreakerPass(CLOSED.generation)
    breaker = tripped(CLOSED, 100.0)
    assert not breaker.is_current_result(before, 99.0)
    probe = BreakerPass(breaker.generation, "t1")
    closed = breaker.with_probe_lease("t1", 101.3).after_success("t1", 102.0)
    assert closed.state(102.0) is BreakerState.CLOSED
    assert not closed.is_current_result(probe, 101.3)
    assert not closed.is_current_result(before, 99.0)
    assert closed.is_current_result(BreakerPass(closed.generation), 102.1)


def test_a_request_whose_generation_is_not_known_counts_if_it_was_sent_since() -> None:
    breaker = tripped(CLOSED, 100.0)
    assert not breaker.is_current_result(BreakerPass(), 99.9)
    assert breaker.is_current_result(BreakerPass(), 100.0)
    assert CLOSED.is_current_result(BreakerPass(), 0.0)


def test_while_it_is_open_only_probes_count() -> None:
    breaker = tripped(CLOSED, 100.0).with_probe_lease("t1", 101.3)
    assert breaker.after_failure("t2", KEY, 101.4, needed=1) is breaker
    assert breaker.after_success("t2", 101.4) is breaker
    again = breaker.after_failure("t1", KEY, 101.4, needed=1)
    assert (again.trips, again.generation, again.since_s) == (2, 2, 100.0)


def test_several_probes_in_a_row_may_be_needed() -> None:
    breaker = tripped(CLOSED, 100.0, needed=3)
    for number in range(3):
        assert breaker.trips
        breaker = breaker.with_probe_lease(f"t{number}", 102.0).after_success(f"t{number}", 102.0)
    assert not breaker.trips


def test_the_result_of_a_probe_that_takes_long_counts_although_others_follow() -> None:
    breaker = tripped(CLOSED, 100.0).with_probe_lease("t1", 102.0)
    assert breaker.leased_until_s(102.0) == 107.0
    assert breaker.leased_until_s(107.0) == 107.0, "the next one may go"
    assert not breaker.with_probe_lease("t2", 107.0).after_success("t1", 160.0).trips


def test_a_probe_without_a_result_is_not_waited_for_long() -> None:
    breaker = tripped(CLOSED, 100.0).with_probe_lease("t1", 102.0)
    assert breaker.after_probe_stream("t1", 102.5).leased_until_s(102.5) == 104.5
    assert breaker.without_probe_lease("t1").leased_until_s(102.5) == 102.5
    assert breaker.after_probe_stream("t2", 102.5) is breaker
    assert breaker.without_probe_lease("t2") is breaker


def test_as_many_probes_as_there_may_be_are_remembered() -> None:
    breaker = tripped(CLOSED, 100.0)
    for number in range(1000):
        breaker = breaker.with_probe_lease(f"t{number}", 102.0 + 6 * number)
    assert len(breaker.probes) == 64


def test_a_pause_that_an_endpoint_asks_for_is_bounded_and_no_failure() -> None:
    asked = CLOSED.after_pause_request(5.0, 100.0)
    assert (asked.not_before_s, asked.generation, asked.trips) == (105.0, 0, 0)
    assert asked.after_pause_request(1.0, 100.0) is asked, "a shorter one does not end it"
    assert CLOSED.after_pause_request(math.inf, 100.0).not_before_s == 3700.0
    assert CLOSED.after_pause_request(-5.0, 100.0).not_before_s <= 100.0


def test_the_share_grows_after_it_has_closed() -> None:
    breaker = tripped(CLOSED, 100.0).with_probe_lease("t", 102.0).after_success("t", 102.0)
    assert [breaker.passing_share(102.0 + seconds) for seconds in (0, 5, 10, 20)] == [0.1, 0.5, 1.0, 1.0]
    assert CLOSED.passing_share(0.0) == 1.0
    opened = tripped(CLOSED, 100.0)
    assert (opened.passing_share(100.1), opened.passing_share(102.0)) == (0.0, 0.01)


@pytest.mark.parametrize(
    "sent",
    [
        {"reopen_at_s": 1e300},
        {"reopen_at_s": math.nan},
        {"reopen_at_s": math.inf, "changed_at_s": math.inf, "since_s": math.nan},
        {"trips": 1 << 60},
        {"needed": 1 << 60},
        {"probes": {"t": 1e300}},
        {"probes": {f"t{number}": math.nan for number in range(1000)}},
        {"generation": 1 << 62},
        {"generation": -3},
    ],
)
def test_whatever_another_process_sends_it_ends(sent: dict[str, object]) -> None:
    other = msgspec.structs.replace(Breaker(7, 2, 99.0, 99.0, 101.0, 1), **sent)
    breaker = CLOSED.merged(other, 100.0)
    after_s = 100.0 + 36.0
    assert breaker.generation in {0, 7}
    assert breaker.leased_until_s(after_s) == after_s
    assert breaker.state(after_s) is not BreakerState.OPEN
    for number in range(64):
        breaker = breaker.with_probe_lease(f"u{number}", after_s).after_success(f"u{number}", after_s)
    assert not breaker.trips
    msgspec.msgpack.encode(breaker.with_clock_shift(-after_s))


def test_the_later_generation_holds_and_then_the_one_that_is_open() -> None:
    opened = tripped(CLOSED, 100.0)
    closed = opened.after_closing(102.0)
    assert opened.merged(closed, 103.0).generation == 2
    assert closed.merged(opened, 103.0) is closed
    again = tripped(opened, 102.0)
    assert closed.merged(again, 103.0).trips == 2
    assert again.merged(closed, 103.0) is again


class Process:
    """One of those that serve an endpoint: what it knows of the breaker, and what it has not read yet."""

    def __init__(self, name: str, others: Callable[[], list[str]]) -> None:
        self.name = name
        self.breaker = CLOSED
        self.turns = ProbeTurns(name, others)
        self.inbox: list[Callable[[Process, float], None]] = []

    def read(self, now: float) -> None:
        events, self.inbox = self.inbox, []
        for event in events:
            event(self, now)


class Sent(msgspec.Struct):
    passed: BreakerPass
    sent_at_s: float
    by: str
    has_ended: bool = False


class Breakers(RuleBasedStateMachine):
    """Three processes, requests whose results come in any order, late or never, and news that takes LATENCY_S."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        names = ["p", "q", "r"]
        self.processes = {
            name: Process(name, lambda name=name: [one for one in names if one != name])  # type: ignore[misc]
            for name in names
        }
        self.sent: dict[str, Sent] = {}
        self.number = 0

    def everywhere(self, event: Callable[[Process, float], None], by: str) -> None:
        """At once where it happens, and in the others when they next read."""
        for name, one in self.processes.items():
            if name == by:
                event(one, self.now)
            else:
                one.inbox.append(event)

    @rule(seconds=st.sampled_from([LATENCY_S, 0.3, 1.0, 2.5, 7.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += min(seconds, LATENCY_S)
        for one in self.processes.values():
            one.read(self.now)
        self.now += max(0.0, seconds - LATENCY_S)

    @rule(names=st.lists(st.sampled_from("pqr"), min_size=1, max_size=6))
    def requests_go_there(self, names: list[str]) -> None:
        for name in names:
            self.ask(name)

    @rule(name=st.sampled_from("pqr"), seconds=st.sampled_from([LATENCY_S, 1.3, 2.6, 8.0]))
    def a_request_fails_and_the_pause_ends(self, name: str, seconds: float) -> None:
        self.settle(self.ask(name), "bad", name)
        self.time_passes(seconds)

    def ask(self, name: str) -> str:
        process = self.processes[name]
        breaker, self.number = process.breaker, self.number + 1
        ticket = f"{name}-{self.number}"
        passed = BreakerPass(breaker.generation)
        if breaker.state(self.now) is BreakerState.HALF_OPEN and (
            process.turns.next_probe_at_s(breaker, KEY, self.now) <= self.now
        ):
            passed = BreakerPass(breaker.generation, ticket)

            def lease(one: Process, now: float) -> None:
                if one.breaker.trips and one.breaker.is_current_result(passed, now):
                    one.breaker = one.breaker.with_probe_lease(ticket, now)

            self.everywhere(lease, name)
        self.sent[ticket] = Sent(passed, self.now, name)
        return ticket

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), result=st.sampled_from(["good", "bad", "neutral"]), name=st.sampled_from("pqr"))
    def a_result_comes(self, data: st.DataObject, result: str, name: str) -> None:
        self.settle(data.draw(st.sampled_from(sorted(self.sent))), result, name)

    def settle(self, ticket: str, result: str, name: str) -> None:
        sent, before = self.sent.pop(ticket), {one.name: one.breaker for one in self.processes.values()}

        def settle(one: Process, now: float) -> None:
            breaker = one.breaker
            if not breaker.is_current_result(sent.passed, sent.sent_at_s):
                return
            match result:
                case "good":
                    one.breaker = breaker.after_success(sent.passed.ticket, now)
                case "bad":
                    one.breaker = breaker.after_failure(sent.passed.ticket, KEY, now, needed=1 + (len(ticket) % 2))
                case _:
                    one.breaker = breaker.without_probe_lease(sent.passed.ticket)

        self.everywhere(settle, name)
        if sent.passed.generation != before[name].generation:
            assert self.processes[name].breaker is before[name], "a late result changes nothing"

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.sent)))
        sent = self.sent[ticket]

        def end(one: Process, now: float) -> None:
            if one.breaker.is_current_result(sent.passed, sent.sent_at_s):
                one.breaker = one.breaker.after_probe_stream(ticket, now)

        self.everywhere(end, sent.by)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_result_is_lost(self, data: st.DataObject) -> None:
        """With all that would end its lease."""
        self.sent.pop(data.draw(st.sampled_from(sorted(self.sent))))

    @rule(name=st.sampled_from("pqr"))
    def a_process_restarts(self, name: str) -> None:
        """Before it serves, it asks the others."""
        process, others = self.processes[name], [one for one in self.processes.values() if one.name != name]
        process.breaker, process.inbox = CLOSED, []
        for other in others:
            other.read(self.now)
            process.breaker = process.breaker.merged(other.breaker, self.now)

    @rule(name=st.sampled_from("pqr"))
    def a_heartbeat(self, name: str) -> None:
        known = self.processes[name].breaker.with_clock_shift(-self.now)

        def merge(one: Process, now: float) -> None:
            one.breaker = one.breaker.merged(known.with_clock_shift(now), now)

        self.everywhere(merge, name)

    @rule(name=st.sampled_from("pqr"))
    def an_operator_resets_it(self, name: str) -> None:
        if self.processes[name].breaker.trips:
            self.processes[name].breaker = self.processes[name].breaker.reset(self.now)
            self.a_heartbeat(name)

    @invariant()
    def at_most_one_probe_has_a_lease(self) -> None:
        generations = {one.breaker.generation for one in self.processes.values()}
        if len(generations) > 1:
            return
        for one in self.processes.values():
            live = [ticket for ticket, end_s in one.breaker.probes.items() if end_s > self.now]
            assert len(live) <= 1, live

    @invariant()
    def there_is_a_way_out(self) -> None:
        """From here, with requests that are served, whoever gets them, it closes; and it has not forgotten to open."""
        for process in self.processes.values():
            breaker, now = process.breaker, self.now
            for number in range(200):
                if not breaker.trips:
                    break
                now += 0.4
                if (
                    breaker.state(now) is BreakerState.HALF_OPEN
                    and process.turns.next_probe_at_s(breaker, KEY, now) <= now
                ):
                    breaker = breaker.with_probe_lease(f"exit-{number}", now).after_success(f"exit-{number}", now)
            assert not breaker.trips
            assert breaker.after_failure("", KEY, now, needed=1).state(now) is BreakerState.OPEN

    @invariant()
    def its_memory_is_bounded(self) -> None:
        assert all(len(one.breaker.probes) <= 64 for one in self.processes.values())


def test_whatever_happens_a_breaker_has_a_way_out_and_one_probe() -> None:
    run_state_machine_as_test(
        Breakers,
        # without shrinking, as of requests: the failing steps are few enough to read
        settings=settings(
            phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=examples(300), stateful_step_count=60
        ),
    )


def test_exactly_one_process_may_begin_a_probe_at_any_instant_and_each_has_its_turn() -> None:
    names = [f"process-{number}" for number in range(7)]
    breaker = tripped(CLOSED, 0.0)
    turns = {name: ProbeTurns(name, lambda name=name: [one for one in names if one != name]) for name in names}  # type: ignore[misc]
    rng, met = random.Random(0), set()
    for _ in range(2000):
        now = breaker.reopen_at_s + rng.uniform(0, 50)
        free = [name for name, one in turns.items() if one.next_probe_at_s(breaker, KEY, now) <= now]
        assert len(free) <= 1
        met.update(free)
        for one in turns.values():
            # what is promised is kept
            at_s = one.next_probe_at_s(breaker, KEY, now)
            assert at_s <= now + 7.0
            assert one.next_probe_at_s(breaker, KEY, at_s) == pytest.approx(at_s)
    assert met == set(names)
    assert ProbeTurns().next_probe_at_s(breaker, KEY, breaker.reopen_at_s + 0.95) == breaker.reopen_at_s + 0.95, "alone"
