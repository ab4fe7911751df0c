# SPDX-License-Identifier: Apache-2.0
"""A request of a prefill/decode pair whose decode engine dies before its first byte goes to a fallback of its rule."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.api.config_loader import load_snapshot
from extproc.api.dns_resolver import with_resolved_addresses
from extproc.core.effects import AbortDecode, Decision, OutcomeJoined
from extproc.core.explanation import to_text
from extproc.core.fallback import edits_to_unpair
from extproc.core.peer_events import RequestPrefilled
from extproc.core.request_record import Outcome, PrefillResult, RequestHead
from extproc.engines.engine_responses import parse_prefill_response
from extproc.metrics.request_metrics import Metrics
from extproc.request.json_rewrite import raw_top_level_fields, with_changes
from extproc.request.prefill_protocols import PROTOCOLS, PrefillAttempt
from extproc.streams.messages import ProcessingResponse
from extproc.streams.processing_responses import decision_answer
from extproc.wire_names import CLAMPS, ROUTE_NAMESPACE
from tests.extproc.core.test_fallback import SALTED, edited
from tests.extproc.core.test_prefill_completion import (
    BUDGET,
    PRICED,
    SERVER,
    USAGE_LOG,
    D,
    E,
    P,
    Pair,
    Q,
    Scene,
    decision,
    fields,
)
from tests.extproc.core.test_prefill_completion_fallback import SPARE, S, in_flight, refund, with_fallback
from tests.extproc.request.test_prefill_protocols import PARSERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.api.model_server import Connector
    from extproc.core.effects import Effect
    from extproc.core.request_record import PlannedAttempts
    from extproc.wire_names import Api

TRY: Final = PrefillAttempt("t-1-1", "10.0.0.11", 5710, "7c0d")
# What the prefill engine answers, for whichever connector.
ANSWER_BODY: Final = (
    b'{"choices": [{"index": 0, "finish_reason": "length", "disaggregated_params": {"ctx_request_id": 7}}],'
    b' "prompt_token_ids": [1, 2, 3], "kv_transfer_params": {"remote_host": "10.0.0.11"}}'
)
ANSWER: Final = parse_prefill_response(ANSWER_BODY)
SHORT: Final = "fallback: [{modelServerName: spare, degrade: {maxOutputTokens: 10}}]"
# The fallback has answered.
SERVED: Final = Outcome("", 200, S, 2.0, 1.0, 410, 6, 0, served_by=SPARE, attempts=2)


def attempts_of(found: Decision) -> PlannedAttempts:
    assert found.attempts is not None
    return found.attempts


def served_elsewhere(scene: Scene, ticket: str, now: float = 2.0, **outcome: object) -> list[Effect]:
    return scene.core.on_outcome(msgspec.structs.replace(SERVED, ticket=ticket, **outcome), now)


def trips(scene: Scene) -> dict[str, int]:
    table = scene.table
    return {table.addresses[row]: int(table.trips[row]) for row in table.active_rows}


def explained(found: Decision) -> str:
    assert found.history.explanation is not None
    return to_text(found.history.explanation)


def sent_to_fallback(found: Decision) -> dict[str, object]:
    """The body that the fallback's engine reads."""
    assert found.body is not None
    attempts, body = attempts_of(found), found.body
    edits = dict(attempts.edits).get(SPARE, "")
    if attempts.splice:
        edits += f'{attempts.splice},"small";'
    if attempts.salt:
        # of a provider
        edits += f"{attempts.salt},;"
    return edited(body, edits)


def paired(protocol: Connector, api: Api, body: Mapping[str, Any]) -> tuple[bytes, bytes] | None:
    """As its decode engine gets the request, and as any other engine does; None: it is no request of this API."""
    raw = json.dumps(body).encode()
    request = PARSERS[api](raw)
    # as ``body_changes`` has them
    own = {"model": "llama", "cache_salt": "pepper"}
    internal = request.internal_fields
    found = PROTOCOLS[protocol].decode_changes(request, raw_top_level_fields(raw, request.contents), TRY, ANSWER)
    assert found is not None, protocol
    base = {name: value for name, value in own.items() if name not in found.without}
    decode = with_changes(raw, base | found.fields, request.contents, without=(*internal, *found.without))
    return decode, with_changes(raw, dict(own), request.contents, without=internal)


