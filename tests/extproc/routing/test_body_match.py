# SPDX-License-Identifier: Apache-2.0
"""Conditions on bodies: what meets them, what no client can make of them, and what is not read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.console.console_state import _match
from extproc.core.request_record import RequestHead
from extproc.refusals import BadRequest, UnknownModel
from extproc.routing import body_match
from tests.extproc.scenes import configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from extproc.core.core import Core

SERVERS = {"special": endpoints("10.0.0.1:8000"), "usual": endpoints("10.0.0.2:8000")}
HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)


def core(**match: object) -> Core:
    """Requests that meet it go to the server special."""
    rules = [
        {"name": "special", "targetModels": [{"modelServerName": "special"}], "modelMatch": match},
        {"targetModels": [{"modelServerName": "usual"}]},
    ]
    return core_of(servers=SERVERS, routes={"chat": f"rules: {json.dumps(rules)}"})


def on_field(path: str, **condition: object) -> Core:
    return core(body={path: condition})


def meets(core: Core, body: bytes | dict[str, Any], path: str = HEAD.path) -> bool:
    sent = body if isinstance(body, bytes) else json.dumps({"model": "m", "messages": [], **body}).encode()
    head = msgspec.structs.replace(HEAD, path=path)
    return core.builder.build_by_model(head, sent).destination.server == "default/special"


@pytest.mark.parametrize(
    ("path", "condition", "yes", "no"),
    [
        ("tools", {"exists": True}, [[], [{"a": 1}], "x", 0, False], [None]),
        ("tools", {"exists": False}, [None], [[], {}, ""]),
        ("stream", {"boolean": True}, [True], [False, None]),
        ("stream", {"boolean": False}, [False], [True, None]),
        ("flag", {"boolean": True}, [True], [1, "true", [True], {"true": True}]),
        ("kind", {"text": "json"}, ["json"], ["JSON", "json ", ["json"], {"json": 1}, None, 1, True]),
        ("kind", {"text": 'é\n"\\'}, ['é\n"\\'], ["e"]),
        ("kind", {"text": ""}, [""], [None, " "]),
        ("top_k", {"atLeast": 10}, [10, 10.0, 1e300, 11], [9, 9.999, -10, "10", True, None, [10]]),
        ("top_k", {"atLeast": -1, "atMost": 1}, [0, 1, -1.0], [2, -2]),
        ("response_format.type", {"text": "json_schema"}, [], ["json_schema", ["json_schema"], None]),
    ],
)
def test_each_condition(path: str, condition: dict[str, Any], yes: list[Any], no: list[Any]) -> None:
    made, (top, *_) = on_field(path, **condition), path.split(".")
    for value in yes:
        assert meets(made, {top: value}), value
    for value in no:
        assert not meets(made, {top: value}), value
    assert meets(made, {}) == (condition == {"exists": False})


def test_a_field_below_others() -> None:
    made = on_field("response_format.json_schema.schema.type", text="object")
    assert meets(made, {"response_format": {"json_schema": {"name": "x", "schema": {"type": "object"}}}})
    for hostile in (
        {},
        [],
        "object",
        {"json_schema": []},
        {"json_schema": {"schema": None}},
        {"json_schema.schema": 1},
    ):
        assert not meets(made, {"response_format": hostile})


def test_names_that_python_does_not_have() -> None:
    for name in ("class", "x-y", "0", "self", "field_0", "__init__"):
        assert meets(on_field(name, exists=True), {name: 1})
        assert meets(on_field(f"a.{name}", exists=True), {"a": {name: 1}})


def test_all_conditions_must_hold_in_any_rule() -> None:
    made = core(body={"stream": {"boolean": True}, "tools": {"exists": True}}, headers={"x-a": {"exact": "1"}})
    body = {"model": "m", "messages": [], "stream": True, "tools": []}
    with_header = msgspec.structs.replace(HEAD, headers={"x-a": "1"})
    assert made.builder.build_by_model(with_header, json.dumps(body).encode()).destination.server == "default/special"
    assert not meets(made, body)
    del body["tools"]
    assert made.builder.build_by_model(with_header, json.dumps(body).encode()).destination.server == "default/usual"


def test_the_last_of_repeated_or_escaped_names_counts_as_for_engines() -> None:
    made = on_field("user", text="b")
    assert meets(made, rb'{"model":"m","messages":[],"user":"a","\u0075ser":"\u0062"}')
    assert not meets(made, rb'{"model":"m","messages":[],"user":"b","us\u0065r":"a"}')


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/embeddings"])
def test_every_api_with_a_json_body_is_read(path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "user": "ann"}
    assert meets(on_field("user", text="ann"), body, path)


def test_a_form_meets_no_condition_on_a_body() -> None:
    boundary = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    form = boundary + b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
    head = RequestHead(
        "POST", "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=b"}, has_body=True
    )
    for made in (on_field("model", exists=False), core(inputTokens={"atMost": 10**6})):
        assert made.builder.build_by_model(head, form).destination.server == "default/usual"


def test_where_the_path_names_the_model_no_condition_on_a_body_holds() -> None:
    servers = {name: f"protocol: V2\n{spec}" for name, spec in SERVERS.items()}
    rules = [
        {"targetModels": [{"modelServerName": "special"}], "modelMatch": {"body": {"inputs": {"exists": True}}}},
        {"targetModels": [{"modelServerName": "usual"}]},
    ]
    made = core_of(servers=servers, routes={"chat": f"rules: {json.dumps(rules)}"})
    head = RequestHead("POST", "/v2/models/m/infer", {}, has_body=True)
    assert made.builder.build_by_model(head, b"").destination.server == "default/usual"


@pytest.mark.parametrize(
    ("given", "least", "holds"),
    [
        ({"messages": [{"role": "user", "content": "x" * 4_000}]}, 1_000, True),
        ({"messages": [{"role": "user", "content": "x" * 3_900}]}, 1_000, False),
        ({"messages": [{"role": "user", "content": "x" * 400_000}]}, 100_000, True),
        ({"messages": [], "tools": [{"x": "y" * 4_000}]}, 1_000, True),
    ],
)
def test_tokens_of_the_prompt(given: dict[str, Any], least: int, holds: bool) -> None:
    assert meets(core(inputTokens={"atLeast": least}), given) is holds
    assert meets(core(inputTokens={"atMost": least - 1}), given) is not holds


def test_tokens_of_a_prompt_in_tokens_are_counted() -> None:
    body = json.dumps({"model": "m", "prompt": [1] * 999}).encode()
    assert not meets(core(inputTokens={"atLeast": 1000}), body, "/v1/completions")
    assert meets(core(inputTokens={"atLeast": 999, "atMost": 999}), body, "/v1/completions")


def test_tokens_of_the_answer_by_whichever_name() -> None:
    made = core(outputTokens={"atLeast": 500})
    for fields in (
        {"max_tokens": 500},
        {"max_completion_tokens": 501},
        {"max_tokens": 1, "max_completion_tokens": 500},
        {},
    ):
        assert meets(made, fields)
    assert not meets(made, {"max_tokens": 499})
    # without a limit it may be of any length
    assert not meets(core(outputTokens={"atMost": 10_000_000}), {})


def test_a_request_that_no_rule_takes_hears_of_its_body() -> None:
    rules = [{"targetModels": [{"modelServerName": "special"}], "modelMatch": {"body": {"tools": {"exists": True}}}}]
    made = core_of(servers=SERVERS, routes={"chat": f"rules: {json.dumps(rules)}"})
    with pytest.raises(UnknownModel, match="takes this request's headers, path and body"):
        request(made)


def test_a_hostile_value_costs_no_more_and_meets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    class Counting:
        def __init__(self, decoder: msgspec.json.Decoder[Any]) -> None:
            self.decoder = decoder

        def decode(self, value: msgspec.Raw) -> object:
            seen.append(memoryview(value).nbytes)
            return self.decoder.decode(value)

    monkeypatch.setattr(body_match, "_number", Counting(body_match._number))
    monkeypatch.setattr(body_match, "_text", Counting(body_match._text))
    numbers, texts = on_field("top_k", atLeast=1), on_field("user", text="x" * 1024)
    for value in (b"9" * 1_000_000, b"1." + b"0" * 1_000_000, b"1e" + b"9" * 100):
        assert not meets(numbers, b'{"model":"m","messages":[],"top_k":%b}' % value)
    for value in (b'"%b"' % (b"x" * 1_000_000), b'"%b"' % (b"\\u0078" * 300_000)):
        assert not meets(texts, b'{"model":"m","messages":[],"user":%b}' % value)
    assert seen == []
    # the longest that can meet it
    assert meets(texts, b'{"model":"m","messages":[],"user":"%b"}' % (b"\\u0078" * 1024))
    # not JSON's numbers
    with pytest.raises(BadRequest):
        meets(numbers, b'{"model":"m","messages":[],"top_k":NaN}')


def test_deep_and_wide_bodies_are_read_as_deep_as_the_path() -> None:
    deep = b'{"model":"m","messages":[],"metadata":%b1%b}' % (b'{"a":' * 400, b"}" * 400)
    assert meets(on_field("metadata.a.a.a", exists=True), deep)
    wide = {"metadata": {str(number): number for number in range(20_000)}, "tools": []}
    assert meets(on_field("metadata.19999", atLeast=19_999), wide)


def test_a_long_prompt_is_not_scanned_again() -> None:
    made, length = on_field("user", text="ann"), list[int]()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 500_000}], "user": "ann"}).encode()
    arrival = made.builder.build_by_model(HEAD, body)
    assert arrival.request.contents is not None
    length.append(len(body_match.without_contents(body, arrival.request.contents)))
    assert length[0] < 200
    assert arrival.destination.server == "default/special"


def test_routes_without_such_rules_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(body_match.BodyFieldReader, "read", read)
    assert request(core(headers={"x-a": {"exact": "1"}})).destination.server == "default/usual"
    # nor those whose rule before holds, or whose headers do not
    assert not meets(core(headers={"x-a": {"exact": "1"}}, body={"tools": {"exists": True}}), {"tools": []})


def test_a_held_request_matches_by_what_its_client_sent() -> None:
    held = dict.fromkeys(SERVERS, "activation: {}\nendpoints: []\n")
    rules = [
        {
            "targetModels": [{"modelServerName": "special"}],
            "modelMatch": {"body": {"temperature": {"atLeast": 1}}},
            "set": {"temperature": 0.5},
        },
        {"targetModels": [{"modelServerName": "usual"}]},
    ]
    routes = {"chat": f"rules: {json.dumps(rules)}"}
    made = core_of(servers=held, routes=routes)
    arrival = request(made, temperature=1)
    assert json.loads(arrival.body)["temperature"] == 0.5
    made.apply(configuration(servers=SERVERS, routes=routes), 1.0)
    moved = made.builder.move_to_other_server(arrival)
    assert moved is not None
    assert moved.destination.server == "default/special"


def test_the_rule_is_explained_and_shown() -> None:
    made = core(body={"tools": {"exists": True}, "n": {"atLeast": 2}}, inputTokens={"atMost": 9})
    assert made.explain(request(made, tools=[], n=2), now=0.0).rule == "rules[0] (special)"
    assert made.explain(request(made), now=0.0).rule == "rules[1]"
    match = (
        configuration(
            servers=SERVERS,
            routes={
                "chat": "rules: [{targetModels: [{modelServerName: usual}], modelMatch: {body: {a.b: {text: x}, "
                "c: {boolean: false}, d: {exists: false}}, outputTokens: {atLeast: 1, atMost: 2}}}]"
            },
        )
        .routes[0]
        .spec.rules[0]
        .model_match
    )
    assert _match(match) == "a.b is 'x' and c is false and d is absent and output tokens at least 1 and at most 2"


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ({"body": {"a.b.c.d.e": {"exists": True}}}, "is no path of a field"),
        ({"body": {"a..b": {"exists": True}}}, "is no path of a field"),
        ({"body": {"": {"exists": True}}}, "is no path of a field"),
        ({"body": {"messages[0]": {"exists": True}}}, "is no path of a field"),
        ({"body": {"a": {}}}, "write exactly one of exists"),
        ({"body": {"a": {"exists": True, "text": "x"}}}, "write exactly one of exists"),
        ({"body": {"a": {"boolean": True, "atMost": 1}}}, "write exactly one of exists"),
        ({"body": {"a": {"boolean": "yes"}}}, "boolean"),
        ({"body": {"a": {"text": True}}}, "put it in quotes if it is meant as text"),
        ({"body": {"a": {"text": "x" * 1025}}}, "1025 characters"),
        ({"body": {"a": {"atLeast": 2, "atMost": 1}}}, "atLeast is above atMost"),
        ({"inputTokens": {}}, "write atLeast, atMost or both"),
        ({"outputTokens": {"atLeast": 5, "atMost": 4}}, "atLeast is above atMost"),
        ({"inputTokens": {"atLeast": -1}}, "too small"),
        ({"body": {f"f{number}": {"exists": True} for number in range(17)}}, "body"),
    ],
)
def test_what_cannot_be_met_is_refused(match: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        core(**match)
