# SPDX-License-Identifier: Apache-2.0
"""Requests for a ModelServer without engines: who is held, for how long, who goes when, and where."""

from __future__ import annotations

import json
import random

import pytest

from extproc.core import scale_from_zero as awaiting
from extproc.core.effects import Decision
from extproc.core.request_record import GatewayProperties, RequestHead
from extproc.core.request_states import RequestState
from extproc.refusals import EngineStarting, NoEndpoint, QueueFull, QueueTimeout
from tests.extproc.core.zero import ACTIVATION, BIG, GATE, SMALL, Zero, engine

BOTH = {SMALL: 1, BIG: 1}
PAIRS = """pdGroup: {prefillLabels: {role: prefill}, decodeLabels: {role: decode}}
activation: {holdTimeout: 60s}"""
PREFILL, DECODE = engine(1, labels={"role": "prefill"}), engine(2, labels={"role": "decode"})
LOADS = "adapterLoading: {slots: 1, timeout: 10s, adapters: [{name: sql, source: /sql}]}"


def test_without_activation_a_server_without_engines_refuses_at_once() -> None:
    zero = Zero(more="")
    (ticket,) = zero.ask()
    assert isinstance(zero.refusal(ticket), NoEndpoint)
    assert zero.told() == []


def test_requests_wait_for_the_first_engine_and_go_in_order_of_arrival() -> None:
    zero = Zero()
    tickets = zero.ask(3)
    assert {zero.core.state_of(one) for one in tickets} == {RequestState.AWAITING_ENGINE}
    assert zero.awaits(tickets[0]).longest_s == 60.0
    assert zero.waiting() == {SMALL: 3}
    zero.passes(20.0)
    zero.have(SMALL, engine(1))
    assert zero.order == tickets
    assert {zero.went(one) for one in tickets} == {"10.0.0.1:8000"}
    assert {
        end.history.waits[RequestState.AWAITING_ENGINE] for end in zero.ends.values() if isinstance(end, Decision)
    } == {20.0}
    assert zero.waiting() == {}
    # and the next one goes at once
    (later,) = zero.ask()
    assert zero.went(later)


def test_the_shell_hears_once_that_a_server_is_waited_for() -> None:
    zero = Zero()
    zero.ask(3)
    assert zero.told() == [SMALL]
    zero.have(SMALL, engine(1))
    zero.have(SMALL)
    zero.ask()
    assert zero.told() == [SMALL, SMALL]


def test_more_than_one_tick_sends_on_keep_their_order_and_nobody_overtakes() -> None:
    zero = Zero()
    tickets = zero.ask(150)
    # a new one comes while the first hundred are on their way
    zero.servers[SMALL] = [engine(1)]
    zero.perform(zero.core.apply(zero._snapshot(), zero.now))
    zero.perform(zero.core.tick(zero.now))
    assert len(zero.ends) == 64
    late = zero.ask()
    assert zero.order == [*tickets, *late]


def test_a_draining_engine_gets_nothing_new_and_those_who_come_wait() -> None:
    zero = Zero(small=[engine(1)])
    (running,) = zero.ask()
    zero.have(SMALL, engine(1, draining=True))
    (waits,) = zero.ask()
    assert zero.core.state_of(waits) is RequestState.AWAITING_ENGINE
    zero.finish(running)
    zero.have(SMALL)
    zero.have(SMALL, engine(2))
    assert zero.went(waits) == "10.0.0.2:8000"


def test_an_engine_that_is_wanted_again_before_it_has_gone_takes_those_who_wait() -> None:
    zero = Zero(small=[engine(1, draining=True)])
    (ticket,) = zero.ask()
    zero.have(SMALL, engine(1))
    assert zero.went(ticket) == "10.0.0.1:8000"


def test_an_engine_that_fails_for_some_seconds_is_an_engine() -> None:
    zero = Zero(small=[engine(1)])
    table = zero.core.pools[SMALL].table
    table.trips[0], table.retry_at_s[0], table.has_failures = 3, zero.now + 10, True
    (ticket,) = zero.ask()
    assert zero.went(ticket)


