"""What routers remember of prompts that they sent: each has the index that it has, and not ours.

The blocks are the engines'. What differs between routers is when a prompt enters (at the pick, or with the end of its answer), and what makes
room again: nothing, or as much as the engine says it holds, least recently sent first. Who follows engines' KV events knows what is really
there; what was just sent counts for some seconds, too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

from extproc.endpoints.prompt_cost import PromptCost
from extproc.scheduling.picker import Demand

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from bench.engine.request import Request
    from bench.policies.in_flight import InFlightTracker
    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, Picker, View

PREDICTED_S: Final = 5.0


class Index(msgspec.Struct, frozen=True):
    """``by``: "sent" remembers at the pick, "ended" with the answer, "events" follows KV events. ``is_bounded``: by the engine's own capacity."""

    by: Literal["sent", "ended", "events"] = "sent"
    is_bounded: bool = True


class Remembering:
    """A policy with its own memory in place of ours."""

    def __init__(self, picker: Picker, books: InFlightTracker, index: Index, block_size: int) -> None:
        self._picker, self._books, self._index = picker, books, index
        self._block_size = block_size
        self._held: list[OrderedDict[int, None]] = []
        self._running: dict[int, tuple[int, Request]] = {}
        self._predicted: deque[tuple[float, int, Request]] = deque()
        self._cost = PromptCost()

    def held(self, row: int) -> Collection[int]:
        """The hashes of the blocks that it remembers of an endpoint."""
        return self._held[row].keys()

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The policy's own, of what its router would know."""
        request = self._books.sees(view)
        self._held += [OrderedDict() for _ in range(len(view.table.addresses) - len(self._held))]
        self._remember_ended()
        cached = self._cached(view, request)
        uncached = np.maximum(view.request.input_tokens - cached, 0.0)
        demand = Demand(cached, self._cost.work(uncached, cached))
        pick = self._picker.pick(msgspec.structs.replace(view, demand=demand), rng=rng)
        row = pick.rows[0]
        if self._index.by == "sent":
            self._remember(view, row, request)
        elif self._index.by == "ended":
            self._running[request.key] = (row, request)
        else:
            self._predicted.append((view.now_s + PREDICTED_S, row, request))
        return pick

    def _cached(self, view: View, request: Request) -> Floats:
        usable = request.text.hashes[: (request.tokens - 1) // self._block_size]
        cached = np.zeros(len(self._held))
        if self._index.by == "events":
            for address, engine in self._books.engines.items():
                cached[self._books.row_of(view.table, address)] = len(engine.pool.match(usable))
            self._add_predicted(cached, usable, view.now_s)
        else:
            for row, held in enumerate(self._held):
                cached[row] = _matched(held, usable)
        return cached * self._block_size

    def _add_predicted(self, cached: Floats, usable: list[int], now: float) -> None:
        while self._predicted and self._predicted[0][0] < now:
            self._predicted.popleft()
        for _, row, sent in self._predicted:
            pairs = zip(sent.text.hashes, usable, strict=False)
            same = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
            cached[row] = max(cached[row], min(len(sent.text.hashes), len(usable)) if same is None else same)

    def _remember_ended(self) -> None:
        for key in [key for key, (_, request) in self._running.items() if request.is_done]:
            self._add(*self._running.pop(key))

    def _remember(self, view: View, row: int, request: Request) -> None:
        self._add(row, request)
        capacity = int(view.table.kv_tokens[row]) // self._block_size
        if self._index.is_bounded and capacity:
            while len(self._held[row]) > capacity:
                self._held[row].popitem(last=False)

    def _add(self, row: int, request: Request) -> None:
        held = self._held[row]
        for block in reversed(request.text.hashes):
            held[block] = None
            held.move_to_end(block)


def _matched(held: OrderedDict[int, None], blocks: list[int]) -> int:
    for number, block in enumerate(blocks):
        if block not in held:
            return number
    return len(blocks)
