# SPDX-License-Identifier: Apache-2.0
"""Reading and writing ext_proc messages by themselves, with warm and with cold caches: ``make bench`` runs these."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.micro.test_core import body
from extproc.api.usage_log import UsageContext
from extproc.core.effects import Decision
from extproc.endpoints.table import EndpointRef
from extproc.request.body_parser import parse_body
from extproc.scheduling.pool import Assignment
from extproc.streams.headers import read_head
from extproc.streams.messages import ProcessingRequest
from extproc.streams.processing_responses import decision_answer, duplex_decision_answer
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

# as many as OpenAI's client sends through Envoy
HEADERS = [(":authority", "gateway"), (":path", "/v1/chat/completions"), (":method", "POST"), (":scheme", "https")]
HEADERS += [(f"x-stainless-{number}", f"a value of some length {number}") for number in range(16)]
USAGE = UsageContext(
    ticket="abcdef123456-1f",
    tenant="acme",
    api_key="acme-web",
    route="default/llama",
    server="default/llama",
    model="llama",
    served_model="meta-llama/Llama-3.1-8B-Instruct",
    api="CHAT",
    streamed=True,
    input_tokens=500,
    output_tokens=200,
)


def request_headers() -> bytes:
    message = ProcessingRequest()
    for key, value in HEADERS:
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message.SerializeToString()


def decision(changed_bytes: int, usage: UsageContext | None = None) -> Decision:
    addresses = tuple(f"10.0.0.{number}:8000" for number in range(1, 5))
    assignment = Assignment(EndpointRef(addresses[0], 0, 0), addresses, 500.0, 0.0, 0.0, None, 500.0, 0.1)
    body = b"x" * changed_bytes if changed_bytes else None
    return Decision("abcdef123456-1f", "default/llama", "acme", assignment, body, usage=usage)


def read_request_head(message: bytes) -> bool:
    return read_head(ProcessingRequest.FromString(message).request_headers).has_body


CALLS: dict[str, Callable[[], object]] = {
    "read headers": partial(read_request_head, request_headers()),
    "parse 2 KB": partial(parse_body, Api.CHAT, body(2_000)),
    "answer": partial(decision_answer, decision(0)),
    "answer with 2 KB": partial(decision_answer, decision(2_000)),
    "answer with 2 KB and its usage": partial(decision_answer, decision(2_000, USAGE)),
    "answer with 400 KB": partial(decision_answer, decision(400_000)),
    "duplex answer": partial(duplex_decision_answer, decision(0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_warm(benchmark: BenchmarkFixture, call: str) -> None:
    assert benchmark(CALLS[call])


@pytest.mark.parametrize("call", CALLS)
def test_cold(benchmark: BenchmarkFixture, call: str) -> None:
    """8 MB are written between two calls, as a process that serves has touched other data since the last request."""
    others = np.zeros(8 << 20, np.uint8)

    def touch() -> None:
        others.__iadd__(1)

    # the library leaves its annotation out
    assert benchmark.pedantic(CALLS[call], setup=touch, rounds=300)  # type: ignore[no-untyped-call]
