# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for an adapter: what engines are asked for, who goes when, and what is remembered of failures."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, LoadAdapter, RequestHeld, RequestRefused, WakeAt
from extproc.core.peer_events import AdapterChanged, EngineReported, EventBatch
from extproc.core.request_record import AdapterLoadResult, Outcome, RequestHead
from extproc.core.request_states import RequestState
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.engines.metrics import EngineReport, LoraState
from extproc.refusals import AdapterBroken, AdapterUnavailable, Refusal
from tests.extproc.scenes import configuration, endpoints, request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.effects import Effect
    from extproc.endpoints.adapter_slots import Change

SERVER = "default/llama"
A, B = "10.0.0.1:8000", "10.0.0.2:8000"
NAMES = ["sql", "law", "art", "bio"]
ROUTE = "loraAdapters: [sql, law, art, bio]"


def server_of(addresses: Sequence[str], *, slots: int = 1, more: str = "", scrape: str = "0s") -> str:
    """A ModelServer's spec."""
    adapters = ", ".join(f"{{name: {one}, source: /{one}}}" for one in NAMES)
    loading = f"adapterLoading: {{slots: {slots}, timeout: 10s, adapters: [{adapters}]}}"
    return f"scrapeInterval: {scrape}\n{loading}\n{endpoints(*addresses)}\n{more}"


GATE = """
flowControl:
  saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}
  timeout: 20s
"""


class Shell:
    """Does what the core asks for, by hand: ``loads`` are those that have not ended."""

    def __init__(
        self, *, engines: int = 2, slots: int = 1, more: str = "", machine: str | None = None, scrape: str = "0s"
    ) -> None:
        server = server_of((A, B)[:engines], slots=slots, more=more, scrape=scrape)
        self.core = Core(
            configuration(servers={"llama": server}, routes={"chat": ROUTE}),
            rng=random.Random(0),
            ticket_prefix="t",
            machine=machine,
        )
        self.now = 100.0
        self.loads: list[LoadAdapter] = []
        self.ends: dict[str, Decision | RequestRefused] = {}
        self.told: list[AdapterChanged] = []
        self.wake_at_s: float | None = None

    @property
    def asked(self) -> list[tuple[str, str, str | None]]:
        return [(one.address, one.adapter, one.unload[0] if one.unload else None) for one in self.loads]

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case LoadAdapter():
                    self.loads.append(effect)
                case Decision() | RequestRefused():
                    assert effect.ticket not in self.ends
                    self.ends[effect.ticket] = effect
                case Broadcast(AdapterChanged() as change):
                    self.told.append(change)
                case WakeAt():
                    self.wake_at_s = min(effect.at_s, self.wake_at_s or effect.at_s)

    def ask(self, model: str, count: int = 1) -> list[str]:
        tickets = []
        for _ in range(count):
            own, effects = self.core.arrive(request(self.core, model=model), self.now)
            tickets.append(own.ticket)
            self.perform([own, *effects])
        self.passes(0.0)
        return tickets

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wake_at_s is not None and self.wake_at_s <= until:
            self.now, self.wake_at_s = max(self.now, self.wake_at_s), None
            self.perform(self.core.tick(self.now))
        self.now = until

    def loaded(self, problem: AdapterLoadProblem | None = None, *, message: str = "") -> None:
        """The oldest load ends."""
        ask = self.loads.pop(0)
        result = AdapterLoadResult(ask.server, ask.address, ask.adapter, problem, message, unloaded=ask.unload)
        self.perform(self.core.on_work_result(result, self.now))
        self.passes(0.0)

    def finish(self, ticket: str) -> None:
        self.perform(self.core.on_stream_closed(ticket, self.now))
        self.passes(0.0)

    def serves(self, model: str) -> list[str]:
        """Requests for the adapter, from their arrival to their dispatch."""
        tickets = self.ask(model)
        self.loaded()
        assert self.went(tickets[0])
        return tickets

    def went(self, ticket: str) -> str:
        end = self.ends[ticket]
        assert isinstance(end, Decision), end
        return end.assignment.endpoint.address

    def refusal(self, ticket: str) -> object:
        end = self.ends[ticket]
        assert isinstance(end, RequestRefused)
        return end.refusal

    def says(self, address: str, *, models: set[str] | None = None, active: set[str] | None = None) -> None:
        listed = None if models is None else frozenset({"m", *models})
        report = EngineReport(
            waiting=0, running=len(active or ()), loras=None if active is None else LoraState(frozenset(active))
        )
        self.perform(self.core.on_engine_report(EngineReported(SERVER, address, report, models=listed), self.now))
        self.passes(0.0)

    def hears(self, address: str, adapter: str, change: Change, *more: tuple[str, Change]) -> None:
        events = [AdapterChanged(SERVER, address, *one) for one in ((adapter, change), *more)]
        self.perform(self.core.apply_peer_batch(EventBatch("p", list(events)), self.now))
        self.passes(0.0)


