# SPDX-License-Identifier: Apache-2.0
"""The table of states, and the core held against it: whatever happens in whatever order, nothing is left behind."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.admission.limits import LocalLimits
from extproc.config.load import load
from extproc.core.core import Core
from extproc.core.effects import AskLimits, AskTokens, Decision, Effect, Hold, Refused, SettleGrant, Tell, WakeAt
from extproc.core.peer_events import SILENCE_S, EventBatch, PeerEvent
from extproc.core.states import TRANSITIONS, Event, IllegalEvent, State
from extproc.core.types import Head, Outcome
from extproc.errors import RateLimited, Refusal
from extproc.request.model import Api

if TYPE_CHECKING:
    from extproc.admission.limits import Grant
    from extproc.core.entering import Answer

LIMITS = "[{unit: hour, requests: 40, outputTokens: 4000}, {unit: hour, requests: 60, scope: Global}]"
FLOW_CONTROL = (
    "{saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 2}, maxRequests: 4, timeout: 20s}"
)
CONFIGURATION = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: m
  scrapeInterval: 0s
  kvEvents: {{port: 5557}}
  endpoints: {endpoints}
  {more}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: chat}}
spec:
  modelName: m
  rules: [{{targetModels: [{{modelServerName: llama}}]}}]
  rateLimits: {limits}
"""
ONE, TWO = "[{address: '10.0.0.1:8000'}]", "[{address: '10.0.0.1:8000'}, {address: '10.0.0.2:8000'}]"
CONFIGURATIONS = [
    CONFIGURATION.format(endpoints=endpoints, more=more, limits=limits).encode()
    for endpoints in ("[]", ONE, TWO)
    for more in ("", f"flowControl: {FLOW_CONTROL}")
    for limits in ("[]", LIMITS)
]
FULL = CONFIGURATIONS[-1]


def test_the_table_covers_every_pair_of_state_and_event() -> None:
    assert set(TRANSITIONS) == set(State)
    assert all(set(events) == set(Event) for events in TRANSITIONS.values())


def test_every_state_can_be_reached_and_left() -> None:
    successors = {state: {one for to in TRANSITIONS[state].values() if to for one in to} for state in State}
    assert set().union(*successors.values()) == set(State)
    assert all(to - {state} for state, to in successors.items())


def test_an_illegal_event_names_the_request_and_changes_nothing() -> None:
    core = Core(load({"a.yaml": CONFIGURATIONS[4]}), rng=random.Random(0), ticket_prefix="t")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = Head("POST", "/v1/chat/completions", {}, has_body=True)
    own, _ = core.arrive(core.intake.receive(Api.CHAT, head, body), 0.0)
    with pytest.raises(IllegalEvent, match=r"ANSWERED is not legal while request t-1 is in state RUNNING"):
        core.resume(own.ticket, None, 0.0)
    assert core.state_of(own.ticket) is State.RUNNING


