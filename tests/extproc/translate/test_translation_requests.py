# SPDX-License-Identifier: Apache-2.0
"""Requests: valid for the SDKs' types, the same after a round trip, and refused where something would be missed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given

from extproc.refusals import BadRequest, UnknownPath
from extproc.translate.translation import TranslatedRequest, Translation, find_translation
from tests.extproc.translate import corpora
from tests.extproc.translate.sdk_clients import validate_request

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "rain", "description": "of a town", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}


def between(client: str, engine: str) -> Translation:
    found = find_translation(client, engine)
    assert found is not None
    return found


def translated(client: str, engine: str, request: Json, *, strict: bool = False) -> TranslatedRequest:
    return between(client, engine).translate_request(json.dumps(request).encode(), strict=strict)


def request(client: str, engine: str, given_one: Json, *, strict: bool = False) -> Json:
    return json.loads(translated(client, engine, given_one, strict=strict).body)  # type: ignore[no-any-return]


def content(parts: Any, *, joined: bool) -> Any:  # noqa: ANN401 - JSON
    """Parts of text alone as one text, where the other API has no parts."""
    if isinstance(parts, list) and joined:
        return "".join(one["text"] for one in parts)
    return parts


def normalised(given_one: Json, dropped: tuple[str, ...]) -> Json:
    """A request for chat less what means nothing and what was dropped."""
    out = copy.deepcopy(given_one)
    for message in out["messages"]:
        if message["role"] == "developer":
            message["role"] = "system"
        message["content"] = content(message.get("content"), joined=message["role"] != "user")
        for detail in message.pop("reasoning_details", ()):
            assert detail["signature"] == "c2ln"
    for name in dropped:
        out.pop(name, None)
    for tool in out.get("tools", ()):
        if not tool["function"].get("strict"):
            tool["function"].pop("strict", None)
    out.pop("stream_options", None)
    return out


@pytest.mark.parametrize("engine", ["messages", "responses"])
@given(corpora.chat_requests())
def test_a_request_for_chat_is_valid_there_and_the_same_after_a_round_trip(engine: str, given_one: Json) -> None:
    there = translated("chat", engine, given_one)
    validate_request(engine, json.loads(there.body))
    back = between(engine, "chat").translate_request(there.body, strict=False)
    found = json.loads(back.body)
    validate_request("chat", found)
    expected = normalised(given_one, there.dropped)
    if engine == "messages":
        expected.setdefault("max_tokens", 4096)
        is_single = expected.get("parallel_tool_calls") is False  # a part of the choice there
        if is_single and expected.setdefault("tool_choice", "auto") == "none":
            expected.pop("parallel_tool_calls")
    assert normalised(found, ()) == expected
    assert set(back.dropped) <= {"reasoning.signature"}


@given(corpora.chat_requests())
def test_what_is_dropped_is_refused_if_strict(given_one: Json) -> None:
    there = translated("chat", "messages", given_one)
    if there.dropped:
        with pytest.raises(BadRequest, match=there.dropped[0]):
            translated("chat", "messages", given_one, strict=True)
    else:
        assert translated("chat", "messages", given_one, strict=True) == there


@given(corpora.chat_requests())
def test_messages_and_responses_are_translated_through_chat(given_one: Json) -> None:
    first = translated("chat", "messages", given_one)
    composed = between("messages", "responses").translate_request(first.body, strict=False)
    validate_request("responses", json.loads(composed.body))
    again = between("responses", "messages").translate_request(composed.body, strict=False)
    validate_request("messages", json.loads(again.body))


# One by one


def test_a_request_of_an_anthropic_client_for_chat() -> None:
    found = request(
        "messages",
        "chat",
        {
            "model": "m",
            "max_tokens": 7,
            "stream": True,
            "system": [{"type": "text", "text": "be kind"}],
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "metadata": {"user_id": "u"},
            "service_tier": "standard_only",
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            "messages": HELLO,
        },
        strict=True,
    )
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    function = {"name": "rain", "parameters": {"type": "object"}, "description": "of a town"}
    assert found == {
        "model": "m",
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "user": "u",
        "service_tier": "default",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "messages": [{"role": "system", "content": "be kind"}, *HELLO],
    }


def test_results_of_tools_are_messages_and_their_images_the_users() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}, image]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no such town", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "go on"},
    ]
    given_one = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    assert request("messages", "chat", given_one, strict=True)["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no such town"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                {"type": "text", "text": "go on"},
            ],
        },
    ]


THOUGHT = [
    {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "eA=="},
    {"type": "text", "text": "so"},
    {"type": "tool_use", "id": "a", "name": "rain", "input": {"town": "Ulm"}},
]


def test_signatures_of_a_provider_come_back_to_it_in_the_next_request() -> None:
    answer = {"id": "msg_1", "model": "m", "content": THOUGHT, "stop_reason": "tool_use", "usage": {}}
    completion = json.loads(between("chat", "messages").translate_answer(200, json.dumps(answer).encode()))
    messages = [*HELLO, completion["choices"][0]["message"], {"role": "tool", "tool_call_id": "a", "content": "dry"}]
    there = translated("chat", "messages", {"model": "m", "messages": messages}, strict=True)
    assert json.loads(there.body)["messages"][1] == {"role": "assistant", "content": THOUGHT}


def test_signatures_come_back_through_responses() -> None:
    answer = {"id": "msg_1", "model": "m", "content": THOUGHT, "stop_reason": "tool_use", "usage": {}}
    response = json.loads(between("responses", "messages").translate_answer(200, json.dumps(answer).encode()))
    items = [*HELLO, *response["output"], {"type": "function_call_output", "call_id": "a", "output": "dry"}]
    there = translated("responses", "messages", {"model": "m", "input": items, "store": False}, strict=True)
    assert json.loads(there.body)["messages"][1] == {"role": "assistant", "content": THOUGHT}


def test_engines_of_chat_get_the_text_of_reasoning_without_its_signature() -> None:
    given_one = {"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": THOUGHT}]}
    there = translated("messages", "chat", given_one)
    assert there.dropped == ("reasoning.signature",)
    message = json.loads(there.body)["messages"][0]
    assert message["reasoning_content"] == "hm"
    assert "reasoning_details" not in message


def test_a_request_of_a_coding_agent_for_chat() -> None:
    tool = {
        "type": "function",
        "name": "shell",
        "description": "runs",
        "strict": False,
        "parameters": {"type": "object"},
    }
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be careful"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "shell", "arguments": '{"x":1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "b", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "two"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "done", "annotations": []}],
        },
        {"role": "user", "content": "thanks"},
    ]
    there = translated(
        "responses",
        "chat",
        {
            "model": "m",
            "instructions": "you are an agent",
            "input": items,
            "tools": [tool],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "text": {"verbosity": "low"},
        },
    )
    assert there.dropped == ("reasoning.summary",)
    assert there.stream
    found = json.loads(there.body)
    calls = [corpora.call("a", "shell", {"x": 1}), corpora.call("b", "shell", {})]
    assert found.pop("messages") == [
        {"role": "system", "content": "you are an agent\n\nbe careful"},
        {"role": "user", "content": [{"type": "text", "text": "list"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    function = {"name": "shell", "description": "runs", "parameters": {"type": "object"}}
    assert found == {
        "model": "m",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "medium",
        "verbosity": "low",
        "prompt_cache_key": "k",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_responses_has_by_default_and_chat_not_is_switched_off() -> None:
    found = request("chat", "responses", {"model": "m", "messages": HELLO, "tools": [FUNCTION]})
    assert found["store"] is False
    assert found["tools"][0]["strict"] is False


def test_images_for_responses_have_the_detail_that_engines_require() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    found = request("chat", "responses", {"model": "m", "messages": [{"role": "user", "content": parts}]})
    image = {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"}
    assert found["input"][0]["content"] == [image]


def test_a_file_is_a_document_for_messages() -> None:
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}}
    found = request("chat", "messages", {"model": "m", "messages": [{"role": "user", "content": [file]}]})
    source = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
    assert found["messages"][0]["content"] == [{"type": "document", "source": source, "title": "a.pdf"}]


@pytest.mark.parametrize("client", ["chat", "responses"])
def test_messages_get_a_limit_of_tokens_where_the_client_sets_none(client: str) -> None:
    given_one = {"model": "m", "messages": HELLO} if client == "chat" else {"model": "m", "input": "hello"}
    assert request(client, "messages", given_one)["max_tokens"] == 4096


def test_the_newer_limit_of_tokens_counts() -> None:
    given_one = {"model": "m", "messages": HELLO, "max_completion_tokens": 3, "max_tokens": 9}
    assert request("chat", "messages", given_one)["max_tokens"] == 3
    assert request("chat", "responses", given_one)["max_output_tokens"] == 3
    swapped = {"model": "m", "messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3}
    assert request("chat", "responses", swapped)["max_output_tokens"] == 3


def test_a_message_of_the_system_within_a_conversation_stays_in_its_place() -> None:
    messages = [*HELLO, {"role": "developer", "content": "in French"}]
    found = request("chat", "messages", {"model": "m", "messages": messages})
    assert "system" not in found
    assert found["messages"] == [*HELLO, {"role": "system", "content": "in French"}]


def test_reasoning_effort_none_is_thinking_that_is_disabled() -> None:
    found = request("chat", "messages", {"model": "m", "messages": HELLO, "reasoning_effort": "none"}, strict=True)
    assert found["thinking"] == {"type": "disabled"}
    assert request("messages", "chat", found)["reasoning_effort"] == "none"


def test_dropped_fields_are_named_by_their_paths() -> None:
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    there = translated(
        "messages",
        "chat",
        {
            "model": "m",
            "max_tokens": 1,
            "system": [cached],
            "messages": [{"role": "user", "content": [cached]}],
            "tools": [{**TOOL, "cache_control": {}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "speed": "fast",
        },
    )
    assert there.dropped == (
        "messages.content.cache_control",
        "speed",
        "system.cache_control",
        "thinking.budget_tokens",
        "tools.cache_control",
    )


SYSTEM = {"role": "system", "content": [{"type": "text", "text": "in French"}]}
CUT = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x'}}]}
IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "high"}


@pytest.mark.parametrize(
    ("client", "fields", "messages"),
    [
        ("messages", {"messages": [*HELLO, SYSTEM]}, [*HELLO, {"role": "system", "content": "in French"}]),
        ("responses", {"input": [*HELLO, SYSTEM]}, [*HELLO, {"role": "system", "content": "in French"}]),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "a"}}]}
                ]
            },
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "a",
                                "is_error": True,
                                "content": [{"type": "text", "text": "none"}],
                            }
                        ],
                    }
                ]
            },
            [{"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Error: none"}]}],
        ),
        (
            "responses",
            {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
            [{"role": "assistant", "content": None, "refusal": "no"}],
        ),
        (
            "responses",
            {"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}, *HELLO]},
            [
                {"role": "tool", "tool_call_id": "a", "content": ""},
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": "high"}}],
                },
                *HELLO,
            ],
        ),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
            [
                {"role": "tool", "tool_call_id": "a", "content": ""},
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": "high"}}],
                },
            ],
        ),
    ],
)
def test_messages_for_chat(client: str, fields: Json, messages: list[Json]) -> None:
    given_one = {"model": "m", **fields} | ({"max_tokens": 1} if client == "messages" else {})
    assert request(client, "chat", given_one, strict=True)["messages"] == messages


def test_all_leading_messages_of_the_system_are_the_system_of_messages() -> None:
    messages = [{"role": "system", "content": "one"}, SYSTEM, *HELLO, {"role": "assistant", "refusal": "no"}]
    found = request("chat", "messages", {"model": "m", "messages": messages}, strict=True)
    assert found["system"] == [{"type": "text", "text": "one"}, {"type": "text", "text": "in French"}]
    assert found["messages"][1] == {"role": "assistant", "content": [{"type": "text", "text": "no"}]}


def test_json_without_a_schema_passes_between_chat_and_responses() -> None:
    there = request("chat", "responses", {"model": "m", "messages": HELLO, "response_format": {"type": "json_object"}})
    assert there["text"] == {"format": {"type": "json_object"}}
    assert request("responses", "chat", there)["response_format"] == {"type": "json_object"}


def test_text_of_reasoning_beside_its_signature_belongs_together() -> None:
    details = [{"type": "reasoning.encrypted", "data": "x"}, {"type": "reasoning.text", "signature": "c2ln"}]
    message = {"role": "assistant", "content": "so", "reasoning_content": "hm", "reasoning_details": details}
    found = request("chat", "messages", {"model": "m", "messages": [message]}, strict=True)
    assert found["messages"][0]["content"][1] == {"type": "thinking", "thinking": "hm", "signature": "c2ln"}


@pytest.mark.parametrize(
    ("client", "fields", "advice"),
    [
        ("chat", {"messages": [CUT]}, "must be a JSON object"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
            "data:TYPE",
        ),
        ("chat", {"messages": HELLO, "tools": [{"type": "custom"}]}, "define tools as functions"),
        ("chat", {"messages": HELLO, "tools": [FUNCTION], "tool_choice": {"type": "custom"}}, "or a function"),
        ("messages", {"messages": HELLO, "tool_choice": {"type": "best"}}, "must be auto, any, none or tool"),
        ("messages", {"messages": HELLO, "system": [{"type": "image", "source": {"type": "url"}}]}, "text alone"),
        ("responses", {"input": [{"role": "developer", "content": [IMAGE]}]}, "text alone"),
        ("responses", {"input": [{"role": "assistant", "content": [IMAGE]}]}, "text alone"),
    ],
)
def test_mistakes_are_named(client: str, fields: Json, advice: str) -> None:
    with pytest.raises(BadRequest, match=advice):
        translated(client, "messages" if client == "chat" else "chat", {"model": "m", **fields})


@pytest.mark.parametrize(
    ("client", "fields", "dropped"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 3}, ("logprobs", "top_logprobs")),
        ("chat", {"presence_penalty": 1, "logit_bias": {"5": 1}}, ("logit_bias", "presence_penalty")),
        ("chat", {"stream_options": {"include_obfuscation": False}}, ("stream_options.include_obfuscation",)),
        ("chat", {"messages": [{**HELLO[0], "name": "Ann"}]}, ("messages.name",)),
        ("chat", {"reasoning_effort": "minimal"}, ("reasoning_effort",)),
        ("chat", {"response_format": {"type": "json_object"}}, ("response_format",)),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "a", "reasoning": "hm"}]},
            ("messages.reasoning_content",),
        ),
        ("responses", {"truncation": "auto"}, ("truncation",)),
        ("responses", {"include": ["message.output_text.logprobs"]}, ("include",)),
        ("messages", {"thinking": {"type": "adaptive", "display": "omitted"}}, ("thinking.display",)),
    ],
)
def test_what_is_dropped(client: str, fields: Json, dropped: tuple[str, ...]) -> None:
    engine = "chat" if client != "chat" else "messages"
    given_one = {"model": "m", "max_tokens": 1, "messages": HELLO, "input": "hello", **fields}
    given_one.pop("messages" if client == "responses" else "input")
    given_one.pop("max_tokens" if client == "responses" else "", None)
    assert translated(client, engine, given_one).dropped == dropped


ITEMS: dict[str, Json] = {
    "a call of a server": {"type": "web_search_call", "id": "ws_1"},
    "a reference": {"type": "item_reference", "id": "msg_1"},
    "a file of the server": {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
    "an image of the server": {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
}
BLOCKS: dict[str, Json] = {
    "a call of a server": {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
    "an image of the server": {"type": "image", "source": {"type": "file", "file_id": "f"}},
    "a document somewhere": {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
}
REFUSED: list[tuple[str, Json]] = [
    *(("responses", {"input": [one]}) for one in ITEMS.values()),
    *(("messages", {"messages": [{"role": "user", "content": [one]}]}) for one in BLOCKS.values()),
    ("responses", {"input": "a", "previous_response_id": "resp_1"}),
    ("responses", {"input": "a", "conversation": "conv_1"}),
    ("responses", {"input": "a", "store": True}),
    ("responses", {"input": "a", "background": True}),
    ("responses", {"input": "a", "prompt": {"id": "pmpt_1"}}),
    ("responses", {"input": "a", "tools": [{"type": "web_search"}]}),
    ("responses", {"input": "a", "tools": [{"type": "custom", "name": "patch"}]}),
    ("responses", {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("messages", {"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("messages", {"messages": HELLO, "container": "c"}),
    ("messages", {"messages": HELLO, "mcp_servers": [{"type": "url"}]}),
    ("chat", {"messages": HELLO, "n": 2}),
    ("chat", {"messages": HELLO, "functions": []}),
    ("chat", {"messages": HELLO, "web_search_options": {}}),
    ("chat", {"messages": HELLO, "modalities": ["text", "audio"]}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
]


@pytest.mark.parametrize(("client", "fields"), REFUSED, ids=[f"{one[0]}-{[*one[1]][-1]}" for one in REFUSED])
def test_what_would_be_missed_is_refused_always(client: str, fields: Json) -> None:
    for engine in {"chat", "messages", "responses"} - {client}:
        with pytest.raises(BadRequest) as caught:
            translated(client, engine, {"model": "m", "max_tokens": 1, **fields})
        assert caught.value.status == 400


def test_what_says_no_more_than_its_absence_is_neither_refused_nor_dropped() -> None:
    quiet = {"n": 1, "store": False, "modalities": ["text"], "logprobs": False, "presence_penalty": 0, "stop": None}
    there = translated("chat", "messages", {"model": "m", "messages": HELLO, **quiet}, strict=True)
    assert there.dropped == ()


# Paths and headers


def test_the_path_keeps_its_prefix() -> None:
    assert between("messages", "chat").engine_path("/team/v1/messages?beta=true") == "/team/v1/chat/completions"
    assert between("responses", "messages").engine_path("/v1/responses") == "/v1/messages"
    with pytest.raises(UnknownPath):
        between("messages", "chat").engine_path("/v1/messages/count_tokens")


def test_headers_of_messages_come_and_go() -> None:
    assert ("anthropic-version", "2023-06-01") in between("chat", "messages").headers()
    assert ("anthropic-version", None) in between("messages", "chat").headers()


@pytest.mark.parametrize(("options", "is_included"), [({}, False), ({"stream_options": {"include_usage": True}}, True)])
def test_whether_a_client_of_chat_requests_usage(options: Json, is_included: bool) -> None:
    there = translated("chat", "messages", {"model": "m", "messages": HELLO, "stream": True, **options}, strict=True)
    assert there.include_usage is is_included
    assert "stream_options" not in json.loads(there.body)
