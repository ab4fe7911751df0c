# SPDX-License-Identifier: Apache-2.0
"""Two processes that tell each other everything pick as one."""

from __future__ import annotations

import json
import random

import pytest

from extproc.admission.fairness import VirtualTokenCounter
from extproc.admission.flow_queues import FlowKey
from extproc.api.config_loader import load_snapshot
from extproc.core import running_requests
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, Effect, OutcomeJoined, RequestHeld
from extproc.core.peer_events import (
    SILENCE_S,
    AskRequestsStarted,
    EngineReported,
    EventBatch,
    LimitSpent,
    OutcomeKnown,
    PeerEvent,
    ProcessAlive,
    RequestEnded,
    decode_events,
    encode_events,
)
from extproc.core.request_record import Outcome, RequestHead
from extproc.core.request_states import RequestState
from extproc.engines.metrics import CacheConfig, EngineReport
from tests.extproc.conftest import CONFIG, decide
from tests.extproc.scenes import ONE_AT_A_TIME

HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)


def body(text: str) -> bytes:
    return json.dumps({"model": "chat", "messages": [{"role": "user", "content": text}], "stream": True}).encode()


class Process:
    """A core that tells the others and hears them."""

    def __init__(self, name: str, config: bytes = CONFIG, *, machine: str = "here") -> None:
        self.name = name
        self.core = Core(load_snapshot({"a.yaml": config}), rng=random.Random(0), ticket_prefix=name, machine=machine)
        self.pool = self.core.pools["default/llama"]

    def ingest(self, other: Process, *events: PeerEvent, now: float = 0.0) -> list[Effect]:
        return self.core.apply_peer_batch(decode_events(encode_events(EventBatch(other.name, list(events)))), now)

    def decide(self, text: str, now: float = 0.0, head: RequestHead = HEAD) -> tuple[Decision, PeerEvent]:
        own, effects = self.core.arrive(self.core.builder.build_by_model(head, body(text)), now)
        assert isinstance(own, Decision)
        (started,) = told(effects)
        return own, started


def told(effects: list[Effect]) -> list[PeerEvent]:
    return [one.event for one in effects if isinstance(one, Broadcast)]


@pytest.fixture
def pair() -> tuple[Process, Process]:
    return Process("a"), Process("b")


def test_a_request_counts_everywhere_until_it_ends(pair: tuple[Process, Process]) -> None:
    one, other = pair
    decision, started = one.decide("hello " * 200)
    other.ingest(one, started)
    address = decision.assignment.endpoint.address
    row, its_row = one.pool.table.row_of(address), other.pool.table.row_of(address)
    assert other.pool.table.in_flight[its_row] == 1
    assert other.pool.table.backlog_tokens[its_row] == one.pool.table.backlog_tokens[row] > 0
    other.ingest(one, RequestEnded(decision.ticket))
    assert other.pool.table.in_flight.sum() == 0


def test_a_prefix_that_one_sent_is_known_to_the_other(pair: tuple[Process, Process]) -> None:
    one, other = pair
    first, started = one.decide("the same long beginning " * 300)
    other.ingest(one, started)
    second, _ = other.decide("the same long beginning " * 300)
    assert second.assignment.endpoint.address == first.assignment.endpoint.address
    assert second.assignment.cached_tokens > 1000


def test_an_outcome_that_comes_to_one_teaches_both_and_is_counted_by_its_owner(pair: tuple[Process, Process]) -> None:
    one, other = pair
    decision, started = one.decide("hello " * 2000)
    other.ingest(one, started)
    served = decision.assignment.endpoint.address
    outcome = Outcome(decision.ticket, 200, served, 1.0, 0.5, 3000, 10, 0)
    effects = other.core.on_outcome(outcome, 1.0)
    assert told(effects) == [OutcomeKnown(outcome)]
    (settled,) = [effect for effect in effects if isinstance(effect, OutcomeJoined)]
    assert not settled.is_ours
    (ours,) = one.ingest(other, OutcomeKnown(outcome), now=1.0)
    assert isinstance(ours, OutcomeJoined)
    assert ours.is_ours
    rows = [process.pool.table.row_of(served) for process in pair]
    rates = [process.pool.table.prefill_rate[row] for process, row in zip(pair, rows, strict=True)]
    assert rates[0] == rates[1] != 10_000
    counted = [process.pool.table.prompt_tokens[row] for process, row in zip(pair, rows, strict=True)]
    assert counted == [3000, 0]


