# SPDX-License-Identifier: Apache-2.0
"""What engines, runtime agents, and servers that know no such call answer, and what they mean by it."""

from __future__ import annotations

import json

import pytest

from extproc.engines.engine_responses import (
    AdapterLoadProblem,
    ListedModels,
    UnreadableResponse,
    error_message,
    is_unloaded,
    parse_load_response,
    parse_model_list,
)
from extproc.feeds.tokenizers import max_tokens_in_payload, parse_tokens


def error(message: str, kind: str = "InvalidUserInput") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": 400}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, b"Success: LoRA adapter 'sql' added successfully.", None),
        (400, error("The lora adapter 'sql' has already been loaded. If you want to"), None),
        (404, error("Loading lora sql failed: No adapter found for /sql", "NotFoundError"), AdapterLoadProblem.BROKEN),
        (
            500,
            error("LoRA rank 64 is greater than max_lora_rank 16.", "InternalServerError"),
            AdapterLoadProblem.BROKEN,
        ),
        (400, error("The maximum number of adapters is loaded (2)"), AdapterLoadProblem.BUSY),
        (503, error("the engine holds 2 adapters, and all of them are pinned or in use"), AdapterLoadProblem.BUSY),
        (502, error("sql could not be downloaded: 404"), AdapterLoadProblem.BROKEN),
        # vLLM without VLLM_ALLOW_RUNTIME_LORA_UPDATING, and an agent of an engine that loads none
        (404, b'{"detail":"Not Found"}', AdapterLoadProblem.UNREACHABLE),
        (404, b"404: Not Found", AdapterLoadProblem.UNREACHABLE),
        (501, error("this engine loads no adapters while it runs"), AdapterLoadProblem.UNREACHABLE),
        (401, b'{"error":"Unauthorized"}', AdapterLoadProblem.UNREACHABLE),
    ],
)
def test_an_answer_says_whether_to_wait_to_go_elsewhere_or_to_give_up(
    status: int, body: bytes, problem: AdapterLoadProblem | None
) -> None:
    assert parse_load_response(status, body).problem is problem


@pytest.mark.parametrize(
    ("status", "message", "result"),
    [
        (200, "", "loaded"),
        (400, "The lora adapter 'sql' has already been loaded. If you want to ...", "already"),
        (400, "LoRA adapter with name sql is already loaded", "already"),
        (400, "adapter sql already exists", "already"),
        (409, "adapter sql is already registered", "already"),
        (400, "Maximum number of loaded LoRA adapters is 4. Please unload some", "full"),
        (400, "the engine holds max_loras=2 adapters: too many", "full"),
        (500, "all slots are full", "full"),
        (400, "the number of adapters would exceed the pool", "full"),
        (400, "LoRA rank 64 is greater than max_lora_rank 16.", "failed"),
        (404, "No adapter found for /x", "failed"),
        (500, "CUDA out of memory", "failed"),
        # it starts, or is busy: to unload another adapter would not help
        (503, "not ready", "failed"),
    ],
)
def test_a_load_is_done_was_done_before_needs_room_or_failed(status: int, message: str, result: str) -> None:
    shapes = ({"error": {"message": message}}, {"message": message}, {"success": False, "error_message": message})
    for body in (*(json.dumps(one).encode() for one in shapes), message.encode()):
        answer = parse_load_response(status, body)
        assert (answer.problem is None) == (result in {"loaded", "already"})
        assert answer.was_there == (result == "already")
        assert answer.is_full == (result == "full")
        assert answer.problem is AdapterLoadProblem.BUSY or not answer.is_full


@pytest.mark.parametrize("text", ["too many trees", "the depth exceeds 3", "already loaded", "max_loras", "no room"])
@pytest.mark.parametrize("status", [400, 404, 500, 502])
def test_the_text_of_an_artefact_passes_for_no_answer_of_its_server(status: int, text: str) -> None:
    answer = parse_load_response(status, error(text), is_model=True)
    assert answer.problem is AdapterLoadProblem.BROKEN
    assert not answer.is_full
    assert parse_load_response(503, error(text), is_model=True).problem is AdapterLoadProblem.BUSY
    assert parse_load_response(200, b"", is_model=True).problem is None


def test_an_adapter_that_was_there_is_told_from_one_that_came() -> None:
    assert parse_load_response(400, error("The lora adapter 'sql' has already been loaded.")).was_there
    assert not parse_load_response(200, b"Success").was_there


