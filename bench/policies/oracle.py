"""A bound: the least time to the first token by what engines really hold, run and have waiting. Nobody can know that.

For each engine: the steps until all that wait there have been prefilled, by the engine's own step times with what it decodes, and then this
request's own uncached tokens. Greedy: what the choice does to those who come later counts once, as this request's own prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.engine.step_time import Batch
from bench.policies.choosing import least

if TYPE_CHECKING:
    import random

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View


class Oracle:
    """Looks into the engines; ``others``: how much its own prefill counts again for those behind."""

    def __init__(self, books: InFlightTracker, others: float = 1.0) -> None:
        self._books = books
        self._others = others

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        request = self._books.sees(view)
        cost = np.full(len(view.table.addresses), np.inf)
        for address, engine in self._books.engines.items():
            row = view.table.row_of(address)
            if row is not None:
                cost[row] = self._seconds(engine, request, self._books.prefilling(row))
        return least(view, cost, rng)

    def _seconds(self, engine: Scheduler, request: Request, ahead: list[Request]) -> float:
        waits = sum(_left(engine, one) for one in ahead)
        return waits + (1 + self._others) * _left(engine, request)


def _left(engine: Scheduler, request: Request) -> float:
    """Seconds of prefill that a request still needs: on its way, waiting or in the middle of it."""
    if request.is_running:
        return prefill_seconds(engine, request.tokens - request.computed, request.computed)
    size = engine.limits.block_size
    cached = len(engine.pool.match(request.text.hashes[: (request.tokens - 1) // size])) * size
    return prefill_seconds(engine, request.tokens - cached, cached)


def prefill_seconds(engine: Scheduler, tokens: int, history: int) -> float:
    """Of a prompt in chunks, beside what the engine decodes now; what that alone would take is counted once a chunk."""
    budget = engine.limits.max_num_batched_tokens
    decodes = [one for one in engine.running if one.tokens - one.computed == 1]
    read = sum(one.computed for one in decodes)
    seconds, count = 0.0, len(decodes)
    while tokens > 0:
        chunk = min(tokens, max(1, budget - count))
        seconds += engine.speed.seconds(Batch(count + 1, count + chunk, chunk * (history + chunk / 2), read, count))
        tokens, history = tokens - chunk, history + chunk
    return seconds
