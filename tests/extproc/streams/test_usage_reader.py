# SPDX-License-Identifier: Apache-2.0
"""Usage out of answers in pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.streams.usage_reader import ReportedUsage, UsageReader

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
WHOLE = json.dumps(
    {"choices": [{"message": {"content": 'she said "usage": {"prompt_tokens": 99}'}}], "usage": USAGE, "kv": None}
).encode()
STREAM = (
    b"".join(
        f"data: {json.dumps(event)}\n\n".encode()
        for event in (
            {"choices": [{"delta": {"content": '"usage": {"prompt_tokens": 99}'}}], "usage": None},
            {"choices": [{"delta": {"content": "x" * 100}}]},
            {"choices": [], "usage": USAGE},
        )
    )
    + b"data: [DONE]\n\n"
)
RESPONSES = (
    b'data: {"type": "response.completed", "response": {"output": "%s", "usage": {"input_tokens": 5,'
    b' "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 7, "total_tokens": 12}}}\n\n' % (b"y" * 100_000)
)


def read(body: bytes, cuts: list[int]) -> ReportedUsage:
    reader = UsageReader()
    edges = sorted({0, *(cut % (len(body) + 1) for cut in cuts), len(body)})
    for start, end in itertools.pairwise(edges):
        reader.feed(body[start:end])
    return reader.finish()


@given(st.sampled_from([WHOLE, STREAM]), st.lists(st.integers(0, 1000), max_size=12))
def test_it_is_found_wherever_the_pieces_end(body: bytes, cuts: list[int]) -> None:
    assert read(body, cuts) == ReportedUsage(12, 3, 8)


@given(st.lists(st.integers(0, 101_000), max_size=12))
def test_the_responses_api_repeats_the_whole_answer_before_it(cuts: list[int]) -> None:
    assert read(RESPONSES, cuts) == ReportedUsage(5, 7, 2)


def test_every_byte_by_itself() -> None:
    reader = UsageReader()
    for byte in STREAM:
        reader.feed(bytes([byte]))
    assert reader.finish() == ReportedUsage(12, 3, 8)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'"usage":',
        b'{"usage": [1]}',
        b'{"usage": {"prompt_tokens": "many"}}',
        b'{"usage": {"prompt_tok',
    ],
)
def test_what_says_nothing_is_nothing(body: bytes) -> None:
    assert read(body, []) == ReportedUsage()


def test_little_is_kept_of_a_long_answer() -> None:
    reader = UsageReader()
    for _ in range(1000):
        reader.feed(b"z" * 50_000)
    assert len(reader._line) <= 32 * 1024


@pytest.mark.parametrize("number", ["-1", "1e300", "NaN", '"7"', "true", "9" * 5000, "1000000001", "[" * 3000])
def test_usage_that_is_no_count_is_ignored(number: str) -> None:
    reader = UsageReader()
    reader.feed(f'{{"usage": {{"prompt_tokens": {number}}}}}'.encode())
    assert reader.finish().prompt_tokens is None


def test_a_stream_of_the_messages_api_tells_usage_at_both_ends() -> None:
    reader = UsageReader()
    reader.feed(
        b'event: message_start\ndata: {"type": "message_start", "message": {"usage": {"input_tokens": 31,'
        b' "output_tokens": 0}}}\n\n'
    )
    # who leaves now has written something, nobody knows how much
    assert reader.finish() == ReportedUsage(31, None, None)
    reader.feed(b'event: message_delta\ndata: {"usage": {"output_tokens": 7}}\n\n')
    assert reader.finish() == ReportedUsage(31, 7, None)


def test_input_of_the_messages_api_is_what_was_not_cached() -> None:
    reader = UsageReader()
    reader.feed(b'{"content": [], "usage": {"input_tokens": 10, "output_tokens": 7, ')
    reader.feed(b'"cache_creation_input_tokens": 5, "cache_read_input_tokens": 16}}')
    assert reader.finish() == ReportedUsage(31, 7, 16)
