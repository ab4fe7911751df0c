# SPDX-License-Identifier: Apache-2.0
"""What each connector wants of the leg, on every API whose prompts can be prefilled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from extproc.engines.engine_responses import (
    BootstrapEngineId,
    PrefillResponse,
    UnreadableResponse,
    parse_bootstrap_engines,
    parse_prefill_response,
)
from extproc.request import anthropic, openai, token_apis
from extproc.request.json_rewrite import raw_top_level_fields, with_changes
from extproc.request.prefill_protocols import (
    PROTOCOLS,
    WHOLE,
    PrefillAttempt,
    _number,
    sglang_abort_bodies,
    why_body_not_disaggregated,
)
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.model_server import Connector

STORES: Final[tuple[Connector, ...]] = (
    "ExampleConnector",
    "LMCacheConnectorV1",
    "MooncakeStoreConnector",
    "HF3FSKVConnector",
    "FlexKVConnectorV1",
)
NIXL: Final[tuple[Connector, ...]] = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
TRY: Final = PrefillAttempt("t-1-1", "10.0.0.11", 5710, "7c0d")
# As vLLM 0.32 has it.
ASKED: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# vLLM 0.32.0 with NixlConnector: a prompt of 300 characters, of which two blocks were cached.
RECORDED: Final = Path(__file__).parent / "nixl_answers.jsonl"
ANSWERED: Final = (
    b'{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[11, 12, 13]],'
    b' "remote_engine_id": "7c0d", "remote_request_id": "chatcmpl-1-1a2b3c4d", "remote_host": "10.0.0.11",'
    b' "remote_port": 5600, "tp_size": 2, "remote_blocks_expiry_time": null, "transfer_mode": "pull", "x": 1.50}'
)
EMBEDDINGS: Final = {"type": "prompt_embeds", "data": "AAAA"}
PARSERS: Final = {
    Api.CHAT: openai.parse_chat,
    Api.COMPLETIONS: openai.parse_completion,
    Api.RESPONSES: openai.parse_responses,
    Api.MESSAGES: anthropic.parse_messages,
    Api.GENERATE: token_apis.parse_generate,
}
MESSAGES: Final = [{"role": "user", "content": "hello"}]


def prefill(api: Api, connector: Connector, body: dict[str, Any]) -> dict[str, Any]:
    raw = json.dumps(body).encode()
    request = PARSERS[api](raw)
    changes = PROTOCOLS[connector].prefill_changes(request, raw_top_level_fields(raw, request.contents), TRY)
    changed = with_changes(raw, changes.fields, request.contents, without=changes.without)
    found: dict[str, Any] = json.loads(changed)
    return found


def decode(api: Api, connector: Connector, body: dict[str, Any], answer: PrefillResponse) -> bytes | None:
    raw = json.dumps(body).encode()
    request = PARSERS[api](raw)
    changes = PROTOCOLS[connector].decode_changes(request, raw_top_level_fields(raw, request.contents), TRY, answer)
    return None if changes is None else with_changes(raw, changes.fields, request.contents, without=changes.without)


CASES: Final[list[tuple[Api, dict[str, Any], dict[str, Any]]]] = [
    (
        Api.CHAT,
        {"model": "m", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
        {"model": "m", "messages": MESSAGES, "stream": False, "max_tokens": 1},
    ),
    (
        Api.CHAT,
        {
            "model": "m",
            "messages": MESSAGES,
            "max_tokens": 9,
            "max_completion_tokens": 8,
            "min_tokens": 3,
            "min_completion_tokens": 2,
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "json_object"},
            "stop": ["x"],
            "logprobs": True,
            "cache_salt": "s",
        },
        {
            "model": "m",
            "messages": MESSAGES,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "json_object"},
            "stop": ["x"],
            "logprobs": True,
            "cache_salt": "s",
        },
    ),
    (
        Api.CHAT,
        {"model": "m", "messages": MESSAGES, "max_completion_tokens": 8},
        {"model": "m", "messages": MESSAGES, "max_completion_tokens": 1},
    ),
    (Api.COMPLETIONS, {"model": "m", "prompt": "once"}, {"model": "m", "prompt": "once", "max_tokens": 1}),
    (
        Api.RESPONSES,
        {"model": "m", "input": "hello", "stream": True},
        {"model": "m", "input": "hello", "stream": False, "max_output_tokens": 1, "store": False},
    ),
    (
        Api.MESSAGES,
        {"model": "m", "messages": MESSAGES, "max_tokens": 100, "stream": True},
        {"model": "m", "messages": MESSAGES, "max_tokens": 1, "stream": False},
    ),
    (
        Api.GENERATE,
        {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "min_tokens": 2, "top_k": 5}},
        {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "top_k": 5}},
    ),
]


def id_of(api: Api, connector: Connector) -> str:
    """In a body: both engines must know a request by one id, and vLLM's responses have none of the header."""
    return "resp_t-1-1" if (api, connector) == (Api.RESPONSES, "NixlPushConnector") else ""