TEXTS: Final = st.text(max_size=8) | st.sampled_from([";", "1,2,x;", '"},{"', "\\", "\u20ac;"])
VALUES: Final = st.none() | st.integers() | TEXTS | st.lists(TEXTS, max_size=2)
OPTIONAL: Final = {
    "temperature": st.floats(0, 2),
    "stream": st.booleans(),
    "user": TEXTS,
    "stop": TEXTS,
    # which clients may not set, or which change nothing
    "kv_transfer_params": st.none() | st.dictionaries(TEXTS, VALUES, max_size=2),
    "bootstrap_room": st.none() | st.integers(0, 9),
    "rid": st.none() | TEXTS,
    "request_id": st.none() | TEXTS,
    "cache_salt": st.none() | TEXTS,
    "disaggregated_params": st.none(),
    "prompt_token_ids": st.none(),
    "prompt_token_ids_b64": st.none(),
}
NEEDED: Final[dict[str, st.SearchStrategy[Any]]] = {
    "chat": st.fixed_dictionaries({"messages": st.just([{"role": "user", "content": "hello"}])}),
    "completions": st.fixed_dictionaries({"prompt": TEXTS}),
    "responses": st.fixed_dictionaries({"input": TEXTS}),
    "messages": st.fixed_dictionaries(
        {"messages": st.just([{"role": "user", "content": "hello"}]), "max_tokens": st.just(8)}
    ),
    "generate": st.fixed_dictionaries(
        {
            "token_ids": st.just([1, 2, 3]),
            "sampling_params": st.dictionaries(st.sampled_from(["stop", "seed", "extra_args"]), st.none(), max_size=3),
        }
    ),
}


