# SPDX-License-Identifier: Apache-2.0
"""Requests arrive, are over, and their outcomes teach: the whole way without a network."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core import running_requests
from extproc.core.core import Core
from extproc.core.request_record import Outcome, RequestHead
from extproc.endpoints.engine_reports import apply_report
from extproc.endpoints.in_flight import backlogs, requests_in_backlog
from extproc.engines.metrics import EngineReport, LoraState
from extproc.prefix.kv_event_decoder import BlocksStored
from extproc.prefix.kv_index import EventSource
from extproc.refusals import BadRequest, MethodNotAllowed, NoEndpoint, UnknownModel, UnknownPath
from extproc.streams.messages import ProcessingResponse
from extproc.streams.processing_responses import decision_answer
from extproc.wire_names import Api
from tests.extproc.conftest import CONFIG, decide, in_some_state, settle

if TYPE_CHECKING:
    from extproc.core.effects import Decision
    from extproc.scheduling.pool import Pool

HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
LONG = "tell me more " * 1000


def chat(text: str = LONG, *, model: str = "llama-3.1-8b", **fields: object) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **fields}).encode()


def arrive(core: Core, body: bytes, now: float = 0.0) -> Decision:
    return decide(core, HEAD, body, now)


@pytest.fixture
def pool(core: Core) -> Pool:
    return core.pools["default/llama"]


def outcome_of(decision: Decision, **changes: object) -> Outcome:
    fields = {
        "ticket": decision.ticket,
        "status": 200,
        "served": decision.assignment.addresses[0],
        "duration_s": 1.0,
        "ttfb_s": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "cached_tokens": None,
    }
    return Outcome(**{**fields, **changes})  # type: ignore[arg-type]  # the fields' types are checked where they are used


@pytest.fixture(autouse=True)
def _serve_under_the_engines_name(core: Core) -> None:
    """Clients of these tests ask for the model by the name that engines know, unless they say so."""
    core.apply(load_snapshot({"all.yaml": CONFIG.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}), 0.0)


def test_a_request_goes_to_an_endpoint_with_the_others_behind_it(core: Core) -> None:
    decision = arrive(core, chat())

    assert decision.server == "default/llama"
    assert set(decision.assignment.addresses) == {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}
    assert decision.body is None


def test_tickets_differ(core: Core) -> None:
    assert len({arrive(core, chat()).ticket for _ in range(20)}) == 20


def test_the_next_turn_goes_where_its_prefix_is(core: Core) -> None:
    first = arrive(core, chat())
    core.on_stream_closed(first.ticket, 0.0)
    turn = json.loads(chat())
    turn["messages"] += [{"role": "assistant", "content": "more"}, {"role": "user", "content": "and more"}]
    second = arrive(core, json.dumps(turn).encode(), now=1.0)

    assert second.assignment.addresses[0] == first.assignment.addresses[0]
    assert second.assignment.cached_tokens > 0.9 * second.assignment.input_tokens


def test_an_adapter_does_not_share_its_bases_prefixes(core: Core) -> None:
    core.on_stream_closed(arrive(core, chat()).ticket, 0.0)

    assert arrive(core, chat(model="sql")).assignment.cached_tokens == 0


def test_requests_in_flight_are_counted_from_pick_to_end(core: Core, pool: Pool) -> None:
    decisions = [arrive(core, chat(f"{number} {LONG}")) for number in range(6)]

    assert pool.table.in_flight.sum() == 6
    assert sorted(pool.table.in_flight[:3]) == [2, 2, 2]
    for decision in decisions:
        core.on_stream_closed(decision.ticket, 0.0)
        core.on_stream_closed(decision.ticket, 0.0)  # a second end changes nothing
    assert pool.table.in_flight.sum() == 0


def test_the_body_goes_on_under_the_engines_model_name(core: Core) -> None:
    core.apply(load_snapshot({"all.yaml": CONFIG}), 0.0)
    decision = arrive(core, chat(model="chat", top_p=0.5))

    assert decision.body is not None
    assert json.loads(decision.body) == {**json.loads(chat(top_p=0.5)), "model": "llama-3.1-8b"}


def test_an_adapter_keeps_its_name(core: Core) -> None:
    assert arrive(core, chat(model="sql")).body is None


def test_usage_is_asked_for_in_streams_beside_the_clients_other_options(core: Core) -> None:
    decision = arrive(core, chat(stream=True, stream_options={"continuous_usage_stats": True}))

    assert decision.body is not None
    assert json.loads(decision.body)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_usage_is_left_alone_where_the_server_says_so(core: Core) -> None:
    quiet = CONFIG.replace(b"  endpoints:", b"  streamUsage: AsRequested\n  endpoints:").replace(
        b": chat\n  lora", b": llama-3.1-8b\n  lora"
    )
    core.apply(load_snapshot({"all.yaml": quiet}), 0.0)

    assert arrive(core, chat(stream=True)).body is None


@pytest.mark.parametrize(
    ("head", "refusal"),
    [
        (RequestHead("POST", "/v2/chat", {}, has_body=True), UnknownPath),
        (RequestHead("POST", "/v1/chat/completions/", {}, has_body=True), UnknownPath),
        (RequestHead("GET", "/v1/chat/completions", {}, has_body=False), MethodNotAllowed),
        (RequestHead("POST", "/v1/chat/completions", {}, has_body=False), BadRequest),
    ],
)
def test_what_headers_already_show_is_refused_before_the_body(core: Core, head: RequestHead, refusal: type) -> None:
    with pytest.raises(refusal):
        core.builder.check_head(head)


def test_a_refused_request_counts_nowhere(core: Core, pool: Pool) -> None:
    with pytest.raises(UnknownModel):
        arrive(core, chat(model="nobody"))
    core.apply(
        load_snapshot(
            {
                "all.yaml": b"\n".join(line for line in CONFIG.splitlines() if b"endpoints" not in line).replace(
                    b"  model: llama-3.1-8b", b"  model: llama-3.1-8b\n  endpoints: []"
                )
            }
        ),
        0.0,
    )
    with pytest.raises(NoEndpoint):
        arrive(core, chat(model="chat"))

    assert pool.table.in_flight.sum() == 0


def test_a_new_configuration_keeps_what_is_known_of_endpoints_that_stay(core: Core) -> None:
    first = arrive(core, chat())
    used = first.assignment.addresses[0].encode()
    gone = next(address for address in (b"10.0.0.1:8000", b"10.0.0.2:8000") if address != used)
    core.apply(
        load_snapshot(
            {"all.yaml": CONFIG.replace(gone, b"10.0.0.9:8000").replace(b"Name: chat", b"Name: llama-3.1-8b")}
        ),
        0.0,
    )

    second = arrive(core, chat(), now=5.0)
    assert second.assignment.addresses[0] == first.assignment.addresses[0]
    assert "10.0.0.9:8000" in second.assignment.addresses
    assert gone.decode() not in second.assignment.addresses


def test_a_server_that_leaves_the_configuration_takes_its_requests_with_it_quietly(core: Core) -> None:
    decision = arrive(core, chat())
    core.apply(load_snapshot({}), 0.0)
    core.on_stream_closed(decision.ticket, 0.0)

    assert settle(core, outcome_of(decision), 1.0) is not None


def test_an_outcome_settles_its_ticket_once_before_or_after_the_end(core: Core) -> None:
    early, late = arrive(core, chat()), arrive(core, chat())
    assert settle(core, outcome_of(early), 1.0) is not None
    core.on_stream_closed(early.ticket, 0.0)
    core.on_stream_closed(late.ticket, 0.0)
    assert settle(core, outcome_of(late), 1.0) is not None

    assert settle(core, outcome_of(early), 2.0) is None
    assert settle(core, outcome_of(late), 2.0) is None


def test_an_unknown_ticket_teaches_nothing(core: Core) -> None:
    decision = arrive(core, chat())

    assert settle(core, outcome_of(decision, ticket="of-another-process"), 1.0) is None


def test_outcomes_that_never_come_do_not_pile_up(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    # 65,536 in service: the same, and many seconds
    monkeypatch.setattr(running_requests, "MOST_ENDED", 50)
    first = arrive(core, chat("hi"))
    core.on_stream_closed(first.ticket, 0.0)
    for _ in range(50):
        core.on_stream_closed(arrive(core, chat("hi")).ticket, 0.0)

    assert settle(core, outcome_of(first), 1.0) is None
    assert in_some_state(core) == 50


def test_an_endpoint_that_was_passed_over_is_avoided_until_it_serves(core: Core) -> None:
    first = arrive(core, chat())
    dead, served = first.assignment.addresses[:2]
    core.on_stream_closed(first.ticket, 0.0)
    settle(core, outcome_of(first, served=served), 10.0)

    again = arrive(core, chat(), now=10.5)
    assert again.assignment.addresses[0] == served  # not the idle dead one, and the prefix is known to be there now
    assert dead == again.assignment.addresses[-1]


def test_a_status_of_unavailable_is_a_failure_and_an_engines_own_error_is_not(core: Core, pool: Pool) -> None:
    for status, failures in ((503, 1), (500, 0), (0, 0), (504, 1), (400, 0)):
        pool.table.trips[:] = 0
        decision = arrive(core, chat())
        settle(core, outcome_of(decision, status=status), 1.0)
        assert pool.table.trips.sum() == failures, status


def test_bytes_per_token_are_learned_from_reported_usage(core: Core, pool: Pool) -> None:
    size = len(LONG)
    for _ in range(200):
        decision = arrive(core, chat())
        settle(core, outcome_of(decision, prompt_tokens=size // 3), 1.0)

    assert 2.9 < pool.caches.bytes_per_token < 3.1


def test_the_prefill_rate_is_learned_from_streamed_answers_only(core: Core, pool: Pool) -> None:
    for streamed in (False, True):
        decision = arrive(core, chat(stream=streamed))
        row = decision.assignment.endpoint.row
        before = pool.table.prefill_rate[row]
        settle(core, outcome_of(decision, ttfb_s=0.05, prompt_tokens=3250, cached_tokens=0), 1.0)
        assert bool(pool.table.prefill_rate[row] > before) is streamed
        core.on_stream_closed(decision.ticket, 0.0)


def test_a_restarted_engine_is_known_by_its_first_unexpected_miss(core: Core, pool: Pool) -> None:
    prompts = [f"{number} {LONG}" for number in range(4)]
    for now, prompt in enumerate(prompts):
        decision = arrive(core, chat(prompt), float(now))
        core.on_stream_closed(decision.ticket, now + 0.4)
        settle(core, outcome_of(decision, prompt_tokens=3250, cached_tokens=16), now + 0.5)
    # asked again, one of the prompts is not there any more
    again = arrive(core, chat(prompts[3]), now=100.0)
    row = again.assignment.endpoint.row
    assert again.assignment.cached_tokens > 2000
    core.on_stream_closed(again.ticket, 100.4)
    settle(core, outcome_of(again, prompt_tokens=3250), 100.5)

    # only what was just sent remains there
    assert pool.caches.index.blocks_held(row) == len(chain_of(prompts[3]))


def test_an_endpoint_may_hold_its_share_of_what_the_process_remembers(
    core: Core, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.prefix.approximate_index.MOST_BLOCKS_IN_ALL", 3 * 50)
    core.apply(core.snapshot, 0.0)
    for number in range(8):
        core.on_stream_closed(arrive(core, chat(f"{number} {LONG}"), float(number)).ticket, number + 0.5)

    assert 0 < max(pool.caches.index.blocks_held(row) for row in range(3)) <= 50
    monkeypatch.undo()
    core.apply(core.snapshot, 10.0)
    core.on_stream_closed(arrive(core, chat(f"9 {LONG}"), 11.0).ticket, 12.0)
    assert max(pool.caches.index.blocks_held(row) for row in range(3)) > 50


def test_ten_lying_engines_of_eight_ranks_have_no_more_blocks_than_a_process_tracks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.prefix.kv_event_decoder.MOST_BLOCKS_IN_ALL", 800)
    endpoints = ", ".join(f'{{address: "127.0.0.{number}:80"}}' for number in range(1, 11))
    config = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: liars}}
spec: {{model: m, kvEvents: {{dataParallelSize: 8}}, endpoints: [{endpoints}]}}
"""
    core = Core(load_snapshot({"a.yaml": config.encode()}), rng=random.Random(0), ticket_prefix="t")
    index = core.pools["default/liars"].caches.kv_index
    assert index is not None
    for row, rank in itertools.product(range(10), range(8)):
        hashes = tuple(range(500))
        index.apply(EventSource(row, rank), [BlocksStored(hashes, None, hashes, 1)])
    assert sum(index.blocks_held(row) for row in range(10)) == 800
    assert not index.is_complete(EventSource(0, 0))