def test_what_was_lost_on_the_way_is_mended_by_the_heartbeat(pair: tuple[Process, Process]) -> None:
    one, other = pair
    sent = [one.decide(f"number {number} " * 50) for number in range(3)]
    other.ingest(one, *(started for _, started in sent))
    assert other.pool.table.in_flight.sum() == 3
    # the end of the second was lost
    other.ingest(one, ProcessAlive([sent[0][0].ticket, sent[2][0].ticket]))
    assert other.pool.table.in_flight.sum() == 2
    other.ingest(one, ProcessAlive([]))
    assert other.pool.table.in_flight.sum() == 0


def test_a_process_that_missed_a_start_asks_for_it(pair: tuple[Process, Process]) -> None:
    one, other = pair
    decision, started = one.decide("hello")
    (asked,) = told(other.ingest(one, ProcessAlive([decision.ticket])))
    assert told(Process("c").ingest(other, asked)) == []
    assert told(one.ingest(other, asked)) == [started]
    assert told(other.ingest(one, started)) == told(other.ingest(one, ProcessAlive([decision.ticket]))) == []
    assert other.pool.table.in_flight.sum() == 1
    one.core.on_stream_closed(decision.ticket, 0.0)
    assert told(one.ingest(other, asked)) == []
    other.ingest(one, RequestEnded(decision.ticket))
    assert other.pool.table.in_flight.sum() == 0


def test_a_start_that_cannot_be_counted_is_asked_for_once(pair: tuple[Process, Process]) -> None:
    one, _ = pair
    stranger = Process("s", CONFIG.replace(b"10.0.0.", b"10.0.1."))
    decision, started = one.decide("hello")
    alive = ProcessAlive([decision.ticket])
    assert told(stranger.ingest(one, alive)) == [AskRequestsStarted("a", [decision.ticket])]
    stranger.ingest(one, started)
    assert told(stranger.ingest(one, alive)) == []


def test_few_starts_are_asked_for_at_once(pair: tuple[Process, Process]) -> None:
    one, other = pair
    (asked,) = told(other.ingest(one, ProcessAlive([f"a-{number}" for number in range(10_000)])))
    assert isinstance(asked, AskRequestsStarted)
    assert len(asked.tickets) == 500


def test_a_process_that_is_gone_has_no_requests(pair: tuple[Process, Process]) -> None:
    one, other = pair
    other.ingest(one, one.decide("hello")[1], now=10.0)
    other.core.heartbeat(10.0 + SILENCE_S)
    assert (other.pool.table.in_flight.sum(), other.core.peer_view.peer_count) == (1, 1)
    other.core.heartbeat(10.1 + SILENCE_S)
    assert (other.pool.table.in_flight.sum(), other.core.peer_view.peer_count) == (0, 0)


def test_the_same_word_twice_counts_once(pair: tuple[Process, Process]) -> None:
    one, other = pair
    _, started = one.decide("hello")
    other.ingest(one, started, started)
    assert other.pool.table.in_flight.sum() == 1


def test_a_request_that_a_late_message_starts_anew_is_not_given_up_for_its_first_end(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_requests, "MOST_ENDED", 2)
    one, other = pair
    first, started = one.decide("hello")
    outcome = Outcome(first.ticket, 200, first.assignment.addresses[0], 1.0, 0.5, 100, 10, 0)
    other.ingest(one, started, RequestEnded(first.ticket), OutcomeKnown(outcome), started)
    for number in range(2):
        decision, begun = one.decide(f"{number} hello")
        other.ingest(one, begun, RequestEnded(decision.ticket))
    assert other.core.state_of(first.ticket) is RequestState.RUNNING
    # the next beat of its process ends it
    other.ingest(one, ProcessAlive([]))
    assert other.pool.table.in_flight.sum() == 0


def test_what_only_one_is_configured_for_is_passed_over() -> None:
    one = Process("a")
    other = Process("b", CONFIG.replace(b'{address: "10.0.0.1:8000"}, {address: "10.0.0.2:8000"}, ', b""))
    for number in range(9):
        other.ingest(one, one.decide(f"{number} hello")[1])
    assert 1 <= other.pool.table.in_flight.sum() < 9


