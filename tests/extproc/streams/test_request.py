# SPDX-License-Identifier: Apache-2.0
"""The request of one stream: what it leaves behind when something fails, and what it keeps while an engine answers."""

from __future__ import annotations

import gc
import json
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from extproc.metrics.request_metrics import Metrics
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.messages import ProcessingRequest
from tests.extproc.conftest import in_some_state, shell

if TYPE_CHECKING:
    from extproc.core.core import Core

MARK = b"once upon a time "
# under another name, so the body is written anew; and under the engines' own
BODIES = [
    json.dumps({"model": model, "messages": [{"role": "user", "content": (MARK * 5000).decode()}]}).encode()
    for model in ("chat", "sql")
]


def converse(exchange: Exchange, body: bytes, *, duplex: bool) -> None:
    headers, whole = ProcessingRequest(), ProcessingRequest()
    if duplex:
        headers.protocol_config.request_body_mode = headers.protocol_config.response_body_mode = 4
    for key, value in ((":method", "POST"), (":path", "/v1/chat/completions")):
        headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    whole.request_body.body, whole.request_body.end_of_stream = body, True
    for message in (headers, whole):
        exchange.receive(message)


def bodies_kept_by(root: object) -> int:
    """How many byte strings with the prompt can be reached from ``root``."""
    seen, todo, found = set[int](), [root], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        found += isinstance(one, bytes) and one.count(MARK) > 1000
        todo += gc.get_referents(one)
    return found


@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_request_that_an_engine_answers_keeps_no_copy_of_its_body(core: Core, body: bytes, *, duplex: bool) -> None:
    exchange = Exchange(
        shell(core, Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)), DuplexExchange, is_trusted=bool
    )
    converse(exchange, body, duplex=duplex)

    assert core.pools["default/llama"].table.in_flight.sum() == 1
    assert bodies_kept_by(exchange) == 0


@pytest.mark.parametrize("duplex", [False, True])
def test_a_shell_that_fails_behind_the_decision_leaves_no_load(core: Core, *, duplex: bool) -> None:
    failures = [OSError("the disk is full")]

    def perform(*_: object) -> None:
        if failures:
            raise failures.pop()

    context = replace(shell(core, Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)), perform=perform)
    exchange = Exchange(context, DuplexExchange, is_trusted=bool)
    with pytest.raises(OSError, match="full"):
        converse(exchange, BODIES[0], duplex=duplex)
    exchange.on_stream_closed()

    assert core.pools["default/llama"].table.in_flight.sum() == 0
    assert in_some_state(core) == 0
