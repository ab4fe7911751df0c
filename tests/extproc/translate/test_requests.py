# SPDX-License-Identifier: Apache-2.0
"""Requests: valid for the SDKs' types, the same after a round trip, and refused where something would be missed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import BadRequest, UnknownPath
from extproc.translate.translation import Translated, Translation, translation
from tests.extproc.translate import corpora
from tests.extproc.translate.sdk_clients import validate_request

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "rain", "description": "of a town", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}


def between(client: str, engine: str) -> Translation:
    found = translation(client, engine)
    assert found is not None
    return found


def translated(client: str, engine: str, request: Json, *, strict: bool = False) -> Translated:
    return between(client, engine).request(json.dumps(request).encode(), strict=strict)


def request(client: str, engine: str, given_one: Json, *, strict: bool = False) -> Json:
    return json.loads(translated(client, engine, given_one, strict=strict).body)  # type: ignore[no-any-return]


def content(parts: Any, *, joined: bool) -> Any:
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
    back = between(engine, "chat").request(there.body, strict=False)
    found = json.loads(back.body)
    validate_request("chat", found)
    expected = normalised(given_one, there.dropped)
    if engine == "messages":
        expected.setdefault("max_tokens", 4096)
        if expected.get("parallel_tool_calls") is False:
            # it is a part of the choice there
            if expected.setdefault("tool_choice", "auto") == "none":
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
    composed = between("messages", "responses").request(first.body, strict=False)
    validate_request("responses", json.loads(composed.body))
    again = between("responses", "messages").request(composed.body, strict=False)
    validate_request("messages", json.loads(again.body))