@pytest.mark.parametrize(("api", "body", "expected"), CASES)
def test_the_prefill_engine_computes_the_prompt_and_one_token(
    api: Api, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    for store in STORES:
        assert prefill(api, store, body) == expected
    for connector in NIXL:
        with_parameters = prefill(api, connector, body)
        assert with_parameters.pop("kv_transfer_params") == ASKED
        assert with_parameters.pop("request_id", "") == id_of(api, connector)
        if api is Api.GENERATE:
            assert with_parameters["sampling_params"].pop("extra_args") == {"kv_transfer_params": ASKED}
        assert with_parameters == expected


@pytest.mark.parametrize(("api", "body", "expected"), CASES)
def test_the_decode_engine_gets_the_clients_request_and_the_parameters_as_they_came(
    api: Api, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert expected
    answer = parse_prefill_response(b'{"id": "x", "kv_transfer_params": %b}' % ANSWERED)
    for connector in NIXL:
        found = decode(api, connector, body, answer)
        assert found is not None
        assert ANSWERED in found
        changed = json.loads(found)
        if api is Api.GENERATE:
            extra = changed["sampling_params"].pop("extra_args")
            assert extra == {"kv_transfer_params": json.loads(ANSWERED)}
        assert changed.pop("kv_transfer_params") == json.loads(ANSWERED)
        assert changed.pop("request_id", "") == id_of(api, connector)
        assert changed == body
    for store in STORES:
        assert json.loads(decode(api, store, body, PrefillResponse()) or b"") == body


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_no_budget_for_thinking_is_above_the_limit_of_a_prefill(thinking: dict[str, Any]) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 2000, "thinking": thinking}
    for store in STORES:
        assert ("thinking" in prefill(Api.MESSAGES, store, body)) == (thinking["type"] == "adaptive")
    assert ("thinking" in prefill(Api.MESSAGES, "OffloadingConnector", body)) == (thinking["type"] == "adaptive")
    # vLLM knows these prefills by do_remote_decode
    for connector in (*NIXL, "MooncakeConnector"):
        assert prefill(Api.MESSAGES, connector, body)["thinking"] == thinking


class Recorded(msgspec.Struct, frozen=True):
    api: str
    answer: msgspec.Raw


@pytest.mark.parametrize(
    "recorded", msgspec.json.Decoder(Recorded).decode_lines(RECORDED.read_bytes()), ids=lambda one: one.api
)
def test_what_a_real_engine_has_answered_is_read(recorded: Recorded) -> None:
    api, whole = Api[recorded.api], bytes(recorded.answer)
    answer, told = parse_prefill_response(whole), json.loads(whole)["kv_transfer_params"]
    assert (answer.prompt_tokens, answer.cached_tokens) == (told["remote_num_tokens"], 256)
    assert answer.is_cut
    found = json.loads(decode(api, "NixlConnector", {"model": "m", **api.spec.example}, answer) or b"")
    assert found["kv_transfer_params"] == told


# What both engines get, where that is known before the prefill.
JOINED: Final[Mapping[Connector, tuple[dict[str, Any], dict[str, Any]]]] = {
    "OffloadingConnector": (
        {"remote_decoder": {"kv_request_id": "t-1-1"}},
        {"remote_prefiller": {"kv_request_id": "t-1-1", "remote_host": "10.0.0.11", "remote_port": 5710}},
    ),
}


@pytest.mark.parametrize("connector", JOINED)
@pytest.mark.parametrize(("api", "body", "expected"), CASES)
def test_what_joins_both_engines_is_written_for_each(
    api: Api, body: dict[str, Any], expected: dict[str, Any], connector: Connector
) -> None:
    for sent, rest, parameters in zip(
        (prefill(api, connector, body), json.loads(decode(api, connector, body, PrefillResponse()) or b"")),
        (expected, body),
        JOINED[connector],
        strict=True,
    ):
        assert sent.pop("kv_transfer_params") == parameters
        if api is Api.GENERATE:
            assert sent["sampling_params"].pop("extra_args") == {"kv_transfer_params": parameters}
        assert sent == rest


ASKED_BY_MOONCAKE: Final = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-t-1-1"}
TOLD_BY_MOONCAKE: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "xfer-t-1-1",
    "remote_engine_id": "7c0d",
    "remote_bootstrap_addr": "http://10.0.0.11:5710",
}
CUT: Final = PrefillResponse(is_cut=True)


