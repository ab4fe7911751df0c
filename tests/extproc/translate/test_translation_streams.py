# SPDX-License-Identifier: Apache-2.0
"""Streamed answers: whole for the SDKs' own helpers, the same wherever cut, never whole if they are not."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.translate.translation import StreamTranslator, Translation, find_translation
from tests.extproc.translate import corpora
from tests.extproc.translate.sdk_clients import accumulated, validated_answer

Json = dict[str, Any]


def between(client: str, engine: str) -> Translation:
    found = find_translation(client, engine)
    assert found is not None
    return found


def read(stream: StreamTranslator, *pieces: bytes) -> bytes:
    return b"".join([*map(stream.feed, pieces), stream.finish()])


def whole(client: str, engine: str, answer: Json) -> Json:
    return json.loads(between(client, engine).translate_answer(200, json.dumps(answer).encode()))  # type: ignore[no-any-return]


def events_of(body: bytes) -> list[Json]:
    found = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(one) for one in found if one != b"[DONE]"]


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def comparable(api: str, answer: Json) -> Json:
    """Less what the SDKs' helpers add."""
    answer = without_nulls(answer)
    if api == "chat":
        for choice in answer["choices"]:
            message = choice["message"]
            choice.pop("stop_reason", None)  # the helper forgets it
            for name in ("content", "refusal"):
                if not message.get(name):
                    message.pop(name, None)
            for one in message.get("tool_calls", ()):
                one.pop("index", None)
                one["function"].pop("parsed_arguments", None)
    if api == "responses":
        for item in answer["output"]:
            item.pop("parsed_arguments", None)
    return answer


def same_as_whole(client: str, engine: str, answer: Json, events: bytes) -> None:
    expected = whole(client, engine, answer)
    validated_answer(client, expected)
    streamed = accumulated(client, read(between(client, engine).open_stream(), events))
    assert comparable(client, streamed) == comparable(client, expected)


@given(st.data())
def test_chunks_become_the_events_of_the_same_message(data: st.DataObject) -> None:
    completion = data.draw(corpora.completions(signed=data.draw(st.booleans())))
    same_as_whole("messages", "chat", completion, corpora.sse(data.draw(corpora.chunks(completion)), done=True))


@given(st.data())
def test_chunks_become_the_events_of_the_same_response(data: st.DataObject) -> None:
    completion = data.draw(corpora.completions(signed=data.draw(st.booleans())))
    same_as_whole("responses", "chat", completion, corpora.sse(data.draw(corpora.chunks(completion)), done=True))


@pytest.mark.parametrize("client", ["chat", "responses"])
@given(st.data())
def test_events_of_messages_become_the_same_answer(client: str, data: st.DataObject) -> None:
    message = data.draw(corpora.answered_messages())
    same_as_whole(client, "messages", message, corpora.sse(data.draw(corpora.message_events(message)), done=False))


@pytest.mark.parametrize("client", ["chat", "messages"])
@given(st.data())
def test_events_of_responses_become_the_same_answer(client: str, data: st.DataObject) -> None:
    completion = data.draw(corpora.completions(signed=True))
    stream = between("responses", "chat").open_stream()
    events = read(stream, corpora.sse(data.draw(corpora.chunks(completion)), done=True))
    same_as_whole(client, "responses", events_of(events)[-1]["response"], events)


@given(st.data())
def test_a_message_comes_back_through_a_stream_of_responses(data: st.DataObject) -> None:
    """Redacted thinking and signatures with it; a stop sequence has no place."""
    message = data.draw(corpora.answered_messages())
    events = corpora.sse(data.draw(corpora.message_events(message)), done=False)
    there = read(between("responses", "messages").open_stream(), events)
    back = accumulated("messages", read(between("messages", "responses").open_stream(), there))
    assert back["content"] == message["content"]
    assert back["usage"] == message["usage"]


# Cut anywhere


