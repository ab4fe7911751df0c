# SPDX-License-Identifier: Apache-2.0
"""The table of states, and the core held against it: whatever happens in whatever order, nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from extproc.core.core import Core
from extproc.core.effects import AskGuard, AskLimits
from extproc.core.peer_events import (
    SILENCE_S,
    AdapterChanged,
    EngineReported,
    ProcessAlive,
    RequestEnded,
    RequestStarted,
)
from extproc.core.request_record import RequestHead
from extproc.core.request_states import TRANSITIONS, IllegalEvent, RequestEvent, RequestState
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.engines.metrics import EngineReport
from extproc.refusals import Refusal
from tests.examples import examples
from tests.extproc.core.life import GUARD_ANSWERS, Life
from tests.extproc.core.setting import (
    ACTIVATIONS,
    GATES,
    GUARDS,
    LEAVING,
    LEGAL,
    LIMITS,
    MOST_ENDED,
    ONE,
    SERVER,
    TWO,
    body,
    prefilled,
    snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.admission_pipeline import Answer
    from extproc.endpoints.adapter_slots import Change

MODELS = st.sampled_from(["m", "m", "sql", "law"])
WHO = {"tenant": st.sampled_from("ab"), "urgency": st.sampled_from(["high", "", "low"])}
PREFILL_FAILURES: dict[str, dict[str, object]] = {
    "late": {"answered_at_s": -1000.0},
    "unreachable": {"failure": "unreachable"},
    "error": {"status": 500, "body": b""},
    "refused": {"status": 400, "body": b""},
}
# Events that need nothing beside a ticket.
SELF_CONTAINED = [RequestEvent.LEFT, RequestEvent.FINISHED, RequestEvent.OUTCOME, RequestEvent.STARTED_ELSEWHERE]


def test_the_table_has_every_state_and_every_event() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    assert {event for events in TRANSITIONS.values() for event in events} == set(RequestEvent)


def test_every_state_can_be_reached_and_left() -> None:
    successors = {state: {one for to in TRANSITIONS[state].values() if to for one in to} for state in RequestState}
    assert set().union(*successors.values()) == set(RequestState)
    assert all(to - {state} for state, to in successors.items())


def test_an_illegal_event_names_the_request_and_changes_nothing() -> None:
    core = Core(snapshot(), rng=random.Random(0), ticket_prefix="t")
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    own, _ = core.arrive(core.builder.build_by_model(head, body(1, stream=False)), 0.0)
    with pytest.raises(IllegalEvent, match=r"ANSWERED is not legal while request t-1 is in state RUNNING"):
        core.resume(own.ticket, None, 0.0)
    assert core.state_of(own.ticket) is RequestState.RUNNING


class Requests(Life, RuleBasedStateMachine):
    """Whatever may happen, in any order."""

    def __init__(self, reached: Counter[tuple[RequestState, RequestEvent]], pairs: str) -> None:
        RuleBasedStateMachine.__init__(self)
        Life.__init__(self, reached, pairs)

    @initialize(gate=st.sampled_from(GATES), limits=st.sampled_from(LIMITS), tokens=st.booleans())
    def a_configuration_is_there(self, gate: str, limits: str, *, tokens: bool) -> None:
        self.configure(TWO, gate, limits)
        self.set_feed(is_there=tokens)

    @initialize(count=st.integers(0, 8), goes_on=st.booleans())
    def requests_are_there(self, count: int, *, goes_on: bool) -> None:
        self.arrive(count)
        if goes_on:
            self.all_that_was_asked_for_comes()

    @rule(words=st.integers(1, 3000), stream=st.booleans(), model=MODELS, **WHO)
    def a_request_arrives(self, words: int, tenant: str, urgency: str, model: str, *, stream: bool) -> None:
        self.arrive(1, words=words, tenant=tenant, urgency=urgency, stream=stream, model=model)

    @rule(count=st.integers(2, 5), model=MODELS, **WHO)
    def many_arrive_and_get_what_they_ask_for(self, count: int, tenant: str, urgency: str, model: str) -> None:
        self.arrive(count, words=20, tenant=tenant, urgency=urgency, stream=False, model=model)
        self.all_that_was_asked_for_comes()
        self.pass_time(0.0)

    @precondition(Life.asking)
    @rule(data=st.data(), kind=st.sampled_from(["granted", "refused", "nobody"]))
    def what_was_asked_for_comes(self, data: st.DataObject, kind: str) -> None:
        self.answer(self.some_ticket(data, among=self.asking()), kind)

    @precondition(Life.asking)
    @rule(data=st.data())
    def a_client_leaves_and_the_answer_comes_too_late(self, data: st.DataObject) -> None:
        ticket = self.some_ticket(data, among=self.asking())
        ask = self.pending.pop(ticket)
        self.happens(RequestEvent.LEFT, ticket, lambda: self.core.on_disconnect(ticket, self.now))
        late = GUARD_ANSWERS["granted"] if isinstance(ask, AskGuard) else [1, 2]
        self.resume(ticket, self.grant(ask) if isinstance(ask, AskLimits) else late)
        assert self.core.state_of(ticket) is RequestState.ABSENT

    @precondition(lambda self: self.own)
    @rule(data=st.data())
    def what_nobody_asked_for_is_a_mistake(self, data: st.DataObject) -> None:
        ticket = self.some_ticket(data, among=self.own)
        state = self.core.state_of(ticket)
        answer: Answer = (
            [1, 2]
            if state in {RequestState.ASKING_LIMITS, RequestState.ASKING_GUARD}
            else Refusal("")
            if state is RequestState.ASKING_TOKENS
            else None
        )
        if state is not RequestState.ABSENT:
            with pytest.raises(IllegalEvent):
                self.core.resume(ticket, answer, self.now)
            assert self.core.state_of(ticket) is state

    @rule(data=st.data(), events=st.lists(st.sampled_from(SELF_CONTAINED), min_size=1, max_size=8))
    def something_happens_to_a_request(self, data: st.DataObject, events: list[RequestEvent]) -> None:
        """Whatever its state is, and whether it can still matter or comes twice or too late."""
        for event in events:
            ticket = self.some_ticket(data)
            if ticket in self.elsewhere and event in {RequestEvent.LEFT, RequestEvent.FINISHED}:
                # only its own worker can end it
                self.hear(data.draw(st.sampled_from("pq")), RequestEnded(ticket))
            else:
                self.make(event, ticket, *data.draw(st.sampled_from([(0, None), (200, None), (200, 70), (503, None)])))

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(
        endpoints=st.sampled_from(["", ONE, TWO, LEAVING]),
        gate=st.sampled_from(GATES),
        limits=st.sampled_from(LIMITS),
        activation=st.sampled_from(ACTIVATIONS),
        guard=st.sampled_from(GUARDS),
    )
    def the_configuration_changes(self, endpoints: str, gate: str, limits: str, activation: str, guard: str) -> None:
        self.configure(endpoints, gate, limits, activation, guard)

    @rule(is_there=st.booleans())
    def a_feed_comes_or_goes(self, *, is_there: bool) -> None:
        self.set_feed(is_there=is_there)

    @rule(waiting=st.integers(0, 3), restarted=st.booleans(), name=st.sampled_from(["", "p"]))
    def an_engine_reports(self, waiting: int, name: str, *, restarted: bool) -> None:
        report = EngineReport(waiting=waiting, running=1)
        said = EngineReported(SERVER, "10.0.0.1:8000", report, has_restarted=restarted)
        if name:
            self.hear(name, said)
        else:
            self.happens(None, "", lambda: self.core.on_engine_report(said, self.now))
            self.must_wake()

    @precondition(lambda self: self.legs or self.beside)
    @rule(data=st.data(), kind=st.sampled_from(["prefilled", "prefilled", *PREFILL_FAILURES]))
    def a_prefill_ends(self, data: st.DataObject, kind: str) -> None:
        ticket = data.draw(st.sampled_from(sorted({**self.legs, **self.beside})))
        done = prefilled(ticket, self.now)
        self.leg_ends(ticket, msgspec.structs.replace(done, **PREFILL_FAILURES.get(kind, {})))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), problem=st.sampled_from([None, None, *AdapterLoadProblem]))
    def a_load_ends(self, data: st.DataObject, problem: AdapterLoadProblem | None) -> None:
        self.load_ends(data.draw(st.sampled_from(self.loads)), problem)

    @rule(
        address=st.sampled_from(["10.0.0.1:8000", "10.0.0.2:8000"]), adapters=st.sets(st.sampled_from(["sql", "law"]))
    )
    def an_engine_lists_its_models(self, address: str, adapters: set[str]) -> None:
        """Whatever it lists: others may load and unload, too."""
        said = EngineReported(SERVER, address, EngineReport(), models=frozenset({"m", *adapters}))
        self.happens(None, "", lambda: self.core.on_engine_report(said, self.now))
        self.must_wake()

    @rule(
        address=st.sampled_from(["10.0.0.1:8000", "10.0.0.2:8000"]),
        adapter=st.sampled_from(["sql", "law", "unknown"]),
        change=st.sampled_from(["loading", "loaded", "closed", "gone"]),
    )
    def a_worker_changes_an_adapter(self, address: str, adapter: str, change: Change) -> None:
        self.hear("p", AdapterChanged(SERVER, address, adapter, change))

    @rule(name=st.sampled_from("pq"), words=st.integers(1, 500), model=MODELS, is_lost=st.booleans())
    def a_worker_sends_a_request(self, name: str, words: int, model: str, *, is_lost: bool) -> None:
        events = self.workers[name].starts(words, self.now, model)
        self.seen += [one.ticket for one in events if isinstance(one, RequestStarted)]
        self.deliver(name, events, is_lost=is_lost)

    @precondition(lambda self: any(worker.running for worker in self.workers.values()))
    @rule(data=st.data(), is_lost=st.booleans())
    def a_workers_request_ends(self, data: st.DataObject, *, is_lost: bool) -> None:
        name = data.draw(st.sampled_from([name for name, worker in self.workers.items() if worker.running]))
        ticket = data.draw(st.sampled_from(self.workers[name].running))
        self.deliver(name, self.workers[name].ends(ticket, self.now), is_lost=is_lost)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), name=st.sampled_from("pq"))
    def something_comes_again_or_from_the_wrong_worker(self, data: st.DataObject, name: str) -> None:
        self.hear(name, data.draw(st.sampled_from(self.batches))[1])

    @rule(name=st.sampled_from("pq"), is_restarted=st.booleans())
    def a_worker_says_what_it_runs(self, name: str, *, is_restarted: bool) -> None:
        self.hear(name, ProcessAlive([] if is_restarted else list(self.workers[name].running)))

    @rule(seconds=st.sampled_from([0.0, 1.0, SILENCE_S + 1]))
    def this_worker_says_what_it_runs(self, seconds: float) -> None:
        self.beat(seconds)

    @invariant()
    def everything_agrees(self) -> None:
        self.holds()

    def some_ticket(self, data: st.DataObject, *, among: Iterable[str] | None = None) -> str:
        """Of a state first, so that rare states are met often."""
        by_state: defaultdict[RequestState, list[str]] = defaultdict(list)
        for ticket in self.seen if among is None else among:
            by_state[self.core.state_of(ticket)].append(ticket)
        state = data.draw(st.sampled_from(sorted(by_state)))
        return data.draw(st.sampled_from(by_state[state]))

    def teardown(self) -> None:
        self.end()


@pytest.mark.parametrize(("pairs", "count"), [("", 600), ("Local", 300), ("Fail", 150), ("Beside", 150)])
def test_whatever_happens_nothing_is_left_behind(pairs: str, count: int) -> None:
    reached: Counter[tuple[RequestState, RequestEvent]] = Counter()
    run_state_machine_as_test(
        lambda: Requests(reached, pairs),
        # without shrinking, which takes minutes here; the failing steps are few enough to read
        settings=settings(
            phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=examples(count), stateful_step_count=40
        ),
    )
    assert set(reached) <= set(LEGAL)


@pytest.mark.parametrize(("state", "event"), LEGAL, ids=lambda one: one.name)
def test_every_event_that_is_legal_leaves_nothing_behind(state: RequestState, event: RequestEvent) -> None:
    reached: Counter[tuple[RequestState, RequestEvent]] = Counter()
    life = Life(reached, pairs="Fail" if state is RequestState.PREFILLING else "")
    try:
        ticket = in_state(life, state)
        assert life.core.state_of(ticket) is state
        make_happen(life, event, ticket)
        assert reached[state, event]
        life.holds()
    finally:
        life.end()


def in_state(life: Life, state: RequestState) -> str:
    """A request that has come into this state by the shortest way."""
    waits = state is RequestState.QUEUED
    has_engines = state is not RequestState.AWAITING_ENGINE
    limits = LIMITS[2 if state is RequestState.ASKING_LIMITS else 1]
    guard = GUARDS[1 if state is RequestState.ASKING_GUARD else 0]
    life.configure(TWO if has_engines else "", GATES[1], limits, ACTIVATIONS[0 if has_engines else 1], guard)
    life.set_feed(is_there=state is RequestState.ASKING_TOKENS)
    if state is RequestState.ABSENT:
        return "unknown"
    life.arrive(3 if waits else 1, model="sql" if state is RequestState.LOADING else "m")
    # whoever waits has been looked at
    life.pass_time(0.0)
    ticket = life.own[-1]
    if state is RequestState.SETTLED:
        life.make(RequestEvent.OUTCOME, ticket)
    elif state is RequestState.ENDED:
        life.make(RequestEvent.FINISHED, ticket)
    return ticket


def grant(life: Life, state: RequestState) -> None:
    match state:
        case RequestState.QUEUED:
            life.make(RequestEvent.FINISHED, life.decided[0])
        case RequestState.LOADING:
            life.load_ends(life.loads[0])
        case RequestState.PREFILLING:
            (ticket,) = life.legs
            life.leg_ends(ticket, prefilled(ticket, life.now))
        case RequestState.AWAITING_ENGINE:
            life.configure(TWO, GATES[1], LIMITS[1], ACTIVATIONS[1])
    life.pass_time(0.0)


def make_happen(life: Life, event: RequestEvent, ticket: str) -> None:
    match event:
        case RequestEvent.ARRIVED:
            life.arrive(1)
        case RequestEvent.ANSWERED if ticket in life.pending:
            life.answer(ticket, "granted")
        case RequestEvent.ANSWERED:
            life.resume(ticket, None)
        case RequestEvent.GRANTED:
            grant(life, life.core.state_of(ticket))
        case RequestEvent.ENGINES_GONE:
            life.configure(LEAVING, GATES[1], LIMITS[1], ACTIVATIONS[1])
            life.pass_time(0.0)
        case RequestEvent.GIVEN_UP:
            life.pass_time(20.0)
        case RequestEvent.FORGOTTEN:
            for _ in range(MOST_ENDED):
                life.arrive(1)
                life.make(RequestEvent.FINISHED, life.own[-1])
        case _:
            life.make(event, ticket)