def test_the_time_is_over_and_the_client_is_told_what_is_left_of_the_start() -> None:
    zero = Zero(more="activation: {holdTimeout: 20s, startTime: 30s}")
    (ticket,) = zero.ask()
    zero.passes(19.9)
    assert ticket not in zero.ends
    zero.passes(0.2)
    refusal = zero.refusal(ticket)
    assert isinstance(refusal, EngineStarting)
    assert (refusal.status, refusal.retry_after_s) == (503, 10)
    assert "became ready within 20 s" in refusal.message
    assert zero.waiting() == {}


def test_a_start_that_is_late_asks_clients_to_come_back_a_little_later() -> None:
    zero = Zero(more="activation: {holdTimeout: 50s, startTime: 30s}")
    (ticket,) = zero.ask()
    zero.passes(50.1)
    # 20 s late: a tenth of what it has taken
    assert zero.refusal(ticket).retry_after_s == 5


def test_what_a_start_takes_is_measured_from_the_first_request() -> None:
    zero = Zero(more="activation: {holdTimeout: 20s, startTime: 30s}")
    zero.ask()
    zero.passes(20.0)
    zero.ask()
    zero.passes(40.0)
    # both have been refused, and the engine comes a minute after the first
    zero.have(SMALL, engine(1))
    assert zero.starts() == [60.0]
    zero.have(SMALL)
    (ticket,) = zero.ask()
    zero.passes(20.1)
    assert zero.refusal(ticket).retry_after_s == 40


def test_an_engine_that_came_much_later_was_not_started_for_the_request() -> None:
    zero = Zero(more="activation: {holdTimeout: 20s, startTime: 30s}")
    zero.ask()
    zero.passes(5000.0)
    zero.have(SMALL, engine(1))
    zero.have(SMALL)
    (ticket,) = zero.ask()
    zero.passes(20.1)
    assert zero.refusal(ticket).retry_after_s == 10


def test_clients_that_hung_up_long_ago_have_begun_no_start() -> None:
    """Else one that asks and leaves at once would make all later ones come back much too late."""
    zero = Zero(more="activation: {holdTimeout: 20s, startTime: 30s}")
    (first,) = zero.ask()
    zero.leave(first)
    zero.passes(3000.0)
    (ticket,) = zero.ask()
    zero.passes(20.1)
    assert zero.refusal(ticket).retry_after_s == 10
    zero.passes(9.9)
    zero.have(SMALL, engine(1))
    assert zero.starts() == [pytest.approx(30.0)]


def test_a_start_that_takes_longer_than_any_before_is_measured_although_clients_give_up() -> None:
    zero = Zero(more="activation: {holdTimeout: 20s, startTime: 30s}")
    for _ in range(10):
        zero.ask()
        zero.passes(60.0)
    zero.have(SMALL, engine(1))
    assert zero.starts() == [600.0]


def test_one_tenant_that_fills_the_places_makes_room_for_the_others() -> None:
    zero = Zero(more="activation: {maxRequests: 10, startTime: 30s}")
    greedy = zero.ask(12, tenant="greedy")
    assert [isinstance(zero.refusal(one), QueueFull) for one in greedy[10:]] == [True, True]
    modest = zero.ask(3, tenant="modest")
    assert not any(one in zero.ends for one in modest)
    # the newest ones have given way
    assert [one for one in greedy if one in zero.ends] == greedy[7:]
    assert "most of them are of your tenant" in zero.refusal(greedy[7]).message
    assert (zero.refusal(greedy[7]).status, zero.refusal(greedy[7]).retry_after_s) == (429, 30)
    # and with equal shares nobody gives way
    more = zero.ask(4, tenant="modest")
    assert [one in zero.ends for one in more] == [False, False, True, True]
    (refused,) = zero.ask(tenant="greedy")
    assert refused in zero.ends
    assert zero.waiting() == {SMALL: 10}
    zero.have(SMALL, engine(1))
    went = [one for one in zero.order if one in zero.ends and not hasattr(zero.ends[one], "refusal")]
    assert went == [*greedy[:5], *modest, *more[:2]]