def test_what_a_running_request_holds_is_not_thought_evicted_however_much_is_sent_meanwhile(
    core: Core, pool: Pool
) -> None:
    prompts = [f"{number} {LONG}" for number in range(8)]
    for row in range(3):
        # room for two prompts of some 13,000 bytes on each engine
        pool.caches.index.set_capacity(row, 2.5 * 13_000)
    arrive(core, chat(prompts[0]))
    for now, prompt in enumerate(prompts[1:], 1):
        core.on_stream_closed(arrive(core, chat(prompt), float(now)).ticket, now + 0.5)

    def held(prompt: str) -> float:
        return arrive(core, chat(prompt), 100.0).assignment.cached_tokens

    assert held(prompts[0]) > 2000
    assert held(prompts[1]) < 2000


def test_engines_say_who_waits_and_so_how_much_does(core: Core, pool: Pool) -> None:
    table = pool.table
    for number in range(9):
        arrive(core, chat(f"{number} {LONG}"), 0.0)
    row = int(table.in_flight.argmax())
    sent = len(table.prefill_queues[row].requests)
    assert sent >= 3
    apply_report(table, row, EngineReport(waiting=1, running=sent - 1, first_tokens=sent - 1), 0.5)
    assert len(table.prefill_queues[row].requests) == 1
    assert requests_in_backlog(table, backlogs(table, 0.5))[row] == pytest.approx(1.0)


