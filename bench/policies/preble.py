"""Preble's E2, exploit and explore (ICLR 2025; WukLab/preble).

More of the prompt cached somewhere than not: to the least loaded of those who hold most of it, unless that one has more than 1.5 times the least
load. Else to the least ``L + M + P``: ``L`` the work sent there in the last three minutes (prefill of what was missed, and decode), ``M`` the prefill time of
what has to be evicted for the prompt, each block weighed by how often it was used of late, and ``P`` the prefill time of what is missed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.choosing import least

if TYPE_CHECKING:
    import random

    from bench.engine.request import Request
    from bench.policies.in_flight import InFlightTracker
    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

WINDOW_S: Final = 180.0
_IMBALANCE: Final = 1.5


class _Side:
    """What was sent to one engine."""

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

    def forget(self, before: float, capacity: int) -> None:
        while self._sent and self._sent[0][0] < before:
            _, seconds, blocks = self._sent.popleft()
            self.load_s -= seconds
            self._uses.subtract(blocks)
        while len(self._blocks) > capacity:
            block, _ = self._blocks.popitem(last=False)
            self._uses.pop(block, None)

    def eviction(self, count: int, capacity: int) -> float:
        """How often the blocks that must go for ``count`` new ones were used, of all that was sent."""
        needed = max(0, len(self._blocks) + count - capacity)
        used = sum(self._uses[block] for block in islice(self._blocks, needed))
        return used / max(1, len(self._sent))


class ExploitExplore:
    """``prefill``: tokens a second and ``decode_s``: seconds a token, as Preble measures of its GPUs before."""

    def __init__(self, books: InFlightTracker, *, prefill: float, decode_s: float, block_size: int) -> None:
        self._books = books
        self._prefill, self._decode_s, self._block_size = prefill, decode_s, block_size
        self._sides: list[_Side] = []
        self._output_tokens = 200.0

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        request = self._books.sees(view)
        table, now = view.table, view.now_s
        self._sides += [_Side() for _ in range(len(table.addresses) - len(self._sides))]
        capacity = max(1, int(table.kv_capacity_tokens.max()) // self._block_size)
        for side in self._sides:
            side.forget(now - WINDOW_S, capacity)
        may, cached = view.candidates(), view.demand.cached_tokens
        load = np.array([side.load_s for side in self._sides])
        missed = view.request.input_tokens - cached
        pick = self._exploit(view, load, rng) or least(view, load + self._costs(missed, capacity), rng, may)
        self._send(pick.rows[0], request, float(missed[pick.rows[0]]), now)
        return pick

    def _exploit(self, view: View, load: Floats, rng: random.Random) -> Pick | None:
        may, cached = view.candidates(), view.demand.cached_tokens
        most = float(cached[may].max())
        if most <= view.request.input_tokens - most:
            return None
        pick = least(view, load, rng, may & (cached >= most))
        return pick if load[pick.rows[0]] <= _IMBALANCE * max(float(load[may].min()), 1.0) else None

    def _costs(self, missed: Floats, capacity: int) -> Floats:
        seconds = self._block_size / self._prefill
        evicted = [
            seconds * side.eviction(int(tokens) // self._block_size, capacity)
            for side, tokens in zip(self._sides, missed, strict=True)
        ]
        return np.array(evicted) + missed / self._prefill

    def _send(self, row: int, request: Request, missed: float, now: float) -> None:
        seconds = missed / self._prefill + self._output_tokens * self._decode_s
        self._sides[row].send(now, seconds, list(request.text.hashes))