def test_of_the_tenant_with_most_what_matters_least_gives_way() -> None:
    zero = Zero(more="activation: {maxRequests: 4}")
    plain = zero.ask(2, tenant="greedy")
    urgent = zero.ask(2, tenant="greedy", urgency="high")
    zero.ask(tenant="modest")
    assert [one in zero.ends for one in (*plain, *urgent)] == [False, True, False, False]


def test_large_bodies_of_one_tenant_make_room_too() -> None:
    zero = Zero(more="activation: {maxBytes: 8Ki}")
    greedy = zero.ask(4, tenant="greedy", size=1900)
    (modest,) = zero.ask(tenant="modest", size=1900)
    assert modest not in zero.ends
    assert [one in zero.ends for one in greedy] == [False, False, False, True]
    # what is larger than all places together makes nobody leave
    (huge,) = zero.ask(tenant="other", size=9000)
    assert huge in zero.ends
    # nor does what would leave its tenant with more than the one that gives way
    (large,) = zero.ask(tenant="other", size=5000)
    assert large in zero.ends
    assert zero.waiting() == {SMALL: 4}


def test_one_tenant_cannot_fill_a_process_with_requests_for_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaiting, "MOST_REQUESTS", 6)
    zero = Zero(weights=BOTH)
    greedy = zero.ask(8, tenant="greedy")
    modest = zero.ask(2, tenant="modest")
    assert not any(one in zero.ends for one in modest)
    assert len([one for one in greedy if one not in zero.ends]) == 4
    assert sum(zero.waiting().values()) == 6


def test_a_flood_of_clients_that_leave_at_once_leaves_nothing_behind() -> None:
    zero = Zero(weights=BOTH)
    for number in range(300):
        for ticket in zero.ask(3, tenant=f"tenant-{number % 7}"):
            zero.leave(ticket)
    assert zero.waiting() == {}
    held = zero.core._pipeline.engines._held
    assert (held.requests, held.bytes, dict(held._requests), dict(held._bytes)) == (0, 0, {}, {})


def test_a_client_that_leaves_costs_nothing() -> None:
    zero = Zero()
    first, second = zero.ask(2)
    zero.leave(first)
    assert zero.waiting() == {SMALL: 1}
    zero.have(SMALL, engine(1))
    assert zero.order == [second]
    assert zero.core.state_of(first) is RequestState.ABSENT
    # what its limit had granted is back
    (bucket,) = zero.core.admission.limits._buckets.values()
    assert bucket.level == pytest.approx(9999)


def test_a_server_holds_so_many_requests_and_no_more() -> None:
    zero = Zero(more="activation: {maxRequests: 2, startTime: 30s}")
    *held, refused = zero.ask(3)
    refusal = zero.refusal(refused)
    assert isinstance(refusal, QueueFull)
    assert (refusal.status, refusal.retry_after_s) == (429, 30)
    zero.have(SMALL, engine(1))
    assert zero.order == [refused, *held]


def test_a_server_holds_so_many_bytes_and_no_more() -> None:
    zero = Zero(more="activation: {maxBytes: 1Ki}")
    (held,) = zero.ask(size=600)
    (refused,) = zero.ask(size=600)
    assert isinstance(zero.refusal(refused), QueueFull)
    zero.leave(held)
    zero.ask(size=600)
    assert zero.waiting() == {SMALL: 1}


def test_all_servers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaiting, "MOST_REQUESTS", 3)
    zero = Zero(weights=BOTH)
    tickets = zero.ask(10)
    assert sum(zero.waiting().values()) == 3
    assert all(isinstance(zero.refusal(one), QueueFull) for one in tickets if one in zero.ends)


def test_a_server_that_leaves_the_configuration_refuses_and_the_others_stay() -> None:
    zero = Zero(weights=BOTH)
    tickets = zero.ask(20)
    gone = zero.waiting()[BIG]
    del zero.servers[BIG]
    zero.weights = {SMALL: 1}
    zero.apply()
    assert len([one for one in tickets if one in zero.ends and isinstance(zero.refusal(one), NoEndpoint)]) == gone
    assert zero.waiting() == {SMALL: 20 - gone}


