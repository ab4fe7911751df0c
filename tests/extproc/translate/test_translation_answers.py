# SPDX-License-Identifier: Apache-2.0
"""Whole answers and errors: objects of the SDKs, and exceptions of theirs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import UntranslatableAnswer
from tests.extproc.translate import corpora
from tests.extproc.translate.sdk_clients import answered, validated_answer
from tests.extproc.translate.test_translation_streams import PAIRS, between, comparable, whole

Json = dict[str, Any]


@pytest.mark.parametrize("client", ["messages", "responses"])
@given(st.data())
def test_a_completion_is_the_same_after_a_round_trip(client: str, data: st.DataObject) -> None:
    completion = data.draw(corpora.completions(signed=True))
    there = whole(client, "chat", completion)
    validated_answer(client, there)
    back = whole("chat", client, there)
    validated_answer("chat", back)
    expected = comparable("chat", completion)
    message = expected["choices"][0]["message"]
    if client == "messages":
        expected["created"] = 0  # messages have no time
        if message.get("refusal"):
            message["content"] = message.pop("refusal")
            expected["choices"][0]["finish_reason"] = "content_filter"
    found = comparable("chat", back)
    for one in found["choices"][0]["message"].get("reasoning_details", ()):
        one.pop("id", None)
    assert found == expected


@given(corpora.answered_messages())
def test_a_message_is_the_same_after_a_round_trip(message: Json) -> None:
    for through in ("chat", "responses"):
        there = whole(through, "messages", message)
        validated_answer(through, there)
        back = whole("messages", through, there)
        validated_answer("messages", back)
        expected = {**message, "stop_details": None}
        if through == "responses" and message["stop_reason"] == "stop_sequence":  # no place
            expected |= {"stop_reason": "end_turn", "stop_sequence": None}
        assert comparable("messages", back) == comparable("messages", expected)


CALLED = {
    "id": "chatcmpl-1f",
    "model": "m",
    "created": 5,
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [corpora.call("a", "rain", {"town": "Ulm"})],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
        "completion_tokens_details": {"reasoning_tokens": 15},
    },
}


def test_a_forced_call_that_an_engine_ends_with_stop_is_a_use_of_a_tool() -> None:
    found = answered("messages", between("messages", "chat").translate_answer(200, json.dumps(CALLED).encode()))
    assert found.id == "msg_1f"
    assert found.stop_reason == "tool_use"
    assert [block.type for block in found.content] == ["thinking", "tool_use"]
    assert found.content[1].input == {"town": "Ulm"}
    usage = found.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (30, 60, 10)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (20, 15)


def test_a_response_has_items_with_ids_of_the_engines_id() -> None:
    found = answered("responses", between("responses", "chat").translate_answer(200, json.dumps(CALLED).encode()))
    assert (found.id, found.created_at, found.status) == ("resp_1f", 5, "completed")
    assert [(one.type, one.id) for one in found.output] == [("reasoning", "rs_1f_0"), ("function_call", "fc_1f_1")]
    assert found.output[0].content[0].text == "hm"
    assert (found.usage.input_tokens, found.usage.input_tokens_details.cached_tokens) == (100, 60)
    assert found.usage.output_tokens_details.reasoning_tokens == 15


@pytest.mark.parametrize(
    ("finish", "stop_reason", "status"),
    [
        ("stop", "end_turn", "completed"),
        ("length", "max_tokens", "incomplete"),
        ("content_filter", "refusal", "incomplete"),
        ("abort", "end_turn", "completed"),
    ],
)
def test_why_an_answer_ended(finish: str, stop_reason: str, status: str) -> None:
    message = {"role": "assistant", "content": "a"}
    body = {"id": "1", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    assert whole("messages", "chat", body)["stop_reason"] == stop_reason
    assert whole("responses", "chat", body)["status"] == status


def test_arguments_that_were_cut_are_shown_as_they_are() -> None:
    cut = json.loads(json.dumps(CALLED).replace('\\"Ulm\\"}', ""))
    found = whole("messages", "chat", cut)
    assert found["content"][1]["input"] == {"arguments": '{"town":'}


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_what_is_no_answer_is_an_error_of_the_gateway(client: str, engine: str) -> None:
    for body in (b"", b"<html>", b"[1]", b'{"choices": 5, "content": 5, "output": 5}'):
        with pytest.raises(UntranslatableAnswer, match="cannot be translated"):
            between(client, engine).translate_answer(200, body)


def test_content_that_no_other_api_has_is_an_error_of_the_gateway() -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "hologram"}]}
    with pytest.raises(UntranslatableAnswer, match="hologram"):
        between("chat", "responses").translate_answer(200, json.dumps({"output": [item]}).encode())


# Errors


BODIES: dict[str, Json] = {
    "openai": {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "x"}},
    "older vLLM": {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400},
    "text": {"error": "too long"},
    "fastapi": {"detail": "too long"},
    "anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}},
}


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_an_error_of_any_form_is_one_of_the_client(client: str, engine: str, form: str) -> None:
    body = between(client, engine).translate_answer(400, json.dumps(BODIES[form]).encode())
    raised = anthropic.BadRequestError if client == "messages" else openai.BadRequestError
    with pytest.raises(raised, match="too long") as caught:
        answered(client, body, 400)
    if client == "messages":
        assert caught.value.body["error"]["type"] == "invalid_request_error"
    elif form == "openai":
        assert (caught.value.param, caught.value.code) == ("messages", "x")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, "authentication_error"), (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error")],
)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "The engine answered with status"),
        (b"<html>nginx", "The engine answered with status"),
        (b"no route", "no route"),
        (b'{"error": {"message": 5, "type": [], "code": {}}}', "The engine answered with status"),
    ],
)
def test_an_error_without_an_object_is_one_by_its_status(status: int, kind: str, body: bytes, message: str) -> None:
    found = json.loads(between("messages", "chat").translate_answer(status, body))
    assert found["error"]["type"] == kind
    assert message in found["error"]["message"]


def test_long_errors_are_cut() -> None:
    for body in (b"x" * 100_000, json.dumps({"error": {"message": "x" * 100_000}}).encode()):
        assert len(between("chat", "messages").translate_answer(500, body)) < 5000


@pytest.mark.parametrize("engine", ["chat", "responses"])
def test_an_error_with_status_200_is_one(engine: str) -> None:
    body = json.dumps({"status": "failed", "error": {"message": "broken", "type": "server_error"}}).encode()
    with pytest.raises(UntranslatableAnswer, match="broken"):
        between("messages", engine).translate_answer(200, body)