@pytest.mark.parametrize("connector", PROTOCOLS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_edits_make_of_the_decode_engines_body_what_any_other_engine_gets(
    connector: Connector, data: st.DataObject
) -> None:
    api = data.draw(st.sampled_from([one for one in PARSERS if one in PROTOCOLS[connector].apis]))
    needed = data.draw(NEEDED[api.name.lower()])
    more = data.draw(st.fixed_dictionaries({}, optional=OPTIONAL))
    names = data.draw(st.permutations([*needed, *more, "model"]))
    body = {name: {**needed, **more, "model": "chat"}[name] for name in names}
    made = paired(connector, api, body)
    assert made is not None
    edits = edits_to_unpair(*made)
    assert edits is not None
    found, wanted = edited(made[0], edits), json.loads(made[1])
    assert found == wanted
    # and no member is left with a comma too many, nor another one moved
    assert [name for name in found if name in wanted and name != "prompt_token_ids_b64"] == [
        name for name in wanted if name != "prompt_token_ids_b64"
    ]


def test_what_cannot_travel_beside_the_body_is_not_changed_back() -> None:
    long = "word " * 1000
    assert edits_to_unpair(b'{"model":"m","prompt":[1,2]}', json.dumps({"model": "m", "prompt": long}).encode()) is None
    assert edits_to_unpair(b'{"model":"m","prompt":[1,2]}', b'{"model":"m","prompt":"\xff"}') is None
    # large members that are the same may be
    same = json.dumps({"prompt": long})[1:-1].encode()
    assert edits_to_unpair(b"{%b,%b}" % (same, b'"x":1'), b"{%b}" % same) == f"{len(same) + 1},6,;"


@pytest.mark.parametrize("stream", [False, True])
def test_envoy_goes_on_to_the_fallback_with_the_body_of_before(*, stream: bool) -> None:
    scene = Scene(with_fallback(engines=(D, E)))
    _, asked, _ = scene.arrive(stream=stream, max_tokens=20)
    found = decision(scene.answer(asked.ticket, 0.5))
    (decode,) = found.assignment.addresses
    attempts = attempts_of(found)
    # what stands in the body is for one decode engine
    assert (attempts.servers, attempts.addresses) == ((SERVER, SPARE), (decode, S))
    assert (attempts.degraded, attempts.shorter) == ((), ())
    assert "remote_block_ids" in fields(found.body)["kv_transfer_params"]
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    there = sent_to_fallback(found)
    assert there.pop("messages")
    assert there == {"model": "small", "stream": stream, "max_tokens": 20, **usage}
    answer = ProcessingResponse.FromString(decision_answer(found))
    sent = [one.header for one in answer.request_body.response.header_mutation.set_headers]
    assert [one.raw_value for one in sent if one.key == "x-envoy-max-retries"] == [b"1"]
    route = answer.dynamic_metadata.fields[ROUTE_NAMESPACE].struct_value
    assert route.fields[CLAMPS].struct_value.fields[SPARE].string_value == dict(attempts.edits)[SPARE]
    assert "fallback default/spare at 10.0.1.1:8000: is tried next" in explained(found)


@pytest.mark.parametrize("more", [{}, {"cache_salt": "pepper"}, {"stream": True}])
def test_a_provider_gets_neither_the_pairs_fields_nor_the_salt(more: dict[str, Any]) -> None:
    scene = Scene(
        with_fallback(spare="provider: {host: a.example}, apis: [ChatCompletions]") + b"---\n" + SALTED.encode()
    )
    scene.core.apply(with_resolved_addresses(scene.core.snapshot, {"a.example": ("10.0.1.1",)}), 0.0)
    _, asked, _ = scene.arrive(**more)
    found = decision(scene.answer(asked.ticket, 0.5))
    assert {"cache_salt", "kv_transfer_params"} <= fields(found.body).keys()
    wanted = {"model", "messages", *more} - {"cache_salt"}
    assert sent_to_fallback(found).keys() - {"stream_options"} == wanted


def test_an_engine_of_its_own_that_computes_the_prompt_is_followed_by_the_others() -> None:
    scene = Scene(with_fallback("onPrefillFailure: Local", engines=(D, E)))
    _, asked, _ = scene.arrive()
    found = decision(scene.answer(asked.ticket, 0.5, failure="unreachable"))
    attempts = attempts_of(found)
    assert attempts.servers == (SERVER, SERVER, SPARE)
    assert {*attempts.addresses} == {D, E, S}
    assert not attempts.edits


@pytest.mark.parametrize("connector", ["ExampleConnector", "OffloadingConnector"])
def test_what_any_engine_finds_is_tried_at_another_one_first_if_it_is_not_leased(connector: Connector) -> None:
    scene = Scene(with_fallback(engines=(D, E)).replace(b"NixlConnector", connector.encode()))
    _, asked, _ = scene.arrive()
    attempts = attempts_of(decision(scene.answer(asked.ticket, 0.5)))
    own = 1 if PROTOCOLS[connector].has_lease else 2
    assert attempts.servers == (*(SERVER,) * own, SPARE)


def test_the_decode_engine_alone_is_blamed_and_the_fallback_is_charged() -> None:
    spare = f"endpoints: [{{address: {S}}}], pricing: [{{perMillion: {{input: 3, output: 30}}}}]"
    scene = Scene(with_fallback(spare=spare, others=PRICED, route=BUDGET) + USAGE_LOG)
    scene.core.align_with_wall_clock(1_000_000.0, 0.0)
    _, asked, _ = scene.arrive(1.0, max_tokens=500)
    reserved = scene.spent()
    found = decision(scene.answer(asked.ticket, 1.5))
    assert scene.spent() == reserved
    assert found.usage is not None
    there = found.usage.as_served_by(SPARE)
    assert there.price is not None
    assert (there.server, there.served_model, there.price.rates.input) == (SPARE, "small", 3_000_000)
    assert in_flight(scene) == {D: 1}
    (settled,) = refund(served_elsewhere(scene, found.ticket, 3.0))
    assert (settled.server, settled.fell_back_from, settled.used.cost_micros) == (SPARE, SERVER, 3 * 410 + 30 * 6)
    assert settled.prefilled_by == P
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0)
    metrics.count_effect(settled)
    # what was prefilled was of no use
    labels = {"server": SERVER, "outcome": "failed"}
    assert metrics.registry.get_sample_value("attache_prefilled_answers_total", labels) == 1
    assert scene.spent() == {"input_tokens": 410, "output_tokens": 6, "requests": 1}
    assert trips(scene) == {P: 0, D: 1}
    assert not refund(served_elsewhere(scene, found.ticket, 3.1))
    scene.core.on_stream_closed(found.ticket, 3.0)
    assert scene.is_free
    assert not scene.core.records()


def test_a_fallback_that_gives_shorter_answers_gets_its_limit_too() -> None:
    scene = Scene(with_fallback(fallback=SHORT))
    _, asked, _ = scene.arrive(max_tokens=500)
    found = decision(scene.answer(asked.ticket, 0.5))
    assert attempts_of(found).shorter == (SPARE,)
    assert fields(found.body)["max_tokens"] == 500
    there = sent_to_fallback(found)
    assert (there["max_tokens"], there["model"], "kv_transfer_params" in there) == (10, "small", False)
    _, asked, _ = scene.arrive(1.0)
    there = sent_to_fallback(decision(scene.answer(asked.ticket, 1.5)))
    assert (there["max_completion_tokens"], "kv_transfer_params" in there) == (10, False)


