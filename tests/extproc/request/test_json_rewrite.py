# SPDX-License-Identifier: Apache-2.0
"""Changed bodies: what is changed, and that nothing else is, however the client has written it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.request.body_parser import parse_body
from extproc.request.json_rewrite import has_unambiguous_names, span_of, with_changes
from extproc.wire_names import Api
from tests.examples import examples

CHANGES: dict[str, object] = {"model": "b", "stream_options": {"include_usage": True}}
# longer than what parse gives no span for
LONG = "x" * 33_000
PLACEHOLDER = "\0contents\0"


class _Whole(msgspec.Struct):
    contents: msgspec.Raw


def members(body: bytes) -> list[tuple[str, bytes]]:
    """Top-level names and values, as the bytes that they are written in; repeated names as often as they occur."""
    text, decoder, found = body.decode(), json.JSONDecoder(), []
    at = text.index("{") + 1
    while (at := _skip(text, at)) < len(text) and text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = decoder.raw_decode(text, start)
        found.append((name, text[start:end].encode()))
        at = _skip(text, end)
        at += text[at] == ","
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


names = st.sampled_from(["model", "stream_options", "contents", "Model", '"model"', PLACEHOLDER]) | st.text(max_size=5)
spaces = st.text(" \n\t\r", max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def json_texts(draw: st.DrawFn) -> str:
    """One JSON value as some client may write it."""
    return json.dumps(draw(values), ensure_ascii=draw(st.booleans()), indent=draw(st.none() | st.just(1)))


@st.composite
def written_names(draw: st.DrawFn) -> str:
    """A name in quotes, some of its characters escaped."""
    name = draw(names)
    escaped = draw(st.sets(st.integers(0, max(len(name) - 1, 0)), max_size=2))
    parts = [
        f"\\u{ord(one):04x}" if number in escaped and ord(one) < 0x10000 else json.dumps(one, ensure_ascii=False)[1:-1]
        for number, one in enumerate(name)
    ]
    return f'"{"".join(parts)}"'


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """A JSON object: names in any order, repeated and escaped, white space anywhere; "contents" is always there."""
    written = draw(st.lists(st.tuples(written_names(), json_texts()), max_size=6))
    written.insert(draw(st.integers(0, len(written))), ('"contents"', draw(json_texts())))
    parts = [f"{draw(spaces)}{name}{draw(spaces)}:{draw(spaces)}{value}{draw(spaces)}" for name, value in written]
    return f"{draw(spaces)}{{{','.join(parts)}}}{draw(spaces)}".encode()


def check(body: bytes, changed: bytes) -> None:
    """Every name stands there once, with the changed value or the bytes of the original's last one."""
    expected = dict(members(body)) | {name: msgspec.json.encode(value) for name, value in CHANGES.items()}
    assert members(changed) == list(expected.items())


@settings(max_examples=examples(250))
@given(objects())
@example(b'{"model":"a","mod\\u0065l":"evil","contents":1}')
@example(b'{"contents":{"model":"nested"},"x":"\\"model\\":\\"text\\"","model":"a"}')
@example(b'{"n":123456789012345678901234567890,"e":1.50e+3,"model":"a","contents":[]}')
def test_only_the_changes_change(body: bytes) -> None:
    check(body, with_changes(body, CHANGES))


@settings(max_examples=examples(250))
@given(objects())
@example(b'{"contents":[1],"model":"a","contents":[2]}')
@example(b'{"model":{"contents":1},"contents":2}')
@example(b'{"a":"\\u0000contents\\u0000","contents":1}')
def test_the_span_of_the_contents_makes_no_difference(body: bytes) -> None:
    last = msgspec.json.decode(body, type=_Whole).contents
    span = span_of(body, last, last)
    assert span is not None
    assert body[slice(*span)] == bytes(last)

    assert with_changes(body, CHANGES, span) == with_changes(body, CHANGES)


@settings(max_examples=examples(250))
@given(st.lists(values, min_size=1, max_size=4), st.booleans(), values)
def test_conversations_with_long_contents_are_changed_alike(contents: list[Any], is_first: bool, tools: object) -> None:
    messages = [{"role": "user", "content": content, "name": PLACEHOLDER} for content in [*contents, LONG]]
    fields = {"model": "a", "messages": messages, "tools": tools, "stream": True}
    body = json.dumps(fields if is_first else dict(reversed(fields.items())), indent=1).encode()
    span = parse_body(Api.CHAT, body).contents
    assert span is not None

    changed = with_changes(body, CHANGES, span)

    check(body, changed)
    assert changed == with_changes(body, CHANGES)


def test_what_replaces_the_contents_themselves_stays() -> None:
    body = b'{"model":"a","contents":"long"}'
    contents = msgspec.json.decode(body, type=_Whole).contents

    assert with_changes(body, {"contents": 1}, span_of(body, contents, contents)) == b'{"model":"a","contents":1}'


def test_values_of_another_buffer_have_no_span() -> None:
    body, other = b'{"contents":"long"}', b'{"contents":"long", "and": "longer"}'
    contents = msgspec.json.decode(other, type=_Whole).contents

    assert span_of(body, contents.copy(), contents.copy()) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":1}}'])
def test_what_is_no_object_is_an_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        with_changes(body, CHANGES)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_bodies_as_libraries_write_them_are_plain(separators: tuple[str, str]) -> None:
    fields = {"model": "m", "messages": [{"content": "x" * 40_000}], "n": 2**63 + 1, "metadata": {"é": "é"}}
    body = json.dumps(fields, separators=separators).encode()

    assert has_unambiguous_names(body)
    assert has_unambiguous_names(body, (body.index(b'"xxx'), body.index(b"}]")))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model": "a", "n": 1, "model": "b"}',
        b'{"model":"b","\\u006dodel":"a"}',
        b'{"\\u006dodel":"b"}',
        b'{"model": "b", "\\u006dodel": "b"}',
        # as long as the plain form is
        b'{"model": "a","model":"b"}',
        b'{"n":1,"n":1,"m": 1}',
    ],
)
def test_a_body_with_repeated_or_escaped_names_is_not_plain(body: bytes) -> None:
    assert not has_unambiguous_names(body)
    assert has_unambiguous_names(with_changes(body, {}))


def test_fields_are_removed_wherever_they_stand() -> None:
    body = b'{"priority":1,"model":"m","contents":[1,2],"\\u0070riority":2,"seed":9007199254740993}'
    contents = (body.index(b"1,2"), body.index(b"1,2") + 3)

    changed = with_changes(body, {}, contents, without=("priority",))

    assert changed == b'{"model":"m","contents":[1,2],"seed":9007199254740993}'