def test_one_asks_the_engines_for_all(pair: tuple[Process, Process]) -> None:
    one, other = pair
    said = EngineReported("default/llama", "10.0.0.2:8000", EngineReport(waiting=4, running=2), CacheConfig(16, 64_000))
    other.ingest(
        one, said, EngineReported("default/llama", "10.0.0.2:8000", EngineReport(), models=frozenset({"sql"})), now=5.0
    )
    row = other.pool.table.row_of("10.0.0.2:8000")
    assert row is not None
    assert (other.pool.table.waiting[row], other.pool.table.reported_at_s[row]) == (4, 5.0)
    assert other.pool.table.loras[row].served == frozenset({"sql"})
    assert other.pool.caches.index.first_block_bytes == 64
    other.ingest(
        one,
        EngineReported("gone", "10.0.0.2:8000", EngineReport()),
        EngineReported("default/llama", "gone:1", EngineReport()),
    )


LIMITED = CONFIG.replace(b"  loraAdapters: [sql]", b"  loraAdapters: [sql]\n  rateLimits: [{unit: hour, requests: 10}]")


def test_what_one_worker_grants_of_a_local_limit_is_gone_for_the_others_of_its_machine() -> None:
    a, b = (Process(name, LIMITED) for name in ("a", "b"))
    elsewhere = Process("c", LIMITED, machine="there")
    own, effects = a.core.arrive(a.core.builder.build_by_model(HEAD, body("hello")), 0.0)
    assert isinstance(own, Decision)
    (spent,) = [event for event in told(effects) if isinstance(event, LimitSpent)]
    for other in (b, elsewhere):
        other.ingest(a, *4 * [spent])
    levels = [decide(process.core, HEAD, body("hello")).grants[0].levels for process in (b, elsewhere)]
    assert levels == [[5.0], [9.0]]


QUEUED = CONFIG.replace(b"  scrapeInterval: 0s", b"  scrapeInterval: 0s\n  flowControl: {}")


def test_a_flow_is_charged_everywhere_for_what_it_had_anywhere() -> None:
    a, b = Process("a", QUEUED), Process("b", QUEUED)
    head = RequestHead("POST", "/v1/chat/completions", {"x-attache-tenant": "acme"}, has_body=True, is_trusted=True)
    decision, started = a.decide("hello " * 500, head=head)
    b.ingest(a, started)

    def counter(one: Process) -> float:
        flows = one.core.admission.gates["default/llama"].queue.band_of(0).flows
        policy = flows.policy
        assert isinstance(policy, VirtualTokenCounter)
        return float(policy.counters[flows.assign_row(FlowKey("acme", "llama-3.1-8b"))])

    assert counter(a) == counter(b) > 500
    outcome = Outcome(decision.ticket, 200, decision.assignment.addresses[0], 1.0, 0.5, 600, 10, 0)
    b.ingest(a, *told(a.core.on_outcome(outcome, 1.0)))
    assert counter(a) == counter(b) == 620


def test_what_a_request_waited_for_its_turn_is_no_processs_ttft() -> None:
    config = QUEUED.replace(b"flowControl: {}", f"flowControl: {{{ONE_AT_A_TIME}}}".encode())
    one, other = Process("a", config), Process("b", config)
    engines = len(one.pool.table)
    sent = [one.decide(f"number {number} " * 2000) for number in range(engines)]
    held, _ = one.core.arrive(one.core.builder.build_by_model(HEAD, body("the last one " * 2000)), 0.0)
    assert isinstance(held, RequestHeld)
    effects = one.core.on_stream_closed(sent[0][0].ticket, 30.0) + one.core.tick(30.0)
    (decision,) = (effect for effect in effects if isinstance(effect, Decision))
    for event in (*(started for _, started in sent), *told(effects)):
        other.ingest(one, event, now=30.0)
    served = decision.assignment.endpoint.address
    outcome = Outcome(decision.ticket, 200, served, 31.0, 30.5, 3000, 10, 0)
    for process in (one, other):
        process.core.on_outcome(outcome, 31.0)
        row = process.pool.table.row_of(served)
        assert row is not None
        assert 0 < process.pool.table.ttft_s[row] < 1


def test_a_request_that_starts_again_after_its_end_is_not_forgotten_while_it_runs(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.core.running_requests.MOST_ENDED", 1)
    one, other = pair
    decision, started = one.decide("hello")
    served = decision.assignment.endpoint.address
    learned = OutcomeKnown(Outcome(decision.ticket, 200, served, 1.0, 0.5, 10, 10, None))
    other.ingest(one, started, RequestEnded(decision.ticket), learned, started)
    own, _ = other.decide("mine")
    other.core.on_stream_closed(own.ticket, 1.0)
    assert other.core.state_of(decision.ticket) is RequestState.RUNNING
    assert other.core.state_of(own.ticket) is RequestState.ENDED
