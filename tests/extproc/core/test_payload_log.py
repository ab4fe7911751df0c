# SPDX-License-Identifier: Apache-2.0
"""Events of the payload log: secrets are out before anything is kept, and what is kept is bounded."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.payload_log import PayloadLog, Redaction, compile_pattern, parse_json_path
from extproc.api.quantities import ByteSize
from extproc.core.payload_log import (
    ByteCapacity,
    CapturedBody,
    PayloadCapture,
    capture_events,
    compile_redactor,
    is_sampled,
    merge_stream_events,
)

ABOUT = {"ticket": "t-1", "inferenceservicename": "llama"}
CANARY = "sk-canary0123456789"


def capture(**fields: Any) -> PayloadCapture:  # noqa: ANN401 - those of PayloadLog
    return PayloadCapture(PayloadLog(**fields), dict(ABOUT), ByteCapacity(), 0.0)


def data_of(made: PayloadCapture) -> list[Any]:
    return [None if one.data is None else json.loads(one.data) for one in capture_events(made, "urn:x", "a", "b")]


def redacted(value: object, *paths: str, patterns: tuple[str, ...] = ()) -> object:
    return compile_redactor(paths, patterns).redact(value)


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("$.user", {"user": "[redacted]", "messages": [{"content": "a"}, {"content": ["b"]}], "deep": {"user": 1}}),
        (
            "$..user",
            {"user": "[redacted]", "messages": [{"content": "a"}, {"content": ["b"]}], "deep": {"user": "[redacted]"}},
        ),
        ("$.messages[*].content", {"user": "u", "messages": [{"content": "[redacted]"}] * 2, "deep": {"user": 1}}),
        ("$.messages[1]", {"user": "u", "messages": [{"content": "a"}, "[redacted]"], "deep": {"user": 1}}),
        ("$.*", dict.fromkeys(("user", "messages", "deep"), "[redacted]")),
        ("$.none.at.all", {"user": "u", "messages": [{"content": "a"}, {"content": ["b"]}], "deep": {"user": 1}}),
    ],
)
def test_members_at_a_path_are_replaced(path: str, left: object) -> None:
    value = {"user": "u", "messages": [{"content": "a"}, {"content": ["b"]}], "deep": {"user": 1}}
    assert redacted(value, path) == left


@pytest.mark.parametrize("text", ["", "$", "user", "$.", "$.a.", "$[", "$[x]", "$...a", "$.a[?(@.b)]", "$.a b["])
def test_a_path_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no path that is known"):
        parse_json_path(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("a*", "matches the empty text"), ("(", "no expression"), ("(a{900}){3}", "smaller|expression")],
)
def test_a_pattern_that_cannot_be_used_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compile_pattern(text)


def test_a_pattern_that_ruins_other_libraries_takes_linear_time() -> None:
    assert redacted("a " * 100_000 + "!", patterns=("(a ?)+$",)) == "a " * 100_000 + "!"


@given(
    st.recursive(
        st.just(CANARY) | st.text(max_size=5).map(lambda text: f"{text}{CANARY}{text}"),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just(CANARY), inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_no_secret_is_left_wherever_it_stands(value: object) -> None:
    assert CANARY not in msgspec.json.encode(redacted(value, patterns=(r"sk-[a-z0-9]+",))).decode()


@given(st.lists(st.integers(0, 30), max_size=6))
def test_a_secret_that_is_spread_over_the_events_of_a_stream_is_found(cuts: list[int]) -> None:
    text = f"here: {CANARY}."
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    events = [{"id": "c", "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    stream = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    made = capture(redact=Redaction(patterns=(r"sk-[a-z0-9]+",)))
    made.on_answer_headers(200, "text/event-stream; charset=utf-8", 1.0)
    for start in range(0, len(stream), 7):
        made.answer.add(stream[start : start + 7])
    _, answer = data_of(made)
    assert answer == {"id": "c", "choices": [{"index": 0, "delta": {"content": "here: [redacted]."}}]}


PIECES = [
    {"token": piece, "bytes": list(piece.encode()), "top_logprobs": [{"token": piece, "logprob": -0.1}]}
    for piece in ("sk", "-can", "ary")
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", {"content": PIECES}),
        ("logprobs", PIECES),
        ("top_logprobs", PIECES[0]["top_logprobs"]),
        ("bytes", PIECES[0]["bytes"]),
        ("prompt_logprobs", [None, {"7": {"logprob": -0.1, "decoded_token": "sk"}}]),
        ("token_ids", [7, 8]),
        ("prompt_token_ids", [7, 8]),
        ("prompt_token_ids_b64", "BwAAAAgAAAA="),
        ("input_ids", [7, 8]),
        ("tokens", [7, 8]),
        ("words", [{"word": "sk", "start": 0.1}]),
        ("prompt", [7, 8]),
        ("input", [[7, 8], [9]]),
    ],
)
def test_what_has_a_text_in_pieces_is_left_out_where_patterns_are_searched(name: str, value: object) -> None:
    body = {"choices": [{"index": 0, name: value}]}
    assert redacted(body, patterns=("sk-[a-z]+",)) == {"choices": [{"index": 0, name: "[not searchable]"}]}
    assert redacted(body, "$.user") == body
    # of a stream, too
    made = capture(redact=Redaction(patterns=("sk-[a-z]+",)))
    made.on_answer_headers(200, "text/event-stream", 1.0)
    made.answer.add((b"data: " + msgspec.json.encode(body) + b"\n\n") * 2)
    assert data_of(made)[1] == {"choices": [{"index": 0, name: "[not searchable]"}]}


def test_what_only_asks_for_pieces_or_has_none_stays() -> None:
    body = {"logprobs": True, "top_logprobs": 5, "choices": [{"logprobs": None}, {"logprobs": []}], "bytes": 16}
    assert redacted({**body, "prompt": ["a"], "input": []}, patterns=("sk",)) == {**body, "prompt": ["a"], "input": []}


def test_choices_of_a_stream_are_kept_apart() -> None:
    def event(index: int, text: str) -> bytes:
        return (
            b"data: " + msgspec.json.encode({"choices": [{"index": index, "text": text}], "usage": None}) + b"\r\n\r\n"
        )

    merged = merge_stream_events(
        event(1, "b") + event(0, "a") + event(1, "B") + b'data: {"usage": {"n": 3}}\n\n: comment\n\n'
    )
    assert merged == {"choices": [{"index": 1, "text": "bB"}, {"index": 0, "text": "a"}], "usage": {"n": 3}}


def test_an_event_has_the_attributes_of_kserve_and_the_body() -> None:
    made = capture()
    made.request.add(b'{"model": ')
    made.request.add(b'"llama"}')
    made.on_answer_headers(200, "application/json", 1.0)
    made.answer.add(b'{"id": 1}')
    request, answer = capture_events(made, "urn:x", "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z")
    assert request.attributes == {
        "specversion": "1.0",
        "id": "t-1",
        "source": "urn:x",
        "type": "org.kubeflow.serving.inference.request",
        "time": "2026-01-01T00:00:00Z",
        "ticket": "t-1",
        "inferenceservicename": "llama",
        "bytes": 18,
        "datacontenttype": "application/json",
    }
    assert request.data == b'{"model":"llama"}'
    assert answer.attributes["type"] == "org.kubeflow.serving.inference.response"
    assert (answer.attributes["id"], answer.attributes["status"]) == ("t-1", 200)


@pytest.mark.parametrize(
    ("body", "omitted"),
    [(b"x" * 101, "too-long"), (b"not JSON " + CANARY.encode(), "not-json"), (b"[" * 100, "not-json")],
)
def test_what_cannot_be_searched_is_logged_without_its_content(body: bytes, omitted: str) -> None:
    made = capture(mode="Request", max_bytes=ByteSize("100"))
    made.request.add(body)
    (event,) = capture_events(made, "urn:x", "a", "b")
    assert (event.attributes["omitted"], event.attributes["bytes"], event.data) == (omitted, len(body), None)


@pytest.mark.parametrize("stream", [b": a comment\n\n", b"data: [DONE]\n\n", b"\x1f\x8b"])
def test_a_stream_without_an_event_says_so(stream: bytes) -> None:
    made = capture(mode="Response")
    made.on_answer_headers(200, "text/event-stream", 1.0)
    made.answer.add(stream)
    (event,) = capture_events(made, "urn:x", "a", "b")
    assert (event.attributes.get("omitted"), event.data) == ("not-json", None)


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_an_encoded_answer_is_logged_without_its_content(kind: str) -> None:
    made = capture(mode="Response")
    made.on_answer_headers(200, kind, 1.0, is_encoded=True)
    # whatever it says
    made.answer.add(b"7")
    (event,) = capture_events(made, "urn:x", "a", "b")
    assert (event.attributes["omitted"], event.attributes["bytes"], event.data) == ("encoded", 1, None)


def test_pictures_are_digests() -> None:
    made = capture(mode="Request")
    made.request.add(msgspec.json.encode({"url": "data:image/png;base64," + "QUJD" * 1000}))
    (data,) = data_of(made)
    assert data["url"].startswith("data:image/png;base64,[sha256=")
    assert data["url"].endswith(", 4000 bytes]")


@pytest.mark.parametrize(("mode", "kinds"), [("All", 2), ("Request", 1), ("Response", 1)])
def test_one_side_alone_can_be_logged(mode: Any, kinds: int) -> None:  # noqa: ANN401 - a literal
    made = capture(mode=mode)
    made.on_answer_headers(503, "text/plain", 1.0)
    assert len(capture_events(made, "urn:x", "a", "b")) == kinds


def test_a_request_without_an_answer_has_one_event() -> None:
    assert len(capture_events(capture(), "urn:x", "a", "b")) == 1


def test_bodies_that_are_kept_are_bounded_together() -> None:
    capacity = ByteCapacity(100)
    first, second, third = (CapturedBody(capacity, 80) for _ in range(3))
    first.add(b"x" * 80)
    second.add(b"x" * 30)
    assert (first.omitted, second.omitted) == ("", "no-capacity")
    first.discard()
    third.add(b"x" * 80)
    assert third.content == b"x" * 80
    # its own bound; what it held is free again
    third.add(b"x")
    assert (third.omitted, third.size) == ("too-long", 81)
    assert capacity.try_reserve(100)


def test_the_sample_is_a_share_and_the_same_everywhere() -> None:
    tickets = [f"ticket-{number}" for number in range(4000)]
    found = sum(is_sampled(one, 0.25) for one in tickets)
    assert 850 < found < 1150
    assert [is_sampled(one, 0.25) for one in tickets] == [is_sampled(one, 0.25) for one in tickets]
    assert all(is_sampled(one, 1.0) for one in tickets)
    assert not any(is_sampled(one, 0.0) for one in tickets)


def test_numbers_are_searched_and_stay_numbers() -> None:
    value = {"card": 4111111111111111, "n": 16, "share": 0.5, "is_on": True}
    assert redacted(value, patterns=(r"\b[0-9]{16}\b",)) == {**value, "card": "[redacted]"}