@pytest.mark.parametrize(("api", "body", "expected"), CASES)
def test_nothing_stops_a_prefill_that_mooncake_would_otherwise_drop(
    api: Api, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    stops = {"stop_token_ids": [7], "stop": ["x"]}
    given = {**body, **stops, "stop_sequences": ["y"]}
    if api is Api.GENERATE:
        given = {**body, "sampling_params": {**body["sampling_params"], **stops}}
    sent, more = prefill(api, "MooncakeConnector", given), {"ignore_eos": True, "min_tokens": 1}
    assert sent.pop("kv_transfer_params") == ASKED_BY_MOONCAKE
    rest = {name: value for name, value in expected.items() if name != "stop"}
    if api is Api.GENERATE:
        assert sent["sampling_params"].pop("extra_args") == {"kv_transfer_params": ASKED_BY_MOONCAKE}
        assert sent == {**rest, "sampling_params": {**rest["sampling_params"], **more}}
    else:
        assert sent == {**rest, **({} if api is Api.MESSAGES else more)}


@pytest.mark.parametrize(("api", "body", "expected"), CASES)
def test_mooncakes_decode_engine_gets_the_clients_request_and_its_transfer(
    api: Api, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert expected
    sent = json.loads(decode(api, "MooncakeConnector", body, CUT) or b"")
    assert sent.pop("kv_transfer_params") == TOLD_BY_MOONCAKE
    if api is Api.GENERATE:
        assert sent["sampling_params"].pop("extra_args") == {"kv_transfer_params": TOLD_BY_MOONCAKE}
    assert sent == body


@pytest.mark.parametrize(
    ("body", "is_cut"),
    [
        ('{"choices": [{"finish_reason": "length"}]}', True),
        ('{"choices": [{"finish_reason": "stop"}]}', False),
        ('{"choices": [{}]}', False),
        ('{"choices": null}', False),
        ('{"stop_reason": "max_tokens"}', True),
        ('{"stop_reason": "end_turn"}', False),
        ('{"status": "incomplete"}', True),
        ('{"status": "completed"}', False),
    ],
)
def test_what_mooncake_has_dropped_no_decode_engine_waits_for(body: str, *, is_cut: bool) -> None:
    answer = parse_prefill_response(body.encode())
    assert answer.is_cut == is_cut
    assert (decode(Api.CHAT, "MooncakeConnector", CASES[0][1], answer) is not None) == is_cut


def test_mooncakes_bootstrap_server_lists_an_engine_by_rank() -> None:
    first = b'{"engine_id": "e", "worker_addr": {"0": {"0": "tcp://10.0.0.11:40001"}}}'
    assert parse_bootstrap_engines(b'{"0": %b}' % first) == (BootstrapEngineId("e"),)
    second = first.replace(b'"e"', b'"f"')
    assert parse_bootstrap_engines(b'{"1": %b, "0": %b}' % (second, first)) == (
        BootstrapEngineId("e", 0),
        BootstrapEngineId("f", 1),
    )


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"0": {}}', b'{"0": {"engine_id": ""}}', b'{"0": {"engine_id": 3}}', b'{"x": {}}']
)
def test_a_list_of_another_form_is_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableResponse):
        parse_bootstrap_engines(body)


def test_a_client_keeps_its_own_extra_arguments() -> None:
    body = {"model": "m", "token_ids": [1], "sampling_params": {"extra_args": {"seed": 3}}}
    extra = prefill(Api.GENERATE, "NixlConnector", body)["sampling_params"]["extra_args"]
    assert extra == {"seed": 3, "kv_transfer_params": ASKED}