class Requests(RuleBasedStateMachine):
    """A core with two peers and a store of global limits, and everything that may happen to its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = Core(load({"a.yaml": FULL}), rng=random.Random(0), ticket_prefix="t", machine="here")
        self.pool = self.core.pools["default/llama"]
        self.pools = [self.pool]
        self.pool.caches.set_feed_state(0, is_whole=True)
        self.store = LocalLimits()
        self.unsettled_grants: list[Grant] = []
        # tickets of requests whose streams are open, and of all that ever were
        self.pending: dict[str, AskLimits | AskTokens | Hold] = {}
        self.decided: list[str] = []
        self.seen: list[str] = ["unknown"]
        self.peers = {name: Core(load({"a.yaml": FULL}), rng=random.Random(1), ticket_prefix=name) for name in "pq"}
        self.told: list[EventBatch] = []

    def follow(self, own: AskLimits | AskTokens | Hold | Decision | Refused | None) -> None:
        match own:
            case AskLimits() | AskTokens() | Hold():
                self.pending[own.ticket] = own
            case Decision():
                self.decided.append(own.ticket)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Decision() | Refused() if effect.was_held:
                    # delivered to a stream that waits, and nobody else
                    assert isinstance(self.pending.pop(effect.ticket), Hold)
                    self.follow(effect)
                case SettleGrant():
                    self.unsettled_grants.remove(effect.grant)
                    self.store.settle(effect.grant, effect.used, self.now)

    @rule(words=st.integers(1, 3000), stream=st.booleans(), tenant=st.sampled_from("ab"))
    def a_request_arrives(self, words: int, tenant: str, *, stream: bool) -> None:
        head = Head("POST", "/v1/chat/completions", {"x-attache-tenant": tenant}, has_body=True, is_trusted=True)
        content = "word " * words
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream, "max_tokens": 50}
        try:
            arrival = self.core.intake.receive(Api.CHAT, head, json.dumps(body).encode())
        except Refusal:
            return
        own, effects = self.core.arrive(arrival, self.now)
        self.seen.append(own.ticket)
        self.follow(own)
        self.perform(effects)

    @precondition(lambda self: any(not isinstance(one, Hold) for one in self.pending.values()))
    @rule(data=st.data(), kind=st.sampled_from(["granted", "refused", "nobody"]))
    def what_was_asked_for_comes(self, data: st.DataObject, kind: str) -> None:
        asking = [ticket for ticket, one in self.pending.items() if not isinstance(one, Hold)]
        self.resume(data.draw(st.sampled_from(asking)), kind)

    def resume(self, ticket: str, kind: str) -> None:
        ask = self.pending.pop(ticket)
        answer: Answer = None
        if isinstance(ask, AskLimits) and kind != "nobody":
            try:
                answer = self.grant(ask) if kind == "granted" else RateLimited("", kind="", headers={}, retry_after_s=1)
            except RateLimited as refusal:
                answer = refusal
        elif isinstance(ask, AskTokens) and kind == "granted":
            answer = list(range(100))
        own, effects = self.core.resume(ticket, answer, self.now)
        self.follow(own)
        self.perform(effects)

    def grant(self, ask: AskLimits) -> Grant:
        import msgspec  # noqa: PLC0415 - here alone

        grant = msgspec.structs.replace(self.store.reserve(ask.charges, self.now), is_global=True)
        self.unsettled_grants.append(grant)
        return grant

    @precondition(lambda self: any(isinstance(one, AskLimits) for one in self.pending.values()))
    @rule()
    def a_client_leaves_and_its_grant_comes_too_late(self) -> None:
        ticket, ask = next((t, one) for t, one in self.pending.items() if isinstance(one, AskLimits))
        del self.pending[ticket]
        self.perform(self.core.leave(ticket, self.now))
        try:
            grant = self.grant(ask)
        except RateLimited:
            return
        own, effects = self.core.resume(ticket, grant, self.now)
        assert own is None
        self.perform(effects)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), verb=st.sampled_from(["leave", "finish"]))
    def a_client_leaves(self, data: st.DataObject, verb: str) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[ticket]
        self.perform(getattr(self.core, verb)(ticket, self.now))

    @precondition(lambda self: self.decided)
    @rule(data=st.data(), verb=st.sampled_from(["leave", "finish"]))
    def a_stream_closes(self, data: st.DataObject, verb: str) -> None:
        ticket = data.draw(st.sampled_from(self.decided))
        self.decided.remove(ticket)
        self.perform(getattr(self.core, verb)(ticket, self.now))

    @rule(data=st.data(), status=st.sampled_from([0, 200, 503]), tokens=st.one_of(st.none(), st.integers(0, 9000)))
    def an_outcome_is_known(self, data: st.DataObject, status: int, tokens: int | None) -> None:
        ticket = data.draw(st.sampled_from(self.seen))
        self.perform(self.core.settle(self.outcome(ticket, status, tokens), self.now))

    def outcome(self, ticket: str, status: int, tokens: int | None) -> Outcome:
        return Outcome(ticket, status, "10.0.0.1:8000", 2.0, 0.5, tokens, tokens, None)

    @rule(data=st.data())
    def an_event_comes_twice_or_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.seen))
        if ticket not in self.pending and ticket not in self.decided:
            self.perform(self.core.finish(ticket, self.now))
            self.perform(self.core.leave(ticket, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.5, 5.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        effects = self.core.tick(self.now)
        self.perform(effects)
        assert [one for one in effects if isinstance(one, WakeAt)] or not self.core.count(State.QUEUED)

    @rule(index=st.integers(0, len(CONFIGURATIONS) - 1))
    def the_configuration_changes(self, index: int) -> None:
        self.perform(self.core.apply(load({"a.yaml": CONFIGURATIONS[index]}), self.now))

    @rule(name=st.sampled_from("pq"), words=st.integers(1, 500))
    def a_worker_sends_a_request(self, name: str, words: int) -> None:
        peer = self.peers[name]
        head = Head("POST", "/v1/chat/completions", {}, has_body=True)
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * words}]}
        sender = Core(
            load({"a.yaml": CONFIGURATIONS[8]}),
            rng=random.Random(0),
            ticket_prefix=f"{name}{self.now}",
            machine="there",
        )
        own, effects = sender.arrive(peer.intake.receive(Api.CHAT, head, json.dumps(body).encode()), self.now)
        assert isinstance(own, Decision | Hold | AskLimits | AskTokens | Refused)
        self.hear(name, [one.event for one in effects if isinstance(one, Tell)])
        self.seen.append(own.ticket)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def a_batch_comes_again(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.told))
        self.hear(batch.origin, batch.events)

    @rule(name=st.sampled_from("pq"))
    def a_worker_runs_nothing_by_its_own_word(self, name: str) -> None:
        from extproc.core.peer_events import Alive  # noqa: PLC0415 - here alone

        self.hear(name, [Alive([])])

    @rule()
    def workers_go_silent(self) -> None:
        self.now += SILENCE_S + 1
        self.perform(self.core.beat(self.now))

    def hear(self, name: str, events: list[PeerEvent]) -> None:
        batch = EventBatch(name, events)
        self.told.append(batch)
        self.perform(self.core.hear(batch, self.now))

    @invariant()
    def streams_and_records_agree(self) -> None:
        assert {ticket for ticket, one in self.pending.items() if isinstance(one, Hold)} == {
            ticket for ticket in self.seen if self.core.state_of(ticket) is State.QUEUED
        }
        assert all(self.core.state_of(ticket) in {State.RUNNING, State.SETTLED} for ticket in self.decided)
        assert all((pool.table.in_flight >= 0).all() for pool in self.core.pools.values())

    def teardown(self) -> None:
        for ticket in list(self.pending):
            self.perform(self.core.leave(ticket, self.now))
        for ticket in self.decided:
            self.perform(self.core.finish(ticket, self.now))
        self.now += SILENCE_S + 1
        self.perform(self.core.beat(self.now))
        for ticket in self.seen:
            self.perform(self.core.settle(self.outcome(ticket, 200, 100), self.now))
        assert self.core.count(*State) == 0
        assert not any(len(gate.queue) for gate in self.core.admission.gates.values())
        for pool in self.core.pools.values():
            # rows of endpoints that are gone keep their last numbers until they are used again
            assert pool.table.in_flight[pool.table.is_active].sum() == 0
            assert pool.table.in_flight_tokens[pool.table.is_active].sum() == 0
        assert self.unsettled_grants == []
        for gate in self.core.admission.gates.values():
            assert all(band.flows.running.sum() == 0 for band in gate.queue.bands)


class TestRequests(Requests.TestCase):
    # without shrinking, which takes minutes here; the failing steps are few enough to read
    settings = settings(
        phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=60, stateful_step_count=40, deadline=None
    )
