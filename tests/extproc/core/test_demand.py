# SPDX-License-Identifier: Apache-2.0
"""What a process tells autoscalers: each request once, as its outcome says, and what its engines do."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.api.config_loader import load_snapshot
from extproc.api.status_page_contents import (
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    EngineDemand,
    ProcessDemand,
    RequestCounters,
    ServerDemand,
    bucket_index,
    unfinished_notify_threshold,
)
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, RequestRefused
from extproc.core.peer_events import EventBatch
from extproc.core.request_record import Outcome, RequestHead
from extproc.endpoints.engine_reports import apply_report
from extproc.engines.metrics import EngineReport
from tests.extproc.scenes import configuration, request

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

SERVER = "default/llama"
FIRST = "10.0.0.1:8000"
ONE = f"{{address: '{FIRST}'}}"
GATE = (
    "flowControl: {timeout: 20s, noEndpointTimeout: 20s, saturation: {queueDepth: null, kvUsage: null, maxRequests: 1}}"
)
PAIR = "{address: 'p:1', labels: {role: p}}, {address: 'd:1', labels: {role: d}}, {address: 'b:1', labels: {role: b}}"
ROLES = "pdGroup: {prefillLabels: {role: p}, decodeLabels: {role: d}, decideBy: UncachedTokens}"


def snapshot_of(endpoints: str = ONE, more: str = "") -> Snapshot:
    server = f"endpoints: [{endpoints}]\n{more}"
    return configuration(servers={"llama": server}, routes={"chat": "loraAdapters: [sql]"})


def core_of(endpoints: str = ONE, more: str = "") -> Core:
    return Core(snapshot_of(endpoints, more), rng=random.Random(0), ticket_prefix="t")


def arrive(core: Core, now: float = 0.0, *, words: int = 400, model: str = "m", stream: bool = True) -> str:
    arrival = request(core, "word " * words, model=model, stream=stream, max_tokens=50)
    return core.arrive(arrival, now)[0].ticket


def outcome(ticket: str, **changes: object) -> Outcome:
    plain = Outcome(ticket, 200, FIRST, 2.0, 0.5, 300, 51, 100)
    return msgspec.structs.replace(plain, **changes)


def server(core: Core, now: float = 0.0) -> ServerDemand:
    return core.demand(now).servers[SERVER]


def counted(core: Core, model: str = "m") -> RequestCounters:
    return server(core).counted[model]


def test_a_server_without_requests_tells_its_engines() -> None:
    assert server(core_of()) == ServerDemand(model="m", engines={FIRST: EngineDemand()})


def test_each_step_of_a_request_counts_once() -> None:
    core = core_of()
    first = arrive(core)
    assert counted(core).arrivals == 1
    work = counted(core).prefill_work
    assert 500 < work < 530
    core.on_outcome(outcome(first), 2.0)
    core.on_outcome(outcome(first), 2.0)
    core.on_stream_closed(first, 2.0)
    assert counted(core).finished == 1
    assert counted(core).prompt_tokens == 300
    assert counted(core).output_tokens == 51
    assert counted(core).prefill_work == work


def test_a_prompt_counts_at_its_end_as_the_engine_says_or_as_it_was_estimated() -> None:
    core = core_of()
    said, estimated = arrive(core), arrive(core, 2.0)
    assert counted(core).prompt_tokens == 0.0
    core.on_outcome(outcome(said), 3.0)
    assert (counted(core).prompt_tokens, counted(core).cached_tokens) == (300.0, 100.0)
    core.on_outcome(outcome(estimated, prompt_tokens=None, cached_tokens=None), 4.0)
    # 2,000 bytes and a little, at four bytes a token
    assert 800 < counted(core).prompt_tokens < 820


def test_a_client_that_hangs_up_costs_what_was_expected_of_its_prompt() -> None:
    core = core_of()
    core.on_outcome(outcome(arrive(core)), 2.0)
    before = counted(core)
    left = arrive(core, 3.0, words=1000)
    core.on_outcome(outcome(left, status=0, prompt_tokens=None, completion_tokens=None, has_left=True), 4.0)
    assert counted(core).finished == 2
    assert counted(core).prompt_tokens > before.prompt_tokens
    assert before.output_tokens < counted(core).output_tokens <= before.output_tokens + 50


def test_adapters_count_apart_and_invented_names_do_not() -> None:
    core = core_of()
    arrive(core)
    arrive(core, model="sql")
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    for name in ("sql", "invented", "also"):
        body = json.dumps({"model": name, "messages": []}).encode()
        core.arrive(core.builder.build_for_server(SERVER, head, body), 0.0)
    assert {name: one.arrivals for name, one in server(core).counted.items()} == {"m": 3, "sql": 2}


def test_times_count_from_the_arrival_and_only_those_of_streams() -> None:
    core = core_of(more=GATE)
    first, second = arrive(core), arrive(core, 1.0)
    core.on_outcome(outcome(first), 2.0)
    core.on_stream_closed(first, 2.0)
    assert any(isinstance(one, Decision) and one.ticket == second for one in core.tick(2.0))
    core.on_outcome(outcome(second, duration_s=4.0, ttfb_s=1.5), 5.0)
    core.on_stream_closed(second, 5.0)
    whole = arrive(core, 6.0, stream=False)
    core.on_outcome(outcome(whole), 8.0)
    core.on_stream_closed(whole, 8.0)
    failed = arrive(core, 9.0)
    core.on_outcome(outcome(failed, status=500), 10.0)
    said = server(core)
    assert {at for at, count in enumerate(said.ttft) if count} == {
        bucket_index(one, TTFT_BOUNDS_S) for one in (0.5, 1.5)
    }
    assert {at for at, count in enumerate(said.tpot) if count} == {
        bucket_index(one, TPOT_BOUNDS_S) for one in (1.5 / 50, 2.5 / 50)
    }


def test_what_waits_is_told_with_its_tokens_and_its_age() -> None:
    core = core_of(more=GATE)
    arrive(core)
    work = counted(core).prefill_work
    held = arrive(core, 1.0, words=2000)
    arrive(core, 2.0, words=2000)
    said = server(core, 5.0)
    assert (said.queued, said.oldest_wait_s, said.at_zero) == (2, 4.0, 0)
    # they share their prefix, of which the engine has the first 400 words
    assert 3_500 < said.queued_tokens < 5_100
    assert said.counted["m"].prefill_work > work + said.queued_tokens
    core.on_disconnect(held, 6.0)
    assert (server(core, 6.0).queued, server(core, 6.0).oldest_wait_s) == (1, 4.0)


def test_work_of_a_request_that_waited_counts_when_it_came() -> None:
    core = core_of(more=GATE)
    first, second = arrive(core), arrive(core, 1.0)
    work = counted(core).prefill_work
    core.on_stream_closed(first, 2.0)
    assert any(isinstance(one, Decision) and one.ticket == second for one in core.tick(2.0))
    assert counted(core).prefill_work == work


def test_who_waits_for_engines_that_are_not_there_is_missed_once() -> None:
    core = core_of("", GATE)
    before = core.meter.alarms
    first, second = arrive(core), arrive(core)
    assert core.meter.alarms == before + 1
    assert server(core).at_zero == 2
    core.on_disconnect(first, 1.0)
    core.on_disconnect(second, 1.0)
    assert server(core).at_zero == 0
    arrive(core, 2.0)
    assert core.meter.alarms == before + 2


def test_far_more_requests_than_a_follower_knows_of_are_told_once() -> None:
    core = core_of()
    tickets = [arrive(core) for _ in range(8)]
    assert (core.meter.unfinished_requests(SERVER), core.meter.crowded) == (8, set())
    # eight more than the none that somebody knew of
    tickets.append(arrive(core))
    assert core.meter.crowded == {SERVER}
    core.meter.crowded.clear()
    tickets += [arrive(core) for _ in range(12)]
    assert core.meter.crowded == set()
    for one in tickets[3:]:
        core.on_stream_closed(one, 1.0)
    # nobody was told that they have ended
    tickets = [arrive(core) for _ in range(9)]
    assert (core.meter.unfinished_requests(SERVER), core.meter.crowded) == (12, set())
    # one who knows of these twelve, and one who knows of sixteen
    for known in (12, 16):
        core.meter.set_notify_threshold(SERVER, unfinished_notify_threshold(known))
    tickets += [arrive(core) for _ in range(12)]
    assert core.meter.crowded == set()
    arrive(core)
    assert core.meter.crowded == {SERVER}


def test_news_are_eight_more_and_twice_as_many() -> None:
    assert [unfinished_notify_threshold(known) for known in (0, 1, 8, 9, 100)] == [8, 9, 16, 18, 200]


def test_looking_at_the_page_changes_nothing_of_what_is_news() -> None:
    core = core_of()
    for _ in range(7):
        arrive(core)
        server(core)
    arrive(core)
    server(core)
    arrive(core)
    assert core.meter.crowded == {SERVER}


def test_a_request_that_no_engine_can_take_is_refused_and_its_work_was_asked_for() -> None:
    core = core_of("")
    arrive(core)
    assert (counted(core).arrivals, counted(core).refused) == (1, 1)
    assert counted(core).prefill_work > 500


def test_engines_tell_their_reports_and_speeds_once_there_are_any() -> None:
    core = core_of()
    table = core.pools[SERVER].table
    row = table.row_of(FIRST)
    assert row is not None
    apply_report(table, row, EngineReport(waiting=1.0, running=2.0, kv_usage=0.5), 3.0)
    table.kv_capacity_tokens[row] = 1000.0
    assert server(core, 4.5).engines[FIRST] == EngineDemand(
        waiting=1.0, running=2.0, kv_usage=0.5, report_age_s=1.5, kv_capacity_tokens=1000.0
    )
    for number in range(16):
        ticket = arrive(core, 5.0 + number, words=1000)
        core.on_outcome(outcome(ticket, prompt_tokens=1200, cached_tokens=0), 7.0 + number)
        core.on_stream_closed(ticket, 7.0 + number)
    learned = server(core).engines[FIRST]
    assert learned.prefill_tokens_per_s is not None
    assert learned.step_s is not None
    assert learned.step_s_per_token is not None


def test_engines_have_roles_by_their_labels_and_both_of_a_pair_are_busy() -> None:
    core = core_of(PAIR, ROLES)
    arrive(core, words=2000)
    engines = server(core).engines
    assert {address: one.role for address, one in engines.items()} == {"p:1": "prefill", "d:1": "decode", "b:1": ""}
    assert {address: one.in_flight for address, one in engines.items()} == {"p:1": 1, "d:1": 1, "b:1": 0}


def test_what_has_left_the_configuration_is_told_while_it_answers() -> None:
    core = core_of()
    ticket = arrive(core)
    other = snapshot_of("{address: '10.0.0.2:8000'}")
    core.apply(other, 1.0)
    assert {address: one.in_flight for address, one in server(core).engines.items()} == {FIRST: 1, "10.0.0.2:8000": 0}
    core.apply(load_snapshot({}), 2.0)
    assert server(core).engines[FIRST].in_flight == 1
    core.on_stream_closed(ticket, 3.0)
    assert core.demand(3.0).servers == {}
    core.apply(other, 4.0)
    assert counted(core).arrivals == 1


def test_requests_of_other_processes_are_theirs_to_tell() -> None:
    here, there = (
        Core(core_of().snapshot, rng=random.Random(0), ticket_prefix=name, machine="pod") for name in ("here", "there")
    )
    messages = [{"role": "user", "content": "word " * 400}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    own, effects = there.arrive(
        there.builder.build_by_model(RequestHead("POST", "/v1/chat/completions", {}, has_body=True), body), 0.0
    )
    told = tuple(one.event for one in effects if isinstance(one, Broadcast))
    assert told
    here.apply_peer_batch(EventBatch("there", told), 0.1)
    assert here.pools[SERVER].table.in_flight.sum() == 1
    here.on_outcome(outcome(own.ticket), 0.2)
    assert server(here).counted == {}
    assert server(here).engines[FIRST].in_flight == 0
    assert server(there).engines[FIRST].in_flight == 1


def test_pages_have_numbers_and_can_be_read_by_others() -> None:
    core = core_of()
    arrive(core)
    pages = [core.demand(10.0, began_at_s=4.0) for _ in range(2)]
    assert [one.sequence for one in pages] == [1, 2]
    assert (pages[0].instance, pages[0].age_s) == ("t", 6.0)
    assert msgspec.json.decode(msgspec.json.encode(pages[0]), type=ProcessDemand) == pages[0]


@pytest.mark.parametrize("more", ["", GATE])
def test_what_is_refused_is_told(more: str) -> None:
    core = core_of("", more)
    ticket = arrive(core)
    if more:
        refused = [one for one in core.tick(21.0) if isinstance(one, RequestRefused)]
        assert [one.ticket for one in refused] == [ticket]
    assert (counted(core).arrivals, counted(core).refused, server(core).queued) == (1, 1, 0)