def test_a_long_body_is_not_read_again() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * 20_000}], "stream": True}
    raw = json.dumps(body).encode()
    assert openai.parse_chat(raw).contents is not None
    found = prefill(Api.CHAT, "NixlConnector", body)
    assert (found["messages"], found["stream"], found["max_tokens"]) == (body["messages"], False, 1)


@pytest.mark.parametrize(
    ("api", "more", "reason"),
    [
        (Api.CHAT, {"n": 2}, "answers"),
        (Api.CHAT, {"n": 1}, ""),
        (Api.CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (Api.CHAT, {"prompt_logprobs": None}, ""),
        (Api.CHAT, {"logprobs": True, "top_logprobs": 2}, ""),
        (Api.CHAT, {"use_beam_search": True}, "beam_search"),
        (Api.CHAT, {"use_beam_search": False}, ""),
        (Api.CHAT, {"tool_choice": "required"}, "forced_call"),
        (Api.CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "forced_call"),
        (Api.CHAT, {"tool_choice": "auto"}, ""),
        (Api.CHAT, {"tool_choice": None}, ""),
        (Api.MESSAGES, {"tool_choice": {"type": "any"}}, "forced_call"),
        (Api.MESSAGES, {"tool_choice": {"type": "auto"}}, ""),
        (Api.CHAT, {"kv_transfer_params": {}}, "steering"),
        (Api.CHAT, {"rid": "a"}, ""),
        (Api.COMPLETIONS, {"best_of": 2}, "answers"),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, "prompts"),
        (Api.COMPLETIONS, {"prompt": ["a"]}, ""),
        (Api.COMPLETIONS, {"max_tokens": 0}, "no_answer"),
        (Api.COMPLETIONS, {"echo": True}, ""),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 1}, "prompt_logprobs"),
        (Api.COMPLETIONS, {"prompt_embeds": "AAAA"}, "embeddings"),
        (Api.CHAT, {"messages": [{"role": "user", "content": [EMBEDDINGS]}]}, "embeddings"),
        (Api.CHAT, {"prompt_token_ids": [1, 2]}, ""),
        (Api.RESPONSES, {"previous_response_id": "resp_1"}, "stored_prompt"),
        (Api.RESPONSES, {"background": True}, "background"),
        (Api.RESPONSES, {"truncation": "auto"}, "truncation"),
        (Api.RESPONSES, {"truncation": "disabled"}, ""),
        (Api.CHAT, {"truncate_prompt_tokens": -1}, "truncation"),
        (Api.COMPLETIONS, {"truncate_prompt_tokens": "-1"}, "truncation"),
        (Api.COMPLETIONS, {"truncate_prompt_tokens": 100}, ""),
        (Api.COMPLETIONS, {"truncate_prompt_tokens": None}, ""),
        (Api.GENERATE, {"sampling_params": {"truncate_prompt_tokens": -1}}, "truncation"),
        (Api.GENERATE, {"sampling_params": {"n": 2}}, "answers"),
        (Api.GENERATE, {"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        (Api.MESSAGES, {"system": "s"}, ""),
    ],
)
def test_what_one_engine_must_serve_whole(api: Api, more: dict[str, Any], reason: str) -> None:
    raw = json.dumps({"model": "m", **api.spec.example, **more}).encode()
    assert why_body_not_disaggregated(PARSERS[api](raw), raw, PROTOCOLS["NixlConnector"]) == reason
    assert not reason or reason in WHOLE


def test_apis_without_an_answer_have_no_leg() -> None:
    body = b'{"model": "m", "input": "hello"}'
    assert why_body_not_disaggregated(openai.parse_embeddings(body), body, PROTOCOLS["NixlConnector"]) == "api"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ('{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}', (9, 4)),
        ('{"prompt_tokens": 9, "prompt_tokens_details": null}', (9, None)),
        ('{"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}', (9, 4)),
        ('{"input_tokens": 5, "cache_read_input_tokens": 4}', (9, 4)),
        ("null", (None, None)),
    ],
)
def test_the_prompts_tokens_are_read_in_every_form(usage: str, expected: tuple[int | None, int | None]) -> None:
    found = parse_prefill_response(f'{{"usage": {usage}}}'.encode())
    assert (found.prompt_tokens, found.cached_tokens) == expected


@pytest.mark.parametrize("value", ["null", "[]", '"text"', "7"])
def test_only_an_object_has_parameters(value: str) -> None:
    answer = parse_prefill_response(f'{{"kv_transfer_params": {value}}}'.encode())
    assert decode(Api.CHAT, "NixlConnector", CASES[0][1], answer) is None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"[" * 100_000, b'{"usage": 3}'])
