# SPDX-License-Identifier: Apache-2.0
"""What clients and engines send that is not of their API: a clear error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import BadRequest, UntranslatableAnswer
from extproc.translate.translation import Translation, find_translation
from tests.extproc.translate import corpora
from tests.extproc.translate.test_translation_streams import between, events_of, read

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]
APIS: Final = ("chat", "messages", "responses")
PAIRS: Final = [(client, engine) for client in APIS for engine in APIS if client != engine]
ANYTHING: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2**80),
    st.just(1e300),
    st.sampled_from(["", "text", "message", "tool_use", "thinking", "function_call", "reasoning", "\x00", "é" * 40]),
    st.just([]),
    st.just({}),
    st.just([1]),
    st.just({"type": []}),
    st.just([{"type": {}}]),
    st.just({"a": {"b": {"c": []}}}),
)
HELLO: Final = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "input": "hello"}


def _places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, one in inner for place in _places(one, (*path, name)))]


def _spoiled(data: st.DataObject, value: Any) -> Any:  # noqa: ANN401 - JSON
    """With one to three of its values replaced, or a field added."""
    out = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(_places(out)))
        if not place:
            continue
        at = out
        for step in place[:-1]:
            at = at[step]
        at[place[-1]] = copy.deepcopy(data.draw(ANYTHING))
    return out


@pytest.mark.parametrize(("client", "engine"), PAIRS)
@given(st.data())
def test_a_spoiled_request_is_translated_or_refused(client: str, engine: str, data: st.DataObject) -> None:
    request = data.draw(corpora.chat_requests())
    if client != "chat":
        request = json.loads(between("chat", client).translate_request(json.dumps(request).encode(), strict=False).body)
    body = json.dumps(_spoiled(data, request)).encode()
    with contextlib.suppress(BadRequest):
        assert isinstance(json.loads(between(client, engine).translate_request(body, strict=False).body), dict)


@pytest.mark.parametrize(("client", "engine"), PAIRS)
@given(st.data())
def test_a_spoiled_answer_is_translated_or_an_error(client: str, engine: str, data: st.DataObject) -> None:
    answer = data.draw(corpora.completions())
    if engine != "chat":
        answer = json.loads(between(engine, "chat").translate_answer(200, json.dumps(answer).encode()))
    body = json.dumps(_spoiled(data, answer)).encode()
    with contextlib.suppress(UntranslatableAnswer):
        assert isinstance(json.loads(between(client, engine).translate_answer(200, body)), dict)


@pytest.mark.parametrize(("client", "engine"), PAIRS)
@given(st.data())
def test_a_spoiled_stream_ends_once_and_with_an_error_unless_it_is_whole(
    client: str, engine: str, data: st.DataObject
) -> None:
    completion = data.draw(corpora.completions())
    events = data.draw(corpora.chunks(completion))
    if engine != "chat":
        events = events_of(read(between(engine, "chat").open_stream(), corpora.sse(events, done=True)))
    spoiled = _spoiled(data, events)
    if data.draw(st.booleans()):
        spoiled = data.draw(st.permutations(spoiled))
    stream = between(client, engine).open_stream()
    found = read(stream, *(b"data: " + json.dumps(one).encode() + b"\n\n" for one in spoiled))
    assert stream.is_over
    assert (_has_failed(client, found) is not None) == (stream.error is not None)


def _has_failed(client: str, events: bytes) -> Json | None:
    """The error that ends a stream; asserts that it has one end, and that it is the last event."""
    found = events_of(events)
    if client == "chat":
        failed = [one for one in found if "error" in one]
        assert events.endswith(b"data: [DONE]\n\n") == (not failed)
        return failed[0] if failed else None
    ends = {
        "messages": ("message_stop", "error"),
        "responses": ("response.completed", "response.incomplete", "response.failed"),
    }[client]
    assert [one["type"] for one in found if one["type"] in ends] == [found[-1]["type"]]
    return found[-1] if found[-1]["type"] in ("error", "response.failed") else None


@pytest.mark.parametrize(("client", "engine"), PAIRS)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON"),
        (b"[]", "the body must be an object"),
        (b'{"model": "\xff"}', "JSON"),
        (b'{"model": NaN}', "JSON"),
        (b'{"max_tokens": 1e999}', "JSON"),
        (b'{"model": "\\ud800"}', "JSON"),
        (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"messages": {}, "input": {}}', "must be a list"),
        (b'{"messages": [1], "input": [1]}', "must be a list of objects"),
        (b'{"messages": [{"role": "king"}], "input": [{"role": "king"}]}', "role must be"),
    ],
    ids=["empty", "list", "utf-8", "nan", "huge", "surrogate", "deep", "object", "numbers", "role"],
)
def test_a_body_that_is_no_request_is_refused(client: str, engine: str, body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        between(client, engine).translate_request(body, strict=False)


def test_the_last_of_two_equal_fields_counts_and_only_it_reaches_the_engine() -> None:
    body = b'{"model": "a", "messages": [], "max_tokens": 1, "model": "b"}'
    found = between("messages", "chat").translate_request(body, strict=False).body
    assert found.count(b'"model"') == 1
    assert json.loads(found)["model"] == "b"


@pytest.mark.parametrize("engine", ["chat", "responses"])
def test_a_deep_schema_is_translated(engine: str) -> None:
    deep = b'{"a":' * 200 + b"1" + b"}" * 200
    tool = b'{"name": "f", "input_schema": ' + deep + b"}"
    body = b'{"model": "m", "messages": [], "max_tokens": 1, "tools": [' + tool + b"]}"
    assert deep in between("messages", engine).translate_request(body, strict=False).body


def test_names_of_dropped_fields_are_few_short_and_safe_in_a_header() -> None:
    request = {**HELLO, **{f"field-{at}": 1 for at in range(1000)}, "a\r\nx-evil: 1": 1, "b" * 10_000: 1, "é": 1}
    dropped = between("messages", "chat").translate_request(json.dumps(request).encode(), strict=False).dropped
    assert len(dropped) == 32
    assert max(map(len, dropped)) <= 64
    few = {**HELLO, "a\r\nx-evil: 1": 1, "b" * 10_000: 1, "é": 1}
    assert between("messages", "chat").translate_request(json.dumps(few).encode(), strict=False).dropped == (
        "input",
        "unknown",
    )


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_a_line_without_end_is_an_error_and_is_not_kept(client: str, engine: str) -> None:
    stream = between(client, engine).open_stream()
    piece = b"x" * (1024 * 1024)
    out = stream.feed(b"data: ")
    for _ in range(17):
        out += stream.feed(piece)
    assert "more than 16 MiB" in (stream.error or "")
    assert _has_failed(client, out) is not None
    assert stream.feed(b"\n\n") == b""
    assert stream.finish() == b""


def test_an_event_of_endless_lines_is_an_error() -> None:
    stream = between("messages", "chat").open_stream()
    for _ in range(17):
        stream.feed(b"data: " + b"x" * (1024 * 1024) + b"\n")
    assert "more than 16 MiB" in (stream.error or "")


def test_an_answer_of_endless_text_is_an_error_where_it_must_be_kept() -> None:
    stream = between("responses", "chat").open_stream()
    chunk = {"id": "1", "choices": [{"index": 0, "delta": {"content": "x" * (1024 * 1024)}}]}
    for _ in range(17):
        stream.feed(corpora.sse([chunk], done=False))
    assert "more than 16 MiB" in (stream.error or "")


@pytest.mark.parametrize("client", ["messages", "responses"])
def test_an_answer_of_endless_tool_calls_is_an_error(client: str) -> None:
    calls = [{"index": at, "id": f"call_{at}", "function": {"name": "f"}} for at in range(1025)]
    stream = between(client, "chat").open_stream()
    stream.feed(corpora.sse([{"id": "1", "choices": [{"index": 0, "delta": {"tool_calls": calls}}]}], done=False))
    assert "more than 1024" in (stream.error or "")


LONG: Final = "x" * (1024 * 1024)


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "id": LONG, "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": LONG}}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": LONG}]},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": LONG}]},
    ],
    ids=["id", "name", "data", "signature"],
)
def test_whatever_is_long_in_an_answer_is_kept_up_to_a_bound(delta: Json) -> None:
    stream = between("responses", "chat").open_stream()
    for at in range(17):
        for name in ("tool_calls", "reasoning_details"):
            for one in delta.get(name, ()):
                one["index"] = at
        stream.feed(corpora.sse([{"id": "1", "choices": [{"index": 0, "delta": delta}]}], done=False))
    assert "more than 16 MiB" in (stream.error or "")


@pytest.mark.parametrize("client", ["chat", "responses"])
def test_arguments_of_calls_that_do_not_end_are_kept_up_to_a_bound(client: str) -> None:
    stream = between(client, "messages").open_stream()
    stream.feed(corpora.sse([{"type": "message_start", "message": {"id": "1"}}], done=False))
    for at in range(17):
        block = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": LONG}}
        event = {"type": "content_block_start", "index": at, "content_block": block}
        stream.feed(corpora.sse([event], done=False))
    assert "more than 16 MiB" in (stream.error or "")


@pytest.mark.parametrize(("client", "engine"), PAIRS)
@pytest.mark.parametrize(
    ("status", "body"),
    [(200, {}), (200, {"a": 1}), (200, {"choices": None, "content": None, "output": None}), (302, "good"), (204, {})],
)
def test_what_is_no_answer_becomes_none(client: str, engine: str, status: int, body: object) -> None:
    good = {"choices": [], "content": [], "output": []}
    with pytest.raises(UntranslatableAnswer):
        between(client, engine).translate_answer(status, json.dumps(good if body == "good" else body).encode())


ENDLESS: dict[str, Callable[[int], list[Json]]] = {
    "chat": lambda _: [
        {"id": "1", "choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"id": "1", "choices": [{"index": 0, "delta": {"reasoning_content": "b"}}]},
    ],
    "messages": lambda at: [{"type": "content_block_start", "index": at, "content_block": {"type": "text"}}],
    "responses": lambda at: [{"type": "response.output_item.added", "output_index": at, "item": {"type": "reasoning"}}],
}


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_an_answer_of_endless_blocks_is_an_error(client: str, engine: str) -> None:
    stream = between(client, engine).open_stream()
    starts = {
        "messages": {"type": "message_start", "message": {"id": "1"}},
        "responses": {"type": "response.created", "response": {"id": "1"}},
    }
    stream.feed(corpora.sse([starts[engine]] if engine in starts else [], done=False))
    for at in range(1025):
        stream.feed(corpora.sse(ENDLESS[engine](at), done=False))
    assert "more than 1024" in (stream.error or "")


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_a_body_of_16_mib_is_translated_whole(client: str, engine: str) -> None:
    part = {"type": "input_text" if client == "responses" else "text", "text": "x" * 1000}
    message = {"role": "user", "content": [part] * 16_384}
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": [message], "input": [message]}).encode()
    found = between(client, engine).translate_request(body, strict=False)
    assert found.body.count(b"x" * 1000) == 16_384


def pair(client: str, engine: str) -> Translation | None:
    return find_translation(client, engine)


def test_only_other_apis_are_translated() -> None:
    assert pair("chat", "chat") is None
    assert pair("chat", "completions") is None
    assert pair("", "messages") is None


@pytest.mark.parametrize("client", ["messages", "responses"])
def test_a_whole_answer_that_also_has_a_piece_of_a_stream_is_translated(client: str) -> None:
    call = corpora.call("a", "f", {})
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "delta": {"content": "a"}}
    body = json.dumps({"id": "1", "choices": [{**choice, "finish_reason": "stop"}]}).encode()
    assert isinstance(json.loads(between(client, "chat").translate_answer(200, body)), dict)