def test_a_fallback_whose_budget_is_full_is_not_tried() -> None:
    budget = "fallback: [{modelServerName: spare}], retry: {minConcurrency: 1, budgetPercent: 0}"
    scene = Scene(with_fallback(fallback=budget))
    first, second, third = (scene.arrive(0.1 * number)[1].ticket for number in range(3))
    assert attempts_of(decision(scene.answer(first, 0.5))).servers == (SERVER, SPARE)
    assert attempts_of(decision(scene.answer(second, 0.6))).servers == (SERVER, SPARE)
    # so the engine has failed, and Envoy has passed the other one on
    served_elsewhere(scene, second, 1.0)
    scene.core.on_stream_closed(second, 1.0)
    full = decision(scene.answer(third, 1.1))
    assert (attempts_of(full).servers, attempts_of(full).addresses) == ((SERVER,), (D,))
    assert "its budget is used up" in explained(full)
    counted = scene.core._pipeline._fallbacks._budgets._servers[SPARE]
    assert counted.listed.total() == 1
    for ticket in (first, third):
        scene.core.on_stream_closed(ticket, 2.0)
    assert not counted.has_requests
    assert not scene.core._pipeline._fallbacks._budgets._places


def test_it_counts_at_no_fallback_while_its_prompt_is_computed() -> None:
    scene = Scene(with_fallback())
    budgets = scene.core._pipeline._fallbacks._budgets
    _, asked, _ = scene.arrive()
    assert not budgets._servers
    scene.answer(asked.ticket, 0.5)
    assert budgets._servers[SPARE].listed.total() == 1
    scene.core.on_disconnect(asked.ticket, 1.0)
    assert not budgets._servers[SPARE].has_requests


def test_the_other_processes_know_where_it_may_go() -> None:
    pair = Pair(with_fallback())
    _, asked, effects = pair.one.arrive()
    pair.tell(effects, 0.0)
    effects = pair.one.answer(asked.ticket, 0.5)
    (event,) = [one.event for one in effects if hasattr(one, "event") and isinstance(one.event, RequestPrefilled)]
    assert event.next_servers == (SPARE,)
    pair.tell(effects, 0.5)
    there = pair.other.core._pipeline._fallbacks._budgets._servers[SPARE]
    assert there.listed.total() == 1
    told = pair.other.core.on_outcome(msgspec.structs.replace(SERVED, ticket=asked.ticket), 2.0)
    assert [one.server for one in told if isinstance(one, OutcomeJoined)] == [SERVER]
    assert trips(pair.other) == {P: 0, D: 1}
    pair.tell(pair.one.core.on_stream_closed(asked.ticket, 2.0), 2.0)
    assert not there.has_requests
    assert pair.other.is_free


@pytest.mark.parametrize(("words", "is_alone"), [(400, False), (4000, True)])
def test_a_prompt_that_is_too_long_to_be_put_back_leaves_its_request_alone(words: int, *, is_alone: bool) -> None:
    """TensorRT-LLM's decode engines get tokens in its place."""
    scene = Scene(
        with_fallback(others="engine: TensorRT-LLM").replace(b"NixlConnector", b"context_first"),
    )
    body = {"model": "chat", "prompt": "word; " * words, "max_tokens": 20}
    head = RequestHead("POST", "/v1/completions", {}, has_body=True)
    arrival = scene.core.builder.build_by_model(head, json.dumps(body).encode())
    own, _ = scene.core.arrive(arrival, 0.0, wants_reasons=True)
    result = PrefillResult(own.ticket, status=200, body=ANSWER_BODY, answered_at_s=0.5)
    found = decision(scene.core.on_work_result(result, 0.5))
    assert fields(found.body)["prompt"] == [1, 2, 3]
    assert attempts_of(found).servers == ((SERVER,) if is_alone else (SERVER, SPARE))
    assert ("cannot be taken out again" in explained(found)) is is_alone
    if not is_alone:
        assert sent_to_fallback(found) == {**body, "model": "small"}


def test_a_sidecars_decode_engine_has_no_fallback() -> None:
    configuration = with_fallback().replace(b"leg: Gateway, connector: NixlConnector, onPrefillFailure: Fail", b"")
    found, _ = Scene(configuration).enter()
    assert isinstance(found, Decision)
    assert (found.prefill_address, found.attempts) == (P, None)
    assert "a sidecar has its prompt computed by another engine" in explained(found)


