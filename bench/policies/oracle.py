# SPDX-License-Identifier: Apache-2.0
"""An oracle: the least TTFT by the engines' real state, which no router knows.

For each engine: the time to prefill everything that waits there, by the engine's own step times with its present
decodes, and then this request's uncached tokens. Greedy: the cost to later requests counts once, as this request's
own prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.engine.step_time import prefill_s
from bench.policies.least_cost import least_cost

if TYPE_CHECKING:
    import random

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View


class Oracle:
    """Looks into the engines. ``others``: weight of this request's prefill as a delay of the requests behind it."""

    def __init__(self, tracker: InFlightTracker, others: float = 1.0) -> None:
        self._tracker = tracker
        self._others = others

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        request = self._tracker.observe(view)
        cost = np.full(len(view.table.addresses), np.inf)
        for address, engine in self._tracker.engines.items():
            row = view.table.row_of(address)
            if row is not None:
                cost[row] = self._seconds(engine, request, self._tracker.prefilling(row))
        return least_cost(view, cost, rng)

    def _seconds(self, engine: Scheduler, request: Request, ahead: list[Request]) -> float:
        waits = sum(_left(engine, one) for one in ahead)
        return waits + (1 + self._others) * _left(engine, request)


def _left(engine: Scheduler, request: Request) -> float:
    """Seconds of prefill that a request still needs, whether it is on its way, waiting or running."""
    if request.is_running:
        return _prefill_s(engine, request.tokens - request.computed, request.computed)
    size = engine.limits.block_size
    cached = len(engine.pool.match(request.text.hashes[: (request.tokens - 1) // size])) * size
    return _prefill_s(engine, request.tokens - cached, cached)


def _prefill_s(engine: Scheduler, tokens: int, history: int) -> float:
    """Beside the requests that the engine decodes now; every chunk counts their decodes again."""
    decodes = [one for one in engine.running if one.tokens - one.computed == 1]
    return prefill_s(
        engine.speed,
        tokens,
        history,
        budget=engine.limits.max_num_batched_tokens,
        decodes=len(decodes),
        decodes_read=sum(one.computed for one in decodes),
    )