def test_siblings_wait_for_one_load_and_go_with_it() -> None:
    shell = Shell()
    tickets = shell.ask("sql", 3)
    assert shell.asked == [(A, "sql", None)]
    assert [shell.core.state_of(one) for one in tickets] == [RequestState.LOADING] * 3
    shell.passes(2.0)
    shell.loaded()
    assert [shell.went(one) for one in tickets] == [A] * 3
    assert {end.history.waits[RequestState.LOADING] for end in shell.ends.values() if isinstance(end, Decision)} == {
        2.0
    }
    # it is there now: the next one goes at once
    assert shell.went(shell.ask("sql")[0]) == A
    assert shell.loads == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/x"])
def test_who_may_not_use_an_adapter_has_it_loaded_by_no_path(path: str) -> None:
    policy = """
apiVersion: attache.dev/v1alpha1
kind: ModelAccessPolicy
metadata: {name: base}
spec: {rules: [{from: [{tenants: [acme]}]}]}
"""
    snapshot = configuration(servers={"llama": server_of([A])}, routes={"chat": ROUTE}, others=policy)
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    head = RequestHead("POST", path, {"x-attache-tenant": "acme", "x-gateway-model-name": "sql"}, has_body=True)
    for server in ("", SERVER):
        for model in ("sql", "unknown", "sql\n", "SQL"):
            body = json.dumps({"model": model, "messages": []}).encode()
            with pytest.raises(Refusal):
                core.builder.arrival_builder(server=server)(head, body)
    slots = core.pools[SERVER].slots
    assert slots is not None
    assert not slots.waiting


def test_names_that_nobody_declared_load_nothing() -> None:
    shell = Shell()
    for number in range(1000):
        with pytest.raises(Refusal):
            shell.ask(f"unknown-{number}")
    assert shell.asked == []


def test_a_request_for_the_base_model_never_waits() -> None:
    shell = Shell()
    shell.ask("sql")
    assert shell.went(shell.ask("m")[0])


def test_an_engine_with_a_free_slot_and_less_to_do_loads() -> None:
    shell = Shell()
    shell.ask("m")
    busy = shell.went("t-1")
    shell.ask("sql")
    assert shell.asked == [(B if busy == A else A, "sql", None)]


def test_loads_are_spread_over_engines() -> None:
    shell = Shell(slots=2)
    for name in ("sql", "law", "art"):
        shell.ask(name)
    assert [address for address, _, _ in shell.asked] == [A, B, A]


def test_a_new_adapter_serves_those_who_waited_before_it_makes_room_for_another() -> None:
    shell = Shell(engines=1)
    first, second = shell.ask("sql")[0], shell.ask("law")[0]
    shell.loaded()
    assert shell.went(first) == A
    assert shell.loads == []
    shell.finish(first)
    assert shell.asked == [(A, "law", "sql")]
    shell.loaded()
    assert shell.went(second) == A


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    shell = Shell(engines=1, slots=2)
    for name in ("sql", "law"):
        (ticket,) = shell.serves(name)
        shell.finish(ticket)
        shell.passes(1.0)
    (ticket,) = shell.ask("sql")
    shell.finish(ticket)
    shell.ask("art")
    assert shell.asked == [(A, "art", "law")]


