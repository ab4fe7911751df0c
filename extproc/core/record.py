# SPDX-License-Identifier: Apache-2.0
"""The record of a request, until its stream is closed and its outcome known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.admission.estimates import InputEstimate
from extproc.admission.gate import Gate
from extproc.admission.limits import NO_USAGE, Charge, Grant, Usage
from extproc.admission.queued_request import QueuedRequest
from extproc.core.demand_meter import ModelMeter
from extproc.core.states import State
from extproc.core.types import BUNDLE, Arrival, Attachment
from extproc.prefix.turns import Tail
from extproc.scheduling.assignment import Assignment
from extproc.scheduling.pool import Pool

OURS: Final = ""


class Run(msgspec.Struct):
    """A dispatched request: what its outcome is compared with.

    ``tail``: the end of the prompt that no whole block covers. ``reserved``: the tokens that were expected of it, and
    ``limited``: those that its limits reserved, None if it has none. ``answers``: how many it asked for, over all its
    prompts; ``most_output``: the tokens that it asked for at most, over all answers. ``prompt_bytes``: 0 if they do not
    say how many tokens its ``prompts`` prompts have. ``declines_usage``: its client wants none to be told.
    ``expects_usage``: a whole answer reports it. ``gate``, ``charged``: whose flow paid how much service for it.
    ``is_on_time``: its silence was not counted as a failure of its endpoint. ``input_estimate``: its tenant's, if its
    limits reserved by it.
    """

    pool: Pool
    assignment: Assignment
    chain: list[int]
    tail: Tail
    prompt_bytes: int
    is_streamed: bool
    sent_at_s: float
    reserved: Usage = NO_USAGE
    limited: Usage | None = None
    answers: int = 1
    most_output: float = math.inf
    prompts: int = 1
    declines_usage: bool = False
    waited_s: float = 0.0
    gate: Gate | None = None
    charged: float = 0.0
    expects_usage: bool = False
    is_on_time: bool = True
    input_estimate: InputEstimate | None = None


class Record(msgspec.Struct):
    """One request. ``origin``: the process that decides it, OURS for this one.

    ===================  =======================================================================
    field                meaning
    ===================  =======================================================================
    ``arrival``          the request until it is sent to an engine, then None
    ``run``              what it has at its engine, from then on
    ``queued``           how it stands, or stood, in its server's queue
    ``charges``          of the limits that all machines share
    ``limited``          the tokens that its limits were asked for, None without limits
    ``loading_since_s``  since when it waits for its adapter
    ``loading_s``        how long it has waited for adapters before
    ``engine_since_s``   since when it waits for an engine
    ``engine_wait_s``    how long it has waited for engines before
    ``engine_by_s``      until when it may wait for an engine
    ``answer_by_s``      until when its gateway waits, once the request is held
    ``meter``            where it counts as demand, None if another process decides it
    ``is_work_counted``  whether its prefill work counts there, too
    ===================  =======================================================================
    """

    ticket: str
    state: State
    origin: str = OURS
    arrival: Arrival | None = None
    attachment: Attachment = BUNDLE
    wants_reasons: bool = False
    charges: Sequence[Charge] = ()
    limited: Usage | None = None
    tokens: Sequence[int] | None = None
    grants: tuple[Grant, ...] = ()
    queued: QueuedRequest | None = None
    run: Run | None = None
    loading_since_s: float = 0.0
    loading_s: float = 0.0
    meter: ModelMeter | None = None
    arrived_at_s: float = 0.0
    is_work_counted: bool = False
    engine_since_s: float = 0.0
    engine_wait_s: float = 0.0
    engine_by_s: float = math.inf
    answer_by_s: float = math.inf

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