def test_an_answer_of_another_form_is_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableResponse):
        parse_prefill_response(body)


CONTEXT: Final = (
    b'{"choices": [{"finish_reason": "length", "disaggregated_params": {"request_type": "context_only", '
    b'"ctx_request_id": 7, "first_gen_tokens": [42], "encoded_opaque_state": "AA==", '
    b'"disagg_request_id": 9223372036854775807}}], "prompt_token_ids": [1, 2, 3]}'
)
GENERATION: Final = {
    "request_type": "generation_only",
    "ctx_request_id": 7,
    "first_gen_tokens": [42],
    "encoded_opaque_state": "AA==",
    "disagg_request_id": 9223372036854775807,
}


@pytest.mark.parametrize(
    ("api", "body", "more"),
    [
        (Api.CHAT, {"model": "m", "messages": MESSAGES, "max_tokens": 9}, {"prompt_token_ids": [1, 2, 3]}),
        (Api.CHAT, {"model": "m", "messages": MESSAGES, "prompt_token_ids": [7]}, {"prompt_token_ids": [1, 2, 3]}),
        (Api.COMPLETIONS, {"model": "m", "prompt": "once", "max_tokens": 9}, {"prompt": [1, 2, 3]}),
    ],
)
def test_tensorrt_llm_gets_the_context_first(api: Api, body: dict[str, Any], more: dict[str, Any]) -> None:
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    asked = prefill(api, "context_first", streamed)
    params = asked.pop("disaggregated_params")
    assert asked == {**body, "stream": False}
    assert params.pop("request_type") == "context_only"
    assert 2**42 <= params.pop("disagg_request_id") < 2**63
    assert not params
    told = json.loads(decode(api, "context_first", streamed, parse_prefill_response(CONTEXT)) or b"")
    assert told == {**streamed, **more, "disaggregated_params": GENERATION}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"length"', b'"stop"'),
        (b'"prompt_token_ids": [1, 2, 3]', b'"prompt_token_ids": null'),
        (b"disaggregated_params", b"other_params"),
    ],
)
def test_an_answer_without_a_context_is_of_no_use(old: bytes, new: bytes) -> None:
    assert old in CONTEXT
    for api, body in ((Api.CHAT, CASES[0][1]), (Api.COMPLETIONS, CASES[3][1])):
        assert decode(api, "context_first", body, parse_prefill_response(CONTEXT.replace(old, new))) is None


def test_a_clients_own_tokens_do_not_stand_beside_those_of_the_context() -> None:
    chat = {"model": "m", "messages": MESSAGES, "prompt_token_ids_b64": "AQAAAA=="}
    assert chat.items() <= prefill(Api.CHAT, "context_first", chat).items()
    told = json.loads(decode(Api.CHAT, "context_first", chat, parse_prefill_response(CONTEXT)) or b"")
    assert told["prompt_token_ids"] == [1, 2, 3]
    assert "prompt_token_ids_b64" not in told


def test_ids_of_tries_are_numbers_of_their_own() -> None:
    ids = {_number(PrefillAttempt(f"t-{number}-1", "h")) for number in range(1000)}
    assert len(ids) == 1000
    assert min(ids) >= 2**42
    assert max(ids) < 2**63


def test_tensorrt_llm_takes_prompts_of_two_apis() -> None:
    for api, reason in ((Api.CHAT, ""), (Api.COMPLETIONS, ""), (Api.RESPONSES, "api"), (Api.MESSAGES, "api")):
        raw = json.dumps({"model": "m", **api.spec.example}).encode()
        assert why_body_not_disaggregated(PARSERS[api](raw), raw, PROTOCOLS["context_first"]) == reason


SGLANG: Final = "bootstrap_room"
AT: Final = {"bootstrap_host": "10.0.0.11", "bootstrap_port": 5710}