def example(engine: str) -> bytes:
    """A stream with reasoning, text of many bytes a letter, and two calls whose pieces are mixed."""
    first = {"id": "chatcmpl-1f", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    deltas: list[Json] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hé"},
        {"content": "日本"},
        {"content": "🚀"},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"y":1}'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '":2}'}}]},
    ]
    chunks = [{**first, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**first, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    chunks.append({**first, "choices": [], "usage": usage})
    body = corpora.sse(chunks, done=True)
    return body if engine == "chat" else read(between(engine, "chat").open_stream(), body)


PAIRS = [
    (client, engine) for client in ("chat", "messages", "responses") for engine in ("chat", "messages", "responses")
]
PAIRS = [pair for pair in PAIRS if pair[0] != pair[1]]


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_a_stream_is_the_same_wherever_it_is_cut(client: str, engine: str) -> None:
    body = example(engine)
    whole_one = read(between(client, engine).open_stream(), body)
    for at in range(len(body)):
        assert read(between(client, engine).open_stream(), body[:at], body[at:]) == whole_one
    assert read(between(client, engine).open_stream(), *(body[at : at + 1] for at in range(len(body)))) == whole_one


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_line_breaks_comments_and_fields_that_nobody_needs_change_nothing(client: str, engine: str) -> None:
    body = example(engine)
    other = b": hello\n\n" + body.replace(b"data: ", b"id: 7\nretry: 9\ndata:").replace(b"\n", b"\r\n")
    assert read(between(client, engine).open_stream(), other) == read(between(client, engine).open_stream(), body)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_each_end_of_a_line_and_a_byte_order_mark_wherever_they_are_cut(line_end: bytes, mark: bytes) -> None:
    expected = read(between("messages", "chat").open_stream(), example("chat"))
    body = mark + example("chat").replace(b"\n", line_end)
    for at in range(len(body)):
        assert read(between("messages", "chat").open_stream(), body[:at], b"", body[at:]) == expected
    assert read(between("messages", "chat").open_stream(), *(body[at : at + 1] for at in range(len(body)))) == expected
    # at the end of a line that ends in CR the event is there, without a wait for what follows
    stream = between("messages", "chat").open_stream()
    assert stream.feed(mark + b'data: {"error": {"message": "no"}}' + 2 * line_end)


def test_only_the_first_mark_is_one() -> None:
    stream = between("messages", "chat").open_stream()
    assert not stream.feed(b"\xef\xbb\xbf\n\xef\xbb\xbfdata: nonsense\n\n")


# What clients see


def test_the_events_of_messages_for_a_call_and_its_reasoning() -> None:
    events = events_of(read(between("messages", "chat").open_stream(), example("chat")))
    assert [(one["type"], one.get("index")) for one in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_delta", 2),
        ("content_block_delta", 3),
        ("content_block_stop", 2),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[0]["message"]["id"] == "msg_1f"
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 4
    assert events[-2]["usage"]["cache_read_input_tokens"] == 3


def test_the_events_of_responses_are_numbered_and_their_items_placed() -> None:
    events = events_of(read(between("responses", "chat").open_stream(), example("chat")))
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    added = [one for one in events if one["type"] == "response.output_item.added"]
    assert [(one["output_index"], one["item"]["id"]) for one in added] == [
        (0, "rs_1f_0"),
        (1, "msg_1f_1"),
        (2, "fc_1f_2"),
        (3, "fc_1f_3"),
    ]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert [one["type"] for one in events[-1]["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


def test_the_chunk_of_usage_is_for_those_who_requested_it() -> None:
    body = example("messages")
    with_usage = events_of(read(between("chat", "messages").open_stream(include_usage=True), body))
    without = events_of(read(between("chat", "messages").open_stream(include_usage=False), body))
    assert with_usage[-1]["usage"]["prompt_tokens"] == 7
    assert without == with_usage[:-1]


def test_the_stop_sequence_is_told_both_ways() -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", "stop_reason": "END"}
    body = corpora.sse([{"id": "1", "model": "m", "choices": [choice]}], done=True)
    there = read(between("messages", "chat").open_stream(), body)
    assert events_of(there)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    back = events_of(read(between("chat", "messages").open_stream(), there))
    assert [one["choices"][0]["finish_reason"] for one in back if one["choices"]][-1] == "stop"
    assert [one["choices"][0].get("stop_reason") for one in back if one["choices"]][-1] == "END"


@pytest.mark.parametrize("client", ["messages", "responses"])
def test_calls_without_ids_get_some_of_the_engines_id(client: str) -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    first = {"id": "chatcmpl-1f", "model": "m", "created": 5}
    completion = {**first, "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    delta = {"tool_calls": [{**one, "index": at} for at, one in enumerate(calls)]}
    chunk = {**first, "choices": [{"index": 0, "delta": delta, "finish_reason": "tool_calls"}]}
    same_as_whole(client, "chat", completion, corpora.sse([chunk], done=True))
    found = whole(client, "chat", completion)
    ids = [one.get("call_id", one["id"]) for one in found["content" if client == "messages" else "output"]]
    assert ids == ["call_1f_0", "call_1f_1"]


def test_a_call_without_arguments_has_an_empty_object_of_them() -> None:
    message = {"id": "msg_1", "model": "m", "usage": {}}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    events = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    found = accumulated("chat", read(between("chat", "messages").open_stream(), corpora.sse(events, done=False)))
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_provider_that_sends_message_start_twice_starts_one_answer() -> None:
    start = {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": {}}}
    found = between("chat", "messages").open_stream().feed(corpora.sse([start, start], done=False))
    assert len(events_of(found)) == 1


def test_an_engine_that_sends_items_whole_is_read() -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":1}'}
    response = {"id": "resp_1", "model": "m", "status": "completed", "usage": {"input_tokens": 1}}
    events = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 1, "item": call},
        {"type": "response.completed", "response": response},
    ]
    found = accumulated(
        "messages", read(between("messages", "responses").open_stream(), corpora.sse(events, done=False))
    )
    assert [one.get("text") or one["input"] for one in found["content"]] == ["hello", {"x": 1}]


def test_reasoning_that_an_engine_of_responses_sums_up_is_read() -> None:
    response = {"id": "resp_1", "model": "m", "status": "completed", "usage": {}}
    item = {"type": "reasoning", "id": "rs_1", "summary": []}
    delta = {"type": "response.reasoning_summary_text.delta", "output_index": 0}
    done = {**item, "summary": [{"text": "one"}, {"text": "two"}], "encrypted_content": "c2ln"}
    events = [
        {"type": "response.created", "response": response},
        {"type": "response.in_progress", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.reasoning_summary_part.added", "output_index": 0, "summary_index": 0},
        {**delta, "summary_index": 0, "delta": "one"},
        {"type": "response.reasoning_summary_part.added", "output_index": 0, "summary_index": 1},
        {**delta, "summary_index": 1, "delta": "two"},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": {**response, "output": [done]}},
    ]
    found = accumulated(
        "messages", read(between("messages", "responses").open_stream(), corpora.sse(events, done=False))
    )
    assert found["content"] == [{"type": "thinking", "thinking": "one\n\ntwo", "signature": "c2ln"}]
    assert whole("messages", "responses", events[-1]["response"])["content"] == found["content"]


# Errors


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "come back"}}
ERRORS: dict[str, Json] = {
    "chat": {"error": {"message": "come back", "type": "server_error", "code": 503}},
    "messages": OVERLOADED,
    "responses": {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "come back"}}},
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_an_error_in_a_stream_is_one_for_the_client(client: str, engine: str, is_first: bool) -> None:
    body = b"" if is_first else example(engine)[: len(example(engine)) // 3].rpartition(b"\n\n")[0] + b"\n\n"
    stream = between(client, engine).open_stream()
    out = read(stream, body, corpora.sse([ERRORS[engine]], done=True))
    assert stream.error == "come back"
    assert_fails(client, out, "come back")


@pytest.mark.parametrize("part", [0, 0.3, 0.6])
@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_a_stream_that_breaks_off_has_no_clean_end(client: str, engine: str, part: float) -> None:
    body = example(engine)
    out = read(between(client, engine).open_stream(), body[: int(len(body) * part)])
    assert_fails(client, out, "ended before its answer did")


def assert_fails(client: str, events: bytes, message: str) -> None:
    if client == "responses":
        last = events_of(events)[-1]
        assert last["type"] == "response.failed"
        assert message in last["response"]["error"]["message"]
        return
    with pytest.raises((anthropic.APIStatusError, openai.APIError), match=message):
        accumulated(client, events)


OUT_OF_ORDER: list[tuple[str, list[Json]]] = [
    ("messages", [{"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}]),
    (
        "messages",
        [
            {"type": "message_start", "message": {"id": "msg_1", "model": "m"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        ],
    ),
    ("responses", [{"type": "response.output_text.delta", "output_index": 0, "delta": "a"}]),
    (
        "responses",
        [
            {"type": "response.created", "response": {"id": "resp_1", "model": "m"}},
            {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": "{}"},
        ],
    ),
]


@pytest.mark.parametrize(("engine", "events"), OUT_OF_ORDER, ids=range(4))
def test_events_out_of_their_order_are_an_error(engine: str, events: list[Json]) -> None:
    out = read(between("chat", engine).open_stream(), corpora.sse(events, done=False))
    assert_fails("chat", out, "cannot be translated: .* came ")


def test_done_without_a_reason_to_end_is_no_clean_end() -> None:
    chunk = {"id": "1", "model": "m", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    assert_fails(
        "messages", read(between("messages", "chat").open_stream(), corpora.sse([chunk], done=True)), "ended before"
    )


def test_a_reason_to_end_is_enough_where_done_is_missing() -> None:
    body = example("chat").removesuffix(b"data: [DONE]\n\n")
    assert read(between("messages", "chat").open_stream(), body) == read(
        between("messages", "chat").open_stream(), example("chat")
    )


@pytest.mark.parametrize("engine", ["messages", "responses"])
def test_the_answer_ends_with_its_last_event_however_long_the_connection_lasts(engine: str) -> None:
    stream = between("chat", engine).open_stream()
    assert stream.feed(example(engine)).endswith(b"data: [DONE]\n\n")
    assert stream.is_over


def test_a_chunk_that_has_nothing_does_not_begin_an_answer() -> None:
    first = corpora.sse([{"id": "", "choices": [], "prompt_filter_results": []}], done=False)
    found = read(between("messages", "chat").open_stream(), first, example("chat"))
    assert found == read(between("messages", "chat").open_stream(), example("chat"))
