"""A request that a process has sent, as other processes need to know it."""

from __future__ import annotations

import msgspec

from extproc.admission.queued_request import FlowKey
from extproc.prefix.turns import Tail


class RequestStarted(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """All that it takes to count the request and to learn from its outcome: see Assignment and Sent for the fields."""

    ticket: str
    server: str
    address: str
    prefill: str | None
    chain: list[int]
    tail: Tail
    prompt_bytes: int
    is_streamed: bool
    input_tokens: float
    cached_tokens: float
    indexed_tokens: float
    tokens_ahead: float
    work: float
    tokens: float = 0.0
    # whose flow is charged, and how much, if the server has flow control
    flow: FlowKey | None = None
    priority: int = 0
    service: float = 0.0
