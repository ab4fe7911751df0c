# SPDX-License-Identifier: Apache-2.0
"""A request and 1,000 events of a stream in another API's form, by pair of APIs."""

from __future__ import annotations

import json
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from extproc.translate.translation import Translation, find_translation

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PAIRS = list(permutations(("chat", "messages", "responses"), 2))
EVENTS = 1000


def translation_between(client: str, engine: str) -> Translation:
    found = find_translation(client, engine)
    assert found is not None
    return found


def request_of(client: str, size: int) -> bytes:
    """A conversation of messages of 430 bytes."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": "x" * 430} for at in range(size // 470)]
    body = json.dumps({"model": "m", "max_tokens": 100, "messages": messages, "stream": True}).encode()
    return body if client == "chat" else translation_between("chat", client).translate_request(body, strict=False).body


def events_of(engine: str) -> list[bytes]:
    """A token an event."""
    first = {"id": "chatcmpl-1f", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    token = {**first, "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}]}
    last = {**first, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    chunks = [b"data: %b\n\n" % json.dumps(one).encode() for one in [token] * EVENTS + [last]]
    chunks.append(b"data: [DONE]\n\n")
    if engine == "chat":
        return chunks
    stream = translation_between(engine, "chat").open_stream()
    return [one + b"\n\n" for one in b"".join(map(stream.feed, chunks)).split(b"\n\n") if one]


@pytest.mark.parametrize("size", [2_000, 100_000])
@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_request(benchmark: BenchmarkFixture, client: str, engine: str, size: int) -> None:
    body = request_of(client, size)
    found = benchmark(lambda: translation_between(client, engine).translate_request(body, strict=False))
    assert found.stream


@pytest.mark.parametrize(("client", "engine"), PAIRS)
def test_1000_events(benchmark: BenchmarkFixture, client: str, engine: str) -> None:
    events = events_of(engine)

    def run() -> bytes:
        stream = translation_between(client, engine).open_stream()
        return b"".join([*map(stream.feed, events), stream.finish()])

    assert benchmark(run).count(b" token") >= EVENTS
