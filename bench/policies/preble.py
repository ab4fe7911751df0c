# SPDX-License-Identifier: Apache-2.0
"""Preble's E2, exploit and explore (ICLR 2025; WukLab/preble).

Exploit: if more than half of the prompt is cached somewhere, the least loaded endpoint among those that hold most of
it, unless its load is more than 1.5 times the least load. Else explore: the least ``L + M + P``. ``L``: work sent
there in the last three minutes, prefill of uncached tokens and decode. ``M``: prefill time of the blocks to evict for
the prompt, each weighed by its share of recent uses. ``P``: prefill time of the uncached tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.least_cost import least_cost

if TYPE_CHECKING:
    import random

    from bench.engine.request import Request
    from bench.policies.in_flight import InFlightTracker
    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

WINDOW_S: Final = 180.0
_IMBALANCE: Final = 1.5


class _EngineHistory:
    """What was sent to one engine in the window."""

    def __init__(self) -> None:
        self.load_s = 0.0
        self._sent: deque[tuple[float, float, list[int]]] = deque()
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._uses: Counter[int] = Counter()

    def send(self, now: float, seconds: float, blocks: list[int]) -> None:
        self._sent.append((now, seconds, blocks))
        self.load_s += seconds
        self._uses.update(blocks)
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def forget(self, before_s: float, capacity: int) -> None:
        """Drop what was sent before the instant ``before_s``, and blocks beyond the ``capacity``."""
        while self._sent and self._sent[0][0] < before_s:
            _, seconds, blocks = self._sent.popleft()
            self.load_s -= seconds
            self._uses.subtract(blocks)
        while len(self._blocks) > capacity:
            block, _ = self._blocks.popitem(last=False)
            self._uses.pop(block, None)

    def eviction(self, count: int, capacity: int) -> float:
        """The recent uses of the blocks to evict for ``count`` new ones, per request sent."""
        needed = max(0, len(self._blocks) + count - capacity)
        used = sum(self._uses[block] for block in islice(self._blocks, needed))
        return used / max(1, len(self._sent))


class ExploitExplore:
    """``prefill_tokens_per_s`` and ``decode_s_per_token`` are measured on an idle engine, as in Preble."""

    def __init__(
        self, tracker: InFlightTracker, *, prefill_tokens_per_s: float, decode_s_per_token: float, block_size: int
    ) -> None:
        """``block_size``: the engines', in tokens."""
        self._tracker = tracker
        self._prefill_tokens_per_s, self._decode_s_per_token = prefill_tokens_per_s, decode_s_per_token
        self._block_size = block_size

        self._histories: list[_EngineHistory] = []
        self._output_tokens = 200.0

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        request = self._tracker.observe(view)
        table, now = view.table, view.now_s
        self._histories += [_EngineHistory() for _ in range(len(table.addresses) - len(self._histories))]
        capacity = max(1, int(table.kv_capacity_tokens.max()) // self._block_size)
        for history in self._histories:
            history.forget(now - WINDOW_S, capacity)
        may, cached = view.candidates(), view.demand.cached_tokens
        load = np.array([history.load_s for history in self._histories])
        missed = view.request.input_tokens - cached
        pick = self._exploit(view, load, rng) or least_cost(view, load + self._costs(missed, capacity), rng, may)
        self._send(pick.rows[0], request, float(missed[pick.rows[0]]), now)
        return pick

    def _exploit(self, view: View, load: Floats, rng: random.Random) -> Pick | None:
        may, cached = view.candidates(), view.demand.cached_tokens
        most = float(cached[may].max())
        if most <= view.request.input_tokens - most:
            return None
        pick = least_cost(view, load, rng, may & (cached >= most))
        return pick if load[pick.rows[0]] <= _IMBALANCE * max(float(load[may].min()), 1.0) else None

    def _costs(self, missed: Floats, capacity: int) -> Floats:
        seconds = self._block_size / self._prefill_tokens_per_s
        evicted = [
            seconds * history.eviction(int(tokens) // self._block_size, capacity)
            for history, tokens in zip(self._histories, missed, strict=True)
        ]
        return np.array(evicted) + missed / self._prefill_tokens_per_s

    def _send(self, row: int, request: Request, missed: float, now: float) -> None:
        seconds = missed / self._prefill_tokens_per_s + self._output_tokens * self._decode_s_per_token
        self._histories[row].send(now, seconds, list(request.text.hashes))