@pytest.mark.parametrize(
    ("body", "gone"), [(b'{"evicted": "law"}', ("law",)), (b'{"evicted": ["a", "b"]}', ("a", "b"))]
)
def test_an_agent_may_say_what_it_unloaded(body: bytes, gone: tuple[str, ...]) -> None:
    assert parse_load_response(200, body).unloaded == gone


def test_a_message_is_one_line_of_bounded_length() -> None:
    said = parse_load_response(500, error("a\nb" * 1000)).message
    assert "\n" not in said
    assert len(said) < 400


@pytest.mark.parametrize(("status", "gone"), [(200, True), (404, True), (409, False), (500, False)])
def test_an_adapter_that_is_not_there_is_unloaded(status: int, *, gone: bool) -> None:
    assert is_unloaded(status, b"") is gone
    assert is_unloaded(status, error("The lora adapter 'sql' is not loaded"))


@pytest.mark.parametrize(
    ("lengths", "known"), [([4096], 4096), ([4096, 8192], 8192), ([4096, None], 0), ([True], 0), ([-1], 0), ([], 0)]
)
def test_the_longest_prompt_is_that_of_models_that_are_no_adapters(lengths: list[object], known: int) -> None:
    listed = [{"id": f"m{number}", "max_model_len": length} for number, length in enumerate(lengths)]
    adapter = {"id": "sql", "parent": "m0", "max_model_len": 10**6}
    assert parse_model_list(json.dumps({"data": [*listed, adapter]}).encode()).context_tokens == known


NESTED = b'{"data":' + b"[" * 100_000


def test_models_are_read_by_their_names() -> None:
    listed = {"object": "list", "data": [{"id": "m", "permission": [{"id": "p"}]}, {"id": "sql", "parent": "m"}]}
    assert parse_model_list(json.dumps(listed).encode()) == ListedModels(frozenset({"m", "sql"}), frozenset({"m"}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        NESTED,
        b'{"x":' + b"[" * 100_000,
        b'{"data":[{"id":7}]}',
        b'{"data":[{"id":"\xff"}]}',
        b'{"data":[' + b'{"id":"a"},' * 4096 + b'{"id":"a"}]}',
        b'{"data":[' + b"{}," * 20_000 + b"{}]}",
        b'{"data":[{"id":"%b"}]}' % (b"a" * 2000),
    ],
)
def test_what_is_no_list_of_models_is_unreadable_and_nothing_else(body: bytes) -> None:
    with pytest.raises(UnreadableResponse, match="see what answers at this address"):
        parse_model_list(body)


def test_tokens_are_read_up_to_what_the_prompt_can_have() -> None:
    assert parse_tokens(b'{"count":2,"tokens":[0,4294967295],"token_strs":null}', 2) == [0, 4294967295]
    assert (
        max_tokens_in_payload(b"") < max_tokens_in_payload(b"x" * 1000) < max_tokens_in_payload(b"x" * 10**8) <= 2**20
    )


@pytest.mark.parametrize(
    "tokens", ["[-1]", "[4294967296]", f"[{10**30}]", "[1.5]", '["1"]', "[true]", "[[1]]", "null", "[" * 100_000, "7"]
)
def test_odd_tokens_are_unreadable(tokens: str) -> None:
    with pytest.raises(UnreadableResponse, match="the list of tokens"):
        parse_tokens(b'{"tokens":%b}' % tokens.encode(), 100)


def test_more_tokens_than_the_prompt_can_have_are_refused() -> None:
    with pytest.raises(UnreadableResponse, match="more than 1000 tokens"):
        parse_tokens(json.dumps({"tokens": [1] * 1400}).encode(), 1000)


@pytest.mark.parametrize(
    "body", [NESTED, b'{"error":' * 5000, b'{"error":' * 400 + b"7" + b"}" * 400, b"\xff\x1b[2J", b'{"error":{"x":1}}']
)
def test_a_message_can_be_made_of_any_bytes(body: bytes) -> None:
    message = error_message(body)
    assert message.isprintable()
    assert len(message) <= 300


def test_messages_of_any_shape_are_short() -> None:
    assert error_message(b'{"detail": [{"msg": "x"}]}') == '{"detail": [{"msg": "x"}]}'
    assert error_message(b'{"success": false}') == '{"success": false}'
    assert len(error_message(b"x" * 10_000)) == 300
