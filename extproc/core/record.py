# SPDX-License-Identifier: Apache-2.0
"""The record of a request, until its stream is closed and its outcome known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.admission.gate import Gate
from extproc.admission.limits import NO_USAGE, Charge, Grant, Usage
from extproc.admission.queued_request import QueuedRequest
from extproc.core.states import State
from extproc.core.types import BUNDLE, Arrival, Attachment
from extproc.prefix.turns import Tail
from extproc.scheduling.pool import Assignment, Pool

OURS: Final = ""


class Run(msgspec.Struct):
    """A dispatched request: what its outcome is compared with.

    ``tail``: the end of the prompt that no whole block covers. ``reserved``: the tokens that were expected of it;
    ``most_output``: its maximum of output tokens. ``gate``: where its flow was charged, with ``charged`` weighted tokens.
    """

    pool: Pool
    assignment: Assignment
    chain: Sequence[int]
    tail: Tail
    prompt_bytes: int
    is_streamed: bool
    sent_at_s: float
    reserved: Usage = NO_USAGE
    most_output: float = math.inf
    waited_s: float = 0.0
    gate: Gate | None = None
    charged: float = 0.0


class Record(msgspec.Struct):
    """One request. ``origin``: the process that decides it, OURS for this one.

    ``arrival``: set until dispatch; ``run``: set from then on. ``queued``: its entry in its server's queue, kept after
    it has left the queue.
    """

    ticket: str
    state: State
    origin: str = OURS
    arrival: Arrival | None = None
    attachment: Attachment = BUNDLE
    wants_reasons: bool = False
    charges: Sequence[Charge] = ()
    tokens: Sequence[int] | None = None
    grants: tuple[Grant, ...] = ()
    queued: QueuedRequest | None = None
    run: Run | None = None

    @property
    def arrived(self) -> Arrival:
        """Its arrival, before dispatch; raises ValueError afterwards."""
        if self.arrival is None:
            raise ValueError(f"request {self.ticket} was sent to an engine already")
        return self.arrival

    @property
    def is_ours(self) -> bool:
        """Whether this process decides it."""
        return self.origin == OURS
