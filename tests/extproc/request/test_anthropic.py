# SPDX-License-Identifier: Apache-2.0
"""Bodies of the Messages API: what is read, what counts as a prompt's prefix, and the chat that engines make of it."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from extproc.refusals import BadRequest
from extproc.request.anthropic import to_openai_chat
from extproc.request.body_parser import parse_body
from extproc.wire_names import Api

CACHE: Final = {"cache_control": {"type": "ephemeral"}}
PICTURE: Final = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
TOOL: Final = {"name": "weather", "description": "of a town", "input_schema": {"properties": {"town": {}}}}
USE: Final = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Ulm"}}
RESULT: Final = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def text(said: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": said, **more}


def body(*messages: tuple[str, Any], **fields: object) -> bytes:
    said = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"model": "m", "max_tokens": 7, "messages": said, **fields}).encode()


def prompt(*messages: tuple[str, Any], **fields: object) -> bytes:
    return parse_body(Api.MESSAGES, body(*messages, **fields)).prompt


def test_a_request_is_read() -> None:
    request = parse_body(
        Api.MESSAGES, body(("user", "hello"), stream=True, system="be short", thinking={"type": "enabled"})
    )
    assert (request.model, request.is_streamed, request.max_output_tokens) == ("m", True, 7)
    assert not request.lacks_stream_usage, "its streams end with usage, and it cannot be asked for"
    assert request.prompt.index(b"be short") < request.prompt.index(b"hello")


def test_the_same_conversation_has_the_same_prefix_by_either_api() -> None:
    chat = {"model": "m", "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hé"}]}
    assert prompt(("user", "hé"), system="be short") == parse_body(Api.CHAT, json.dumps(chat).encode()).prompt


def test_what_clients_move_from_turn_to_turn_is_no_part_of_the_prompt() -> None:
    first = prompt(
        ("user", [text("hello", **CACHE)]),
        system=[text("x-anthropic-billing-header: cch=1;"), text("be short", **CACHE)],
        tools=[TOOL],
    )
    second = prompt(
        ("user", "hello"),
        ("assistant", "hi"),
        ("user", [text("bye", **CACHE)]),
        system=[text("x-anthropic-billing-header: cch=2;"), text("be short")],
        tools=[TOOL],
    )
    assert second.startswith(first)


def test_a_marker_on_a_tool_changes_nothing_of_the_messages_prefix() -> None:
    marked = [{**TOOL, **CACHE}]
    again = prompt(("user", "hello"), ("assistant", "hi"), tools=[{**marked[0]}])
    assert again.startswith(prompt(("user", "hello"), tools=marked))
    assert b"cache_control" not in again


def test_tools_results_thoughts_and_pictures_are_told_apart() -> None:
    def of(**changed: Any) -> bytes:  # noqa: ANN401 - JSON
        blocks = {"use": USE, "result": RESULT, "picture": PICTURE, "thought": "hm", **changed}
        return prompt(
            ("assistant", [{"type": "thinking", "thinking": blocks["thought"]}, blocks["use"]]),
            ("user", [text("and?"), blocks["picture"], blocks["result"]]),
        )

    variants = [
        of(),
        of(use={**USE, "input": {"town": "Bonn"}}),
        of(result={**RESULT, "content": [text("snow")]}),
        of(picture={**PICTURE, "source": {"type": "url", "url": "https://example.com/a.png"}}),
        of(thought="aha"),
    ]
    assert len(set(variants)) == len(variants)
    assert of(result={**RESULT, "content": [text("rain", **CACHE)]}) == of()
    # as the engine writes it: results come before the text beside them
    assert of().index(b"rain") < of().index(b"and?")


def test_pictures_are_counted_and_their_bytes_are_not_text() -> None:
    nested = {**RESULT, "content": [text("see"), PICTURE]}
    request = parse_body(Api.MESSAGES, body(("user", [text("look"), PICTURE, nested])))
    assert request.media.tokens == 2_000
    assert request.text_bytes < len(request.prompt) - 100
    assert not request.tokens_scale_with_bytes


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "x" * 4_000},
        {"type": "search_result", "source": "a", "title": "b", "content": [text("x" * 4_000)]},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 4_000}},
        {"type": "document", "source": PICTURE["source"], "context": "x" * 4_000},
        {**RESULT, "content": [{"type": "tool_reference", "tool_name": "x" * 4_000}]},
    ],
)
def test_text_in_every_block_counts_and_tells_prompts_apart(block: dict[str, Any]) -> None:
    content = body(("user", [text("hello"), block]))
    request = parse_body(Api.MESSAGES, content)
    assert request.text_bytes > 4_000
    assert request.prompt != parse_body(Api.MESSAGES, content.replace(b"x" * 4_000, b"y" * 4_000)).prompt
    assert prompt(("user", [text("hello"), {**block, **CACHE}])) == request.prompt


def test_counting_tokens_computes_nothing_that_could_be_cached() -> None:
    request = parse_body(Api.COUNT_TOKENS, body(("user", "hello" * 100)))
    assert (request.prompt, request.answers, request.reports_usage_unchanged) == (b"", 0, False)


@pytest.mark.parametrize("messages", ["hello", [{"content": "hello"}], [7]])
def test_a_body_of_another_shape_is_refused(messages: object) -> None:
    with pytest.raises(BadRequest, match=r"messages|role"):
        parse_body(Api.MESSAGES, json.dumps({"model": "m", "messages": messages}).encode())


@pytest.mark.parametrize("content", [None, 7, {"type": "text"}, [7], [["x"]], [{"type": 7}]])
def test_what_is_no_content_is_the_engines_to_refuse(content: object) -> None:
    assert parse_body(Api.MESSAGES, body(("user", content), system=content, tools=content)).model == "m"


def test_a_large_body_is_renamed_without_reading_its_messages_again() -> None:
    large = body(("user", "x" * 20_000), ("assistant", [text("y" * 20_000)]))
    request = parse_body(Api.MESSAGES, large)
    assert request.contents is not None
    start, end = request.contents
    assert large[start:end].startswith(b'"xx')
    assert large[start:end].endswith(b'y"}]')


def test_the_chat_that_engines_make_of_it() -> None:
    asked = json.loads(
        body(
            ("user", [text("weather?", **CACHE)]),
            ("assistant", [{"type": "thinking", "thinking": "hm"}, USE]),
            ("user", [text("so?"), {**RESULT, "content": [text("rain"), text("wind")]}]),
            system=[text("x-anthropic-billing-header: 1"), text("be "), text("short")],
            tools=[{**TOOL, **CACHE}],
            chat_template_kwargs={"enable_thinking": False},
        )
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
    schema = {"type": "object", "properties": {"town": {}}}
    assert to_openai_chat(asked) == {
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "reasoning": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "rain\nwind"},
            {"role": "user", "content": "so?"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": schema}}
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with pytest.raises(ValueError, match="Messages API"):
        to_openai_chat({"messages": [7]})
