# SPDX-License-Identifier: Apache-2.0
"""Streamed answers: whole for the SDKs' own helpers, the same wherever cut, never whole if they are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.translate.translation import StreamTranslator, Translation, translation
from tests.extproc.translate import corpora
from tests.extproc.translate.sdk_clients import accumulated, validated_answer

Json = dict[str, Any]


def between(client: str, engine: str) -> Translation:
    found = translation(client, engine)
    assert found is not None
    return found


def read(stream: StreamTranslator, *pieces: bytes) -> bytes:
    return b"".join([*map(stream.feed, pieces), stream.end()])


def whole(client: str, engine: str, answer: Json) -> Json:
    return json.loads(between(client, engine).answer(200, json.dumps(answer).encode()))  # type: ignore[no-any-return]


def events_of(body: bytes) -> list[Json]:
    found = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(one) for one in found if one != b"[DONE]"]


def without_nulls(value: Any) -> Any:
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
    streamed = accumulated(client, read(between(client, engine).stream(), events))
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
    stream = between("responses", "chat").stream()
    events = read(stream, corpora.sse(data.draw(corpora.chunks(completion)), done=True))
    same_as_whole(client, "responses", events_of(events)[-1]["response"], events)