def test_an_adapter_in_use_gets_nothing_new_after_a_while_and_makes_room_when_it_is_idle() -> None:
    shell = Shell(engines=1)
    (running,) = shell.serves("sql")
    (waiting,) = shell.ask("law")
    (early,) = shell.ask("sql")
    assert shell.went(early) == A
    shell.passes(3.0)
    (late,) = shell.ask("sql")
    assert shell.core.state_of(late) is RequestState.LOADING
    shell.finish(running)
    assert shell.loads == []
    shell.finish(early)
    assert shell.asked == [(A, "law", "sql")]
    shell.loaded()
    assert shell.went(waiting) == A
    shell.finish(waiting)
    assert shell.asked == [(A, "sql", "law")]
    shell.loaded()
    assert shell.went(late) == A


def test_an_adapter_that_other_gateways_use_is_not_unloaded() -> None:
    shell = Shell(engines=1)
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    shell.says(A, active={"sql"})
    shell.ask("law")
    assert shell.loads == []
    shell.says(A, active=set())
    assert shell.asked == [(A, "law", "sql")]


def test_while_all_slots_are_in_use_a_request_waits_and_is_told_to_come_back() -> None:
    shell = Shell(engines=1)
    shell.serves("sql")
    (ticket,) = shell.ask("law")
    shell.passes(9.9)
    assert ticket not in shell.ends
    shell.passes(0.2)
    refusal = shell.refusal(ticket)
    assert isinstance(refusal, AdapterUnavailable)
    assert "all slots are in use" in refusal.message
    assert refusal.retry_after_s == 5
    # what was to make room stays, and serves
    assert shell.went(shell.ask("sql")[0]) == A


def test_a_client_that_leaves_costs_nothing_and_the_others_go() -> None:
    shell = Shell()
    first, second = shell.ask("sql", 2)
    shell.perform(shell.core.on_disconnect(first, shell.now))
    shell.loaded()
    assert first not in shell.ends
    assert shell.went(second) == A
    assert shell.core.state_of(first) is RequestState.ABSENT


def test_a_load_that_fails_is_tried_at_another_engine() -> None:
    shell = Shell()
    (ticket,) = shell.ask("sql")
    shell.loaded(AdapterLoadProblem.UNREACHABLE)
    assert shell.asked == [(B, "sql", None)]
    shell.loaded()
    assert shell.went(ticket) == B


def test_if_no_engine_answers_the_client_may_come_back_soon() -> None:
    shell = Shell()
    (ticket,) = shell.ask("sql")
    shell.loaded(AdapterLoadProblem.UNREACHABLE)
    shell.loaded(AdapterLoadProblem.UNREACHABLE)
    assert isinstance(shell.refusal(ticket), AdapterUnavailable)
    shell.passes(2.5)
    shell.ask("sql")
    assert len(shell.loads) == 1


def test_weights_that_two_engines_cannot_use_are_not_asked_for_again_for_a_while() -> None:
    shell = Shell()
    tickets = shell.ask("sql", 2)
    shell.loaded(AdapterLoadProblem.BROKEN)
    shell.loaded(AdapterLoadProblem.BROKEN)
    assert all(isinstance(shell.refusal(one), AdapterBroken) for one in tickets)
    (again,) = shell.ask("sql")
    assert isinstance(shell.refusal(again), AdapterBroken)
    assert shell.loads == []
    assert shell.went(shell.serves("law")[0])
    shell.passes(10.5)
    shell.ask("sql")
    assert len(shell.loads) == 1


def test_an_engine_without_room_tells_how_many_it_holds() -> None:
    shell = Shell(engines=1, slots=9)
    pool = shell.core.pools[SERVER]
    assert pool.slots is not None
    pool.slots.slots = None
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    shell.ask("law")
    assert shell.asked == [(A, "law", None)]
    shell.loaded(AdapterLoadProblem.BUSY)
    shell.passes(0.6)
    assert shell.asked == [(A, "law", "sql")]