def test_siblings_of_a_burst_go_where_the_first_one_went(core: Core) -> None:
    decisions = [arrive(core, chat(f"{LONG}{number}")) for number in range(4)]

    assert len({decision.assignment.addresses[0] for decision in decisions}) == 1


def chain_of(text: str) -> list[int]:
    from extproc.prefix.approximate_index import hash_blocks  # noqa: PLC0415
    from extproc.request.body_parser import parse_body  # noqa: PLC0415

    return hash_blocks(parse_body(Api.CHAT, chat(text)).prompt, "llama-3.1-8b")


def test_a_miss_right_behind_its_sibling_is_no_news(core: Core, pool: Pool) -> None:
    pool.reports_cached_tokens = True
    sibling = arrive(core, chat(), now=0.0)
    again = arrive(core, chat(), now=0.2)
    assert again.assignment.endpoint.row == sibling.assignment.endpoint.row
    settle(core, outcome_of(again, prompt_tokens=3250), 1.0)

    assert arrive(core, chat(), now=5.0).assignment.cached_tokens > 2000


def test_the_same_seed_and_requests_give_the_same_decisions() -> None:
    def run() -> list[tuple[str, ...]]:
        core = Core(load_snapshot({"all.yaml": CONFIG}), rng=random.Random(5), ticket_prefix="t")
        return [arrive(core, chat(str(n), model="chat")).assignment.addresses for n in range(50)]

    assert run() == run()


