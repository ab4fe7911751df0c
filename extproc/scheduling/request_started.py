# SPDX-License-Identifier: Apache-2.0
"""The message that tells other processes of a dispatched request."""

from __future__ import annotations

import msgspec

from extproc.admission.queued_request import FlowKey
from extproc.prefix.turns import Tail


class RequestStarted(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """What others need to count the request and to learn from its outcome.

    The fields are those of ``Assignment`` and ``Run``. ``flow``: the flow charged, None without flow control.
    ``service``: the charge in weighted tokens.
    """

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
    flow: FlowKey | None = None
    priority: int = 0
    service: float = 0.0
    # how many the engine writes; the outcome's tokens are those of all of them
    answers: int = 1
    # that it needs, if it is loaded on demand
    adapter: str | None = None
    # those with an id: key, address, and seconds for which they are kept
    sessions: tuple[tuple[str, str, float], ...] = ()