def test_nobody_loses_the_place_when_the_configuration_changes() -> None:
    zero = Zero()
    first = zero.ask(2)
    zero.more[SMALL] = f"{ACTIVATION}\n{GATE}"
    zero.apply()
    second = zero.ask(2)
    zero.more[SMALL] = ACTIVATION
    zero.apply()
    zero.have(SMALL, engine(1))
    assert zero.order == first + second


def test_without_activation_any_more_whoever_waits_is_refused_as_others_are() -> None:
    zero = Zero()
    (ticket,) = zero.ask()
    zero.more[SMALL] = ""
    zero.apply()
    assert isinstance(zero.refusal(ticket), NoEndpoint)


def test_with_flow_control_those_of_high_priority_go_first_and_the_engine_is_not_overrun() -> None:
    zero = Zero(more=f"{ACTIVATION}\n{GATE}")
    low = zero.ask(3)
    high = zero.ask(1, urgency="high")
    assert zero.awaits(low[0]).longest_s == 60.0 + 60.0
    zero.have(SMALL, engine(1))
    # the engine takes two at a time
    assert zero.order == [high[0], low[0]]
    assert {zero.core.state_of(one) for one in low[1:]} == {RequestState.QUEUED}
    zero.finish(high[0])
    assert zero.order == [high[0], low[0], low[1]]


def test_a_queue_that_is_smaller_than_what_waits_takes_them_as_it_has_room_and_refuses_nobody() -> None:
    small_gate = GATE.replace("timeout: 50s", "timeout: 50s, maxRequests: 2")
    zero = Zero(more=f"{ACTIVATION}\n{small_gate}")
    tickets = zero.ask(8)
    zero.have(SMALL, engine(1))
    while len(zero.order) < 8:
        before = len(zero.order)
        zero.finish(zero.order[-1])
        zero.passes(1.0)
        assert len(zero.order) > before
    assert zero.order == tickets
    assert all(zero.went(one) for one in tickets)


def test_whoever_waits_too_long_for_room_is_told_so() -> None:
    zero = Zero(
        more=f"activation: {{holdTimeout: 20s}}\n{GATE.replace('timeout: 50s', 'timeout: 50s, maxRequests: 1')}"
    )
    tickets = zero.ask(4)
    zero.have(SMALL, engine(1))
    zero.passes(21.0)
    assert isinstance(zero.refusal(tickets[-1]), QueueTimeout)


def test_queued_requests_whose_last_engine_leaves_wait_for_the_next_before_those_who_come_later() -> None:
    zero = Zero(small=[engine(1)], more=f"{ACTIVATION}\n{GATE}")
    running = zero.ask(2)
    queued = zero.ask(2)
    assert {zero.core.state_of(one) for one in queued} == {RequestState.QUEUED}
    zero.have(SMALL, engine(1, draining=True))
    assert {zero.core.state_of(one) for one in queued} == {RequestState.AWAITING_ENGINE}
    later = zero.ask(1)
    for one in running:
        zero.finish(one)
    assert set(zero.order) == set(running)
    zero.have(SMALL, engine(2))
    assert zero.order[2:] == queued
    zero.finish(queued[0])
    assert zero.order[4:] == later


@pytest.mark.parametrize("stays", [5.0, 55.0])
def test_engines_that_come_and_go_do_not_keep_a_request_longer_than_its_gateway_waits(stays: float) -> None:
    """``stays``: how long the engine is there each time, too full to take it."""
    zero = Zero(more=f"{ACTIVATION}\n{GATE}")
    zero.ask(4)
    for _ in range(10):
        zero.have(SMALL, engine(1))
        zero.passes(stays)
        zero.have(SMALL)
        zero.passes(20.0)
    assert set(zero.held) <= set(zero.ends)
    assert all(zero.took_s[ticket] <= longest_s for ticket, longest_s in zero.held.items())


