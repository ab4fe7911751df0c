# SPDX-License-Identifier: Apache-2.0
"""Parameters that a rule sets: in each API, before limits count, and never what is the client's."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.parameter_overrides import REFUSED, check_parameters
from extproc.core.effects import Decision, RequestRefused
from extproc.core.request_record import Arrival, RequestHead
from extproc.refusals import RateLimited
from extproc.request import anthropic, body_parser, inference_request, openai, token_apis
from extproc.request.inference_request import CommonFields
from tests.extproc.scenes import configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from extproc.core.core import Core

SERVERS = {name: endpoints(f"10.0.0.{number}:8000") for number, name in enumerate("abc", start=1)}


def routes(*targets: dict[str, Any], more: str = "", **rule: object) -> dict[str, str]:
    listed = [{"modelServerName": "a", **one} for one in targets or ({},)]
    return {"chat": f"rules: {json.dumps([{'targetModels': listed, **rule}])}\n{more}"}


def read(arrival: Arrival) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arrival.body)
    return found


def posted(core: Core, path: str, **body: object) -> Arrival:
    return core.builder.build_by_model(
        RequestHead("POST", path, {}, has_body=True), json.dumps({"model": "m", **body}).encode()
    )


MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1000},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_field_is_set_whatever_the_client_writes_there(path: str) -> None:
    core = core_of(servers=SERVERS, routes=routes({"set": {"top_p": 0.5}}, set={"temperature": 0.25, "top_p": 0.9}))
    for given in ({}, {"temperature": 1.5}, {"temperature": None}, {"temperature": {"hostile": [1, 2]}}):
        arrival = posted(core, path, **BODIES[path], **given)
        assert read(arrival) == {"model": "m", **BODIES[path], "temperature": 0.25, "top_p": 0.5}
        assert arrival.is_changed
    # what has the values already passes as it is
    same = posted(core, path, **BODIES[path], temperature=0.25, top_p=0.5)
    assert not same.is_changed


def test_tokens_in_take_it_among_their_sampling_parameters() -> None:
    core = core_of(servers=SERVERS, routes=routes(set={"temperature": 0.25}, maxOutputTokens=50))
    path = "/inference/v1/generate"
    arrival = posted(core, path, token_ids=[1, 2], sampling_params={"max_tokens": 400, "top_k": 3})
    assert read(arrival)["sampling_params"] == {"max_tokens": 50, "top_k": 3, "temperature": 0.25}
    assert arrival.request.max_output_tokens == 50
    arrival = posted(core, path, token_ids=[1, 2], sampling_params={})
    assert read(arrival)["sampling_params"] == {"max_tokens": 50, "temperature": 0.25}


def test_what_writes_no_answer_is_left_alone() -> None:
    core = core_of(servers=SERVERS, routes=routes(set={"temperature": 0.25}, maxOutputTokens=5))
    for path, body in (("/v1/embeddings", {"input": "hi"}), ("/tokenize", {"prompt": "hi"})):
        assert not posted(core, path, **body).is_changed


@pytest.mark.parametrize(
    ("path", "asked", "sent"),
    [
        ("/v1/chat/completions", {}, {"max_completion_tokens": 64}),
        ("/v1/chat/completions", {"max_tokens": 63}, {"max_tokens": 63}),
        (
            "/v1/chat/completions",
            {"max_tokens": 9, "max_completion_tokens": 99},
            {"max_tokens": 9, "max_completion_tokens": 64},
        ),
        ("/v1/chat/completions", {"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": 64}),
        ("/v1/completions", {}, {}),
        ("/v1/completions", {"max_tokens": 10_000_000}, {"max_tokens": 64}),
        ("/v1/responses", {}, {"max_output_tokens": 64}),
        ("/v1/messages", {}, {"max_tokens": 64}),
    ],
)
def test_answers_are_limited_under_the_apis_own_names(path: str, asked: dict[str, Any], sent: dict[str, Any]) -> None:
    core = core_of(servers=SERVERS, routes=routes({"maxOutputTokens": 64}, maxOutputTokens=500))
    body = BODIES[path]
    arrival = posted(core, path, **{**body, **asked})
    assert read(arrival) == {"model": "m", **body, **asked, **sent}
    most = arrival.request.max_output_tokens
    assert most == max((value for value in sent.values() if value), default=None)


def test_completions_without_a_limit_get_one_that_is_below_their_usual() -> None:
    core = core_of(servers=SERVERS, routes=routes(maxOutputTokens=15))
    assert read(posted(core, "/v1/completions", prompt="hi"))["max_tokens"] == 15


def test_limits_of_tokens_count_what_the_rule_allows() -> None:
    limit = "rateLimits: [{outputTokens: 100, unit: minute, per: Route}]"
    core = core_of(servers=SERVERS, routes=routes(maxOutputTokens=40, more=limit))
    results = [core.arrive(request(core, max_tokens=1_000), 0.0)[0] for _ in range(3)]
    assert [type(one) for one in results] == [Decision, Decision, RequestRefused]
    assert isinstance(results[2], RequestRefused)
    assert isinstance(results[2].refusal, RateLimited)
    # without it, the first is more than the whole limit
    core = core_of(servers=SERVERS, routes=routes(more=limit))
    assert isinstance(core.arrive(request(core, max_tokens=1_000), 0.0)[0], RequestRefused)


def test_a_repeated_or_escaped_name_hides_nothing() -> None:
    core = core_of(servers=SERVERS, routes=routes(set={"temperature": 0.25}, maxOutputTokens=5))
    body = rb'{"model":"m","messages":[],"temperature":0.25,"\u0074emperature":2,"max_tokens":1,"max_tok\u0065ns":9}'
    arrival = core.builder.build_by_model(RequestHead("POST", "/v1/chat/completions", {}, has_body=True), body)
    assert arrival.body == b'{"model":"m","messages":[],"temperature":0.25,"max_tokens":5}'


def test_a_long_prompt_stays_byte_for_byte() -> None:
    core = core_of(servers=SERVERS, routes=routes(set={"temperature": 0.25}))
    arrival = request(core, "x\\u0000contents\\u0000é" * 20_000, temperature=1)
    plain = request(core_of(servers=SERVERS), "x\\u0000contents\\u0000é" * 20_000, temperature=1)
    assert arrival.request.prompt == plain.request.prompt
    assert arrival.body == plain.body.replace(b'"temperature": 1', b'"temperature": 0.25') or (
        read(arrival) == {**read(plain), "temperature": 0.25}
    )


def test_a_request_that_moves_has_the_clients_own_values_back() -> None:
    held = {**SERVERS, "a": "activation: {}\nendpoints: []\n", "b": "activation: {}\nendpoints: []\n"}
    targets = (
        {"set": {"temperature": 0.25, "seed": 7}, "maxOutputTokens": 9},
        {"modelServerName": "b", "set": {"temperature": 0.5}},
    )
    core = core_of(servers=held, routes=routes(*targets))
    arrival = request(core, temperature=1, max_tokens=100)
    core.apply(configuration(servers=SERVERS, routes=routes(*targets)), 1.0)
    found = {arrival.destination.server: arrival}
    for _ in range(40):
        moved = core.builder.move_to_other_server(next(iter(found.values())))
        assert moved is not None
        found[moved.destination.server] = moved
    to_a, to_b = read(found["default/a"]), read(found["default/b"])
    assert (to_a["temperature"], to_a["seed"], to_a["max_tokens"]) == (0.25, 7, 9)
    assert (to_b["temperature"], to_b["max_tokens"]) == (0.5, 100)
    assert "seed" not in to_b
    assert found["default/b"].request.max_output_tokens == 100


def test_a_fallback_has_what_the_target_had() -> None:
    core = core_of(
        servers=SERVERS,
        routes=routes({"set": {"temperature": 0.25}}, fallback=[{"modelServerName": "b"}], maxOutputTokens=9),
    )
    arrival = request(core, temperature=1)
    assert arrival.destination.fallbacks is not None
    other = core.builder.move_to_fallback(arrival, arrival.destination.fallbacks.chain[0])
    assert other.body == arrival.body
    own, _ = core.arrive(arrival, 0.0)
    assert isinstance(own, Decision)
    assert own.attempts is not None
    assert own.attempts.servers == ("default/a",) * 1 + ("default/b",)
    assert not own.attempts.degraded


def test_one_server_may_have_arms_with_other_parameters() -> None:
    arms = [{"set": {"temperature": 0}, "weight": 50}, {"set": {"temperature": 1}, "weight": 50}]
    core = core_of(servers=SERVERS, routes=routes(*arms, sticky="Session"))
    found = {}
    for name in map(str, range(30)):
        values = {read(request(core, headers={"x-session-id": name}))["temperature"] for _ in range(5)}
        assert len(values) == 1
        found[name] = values.pop()
    assert set(found.values()) == {0, 1}
    # another value moves no session to the other arm
    changed = core_of(
        servers=SERVERS,
        routes=routes(arms[0], {"set": {"temperature": 1.5}, "weight": 50}, sticky="Session"),
    )
    for name, value in found.items():
        assert (read(request(changed, headers={"x-session-id": name}))["temperature"] == 1.5) == bool(value)


def test_it_is_explained() -> None:
    core = core_of(servers=SERVERS, routes=routes(set={"temperature": 0.25}, maxOutputTokens=9))
    assert core.explain(request(core), now=0.0).sets == ("temperature", "maxOutputTokens")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({name: 1}, rf"set.{name}: must not be set") for name in sorted(REFUSED)),
        ({"temperature": "hot"}, "set.temperature: expected 'float', got 'str'; it is 'hot'"),
        ({"temperature": 2.5}, "set.temperature"),
        ({"temperature": True}, "set.temperature"),
        ({"top_p": 0}, "set.top_p"),
        ({"seed": 1.5}, "set.seed"),
        ({"stop": [1]}, "set.stop"),
        ({"response_format": "json"}, "set.response_format"),
        ({"reasoning_effort": "extreme"}, "set.reasoning_effort"),
        ({"seed": 10**40}, "set.seed"),
        ({"a.b": 1}, "is no field at the top of a body"),
        ({'x": 1, "model': 1}, "is no field at the top of a body"),
        ({"": 1}, "is no field at the top of a body"),
        ({"metadata": {"x": "y" * 20_000}}, "has more than 16384 bytes"),
        ({f"x{number}": 1 for number in range(33)}, "set"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    for where in ({"set": fields}, {}):
        target = {} if where else {"set": fields}
        with pytest.raises(ConfigInvalid, match=message):
            configuration(servers=SERVERS, routes=routes(target, **where))


@pytest.mark.parametrize("value", [math.nan, math.inf, None, [10**5000], {1, 2}, b"x", [None, math.nan]])
def test_what_json_does_not_have_cannot_be_set(value: object) -> None:
    ((path, problem),) = check_parameters({"x": value}, ("set",))
    assert path == ("set", "x")
    assert "is no value that can be set" in problem


def test_no_parser_reads_a_field_that_a_rule_may_set() -> None:
    known = set(REFUSED) | {"chat_template_kwargs"}
    shapes = [
        one
        for module in (openai, anthropic, token_apis, inference_request, body_parser)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and issubclass(one, CommonFields)
    ]
    assert len(shapes) >= 7
    for shape in shapes:
        assert set(shape.__struct_fields__) <= known, shape
