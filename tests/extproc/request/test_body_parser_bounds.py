# SPDX-License-Identifier: Apache-2.0
"""How many objects and fields a body may have."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.refusals import BadRequest
from extproc.request.body_parser import (
    MOST_COMMAS,
    MOST_MEMBERS,
    MOST_OBJECTS,
    MOST_OTHER_BYTES,
    MOST_STRINGS,
    JsonMarkCounts,
    check_bounds,
    count_json_marks,
    parse_body,
)
from extproc.wire_names import Api
from tests.examples import examples


def chat(messages: int) -> bytes:
    return b'{"model":"m","messages":[' + b",".join([b'{"role":""}'] * messages) + b"]}"


@pytest.mark.parametrize("role", [b'"role"', b'"rol\\u0065"', b'"role" \n'])
def test_a_body_of_empty_messages_is_refused_however_it_is_written(role: bytes) -> None:
    with pytest.raises(BadRequest, match="more than 16384 JSON objects"):
        parse_body(Api.CHAT, chat(150_000).replace(b'"role"', role))


def test_the_bound_is_exact() -> None:
    # the body itself is an object, too
    assert parse_body(Api.CHAT, chat(MOST_OBJECTS - 1)).model == "m"
    with pytest.raises(BadRequest):
        parse_body(Api.CHAT, chat(MOST_OBJECTS))


def test_a_body_of_many_fields_is_refused() -> None:
    fields = b",".join(b'"%d":0' % number for number in range(MOST_MEMBERS))
    with pytest.raises(BadRequest):
        check_bounds(b'{"model":"m","stream_options":{' + fields + b"}}")


@pytest.mark.parametrize("text", ['{ "a": 1, "b\\": {} } ', "\\", '\\"{:', '"{:\\'])
def test_text_may_have_as_many_braces_and_colons_as_it_likes(text: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text * 400_000}]}).encode()
    assert parse_body(Api.CHAT, body).model == "m"


values = st.recursive(
    st.text(alphabet='ab"\\{:,é') | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='k"\\{:'), inner),
)


def counted(value: object) -> JsonMarkCounts:
    """By what a decoder finds."""
    inner: list[object] = []
    own = JsonMarkCounts()
    if isinstance(value, dict):
        inner = list(value.values())
        own = JsonMarkCounts(1, len(value), max(0, len(value) - 1), 2 * len(value))
    elif isinstance(value, list):
        inner = value
        own = JsonMarkCounts(commas=max(0, len(value) - 1))
    elif isinstance(value, str):
        own = JsonMarkCounts(quotes=2)
    for one in inner:
        own = own.plus(counted(one))
    return own


@settings(max_examples=examples(250))
@given(values)
def test_objects_and_members_are_counted_as_a_decoder_counts_them(value: object) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    assert count_json_marks(np.frombuffer(body, np.uint8), is_inside=False) == (counted(value), False)


@settings(max_examples=examples(250))
@given(values, st.integers(min_value=1))
def test_a_text_may_be_counted_in_pieces(value: object, cut: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    cut %= len(body)
    while cut and body[cut - 1 : cut] == b"\\":
        cut -= 1
    first, is_inside = count_json_marks(np.frombuffer(body[:cut], np.uint8), is_inside=False)
    second, is_inside = count_json_marks(np.frombuffer(body[cut:], np.uint8), is_inside=is_inside)
    assert (first.plus(second), is_inside) == (counted(value), False)


def test_bodies_longer_than_a_chunk_are_counted_as_a_whole() -> None:
    # every escape is divided by some multiple of the chunk's size minus a few bytes
    for pad in range(6):
        text = "x" * pad + '\\"{:,' * 700_000
        assert parse_body(Api.CHAT, json.dumps({"model": "m", "messages": [{"role": "u", "content": text}]}).encode())


@pytest.mark.parametrize(
    "prompt",
    [
        b'"",' * MOST_STRINGS + b'""',
        b"1," * MOST_COMMAS + b"11",
        b"[]," * MOST_COMMAS + b"[1]",
        b'"\\"",' * MOST_STRINGS + b'""',
    ],
    ids=["texts", "tokens", "lists", "quotes"],
)
def test_a_list_of_more_prompts_or_tokens_than_any_real_one_is_refused(prompt: bytes) -> None:
    with pytest.raises(BadRequest, match="fewer messages or prompts"):
        parse_body(Api.COMPLETIONS, b'{"model":"m","prompt":[' + prompt + b"]}")


def test_a_million_tokens_and_texts_full_of_commas_pass() -> None:
    tokens = b'{"model":"m","prompt":[' + b"12," * 1_000_000 + b"1]}"
    assert parse_body(Api.COMPLETIONS, tokens).prompts.token_ids == 1_000_001
    assert parse_body(Api.COMPLETIONS, b'{"model":"m","prompt":"' + b"," * 2 * MOST_COMMAS + b'"}').model == "m"


@pytest.mark.parametrize(
    "rest", [b'"' + b"\\n" * MOST_OTHER_BYTES + b'":0', b'"stop":"' + b"x" * MOST_OTHER_BYTES + b'"']
)
def test_other_fields_are_not_as_long_as_prompts(rest: bytes) -> None:
    with pytest.raises(BadRequest, match="beside the messages"):
        parse_body(Api.CHAT, b'{"model":"m","messages":[{"role":"u","content":"hello"}],' + rest + b"}")