def test_what_an_engine_lists_corrects_what_is_believed() -> None:
    shell = Shell(engines=1)
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    # asked for before the load ended
    shell.says(A, models=set())
    assert shell.went(shell.ask("sql")[0]) == A
    shell.passes(3.0)
    shell.says(A, models=set())
    (late,) = shell.ask("sql")
    assert shell.core.state_of(late) is RequestState.LOADING
    # somebody else loads it
    shell.says(A, models={"sql"})
    assert shell.went(late) == A


def test_an_engine_that_answers_404_has_lost_the_adapter() -> None:
    shell = Shell(engines=1)
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    outcome = Outcome(ticket, 404, A, 0.1, 0.1, None, None, None)
    shell.perform(shell.core.on_outcome(outcome, shell.now))
    shell.ask("sql")
    assert shell.asked == [(A, "sql", None)]


def test_an_engine_that_has_restarted_has_none() -> None:
    shell = Shell(engines=1)
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    said = EngineReported(SERVER, A, EngineReport(waiting=0), has_restarted=True)
    shell.perform(shell.core.on_engine_report(said, shell.now))
    shell.ask("sql")
    assert shell.asked == [(A, "sql", None)]


def test_a_second_copy_is_loaded_where_an_engine_has_far_less_to_do_and_nobody_waits_for_it() -> None:
    shell = Shell()
    shell.serves("sql")
    tickets = shell.ask("sql", 4)
    assert shell.loads == []
    tickets += shell.ask("sql")
    assert shell.asked == [(B, "sql", None)]
    assert {shell.went(one) for one in tickets} == {A}
    shell.loaded()
    assert shell.went(shell.ask("sql")[0]) == B


def test_after_its_adapter_a_request_waits_for_its_turn() -> None:
    shell = Shell(engines=1, more=GATE)
    (running,) = shell.ask("m")
    (ticket,) = shell.ask("sql")
    shell.loaded()
    assert shell.core.state_of(ticket) is RequestState.QUEUED
    shell.passes(1.0)
    shell.finish(running)
    end = shell.ends[ticket]
    assert isinstance(end, Decision)
    assert end.history.waits[RequestState.QUEUED] == pytest.approx(1.0)


def test_a_request_whose_turn_comes_when_its_adapter_is_gone_waits_for_it_again() -> None:
    shell = Shell(engines=1, more=GATE)
    (running,) = shell.ask("m")
    (ticket,) = shell.ask("sql")
    shell.loaded()
    shell.passes(3.0)
    shell.says(A, models=set())
    shell.finish(running)
    assert shell.core.state_of(ticket) is RequestState.LOADING
    shell.passes(1.0)
    shell.loaded()
    assert shell.went(ticket) == A
    end = shell.ends[ticket]
    assert isinstance(end, Decision)
    assert end.history.waits == pytest.approx({RequestState.LOADING: 1.0, RequestState.QUEUED: 3.0})


def test_when_the_pause_of_the_engine_with_the_adapter_ends_one_request_tries_it_and_the_others_wait_on() -> None:
    shell = Shell()
    (first,) = shell.serves("sql")
    ill = shell.went(first)
    shell.perform(shell.core.on_outcome(Outcome(first, 503, ill, 0.1, None, None, None, None), shell.now))
    shell.finish(first)
    tickets = shell.ask("sql", 3)
    assert shell.asked == [(B if ill == A else A, "sql", None)]
    shell.passes(2.0)
    assert [shell.core.state_of(one) for one in tickets] == [
        RequestState.RUNNING,
        RequestState.LOADING,
        RequestState.LOADING,
    ]
    shell.loaded()
    assert [shell.went(one) == ill for one in tickets] == [True, False, False]


def test_other_processes_hear_that_an_adapter_makes_room_before_it_is_unloaded() -> None:
    shell = Shell(engines=1, machine="here")
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    shell.told.clear()
    shell.ask("law")
    assert [(one.adapter, one.change) for one in shell.told][:1] == [("sql", "closed")]
    assert shell.loads == []
    shell.passes(0.2)
    assert shell.asked == [(A, "law", "sql")]
    shell.loaded()
    changes = list(dict.fromkeys((one.adapter, one.change) for one in shell.told))
    assert changes == [("sql", "closed"), ("sql", "gone"), ("law", "loading"), ("law", "loaded")]