def beside_configuration(engines: Iterable[str]) -> bytes:
    found = with_fallback("transferPort: 9001", others="engine: SGLang", engines=engines)
    return found.replace(b"NixlConnector", b"bootstrap_room")


def beside(**more: int) -> tuple[Scene, Decision, str]:
    """A request that both engines of SGLang have."""
    scene = Scene(beside_configuration((D, E)))
    found, _ = scene.enter(0.0, 400, headers={}, **more)
    assert isinstance(found, Decision)
    (decode,) = found.assignment.addresses
    return scene, found, decode


def test_a_request_that_two_engines_have_at_once_goes_on_to_the_fallback_without_its_room() -> None:
    scene, found, decode = beside(max_tokens=20)
    attempts = attempts_of(found)
    assert (attempts.servers, attempts.addresses) == ((SERVER, SPARE), (decode, S))
    assert fields(found.body).keys() >= {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
    assert sent_to_fallback(found).keys() == {"model", "messages", "max_tokens"}
    # the prefill engine waits for the other one, which has died
    effects = scene.answer(found.ticket, 0.5, status=500, body=b"transfer failed")
    assert [one.address for one in effects if isinstance(one, AbortDecode)] == [decode]
    assert trips(scene)[P] == 0
    assert scene.load(P) == (0, 0.0)
    (settled,) = refund(served_elsewhere(scene, found.ticket))
    assert (settled.server, settled.fell_back_from) == (SPARE, SERVER)
    assert settled.leg is not None
    assert settled.leg.outcome == "error"
    assert {name for name, count in trips(scene).items() if count} == {decode}
    prefill = scene.table.row_of(P)
    assert prefill is not None
    assert scene.table.healths[prefill].failed == 0
    scene.core.on_stream_closed(found.ticket, 2.0)
    assert scene.is_free


@pytest.mark.parametrize("end", [{"body": b'{"choices": []}'}, {"status": 500}])
def test_the_other_processes_count_it_once_and_blame_the_same_engine(end: dict[str, Any]) -> None:
    pair = Pair(beside_configuration((D,)))
    found, effects = pair.one.enter()
    pair.tell(effects, 0.0)
    there = pair.other.core._pipeline._fallbacks._budgets._servers[SPARE]
    assert there.listed.total() == 1
    pair.tell(pair.one.answer(found.ticket, 0.5, **end), 0.5)
    assert there.listed.total() == 1
    served_elsewhere(pair.other, found.ticket)
    assert trips(pair.other) == {P: 0, D: 1}
    prefill = pair.other.table.row_of(P)
    assert prefill is not None
    assert pair.other.table.healths[prefill].failed == 0
    pair.tell(pair.one.core.on_stream_closed(found.ticket, 2.0), 2.0)
    assert not there.has_requests
    assert pair.other.is_free


def test_its_place_in_the_budget_is_left_though_its_engine_was_away_meanwhile() -> None:
    scene, found, decode = beside()
    others = [one for one in (D, E) if one != decode]
    for now, engines in (0.1, (*others, Q)), (0.2, (*others, Q, decode)):
        scene.core.apply(load_snapshot({"a.yaml": beside_configuration(engines)}), now)
    scene.answer(found.ticket, 0.5, body=b'{"choices": []}')
    scene.core.on_stream_closed(found.ticket, 1.0)
    budgets = scene.core._pipeline._fallbacks._budgets
    assert not budgets._servers[SPARE].has_requests
    assert not budgets._places


@pytest.mark.parametrize(
    ("end", "blamed"),
    [({"status": 500}, False), ({"failure": "timeout"}, True), ({"failure": "unreachable"}, True)],
)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_prefill_engine_that_fails_is_blamed_when_the_decode_engine_has_ended_the_request(
    end: dict[str, Any], *, blamed: bool, is_elsewhere: bool
) -> None:
    scene, found, decode = beside()
    scene.answer(found.ticket, 0.5, **end)
    prefill = scene.table.row_of(P)
    assert prefill is not None
    # no other engine can be the reason of that
    assert (trips(scene)[P] == 1) is (end == {"failure": "unreachable"})
    if is_elsewhere:
        served_elsewhere(scene, found.ticket, errors=frozenset({decode}))
    else:
        scene.core.on_outcome(Outcome(found.ticket, 500, decode, 1.0, 1.0, None, None, None), 1.0)
    # one error is none too many
    assert {name for name, count in trips(scene).items() if count} == ({P} if blamed else set())
    assert scene.table.healths[prefill].failed == 1