def test_a_request_for_an_adapter_waits_for_the_engine_and_then_for_its_adapter() -> None:
    zero = Zero(more=f"{ACTIVATION}\n{LOADS}")
    (ticket,) = zero.ask(model="sql")
    assert zero.awaits(ticket).longest_s == 70.0
    zero.passes(10.0)
    zero.have(SMALL, engine(1))
    assert zero.went(ticket)
    end = zero.ends[ticket]
    assert isinstance(end, Decision)
    assert end.assignment.adapter == "sql"
    assert end.history.held_s == 10.0


def test_an_adapter_that_is_not_loaded_any_more_when_the_engines_are_gone_is_waited_for_again() -> None:
    zero = Zero(small=[engine(1)], more=f"{ACTIVATION}\n{LOADS}")
    zero.perform = lambda effects: Zero.perform(zero, [one for one in effects if type(one).__name__ != "LoadAdapter"])  # type: ignore[method-assign]
    (ticket,) = zero.ask(model="sql")
    assert zero.core.state_of(ticket) is RequestState.LOADING
    zero.passes(4.0)
    zero.have(SMALL)
    assert zero.core.state_of(ticket) is RequestState.AWAITING_ENGINE
    zero.passes(20.0)
    del zero.perform
    zero.have(SMALL, engine(2))
    assert zero.went(ticket) == "10.0.0.2:8000"
    end = zero.ends[ticket]
    assert isinstance(end, Decision)
    assert end.history.waits == {RequestState.LOADING: 4.0, RequestState.AWAITING_ENGINE: 20.0}


def test_both_stages_are_waited_for() -> None:
    zero = Zero(more=PAIRS)
    (ticket,) = zero.ask()
    zero.have(SMALL, PREFILL)
    zero.have(SMALL, DECODE)
    (behind,) = zero.ask()
    assert zero.ends == {}
    zero.have(SMALL, PREFILL, DECODE)
    assert zero.order == [ticket, behind]


def test_a_server_that_has_lost_its_prefill_engines_serves_whole_as_ever() -> None:
    zero = Zero(small=[PREFILL, DECODE], more=PAIRS)
    zero.have(SMALL, DECODE)
    (ticket,) = zero.ask()
    assert zero.went(ticket) == "10.0.0.2:8000"


def test_a_server_that_has_lost_its_decode_engines_is_at_zero() -> None:
    zero = Zero(small=[PREFILL, DECODE], more=PAIRS)
    zero.have(SMALL, PREFILL)
    zero.ask()
    assert zero.waiting() == {SMALL: 1}


def test_of_weighted_servers_those_with_engines_are_preferred() -> None:
    zero = Zero(big=[engine(9)], weights={SMALL: 99, BIG: 1})
    tickets = zero.ask(50)
    assert {zero.went(one) for one in tickets} == {"10.0.0.9:8000"}


def test_a_server_without_activation_keeps_its_share_of_503() -> None:
    zero = Zero(big=[engine(9)], weights=BOTH, more={BIG: ACTIVATION})
    tickets = zero.ask(100)
    refused = [one for one in tickets if not isinstance(zero.ends[one], Decision)]
    assert 20 < len(refused) < 80


def test_a_held_request_goes_to_a_sibling_that_gets_an_engine_first() -> None:
    zero = Zero(weights={SMALL: 99, BIG: 1})
    tickets = zero.ask(5)
    assert zero.waiting() == {SMALL: 5}
    zero.passes(5.0)
    zero.have(BIG, engine(9))
    assert zero.order == tickets
    assert {zero.went(one) for one in tickets} == {"10.0.0.9:8000"}
    assert {end.server for end in zero.ends.values() if isinstance(end, Decision)} == {BIG}
    # nobody waits for the other one any more: what it takes one day is no start
    zero.passes(50.0)
    zero.have(SMALL, engine(1))
    assert zero.starts() == []


def test_the_sibling_may_be_one_that_a_new_configuration_brings() -> None:
    zero = Zero()
    (ticket,) = zero.ask()
    zero.servers[BIG] = [engine(9)]
    zero.weights = {BIG: 1}
    zero.apply()
    assert zero.went(ticket) == "10.0.0.9:8000"


