# SPDX-License-Identifier: Apache-2.0
"""Guards: which requests they get, and what follows from whatever they answer."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.guard_services_by_route import MOST_ADDED_BYTES
from extproc.core.core import Core
from extproc.core.effects import AskGuard, AskLimits, Decision, Fault, GuardAnswered, RequestHeld, RequestRefused
from extproc.core.explanation import to_text
from extproc.core.guard_decisions import GuardCircuitBreaker, GuardFailed, GuardReply, guard_call_owner, guard_event
from extproc.core.request_builder import RequestBuilder
from extproc.core.request_record import RequestHead
from extproc.core.request_states import RequestState
from extproc.refusals import GuardRefused, GuardUnavailable, RateLimited, to_anthropic_body
from tests.extproc.scenes import CHAT, ONE_AT_A_TIME, configuration, endpoints, request

if TYPE_CHECKING:
    from extproc.core.effects import RequestEffect
    from extproc.core.request_record import Arrival

SERVER: Final = f"scrapeInterval: 0s\n{endpoints('10.0.0.1:8000')}"
QUEUE: Final = f"{SERVER}flowControl: {{{ONE_AT_A_TIME}}}"
TEXT: Final = "my key is sk-1"


def gateway(*names: str, **fields: object) -> str:
    guards = [{"name": name, "url": "http://127.0.0.1:1/", **fields} for name in names]
    document = {"apiVersion": "attache.dev/v1alpha1", "kind": "GatewayConfig", "metadata": {"name": "g"}}
    return json.dumps({**document, "spec": {"guards": guards}})


def guarded(mode: str = "Close", *, server: str = SERVER, route: str = "", named: str = "pii") -> Core:
    routes = {"chat": f"guard: {{name: {named}, failureMode: {mode}}}\n{route}"}
    config = configuration(servers={"llama": server}, routes=routes, others=gateway("pii"))
    return Core(config, rng=random.Random(0), ticket_prefix="t")


def asked(core: Core, arrival: Arrival | None = None) -> AskGuard:
    own, _ = core.arrive(request(core, TEXT) if arrival is None else arrival, 0.0)
    assert isinstance(own, AskGuard)
    return own


def reply(**answer: object) -> GuardReply:
    return GuardReply(200, json.dumps(answer).encode(), 0.01)


def said(core: Core, ask: AskGuard, answer: GuardReply | GuardFailed) -> tuple[RequestEffect, GuardAnswered]:
    own, effects = core.resume(ask.ticket, answer, 0.1)
    (counted,) = [one for one in effects if isinstance(one, GuardAnswered)]
    assert own is not None
    return own, counted


def refusal_of(own: RequestEffect) -> GuardRefused | GuardUnavailable:
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, GuardRefused | GuardUnavailable)
    return own.refusal


def test_a_request_of_a_route_without_a_guard_is_decided_at_once() -> None:
    config = configuration(servers={"llama": SERVER}, others=gateway("pii"))
    core = Core(config, rng=random.Random(0), ticket_prefix="t")
    assert isinstance(core.arrive(request(core), 0.0)[0], Decision)


def test_an_allowed_request_goes_on_as_it_is() -> None:
    core = guarded()
    own, counted = said(core, asked(core), reply(action="allow"))
    assert isinstance(own, Decision)
    assert own.body is None
    assert counted == GuardAnswered("pii", "allowed", 0.01, goes_on=True, ticket="t-1")
    core = guarded()
    assert isinstance(said(core, asked(core), GuardReply(204, b""))[0], Decision)


def test_a_refusal_is_in_the_guards_words_and_its_reason_for_the_operator_alone() -> None:
    core = guarded()
    ask = asked(core)
    own, counted = said(core, ask, reply(action="refuse", status=422, message="no keys", reason="sk pattern"))
    refusal = refusal_of(own)
    assert (refusal.status, refusal.message, refusal.outcome) == (422, "no keys", "guard")
    assert (counted.result, counted.detail, counted.goes_on) == ("refused", "sk pattern", False)
    assert core.state_of(ask.ticket) is RequestState.ABSENT
    core = guarded()
    assert refusal_of(said(core, asked(core), reply(action="refuse"))[0]).status == 403
    # statuses that Anthropic's API does not have are mistakes of the request, not of the gateway
    assert json.loads(to_anthropic_body(refusal))["error"]["type"] == "invalid_request_error"


def test_a_refused_request_gets_its_reservation_back_and_a_refused_caller_costs_the_guard_nothing() -> None:
    core = guarded(route="rateLimits: [{unit: hour, requests: 1}]")
    for _ in range(3):
        refusal_of(said(core, asked(core), reply(action="refuse"))[0])
    assert isinstance(said(core, asked(core), reply(action="allow"))[0], Decision)
    own, effects = core.arrive(request(core), 0.0)
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, RateLimited)
    assert not [one for one in effects if isinstance(one, GuardAnswered)]


def test_a_client_that_leaves_gets_its_reservation_back_and_a_late_answer_changes_nothing() -> None:
    core = guarded(route="rateLimits: [{unit: hour, requests: 1}]")
    ask = asked(core)
    core.on_disconnect(ask.ticket, 0.1)
    assert core.resume(ask.ticket, reply(action="allow"), 0.2) == (None, [])
    assert isinstance(said(core, asked(core), reply(action="allow"))[0], Decision)


def test_the_guard_is_asked_after_the_shared_limits_and_before_the_queue() -> None:
    core = guarded(server=QUEUE, route="rateLimits: [{unit: hour, requests: 9, scope: Global}]")

    def through_limits() -> AskGuard:
        own, _ = core.arrive(request(core), 0.0)
        assert isinstance(own, AskLimits)
        own, _ = core.resume(own.ticket, None, 0.0)
        assert isinstance(own, AskGuard)
        return own

    assert isinstance(said(core, through_limits(), reply(action="allow"))[0], Decision)
    second = through_limits()
    assert core.count_requests(RequestState.QUEUED) == 0
    assert isinstance(said(core, second, reply(action="allow"))[0], RequestHeld)


@pytest.mark.parametrize("form", ["fields", "body"])
def test_a_changed_request_is_read_again_and_its_engine_gets_the_change(form: str) -> None:
    core = guarded()
    messages = [{"role": "user", "content": "my key is [redacted] " * 50}]
    ask = asked(core)
    answer = {"messages": messages} if form == "fields" else {"model": "m", "messages": messages}
    own, counted = said(core, ask, reply(action="change", **{form: answer}))
    assert isinstance(own, Decision)
    assert own.body is not None
    assert json.loads(own.body)["messages"] == messages
    assert counted.result == "changed"
    # what it is expected to cost is that of the longer prompt, which is in the index
    assert own.assignment.input_tokens > 100
    again = said(core, asked(core), reply(action="change", **{form: answer}))[0]
    assert isinstance(again, Decision)
    assert again.assignment.cached_tokens > 100


BAD_CHANGES: Final[dict[str, dict[str, Any]]] = {
    "another model": {"fields": {"model": "other"}},
    "a stream where none was asked for": {"fields": {"stream": True}},
    "messages that are none": {"fields": {"messages": 7}},
    "no messages": {"body": {"model": "m"}},
    "neither": {},
    "both": {"fields": {}, "body": {"model": "m", "messages": []}},
    "a body that is no object": {"body": [1]},
    "too long": {"fields": {"user": "u" * (MOST_ADDED_BYTES + 1)}},
    "where the engine connects": {"fields": {"kv_transfer_params": {"remote_host": "10.0.0.9"}}},
}
BAD_ANSWERS: Final = {
    **{name: reply(action="change", **change) for name, change in BAD_CHANGES.items()},
    "no JSON": GuardReply(200, b"<html>"),
    "nothing": GuardReply(200, b""),
    "no object": GuardReply(200, b"[]"),
    "an unknown action": reply(action="maybe"),
    "an action of the wrong type": reply(action=7),
    "a success for a refusal": reply(action="refuse", status=200),
    "a status of servers": reply(action="refuse", status=503),
    "one that Envoy does not know": reply(action="refuse", status=418),
    "one about credentials": reply(action="refuse", status=401),
    "nested deeply": GuardReply(200, b'{"action": "allow", "x": ' + b"[" * 100_000),
    "no UTF-8": GuardReply(200, b'{"action": "\xff"}'),
    "a redirect": GuardReply(302, b""),
    "an error": GuardReply(500, b'{"action": "allow"}'),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_that_cannot_be_followed_is_a_failure_of_the_guard(name: str) -> None:
    core = guarded()
    own, counted = said(core, asked(core), BAD_ANSWERS[name])
    refusal = refusal_of(own)
    assert (refusal.status, refusal.outcome) == (503, "guard_unavailable")
    assert counted.result in {"invalid", "status"}
    assert counted.detail
    core = guarded("Open")
    own, counted = said(core, asked(core), BAD_ANSWERS[name])
    assert isinstance(own, Decision)
    assert own.body is None
    assert counted.goes_on


VALUES: Final = st.recursive(st.none() | st.integers() | st.text(), st.lists)
CHANGES: Final = VALUES.map(lambda value: json.dumps({"action": "change", "fields": {"messages": value}}).encode())


@given(st.binary() | CHANGES)
def test_whatever_a_guard_answers_a_request_is_decided_or_refused(body: bytes) -> None:
    core = guarded()
    own, _ = said(core, asked(core), GuardReply(200, body))
    assert isinstance(own, Decision | RequestRefused)
    assert core.count_requests(RequestState.ASKING_GUARD) == 0


def test_a_guard_that_does_not_answer_refuses_or_not_by_the_failure_mode() -> None:
    core = guarded()
    refusal = refusal_of(said(core, asked(core), GuardFailed("timeout", "no answer within 0.5 s"))[0])
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (503, "guard_unavailable", 1)
    core = guarded("Open")
    assert isinstance(said(core, asked(core), GuardFailed("timeout", ""))[0], Decision)


@pytest.mark.parametrize("mode", ["Open", "Close"])
def test_an_error_that_nobody_has_foreseen_is_a_failure_of_the_guard(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, error = guarded(mode), RecursionError("of this test")

    def fail(*_: object) -> Arrival:
        raise error

    monkeypatch.setattr(RequestBuilder, "with_body", fail)
    ask, answer = asked(core), reply(action="change", body={"model": "m", "messages": []})
    own, effects = core.resume(ask.ticket, answer, 0.1)
    assert [one.result for one in effects if isinstance(one, GuardAnswered)] == ["internal"]
    assert [one.error for one in effects if isinstance(one, Fault)] == [error]
    if mode == "Open":
        assert isinstance(own, Decision)
        assert core.preview_guard_reply(ask, answer)[0] is ask.arrival
    else:
        assert own is not None
        assert refusal_of(own).code == "guard_unavailable"
        with pytest.raises(GuardUnavailable):
            core.preview_guard_reply(ask, answer)


def test_a_guard_that_is_not_configured_is_a_failure_without_a_call() -> None:
    core = guarded(named="other")
    own, effects = core.arrive(request(core), 0.0)
    refusal_of(own)
    assert [one.result for one in effects if isinstance(one, GuardAnswered)] == ["unknown"]
    core = guarded("Open", named="other")
    assert isinstance(core.arrive(request(core), 0.0)[0], Decision)


def test_what_the_guard_gets_is_what_the_engine_reads() -> None:
    core = guarded()
    head = RequestHead("POST", CHAT, {}, has_body=True)
    good, bad = ([{"role": "user", "content": text}] for text in ("hello", "attack"))
    body = f'{{"messages": {json.dumps(good)}, "model": "m", "mess\\u0061ges": {json.dumps(bad)}}}'.encode()
    ask = asked(core, core.builder.build_by_model(head, body))
    event = guard_event(ask.arrival, ask.ticket, "urn:x")
    assert event.data is not None
    assert event.data.count(b'ges"') == 1
    own, _ = said(core, ask, reply(action="allow"))
    assert isinstance(own, Decision)
    assert own.body is not None
    assert json.loads(event.data)["messages"] == json.loads(own.body)["messages"]


@pytest.mark.parametrize(("fields", "marks"), [({}, set[str]()), ({"prompt_token_ids": [1, 2]}, {"unreadable"})])
def test_a_prompt_that_is_no_text_is_marked(fields: dict[str, object], marks: set[str]) -> None:
    core = guarded()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    ask = asked(core, core.builder.build_by_model(RequestHead("POST", CHAT, {}, has_body=True), body))
    event = guard_event(ask.arrival, ask.ticket, "urn:x")
    assert event.attributes.keys() & {"unreadable"} == marks
    assert event.data == body


def test_a_form_is_shown_without_its_content_and_cannot_be_changed() -> None:
    core = guarded()
    parts = ('name="model"\r\n\r\nm', 'name="file"; filename="a.wav"\r\n\r\nRIFF')
    body = "".join(f"--x\r\nContent-Disposition: form-data; {one}\r\n" for one in parts) + "--x--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=x"}
    head = RequestHead("POST", "/v1/audio/transcriptions", headers, has_body=True)
    arrival = core.builder.build_by_model(head, body.encode())
    ask = asked(core, arrival)
    event = guard_event(arrival, ask.ticket, "urn:x")
    assert (event.data, event.attributes["omitted"], event.attributes["bytes"]) == (None, "not-json", len(body))
    assert said(core, ask, reply(action="change", fields={"prompt": "x"}))[1].result == "invalid"
    assert isinstance(said(core, asked(core, arrival), reply(action="allow"))[0], Decision)


def test_a_changed_request_stays_changed_at_another_server() -> None:
    core = guarded()
    ask = asked(core)
    changed, _ = core.preview_guard_reply(
        ask, reply(action="change", fields={"messages": [{"role": "user", "content": "x"}]})
    )
    moved = core.builder.move_to_other_server(changed)
    assert moved is not None
    assert (moved.is_changed, moved.body) == (True, changed.body)


def test_an_explanation_has_what_the_guard_said() -> None:
    core = guarded()
    arrival = request(core)
    assert "the guard 'pii' is asked first" in to_text(core.explain(arrival, 0.0))
    ask = core.guard_ask_for(arrival)
    assert ask is not None
    after, text = core.preview_guard_reply(ask, reply(action="allow", reason="clean"))
    assert "the guard 'pii' allowed it: clean" in to_text(core.explain(after, 0.0, guarded=text))
    with pytest.raises(GuardRefused, match="no keys"):
        core.preview_guard_reply(ask, reply(action="refuse", message="no keys"))
    ask = asked(core)
    core = guarded()
    own, _ = core.arrive(request(core), 0.0, wants_reasons=True)
    own, _ = core.resume(own.ticket, reply(action="allow"), 0.0)
    assert isinstance(own, Decision)
    assert own.history.explanation is not None
    assert own.history.explanation.guard == "'pii' allowed it"


def test_usage_rows_name_the_guard_as_the_reason() -> None:
    core = guarded()
    core._dispatcher.logs_usage = True
    own, _ = said(core, asked(core), reply(action="refuse"))
    assert isinstance(own, RequestRefused)
    assert own.usage is not None
    assert own.usage.refused == "guard"


def times_out(circuit: GuardCircuitBreaker, *callers: str, at_s: float, took_s: float = 0.5) -> None:
    for caller in callers:
        circuit.record_failure(caller, at_s, began_s=at_s - took_s, is_timeout=True)


def test_a_dead_guard_is_tried_by_one_request_in_each_pause() -> None:
    circuit = GuardCircuitBreaker()
    for number in range(1, 6):
        caller = ("acme", "bell")[number % 2]
        assert circuit.may_call(caller, float(number))
        times_out(circuit, caller, at_s=number + 0.5)
    assert [circuit.may_call("cord", at_s) for at_s in (6.0, 6.5, 6.6, 7.6)] == [False, True, False, True]
    circuit.record_answer(7.7)
    assert circuit.may_call("cord", 7.7)


def test_slow_texts_of_one_caller_pause_the_guard_for_nobody_while_others_ask() -> None:
    circuit = GuardCircuitBreaker()
    assert circuit.may_call("bell", 0.0)
    for number in range(1, 13):
        assert circuit.may_call("evil", float(number))
        times_out(circuit, "evil", at_s=number + 0.5)
        assert circuit.may_call("evil", number + 0.5)
    # there was nobody else for a minute: it is paused until somebody is
    assert [circuit.may_call("evil", at_s) for at_s in (73.0, 73.1)] == [True, False]
    assert circuit.may_call("bell", 73.2)
    assert circuit.may_call("evil", 73.3)


def test_of_a_callers_calls_at_the_same_time_one_timeout_counts() -> None:
    circuit = GuardCircuitBreaker()
    for at_s in (1.0, 1.1, 1.2, 1.3):
        times_out(circuit, *["evil"] * 12, at_s=at_s)
    times_out(circuit, "bell", at_s=1.3)
    assert circuit.failures == 2
    times_out(circuit, "evil", at_s=1.6)
    assert circuit.failures == 3


def test_a_timeout_of_a_call_during_which_the_guard_has_answered_does_not_count() -> None:
    circuit = GuardCircuitBreaker()
    circuit.record_answer(0.6)
    times_out(circuit, "acme", "bell", "cord", "dent", "evil", at_s=1.0)
    assert circuit.failures == 0


def test_connections_that_fail_count_for_all() -> None:
    circuit = GuardCircuitBreaker()
    for at_s in (1.0, 1.0, 1.0, 1.0, 1.0):
        assert circuit.may_call("acme", at_s)
        circuit.record_failure("acme", at_s, began_s=0.9, is_timeout=False)
    assert not circuit.may_call("bell", 1.1)


def test_what_a_circuit_remembers_is_bounded() -> None:
    circuit = GuardCircuitBreaker()
    for number in range(100):
        circuit.may_call(f"caller-{number}", float(number))
        times_out(circuit, f"caller-{number}", at_s=float(number))
    assert (len(circuit.callers), len(circuit.failing)) == (2, 5)


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ({"x-attache-tenant": "acme", "x-attache-user": "ann"}, "acme"),
        ({"x-attache-user": "ann"}, "ann"),
        ({}, "anonymous"),
    ],
)
def test_a_caller_is_a_tenant_or_else_a_user(headers: dict[str, str], caller: str) -> None:
    assert guard_call_owner(request(guarded(), headers=headers)) == caller


def test_a_changed_configuration_does_not_disturb_a_request_that_is_asked_about() -> None:
    core = guarded()
    ask = asked(core)
    changed = msgspec.structs.replace(core.snapshot, routes=())
    core.apply(changed, 0.1)
    assert refusal_of(said(core, ask, reply(action="refuse"))[0]).outcome == "guard"