def test_what_another_process_does_is_seen_here() -> None:
    shell = Shell(machine="here")
    shell.hears(B, "sql", "loading")
    # not a second copy elsewhere
    (ticket,) = shell.ask("sql")
    assert shell.asked == [(B, "sql", None)]
    shell.hears(B, "sql", "loaded")
    assert shell.went(ticket) == B
    shell.hears(B, "sql", "closed")
    (late,) = shell.ask("sql")
    assert shell.core.state_of(late) is RequestState.LOADING
    # if that process is gone, its word does not hold for ever
    shell.loads.clear()
    shell.passes(3.0)
    assert shell.went(late) in {A, B}


def test_of_two_processes_that_want_one_slot_the_slower_looks_anew() -> None:
    shell = Shell(engines=1, machine="here")
    (ticket,) = shell.serves("sql")
    shell.finish(ticket)
    shell.ask("law")
    # while ours waits for the others to hear that sql makes room, another one takes the slot
    shell.hears(A, "sql", "gone", ("art", "loading"))
    shell.hears(A, "art", "loaded")
    shell.passes(0.05)
    assert shell.loads == []
    shell.passes(0.3)
    assert shell.asked == [(A, "law", "art")]


def test_what_another_process_unloads_is_not_loaded_there_meanwhile() -> None:
    shell = Shell(engines=1, slots=2, machine="here")
    shell.hears(A, "sql", "gone")
    shell.ask("sql")
    shell.passes(0.4)
    assert shell.loads == []
    shell.passes(1.0)
    assert shell.asked == [(A, "sql", None)]


def test_a_server_that_leaves_the_configuration_refuses_those_who_wait() -> None:
    shell = Shell()
    (ticket,) = shell.ask("sql")
    shell.perform(shell.core.apply(load_snapshot({}), shell.now))
    assert isinstance(shell.ends[ticket], RequestRefused)
    shell.loaded()
    assert shell.core.count_requests(*RequestState) == 0


def test_explain_says_where_an_adapter_is_or_would_be_loaded() -> None:
    shell = Shell(engines=1)

    def said(model: str) -> str:
        body = json.dumps({"model": model, "messages": []}).encode()
        head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
        return shell.core.explain(shell.core.builder.build_by_model(head, body), shell.now).adapter

    assert said("m") == ""
    assert said("sql") == f"'sql' is on no engine; {A} would load it"
    shell.ask("sql")
    assert said("sql") == f"'sql' is on no engine; {A} is loading it"
    shell.loaded()
    assert said("sql") == f"'sql' is loaded on {A}"
    assert said("law") == f"'law' is on no engine; {A} would load it in place of 'sql', once no request uses that"


def test_after_a_start_engines_say_first_what_they_have() -> None:
    shell = Shell(scrape="200ms")
    (ticket,) = shell.ask("sql")
    shell.says(A, models=set())
    shell.says(A, active=set())
    assert shell.loads == []
    shell.says(B, models={"sql"})
    assert shell.went(ticket) == B
    # one that says nothing is not waited for
    silent = Shell(scrape="200ms")
    silent.ask("sql")
    silent.passes(0.9)
    assert silent.loads == []
    silent.passes(0.2)
    assert silent.asked == [(A, "sql", None)]


def test_a_queued_request_whose_adapter_leaves_is_answered_within_what_its_gateway_was_told() -> None:
    shell = Shell(engines=1, more=GATE + "  noEndpointTimeout: 20s\n")
    (running,) = shell.ask("sql")
    shell.loaded()
    held, effects = shell.core.arrive(request(shell.core, model="sql"), shell.now)
    assert isinstance(held, RequestHeld)
    asked_at_s = shell.now
    shell.perform(effects)
    shell.passes(19.0)
    models = EngineReported(SERVER, A, EngineReport(running=1), models=frozenset({"m"}))
    shell.perform(shell.core.on_engine_report(models, shell.now))
    shell.finish(running)
    assert shell.core.state_of(held.ticket) is RequestState.LOADING
    while held.ticket not in shell.ends:
        shell.passes(0.1)
    assert shell.now - asked_at_s <= held.longest_s == 30.0
