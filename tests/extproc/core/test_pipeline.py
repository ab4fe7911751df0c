"""Requests arrive, are over, and their outcomes teach: the whole way without a network."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.config.load import load
from extproc.core.feedback import Outcome
from extproc.core.pipeline import _MOST_UNSETTLED, Pipeline
from extproc.core.types import Decision, Head
from extproc.endpoints.engine_reports import EngineState, report
from extproc.endpoints.ledger import backlogs, queued
from extproc.endpoints.table import Loras
from extproc.errors import BadRequest, MethodNotAllowed, NoEndpoint, UnknownModel, UnknownPath
from extproc.request.model import Api
from extproc.streams.messages import ProcessingResponse
from extproc.streams.responses import decision_answer
from tests.extproc.conftest import CONFIG

if TYPE_CHECKING:
    from extproc.scheduling.pool import Pool

HEAD = Head("POST", "/v1/chat/completions", {}, has_body=True)
LONG = "tell me more " * 1000


def chat(text: str = LONG, *, model: str = "llama-3.1-8b", **fields: object) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **fields}).encode()


def arrive(pipeline: Pipeline, body: bytes, now: float = 0.0) -> Decision:
    return pipeline.arrive(Api.CHAT, HEAD, body, now)


@pytest.fixture
def pool(pipeline: Pipeline) -> Pool:
    return pipeline.pools["default/llama"]


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
def _serve_under_the_engines_name(pipeline: Pipeline) -> None:
    """Clients of these tests ask for the model by the name that engines know, unless they say so."""
    pipeline.apply(load({"all.yaml": CONFIG.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}))


def test_a_request_goes_to_an_endpoint_with_the_others_behind_it(pipeline: Pipeline) -> None:
    decision = arrive(pipeline, chat())

    assert decision.server == "default/llama"
    assert set(decision.assignment.addresses) == {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}
    assert decision.body is None


def test_tickets_differ(pipeline: Pipeline) -> None:
    assert len({arrive(pipeline, chat()).ticket for _ in range(20)}) == 20


def test_the_next_turn_goes_where_its_prefix_is(pipeline: Pipeline) -> None:
    first = arrive(pipeline, chat())
    pipeline.finish(first.ticket)
    turn = json.loads(chat())
    turn["messages"] += [{"role": "assistant", "content": "more"}, {"role": "user", "content": "and more"}]
    second = arrive(pipeline, json.dumps(turn).encode(), now=1.0)

    assert second.assignment.addresses[0] == first.assignment.addresses[0]
    assert second.assignment.cached_tokens > 0.9 * second.assignment.input_tokens


def test_an_adapter_does_not_share_its_bases_prefixes(pipeline: Pipeline) -> None:
    pipeline.finish(arrive(pipeline, chat()).ticket)

    assert arrive(pipeline, chat(model="sql")).assignment.cached_tokens == 0


def test_requests_in_flight_are_counted_from_pick_to_end(pipeline: Pipeline, pool: Pool) -> None:
    decisions = [arrive(pipeline, chat(f"{number} {LONG}")) for number in range(6)]

    assert pool.table.in_flight.sum() == 6
    assert sorted(pool.table.in_flight[:3]) == [2, 2, 2]
    for decision in decisions:
        pipeline.finish(decision.ticket)
        pipeline.finish(decision.ticket)  # a second end changes nothing
    assert pool.table.in_flight.sum() == 0


def test_the_body_goes_on_under_the_engines_model_name(pipeline: Pipeline) -> None:
    pipeline.apply(load({"all.yaml": CONFIG}))
    decision = arrive(pipeline, chat(model="chat", top_p=0.5))

    assert decision.body is not None
    assert json.loads(decision.body) == {**json.loads(chat(top_p=0.5)), "model": "llama-3.1-8b"}


def test_an_adapter_keeps_its_name(pipeline: Pipeline) -> None:
    assert arrive(pipeline, chat(model="sql")).body is None


def test_usage_is_asked_for_in_streams_beside_the_clients_other_options(pipeline: Pipeline) -> None:
    decision = arrive(pipeline, chat(stream=True, stream_options={"continuous_usage_stats": True}))

    assert decision.body is not None
    assert json.loads(decision.body)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_usage_is_left_alone_where_the_server_says_so(pipeline: Pipeline) -> None:
    quiet = CONFIG.replace(b"  endpoints:", b"  streamUsage: AsRequested\n  endpoints:").replace(
        b": chat\n  lora", b": llama-3.1-8b\n  lora"
    )
    pipeline.apply(load({"all.yaml": quiet}))

    assert arrive(pipeline, chat(stream=True)).body is None


@pytest.mark.parametrize(
    ("head", "refusal"),
    [
        (Head("POST", "/v2/chat", {}, has_body=True), UnknownPath),
        (Head("POST", "/v1/chat/completions/", {}, has_body=True), UnknownPath),
        (Head("GET", "/v1/chat/completions", {}, has_body=False), MethodNotAllowed),
        (Head("POST", "/v1/chat/completions", {}, has_body=False), BadRequest),
    ],
)
def test_what_headers_already_show_is_refused_before_the_body(pipeline: Pipeline, head: Head, refusal: type) -> None:
    with pytest.raises(refusal):
        pipeline.intake.admit(head)


def test_a_refused_request_counts_nowhere(pipeline: Pipeline, pool: Pool) -> None:
    with pytest.raises(UnknownModel):
        arrive(pipeline, chat(model="nobody"))
    pipeline.apply(
        load(
            {
                "all.yaml": b"\n".join(line for line in CONFIG.splitlines() if b"endpoints" not in line).replace(
                    b"  model: llama-3.1-8b", b"  model: llama-3.1-8b\n  endpoints: []"
                )
            }
        )
    )
    with pytest.raises(NoEndpoint):
        arrive(pipeline, chat(model="chat"))

    assert pool.table.in_flight.sum() == 0


def test_a_new_configuration_keeps_what_is_known_of_endpoints_that_stay(pipeline: Pipeline) -> None:
    first = arrive(pipeline, chat())
    used = first.assignment.addresses[0].encode()
    gone = next(address for address in (b"10.0.0.1:8000", b"10.0.0.2:8000") if address != used)
    pipeline.apply(
        load({"all.yaml": CONFIG.replace(gone, b"10.0.0.9:8000").replace(b"Name: chat", b"Name: llama-3.1-8b")})
    )

    second = arrive(pipeline, chat(), now=5.0)
    assert second.assignment.addresses[0] == first.assignment.addresses[0]
    assert "10.0.0.9:8000" in second.assignment.addresses
    assert gone.decode() not in second.assignment.addresses


def test_a_server_that_leaves_the_configuration_takes_its_requests_with_it_quietly(pipeline: Pipeline) -> None:
    decision = arrive(pipeline, chat())
    pipeline.apply(load({}))
    pipeline.finish(decision.ticket)

    assert pipeline.settle(outcome_of(decision), 1.0) is not None


def test_an_outcome_settles_its_ticket_once_before_or_after_the_end(pipeline: Pipeline) -> None:
    early, late = arrive(pipeline, chat()), arrive(pipeline, chat())
    assert pipeline.settle(outcome_of(early), 1.0) is not None
    pipeline.finish(early.ticket)
    pipeline.finish(late.ticket)
    assert pipeline.settle(outcome_of(late), 1.0) is not None

    assert pipeline.settle(outcome_of(early), 2.0) is None
    assert pipeline.settle(outcome_of(late), 2.0) is None


def test_an_unknown_ticket_teaches_nothing(pipeline: Pipeline) -> None:
    decision = arrive(pipeline, chat())

    assert pipeline.settle(outcome_of(decision, ticket="of-another-process"), 1.0) is None


def test_outcomes_that_never_come_do_not_pile_up(pipeline: Pipeline) -> None:
    first = arrive(pipeline, chat("hi"))
    pipeline.finish(first.ticket)
    for _ in range(_MOST_UNSETTLED):
        pipeline.finish(arrive(pipeline, chat("hi")).ticket)

    assert pipeline.settle(outcome_of(first), 1.0) is None
    assert len(pipeline._unsettled) == _MOST_UNSETTLED


def test_an_endpoint_that_was_passed_over_is_avoided_until_it_serves(pipeline: Pipeline) -> None:
    first = arrive(pipeline, chat())
    dead, served = first.assignment.addresses[:2]
    pipeline.finish(first.ticket)
    pipeline.settle(outcome_of(first, served=served), 10.0)

    again = arrive(pipeline, chat(), now=10.5)
    assert again.assignment.addresses[0] == served  # not the idle dead one, and the prefix is known to be there now
    assert dead == again.assignment.addresses[-1]


def test_a_status_of_unavailable_is_a_failure_and_an_engines_own_error_is_not(pipeline: Pipeline, pool: Pool) -> None:
    for status, failures in ((503, 1), (500, 0), (0, 0), (504, 1), (400, 0)):
        pool.table.failures[:] = 0
        decision = arrive(pipeline, chat())
        pipeline.settle(outcome_of(decision, status=status), 1.0)
        assert pool.table.failures.sum() == failures, status


def test_bytes_per_token_are_learned_from_reported_usage(pipeline: Pipeline, pool: Pool) -> None:
    size = len(LONG)
    for _ in range(200):
        decision = arrive(pipeline, chat())
        pipeline.settle(outcome_of(decision, prompt_tokens=size // 3), 1.0)

    assert 2.9 < pool.caches.bytes_per_token < 3.1


def test_the_prefill_rate_is_learned_from_streamed_answers_only(pipeline: Pipeline, pool: Pool) -> None:
    for streamed in (False, True):
        decision = arrive(pipeline, chat(stream=streamed))
        row = decision.assignment.place.row
        before = pool.table.prefill_rate[row]
        pipeline.settle(outcome_of(decision, ttfb_s=0.05, prompt_tokens=3250, cached_tokens=0), 1.0)
        assert bool(pool.table.prefill_rate[row] > before) is streamed
        pipeline.finish(decision.ticket)


def test_a_restarted_engine_is_known_by_its_first_unexpected_miss(pipeline: Pipeline, pool: Pool) -> None:
    prompts = [f"{number} {LONG}" for number in range(4)]
    for now, prompt in enumerate(prompts):
        decision = arrive(pipeline, chat(prompt), float(now))
        pipeline.finish(decision.ticket, now + 0.4)
        pipeline.settle(outcome_of(decision, prompt_tokens=3250, cached_tokens=16), now + 0.5)
    # asked again, one of the prompts is not there any more
    again = arrive(pipeline, chat(prompts[3]), now=100.0)
    row = again.assignment.place.row
    assert again.assignment.cached_tokens > 2000
    pipeline.finish(again.ticket, 100.4)
    pipeline.settle(outcome_of(again, prompt_tokens=3250), 100.5)

    # only what was just sent remains there
    assert pool.caches.index.blocks_held(row) == len(pipeline_chain(prompts[3]))


def test_what_a_running_request_holds_is_not_thought_evicted_however_much_is_sent_meanwhile(
    pipeline: Pipeline, pool: Pool
) -> None:
    prompts = [f"{number} {LONG}" for number in range(8)]
    for row in range(3):
        # room for two prompts of some 13,000 bytes on each engine
        pool.caches.index.set_capacity(row, 2.5 * 13_000)
    arrive(pipeline, chat(prompts[0]))
    for now, prompt in enumerate(prompts[1:], 1):
        pipeline.finish(arrive(pipeline, chat(prompt), float(now)).ticket, now + 0.5)

    def held(prompt: str) -> float:
        return arrive(pipeline, chat(prompt), 100.0).assignment.cached_tokens

    assert held(prompts[0]) > 2000
    assert held(prompts[1]) < 2000


def test_engines_say_who_waits_and_so_how_much_does(pipeline: Pipeline, pool: Pool) -> None:
    table = pool.table
    for number in range(9):
        arrive(pipeline, chat(f"{number} {LONG}"), 0.0)
    row = int(table.in_flight.argmax())
    sent = len(table.pending[row])
    assert sent >= 3
    report(table, row, EngineState(waiting=1, running=sent - 1, first_tokens=sent - 1), 0.5)
    assert len(table.pending[row]) == 1
    assert queued(table, backlogs(table, 0.5))[row] == pytest.approx(1.0)


def test_siblings_of_a_burst_go_where_the_first_one_went(pipeline: Pipeline) -> None:
    decisions = [arrive(pipeline, chat(f"{LONG}{number}")) for number in range(4)]

    assert len({decision.assignment.addresses[0] for decision in decisions}) == 1


def pipeline_chain(text: str) -> list[int]:
    from extproc.prefix.hashing import hash_blocks  # noqa: PLC0415
    from extproc.request.openai import parse  # noqa: PLC0415

    return hash_blocks(parse(Api.CHAT, chat(text)).prompt, "llama-3.1-8b")


def test_a_miss_right_behind_its_sibling_is_no_news(pipeline: Pipeline, pool: Pool) -> None:
    pool.reports_cached_tokens = True
    sibling = arrive(pipeline, chat(), now=0.0)
    again = arrive(pipeline, chat(), now=0.2)
    assert again.assignment.place.row == sibling.assignment.place.row
    pipeline.settle(outcome_of(again, prompt_tokens=3250), 1.0)

    assert arrive(pipeline, chat(), now=5.0).assignment.cached_tokens > 2000


def test_the_same_seed_and_requests_give_the_same_decisions() -> None:
    def run() -> list[tuple[str, ...]]:
        pipeline = Pipeline(load({"all.yaml": CONFIG}), rng=random.Random(5), ticket_prefix="t")
        return [arrive(pipeline, chat(str(n), model="chat")).assignment.addresses for n in range(50)]

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


def test_a_pair_is_charged_told_and_let_go_together(pipeline: Pipeline) -> None:
    pipeline.apply(load({"a.yaml": PAIRS}))
    table = pipeline.pools["default/llama"].table
    # no prefill engine is in group b: it takes nothing as long as a can
    table.in_flight[table.row_of("10.0.0.3:8000")] = 100
    decision = arrive(pipeline, chat(model="llama"))
    assert decision.assignment.addresses == ("10.0.0.2:8000",)
    assert decision.assignment.prefill is not None
    assert decision.assignment.prefill.address == "10.0.0.1:8000"
    answer = ProcessingResponse.FromString(decision_answer(decision))
    headers = {o.header.key: o.header.raw_value for o in answer.request_body.response.header_mutation.set_headers}
    assert headers["x-prefiller-host-port"] == b"10.0.0.1:8000"
    prefill, decode = (table.row_of(f"10.0.0.{number}:8000") for number in (1, 2))
    assert (table.in_flight[prefill], table.in_flight[decode]) == (1, 1)
    assert (table.backlog_tokens[prefill] > 3000, table.backlog_tokens[decode]) == (True, 0)
    pipeline.finish(decision.ticket)
    assert (table.in_flight[prefill], table.in_flight[decode]) == (0, 0)
    # both hold the prompt now, so it need not be sent on again
    again = arrive(pipeline, chat(model="llama"), now=1.0)
    assert (again.assignment.addresses[0], again.assignment.prefill) == ("10.0.0.2:8000", None)


def test_an_adapter_goes_only_where_it_is_served(pipeline: Pipeline) -> None:
    table = pipeline.pools["default/llama"].table
    row = table.row_of("10.0.0.2:8000")
    assert row is not None
    table.set_loras(row, Loras(served=frozenset({"llama-3.1-8b", "sql"})))
    for number in range(10):
        assert arrive(pipeline, chat(f"{number} hello", model="sql")).assignment.addresses == ("10.0.0.2:8000",)
    assert len(arrive(pipeline, chat()).assignment.addresses) == 3


def test_a_draining_endpoint_gets_nothing_while_others_are_there(pipeline: Pipeline) -> None:
    drained = CONFIG.replace(b'{address: "10.0.0.1:8000"}', b'{address: "10.0.0.1:8000", draining: true}')
    pipeline.apply(load({"a.yaml": drained.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}))
    for number in range(10):
        assert "10.0.0.1:8000" not in arrive(pipeline, chat(f"{number} hello")).assignment.addresses
    only = CONFIG.replace(
        b'[{address: "10.0.0.1:8000"}, {address: "10.0.0.2:8000"}, {address: "10.0.0.3:8000"}]',
        b'[{address: "10.0.0.1:8000", draining: true}]',
    )
    pipeline.apply(load({"a.yaml": only.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}))
    assert arrive(pipeline, chat()).assignment.addresses == ("10.0.0.1:8000",)


def test_tenants_whose_caches_are_parted_share_no_prefix(pipeline: Pipeline) -> None:
    scoped = CONFIG.replace(b"scrapeInterval: 0s", b"scrapeInterval: 0s\n  cacheScopeHeader: X-Tenant")
    pipeline.apply(load({"a.yaml": scoped.replace(b"modelName: chat", b"modelName: llama-3.1-8b")}))

    def cached(tenant: str) -> float:
        head = Head("POST", "/v1/chat/completions", {"x-tenant": tenant}, has_body=True)
        return pipeline.arrive(Api.CHAT, head, chat(), 0.0).assignment.cached_tokens

    assert (cached("acme"), cached("other")) == (0, 0)
    assert cached("acme") > 1000