def test_a_server_that_an_http_route_has_chosen_is_the_one_that_serves() -> None:
    zero = Zero(weights=BOTH)
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    body = json.dumps({"model": "chat", "messages": []}).encode()
    own, effects = zero.core.arrive(zero.core.builder.build_for_server(SMALL, head, body), zero.now)
    zero.perform(effects)
    zero.have(BIG, engine(9))
    assert own.ticket not in zero.ends
    zero.have(SMALL, engine(1))
    assert zero.went(own.ticket) == "10.0.0.1:8000"


def test_what_a_gateway_has_limited_to_some_addresses_waits_for_no_new_one() -> None:
    zero = Zero()
    (ticket,) = zero.ask(attachment=GatewayProperties(subset=["10.0.0.7:8000"]))
    assert isinstance(zero.refusal(ticket), NoEndpoint)


def test_limits_are_charged_once_and_settled() -> None:
    zero = Zero()
    zero.ask(3)
    (bucket,) = zero.core.admission.limits._buckets.values()
    assert bucket.level == pytest.approx(9997)
    zero.passes(61.0)
    assert bucket.level == pytest.approx(10000)


def test_it_is_explained_what_a_request_would_wait_for() -> None:
    zero = Zero()
    zero.ask(2)
    zero.passes(10.0)
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}).encode()
    found = zero.core.explain(zero.core.builder.build_by_model(head, body), zero.now)
    assert found.addresses == ()
    assert found.waits == (
        "no engine is there; the request would wait for one, up to 60s; 2 wait; an engine is expected in 20 s"
    )


STEPS = ["ask", "ask", "ask", "engines", "engines", "leave", "finish", "finish", "time", "reload"]


@pytest.mark.parametrize("gate", ["", GATE])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_comes_and_goes_each_request_gets_one_answer_and_none_is_lost(seed: int, gate: str) -> None:
    """Arrivals, engines that come, drain and leave, clients that leave, deadlines and new configurations, in any
    order.
    """
    pick = random.Random(seed)
    zero = Zero(more=f"{ACTIVATION}\n{gate}", weights=BOTH)
    asked: list[str] = []
    left: set[str] = set()
    for _ in range(120):
        waiting = [one for one in asked if one not in zero.ends and one not in left]
        running = [one for one in zero.order if zero.core.state_of(one) is RequestState.RUNNING]
        match pick.choice(STEPS):
            case "ask":
                asked += zero.ask(pick.randint(1, 4), urgency=pick.choice(["", "high"]))
            case "engines":
                server = pick.choice([SMALL, BIG])
                first = 1 if server == SMALL else 11
                draining = pick.choice([True, False])
                zero.have(server, *(engine(first + one, draining=draining) for one in range(pick.randint(0, 2))))
            case "leave" if waiting:
                left.add(gone := pick.choice(waiting))
                zero.leave(gone)
            case "finish" if running:
                zero.finish(pick.choice(running))
            case "time":
                zero.passes(pick.choice([0.1, 1.0, 3.0, 30.0]))
            case "reload":
                zero.weights = pick.choice([BOTH, {SMALL: 3, BIG: 1}])
                zero.more = dict.fromkeys((SMALL, BIG), f"{ACTIVATION}\n{pick.choice(['', gate])}")
                zero.apply()
        serving = any("draining" not in one for engines in zero.servers.values() for one in engines)
        # nobody waits for an engine while one is there
        assert not serving or not zero.waiting()
        assert not zero.sent_to_leaving
    # 50 s is the shortest that any of them may wait: for room; nobody is refused before
    refused = [one for one, end in zero.ends.items() if not isinstance(end, Decision)]
    assert all(zero.took_s[one] >= 50.0 for one in refused)
    # an engine comes that has room for all, and each gets its answer
    zero.more = dict.fromkeys((SMALL, BIG), ACTIVATION)
    zero.have(SMALL, engine(1))
    assert set(zero.ends) == set(asked) - left
    assert zero.waiting() == {}
    late = {
        one: (took_s, zero.held[one]) for one, took_s in zero.took_s.items() if took_s > zero.held.get(one, 1e9) + 1e-6
    }
    assert late == {}
