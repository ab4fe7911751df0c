# SPDX-License-Identifier: Apache-2.0
"""What extproc's page /demand would say, counted from outside the core by an observer of the simulation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from extproc.config.demand import (
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    Counted,
    Demand,
    EngineDemand,
    ServerDemand,
    bucket_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.virtual.simulation import Simulation


class _Seen(msgspec.Struct):
    """A request from its arrival on."""

    at_s: float
    tokens: int
    output_tokens: int
    address: str = ""
    first_token_at_s: float = 0.0


class MeasuredDemand:
    """Counts as extproc does: arrivals and prompts when they come, what was cached and written when answers end."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._sequence = 0
        self._counts = Counter[str]()
        self._ttft = [0] * (len(TTFT_BOUNDS_S) + 1)
        self._tpot = [0] * (len(TPOT_BOUNDS_S) + 1)
        self._queued: dict[int, _Seen] = {}
        self._sent: dict[int, _Seen] = {}

    def begins(self, engines: Mapping[str, Scheduler]) -> None:
        """Nothing to remember: engines come and go."""

    def arrives(self, request: Request, position: tuple[int, int], now: float) -> None:
        """It waits until it is sent."""
        self._counts["arrivals"] += 1
        self._counts["prompt_tokens"] += request.prompt_tokens
        self._queued[request.key] = _Seen(now, request.prompt_tokens, request.output_tokens)

    def sent(self, request: Request, address: str, now: float) -> None:
        """It is the engine's now."""
        seen = self._queued.pop(request.key)
        seen.address = address
        self._sent[request.key] = seen

    def first_token(self, request: Request, now: float) -> None:
        """Its TTFT is known."""
        seen = self._sent[request.key]
        seen.first_token_at_s = now
        self._ttft[bucket_of(now - seen.at_s, TTFT_BOUNDS_S)] += 1

    def ended(self, request: Request, now: float) -> None:
        """The rest of it is known."""
        seen = self._sent.pop(request.key)
        cached = request.cached_tokens or 0
        self._counts.update(
            finished=1,
            cached_tokens=cached,
            output_tokens=request.produced,
            prefill_work=request.prompt_tokens - cached,
        )
        if request.produced > 1:
            tpot_s = (now - seen.first_token_at_s) / (request.produced - 1)
            self._tpot[bucket_of(tpot_s, TPOT_BOUNDS_S)] += 1

    def demand(self, simulation: Simulation, now: float) -> Demand:
        """The page at this instant."""
        self._sequence += 1
        queued = list(self._queued.values())
        server = ServerDemand(
            counted={"": Counted(**self._counts)},
            ttft=tuple(self._ttft),
            tpot=tuple(self._tpot),
            queued=len(queued),
            queued_tokens=float(sum(one.tokens for one in queued)),
            oldest_wait_s=max((now - one.at_s for one in queued), default=0.0),
            at_zero=0 if simulation.engines else len(queued),
            engines=self._engines(simulation),
        )
        return Demand("lab", self._sequence, now, {self._server: server})

    def _engines(self, simulation: Simulation) -> dict[str, EngineDemand]:
        tokens = Counter[str]()
        for one in self._sent.values():
            tokens[one.address] += one.tokens + one.output_tokens
        found = {}
        for address, engine in simulation.engines.items():
            said = engine.scheduler
            limits, pool = engine.kind.limits, said.pool
            found[address] = EngineDemand(
                in_flight=simulation.in_flight(address),
                in_flight_tokens=float(tokens[address]),
                waiting=float(len(said.waiting)),
                running=float(len(said.running)),
                kv_usage=1 - pool.free / pool.total,
                report_age_s=0.0,
                kv_capacity_tokens=float(limits.num_gpu_blocks * limits.block_size),
            )
        return found
