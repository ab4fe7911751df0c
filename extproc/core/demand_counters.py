# SPDX-License-Identifier: Apache-2.0
"""Counters of the demand for each ModelServer, for autoscalers."""

from __future__ import annotations

import sys
from bisect import bisect_left
from typing import Final

import msgspec

from extproc.api.status_page_contents import TPOT_BOUNDS_S, TTFT_BOUNDS_S, unfinished_notify_threshold
from extproc.core.request_states import RequestState

NEVER: Final = sys.maxsize
# Adapters come and go with the configuration: beyond so many, new ones count as their base model.
_MOST_MODELS: Final = 1_000


class InFlightLoad(msgspec.Struct):
    """One engine's load by this process. ``tokens``: of prompts and expected answers."""

    requests: int = 0
    tokens: float = 0.0


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request that waits here, in ``state``. ``tokens``: uncached ones of its prompt."""

    since_s: float
    tokens: float
    state: RequestState


class ServerMeter(msgspec.Struct):
    """One ModelServer. ``models``: by requested model. ``ttft``, ``tpot``: requests by bucket. ``waiting``: by ticket,
    the first to come first. ``waiting_tokens``: the sum of theirs. ``in_flight``: by address, of engines with requests.
    ``running``: the sum of these. ``notify_at``: the number of unfinished requests at which a watcher gets a line.
    """

    models: dict[str, ModelMeter] = {}
    ttft: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_S) + 1))
    tpot: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TPOT_BOUNDS_S) + 1))
    waiting: dict[str, WaitingRequest] = {}
    waiting_tokens: float = 0.0
    in_flight: dict[str, InFlightLoad] = {}
    running: int = 0
    notify_at: int = unfinished_notify_threshold(0)

    @property
    def unfinished(self) -> int:
        """Requests that wait here or are at engines."""
        return len(self.waiting) + self.running

    @property
    def is_busy(self) -> bool:
        """Whether requests wait here or are at engines."""
        return bool(self.in_flight or self.waiting)

    def waiting_in(self, state: RequestState) -> int:
        """Requests that wait in ``state``."""
        return sum(one.state is state for one in self.waiting.values())

    def begin_wait(self, ticket: str, wait: WaitingRequest) -> None:
        """The request waits, or waits for something else than before."""
        known = self.waiting.get(ticket)
        self.waiting[ticket] = wait
        self.waiting_tokens += wait.tokens - (0.0 if known is None else known.tokens)

    def end_wait(self, ticket: str) -> None:
        """The request waits no more."""
        known = self.waiting.pop(ticket, None)
        if not self.waiting:
            # do not accumulate rounding errors
            self.waiting_tokens = 0.0
        elif known is not None:
            self.waiting_tokens -= known.tokens

    def begin_run(self, address: str, tokens: float) -> None:
        """An engine gets a request."""
        self.running += 1
        flight = self.in_flight.get(address)
        if flight is None:
            self.in_flight[address] = InFlightLoad(1, tokens)
        else:
            flight.requests += 1
            flight.tokens += tokens

    def end_run(self, address: str, tokens: float) -> None:
        """An engine is free of a request."""
        self.running -= 1
        flight = self.in_flight[address]
        flight.requests -= 1
        flight.tokens -= tokens
        if not flight.requests:
            del self.in_flight[address]

    def count_latencies(self, ttft_s: float, tpot_s: float | None) -> None:
        """A streamed answer has ended. ``tpot_s``: None if it had a single token, or if its tokens are unknown."""
        # as ``bucket_index``, at the cost of one call less for each request
        self.ttft[bisect_left(TTFT_BOUNDS_S, ttft_s)] += 1
        if tpot_s is not None:
            self.tpot[bisect_left(TPOT_BOUNDS_S, tpot_s)] += 1


class ModelMeter(msgspec.Struct):
    """One model of ``server``: the base model or an adapter. The counters are those of ``Counted``."""

    server: ServerMeter
    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    prefill_work: float = 0.0


def add_model_meter(server: ServerMeter, model: str, base_model: str) -> ModelMeter:
    """The meter of a model that the server has none of yet."""
    if len(server.models) >= _MOST_MODELS and base_model in server.models:
        return server.models[base_model]
    meter = server.models[model] = ModelMeter(server)
    return meter