@pytest.mark.parametrize(
    ("api", "body", "changed"),
    [
        (Api.CHAT, {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 3}, {}),
        (Api.CHAT, {"messages": MESSAGES, "stream": True, "stop": ["x"]}, {"stream": False}),
        (Api.COMPLETIONS, {"prompt": "once", "logprobs": 1}, {}),
        (Api.COMPLETIONS, {"prompt": ["once"]}, {}),
        (Api.RESPONSES, {"input": "hello", "max_output_tokens": 9}, {"store": False}),
    ],
)
def test_sglangs_engines_get_the_same_room_with_the_clients_limits(
    api: Api, body: dict[str, Any], changed: dict[str, Any]
) -> None:
    given = {"model": "m", **body, "stream_options": {"include_usage": True}}
    to_prefill = prefill(api, SGLANG, given)
    to_decode = json.loads(decode(api, SGLANG, given, PrefillResponse()) or b"")
    name = "request_id" if api is Api.RESPONSES else "rid"
    joined = {one: to_prefill.pop(one) for one in (*AT, "bootstrap_room", name)}
    assert joined == {one: to_decode.pop(one) for one in joined}
    assert AT.items() <= joined.items()
    assert type(joined["bootstrap_room"]) is int
    assert 0 <= joined["bootstrap_room"] < 2**63
    assert to_decode == given
    assert to_prefill == {"model": "m", **body, **changed}
    # what a client wrote there is gone
    assert prefill(api, SGLANG, {**given, name: "a", "bootstrap_room": 1})[name] == joined[name]


def test_each_of_several_prompts_has_a_room_of_its_own() -> None:
    found = prefill(Api.COMPLETIONS, SGLANG, {"model": "m", "prompt": ["a", "b", "c"]})
    assert found["bootstrap_host"] == ["10.0.0.11"] * 3
    assert found["bootstrap_port"] == [5710] * 3
    assert len(set(found["bootstrap_room"])) == len(set(found["rid"])) == 3
    # an id that another one begins with would abort that, too
    assert len({len(one) for one in found["rid"]}) == 1


def test_no_two_tries_have_a_room() -> None:
    request = openai.parse_chat(json.dumps({"model": "m", "messages": MESSAGES}).encode())
    protocol, tries = PROTOCOLS[SGLANG], [PrefillAttempt(f"t-{number:x}-1", "h", 1) for number in range(1000)]
    found = [protocol.decode_changes(request, {}, one, PrefillResponse()) for one in tries]
    fields = [one.fields for one in found if one is not None]
    assert len({one["bootstrap_room"] for one in fields}) == len({one["rid"] for one in fields}) == 1000
    assert len({len(str(one["rid"])) for one in fields}) == 1


@pytest.mark.parametrize(
    ("api", "body", "count"),
    [
        (Api.CHAT, {"messages": MESSAGES}, 1),
        # of a list of one prompt SGLang makes its id anew
        (Api.COMPLETIONS, {"prompt": "a"}, 2),
        (Api.COMPLETIONS, {"prompt": ["a", "b", "c"]}, 3),
        (Api.RESPONSES, {"input": "a"}, 1),
    ],
)
def test_every_id_that_a_decode_engine_may_have_given_can_be_aborted(
    api: Api, body: dict[str, Any], count: int
) -> None:
    raw = json.dumps({"model": "m", **body}).encode()
    ids = [json.loads(one)["rid"] for one in sglang_abort_bodies(PARSERS[api](raw), TRY)]
    sent = prefill(api, SGLANG, {"model": "m", **body})
    own = sent["request_id" if api is Api.RESPONSES else "rid"]
    assert ids[: len(own)] == own if isinstance(own, list) else ids[0] == own
    assert len(set(ids)) == count


@pytest.mark.parametrize(
    ("api", "more", "reason"),
    [
        (Api.CHAT, {}, ""),
        (Api.CHAT, {"n": 2}, "answers"),
        (Api.CHAT, {"tool_choice": "required"}, ""),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, ""),
        (Api.COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, "answers"),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 1}, "prompt_logprobs"),
        (Api.RESPONSES, {"previous_response_id": "resp_1"}, "stored_prompt"),
        # its body has no field for a room
        (Api.MESSAGES, {}, "api"),
    ],
)
def test_what_two_engines_of_sglang_do_together(api: Api, more: dict[str, Any], reason: str) -> None:
    raw = json.dumps({"model": "m", **api.spec.example, **more}).encode()
    assert why_body_not_disaggregated(PARSERS[api](raw), raw, PROTOCOLS[SGLANG]) == reason


def test_what_computes_no_prompt_needs_no_prefill() -> None:
    raw = json.dumps({"model": "m", "prompt": "a"}).encode()
    assert why_body_not_disaggregated(token_apis.parse_tokenize(raw), raw, PROTOCOLS[SGLANG]) == "no_prompt"