PAIRS = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: llama
  pdGroup: {groupKey: group, prefillLabels: {role: prefill}, decodeLabels: {role: decode}, minUncachedTokens: 200}
  endpoints:
    - {address: "10.0.0.1:8000", labels: {role: prefill, group: a}}
    - {address: "10.0.0.2:8000", labels: {role: decode, group: a}}
    - {address: "10.0.0.3:8000", labels: {role: decode, group: b}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: llama, rules: [{targetModels: [{modelServerName: llama}]}]}
"""


def test_a_pair_is_charged_told_and_let_go_together(core: Core) -> None:
    core.apply(load_snapshot({"a.yaml": PAIRS}), 0.0)
    table = core.pools["default/llama"].table
    # no prefill engine is in group b: it takes nothing as long as a can
    table.in_flight[table.row_of("10.0.0.3:8000")] = 100
    decision = arrive(core, chat(model="llama"))
    assert decision.assignment.addresses == ("10.0.0.2:8000",)
    assert decision.assignment.prefill is not None
    assert decision.assignment.prefill.address == "10.0.0.1:8000"
    answer = ProcessingResponse.FromString(decision_answer(decision))
    headers = {o.header.key: o.header.raw_value for o in answer.request_body.response.header_mutation.set_headers}
    assert headers["x-prefiller-host-port"] == b"10.0.0.1:8000"
    prefill, decode = (table.row_of(f"10.0.0.{number}:8000") for number in (1, 2))
    assert (table.in_flight[prefill], table.in_flight[decode]) == (1, 1)
    assert (table.backlog_tokens[prefill] > 3000, table.backlog_tokens[decode]) == (True, 0)
    core.on_stream_closed(decision.ticket, 0.0)
    assert (table.in_flight[prefill], table.in_flight[decode]) == (0, 0)
    # both hold the prompt now, so it need not be sent on again
    again = arrive(core, chat(model="llama"), now=1.0)
    assert (again.assignment.addresses[0], again.assignment.prefill) == ("10.0.0.2:8000", None)


def test_an_adapter_goes_only_where_it_is_served(core: Core) -> None:
    table = core.pools["default/llama"].table
    row = table.row_of("10.0.0.2:8000")
    assert row is not None
    table.set_loras(row, LoraState(served=frozenset({"llama-3.1-8b", "sql"})))
    for number in range(10):
        assert arrive(core, chat(f"{number} hello", model="sql")).assignment.addresses == ("10.0.0.2:8000",)
    assert len(arrive(core, chat()).assignment.addresses) == 3


def test_a_draining_endpoint_gets_nothing_while_others_are_there(core: Core) -> None:
    drained = CONFIG.replace(b'{address: "10.0.0.1:8000"}', b'{address: "10.0.0.1:8000", draining: true}')
    core.apply(load_snapshot({"a.yaml": drained.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}), 0.0)
    for number in range(10):
        assert "10.0.0.1:8000" not in arrive(core, chat(f"{number} hello")).assignment.addresses
    only = CONFIG.replace(
        b'[{address: "10.0.0.1:8000"}, {address: "10.0.0.2:8000"}, {address: "10.0.0.3:8000"}]',
        b'[{address: "10.0.0.1:8000", draining: true}]',
    )
    core.apply(load_snapshot({"a.yaml": only.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}), 0.0)
    assert arrive(core, chat()).assignment.addresses == ("10.0.0.1:8000",)


def test_tenants_whose_caches_are_parted_share_no_prefix(core: Core) -> None:
    scoped = CONFIG.replace(b"scrapeInterval: 0s", b"scrapeInterval: 0s\n  cacheScopeHeader: X-Tenant")
    core.apply(load_snapshot({"a.yaml": scoped.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}), 0.0)

    def cached(tenant: str) -> float:
        head = RequestHead("POST", "/v1/chat/completions", {"x-tenant": tenant}, has_body=True)
        return decide(core, head, chat()).assignment.cached_tokens

    assert (cached("acme"), cached("other")) == (0, 0)
    assert cached("acme") > 1000
