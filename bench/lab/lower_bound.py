# SPDX-License-Identifier: Apache-2.0
"""A lower bound of TTFT: an idle engine that holds all that was sent before.

What a request takes beyond that, its excess, is what a picker can change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.engine.hardware import API_S
from bench.engine.step_time import prefill_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.virtual.engines import EngineKind


class LowerBound:
    """A RequestObserver. ``kind``: the fastest engine of the trial."""

    def __init__(self, kind: EngineKind) -> None:
        self._kind = kind
        self._seen: set[int] = set()
        self._seconds: dict[tuple[int, int], float] = {}

    def seconds(self, position: tuple[int, int]) -> float:
        """The bound of the request at ``position``; 0 if it never arrived."""
        return self._seconds.get(position, 0.0)

    def begins(self, engines: Mapping[str, Scheduler]) -> None:
        """The state of the engines does not matter."""

    def arrives(self, request: Request, position: tuple[int, int], now: float) -> None:
        """Compute the bound and remember the blocks of the prompt."""
        del now
        hashes = request.text.hashes
        known = next((index for index, block_hash in enumerate(hashes) if block_hash not in self._seen), len(hashes))
        self._seen.update(hashes)
        size = self._kind.limits.block_size
        cached = min(known, (request.prompt_tokens - 1) // size) * size
        budget = self._kind.limits.max_num_batched_tokens
        uncached = request.prompt_tokens - cached
        self._seconds[position] = API_S + prefill_s(self._kind.speed, uncached, cached, budget=budget)

    def sent(self, request: Request, address: str, now: float) -> None:
        """The pick does not matter."""

    def first_token(self, request: Request, now: float) -> None:
        """The real TTFT does not matter."""

    def ended(self, request: Request, now: float) -> None:
        """Remember the blocks of the answer."""
        del now
        self._seen.update(request.text.hashes)
