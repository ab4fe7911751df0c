# SPDX-License-Identifier: Apache-2.0
"""How many objects and fields a body may have."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import BadRequest
from extproc.request.bounds import MOST_MEMBERS, MOST_OBJECTS, _count_outside_strings, check_bounds
from extproc.request.model import Api
from extproc.request.openai import parse


def chat(messages: int) -> bytes:
    return b'{"model":"m","messages":[' + b",".join([b'{"role":""}'] * messages) + b"]}"


@pytest.mark.parametrize("role", [b'"role"', b'"rol\\u0065"', b'"role" \n'])
def test_a_body_of_empty_messages_is_refused_however_it_is_written(role: bytes) -> None:
    with pytest.raises(BadRequest, match="more than 32768 JSON objects"):
        parse(Api.CHAT, chat(150_000).replace(b'"role"', role))


def test_the_bound_is_exact() -> None:
    # the body itself is an object, too
    assert parse(Api.CHAT, chat(MOST_OBJECTS - 1)).model == "m"
    with pytest.raises(BadRequest):
        parse(Api.CHAT, chat(MOST_OBJECTS))


def test_a_body_of_many_fields_is_refused() -> None:
    fields = b",".join(b'"%d":0' % number for number in range(MOST_MEMBERS))
    with pytest.raises(BadRequest):
        check_bounds(b'{"model":"m","stream_options":{' + fields + b"}}")


@pytest.mark.parametrize("text", ['{ "a": 1, "b\\": {} } ', "\\", '\\"{:', '"{:\\'])
def test_text_may_have_as_many_braces_and_colons_as_it_likes(text: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text * 400_000}]}).encode()
    assert parse(Api.CHAT, body).model == "m"


values = st.recursive(
    st.text(alphabet='ab"\\{:,é') | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='k"\\{:'), inner),
)


def counted(value: object) -> tuple[int, int]:
    if isinstance(value, dict):
        below = [counted(one) for one in value.values()]
        return 1 + sum(one[0] for one in below), len(value) + sum(one[1] for one in below)
    if isinstance(value, list):
        below = [counted(one) for one in value]
        return sum(one[0] for one in below), sum(one[1] for one in below)
    return 0, 0


@given(values)
def test_objects_and_members_are_counted_as_a_decoder_counts_them(value: object) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    assert _count_outside_strings(body, is_inside=False) == (*counted(value), False)
