# SPDX-License-Identifier: Apache-2.0
"""Pieces that pass from bytes to bytes: the gateway and the core must not be able to tell them from parsed ones."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.streams.body_relay import ResponseBodyRelay
from extproc.streams.messages import ProcessingRequest, ProcessingResponse
from extproc.streams.processing_responses import MOST_BODY_BYTES, response_body_answers
from tests.extproc.conftest import CONFIG
from tests.extproc.streams.test_duplex import CHAT, Gateway

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
EVENTS = [
    {"choices": [{"delta": {"content": '"usage": {"prompt_tokens": 99}'}}], "usage": None},
    *({"choices": [{"delta": {"content": "x" * size}}]} for size in (1, 80, 90, 300)),
    {"choices": [], "usage": USAGE},
]
SNAPSHOT = load_snapshot({"all.yaml": CONFIG})
STREAM = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in EVENTS) + b"data: [DONE]\n\n"


def piece(body: bytes, served: str = "", *, end: bool = False) -> bytes:
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = body, end
    if served:
        fields = message.metadata_context.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint-served"].string_value = served
    return message.SerializeToString()


def begun() -> Gateway:
    """A gateway whose request is decided and whose answer's headers have passed."""
    gateway = Gateway(Core(SNAPSHOT, rng=random.Random(0), ticket_prefix="t"))
    gateway.headers()
    gateway.body(CHAT)
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    gateway.send(message)
    return gateway


def receive(gateway: Gateway, message: bytes, *, relays: bool) -> tuple[list[bytes], bool]:
    """The answers, and whether the message was relayed."""
    relay = gateway.exchange.passthrough_relay if relays else None
    answer = None if relay is None else relay(message)
    if answer is not None:
        return [answer], True
    return gateway.exchange.receive(ProcessingRequest.FromString(message)), False


def outcome_of(gateway: Gateway) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What was learned, as metrics show it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in gateway.metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@settings(max_examples=40)
@given(
    cuts=st.lists(st.integers(0, len(STREAM)), max_size=40),
    served=st.lists(st.sampled_from(["", "10.0.0.1:8000", "10.0.0.2:8000"]), min_size=1, max_size=4),
)
@example(cuts=list(range(0, len(STREAM), 7)), served=["10.0.0.2:8000"])
def test_answers_and_outcome_are_the_same_however_the_answer_is_cut(cuts: list[int], served: list[str]) -> None:
    edges = sorted({0, *cuts, len(STREAM)})
    pieces = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    messages = [piece(one, served[at % len(served)]) for at, one in enumerate(pieces)]
    fast, slow = begun(), begun()
    for message in (*messages, piece(b"", end=True)):
        assert receive(fast, message, relays=True)[0] == receive(slow, message, relays=False)[0]
    assert fast.exchange.passthrough_relay is None, "after the end, messages are parsed, which refuses them"
    assert outcome_of(fast) == outcome_of(slow)


@pytest.mark.parametrize("served", ["", "10.0.0.1:8000"])
def test_pieces_in_the_middle_are_not_parsed(served: str) -> None:
    gateway = begun()
    relayed = [receive(gateway, piece(b"data: {}\n\n" * size, served), relays=True)[1] for size in range(1, 200)]
    assert relayed[:1] == [False], "the first one has the time of the first byte"
    # metadata are parsed once
    assert relayed[1:] == [not served, *[True] * 197]


def test_a_stream_without_a_decision_relays_nothing(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    gateway.answer(503, b"no healthy upstream", b"")
    assert gateway.exchange.passthrough_relay is None


def fields(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


MEANT = [
    pytest.param(piece(b"", end=True), id="the end"),
    pytest.param(piece(b"x" * (MOST_BODY_BYTES + 1)), id="longer than the gateway takes at once"),
    pytest.param(fields(5, fields(1, b"a") + fields(1, b"b")), id="two bodies"),
    pytest.param(fields(5, fields(1, b"a")) + fields(5, fields(1, b"b")), id="two parts"),
    pytest.param(fields(5, fields(1, b"a")) + fields(7, b""), id="trailers behind it"),
    pytest.param(fields(4, fields(1, b"a")), id="of a request"),
    pytest.param(fields(5, fields(1, b"abc"))[:-1], id="cut off"),
    pytest.param(b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", id="a length without end"),
    pytest.param(b"", id="nothing"),
]


@pytest.mark.parametrize("message", MEANT)
def test_what_means_more_than_a_piece_is_left_to_the_parser(message: bytes) -> None:
    taken: list[bytes] = []
    relay = ResponseBodyRelay(taken.append)
    assert [relay(message), relay(message)] == [None, None]
    assert relay(piece(b"next")) == response_body_answers(b"next", is_end=False)[0]
    assert taken == [b"next"]


@given(st.binary(max_size=300), st.binary(max_size=40))
@example(b"", fields(8, b""))
def test_any_bytes_that_pass_are_a_piece_and_known_metadata(body: bytes, more: bytes) -> None:
    taken: list[bytes] = []
    relay = ResponseBodyRelay(taken.append)
    message = piece(body) + more
    answers = [relay(message), relay(message)]
    if answers[-1] is None:
        return
    read = ProcessingRequest.FromString(message)
    assert read.WhichOneof("request") == "response_body"
    assert not read.response_body.end_of_stream
    assert taken[-1] == read.response_body.body == body
    streamed = ProcessingResponse.FromString(answers[-1]).response_body.response.body_mutation.streamed_response
    assert streamed.body == body
    assert not streamed.end_of_stream
