"""A request that a process has sent, as other processes need to know it."""

from __future__ import annotations

import msgspec

from extproc.prefix.turns import Tail


class Sending(msgspec.Struct, frozen=True, array_like=True, tag="s"):
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
