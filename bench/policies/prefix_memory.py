# SPDX-License-Identifier: Apache-2.0
"""Routers' own memories of the prompts that they sent, in place of Attaché's index.

Blocks are the engines'. Routers differ in when a prompt enters (at the pick, or with the end of its answer) and in
what makes room: nothing, or LRU eviction at the capacity that the engine reports. A router that follows KV events
knows what engines really hold; what it sent in the last seconds counts as held, too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

from extproc.endpoints.costs import PromptCost
from extproc.scheduling.picker import Demand

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from bench.engine.request import Request
    from bench.policies.in_flight import InFlightTracker
    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, Picker, View

# How long a prompt counts as held after its pick, while KV events have not said so.
PREDICTED_S: Final = 5.0


class MemoryRule(msgspec.Struct, frozen=True):
    """When a prompt enters: ``by`` "sent" at the pick, "ended" with the end of its answer, "events" by KV events.

    ``is_bounded``: LRU eviction at the capacity that the engine reports.
    """

    by: Literal["sent", "ended", "events"] = "sent"
    is_bounded: bool = True


class WithPrefixMemory:
    """A policy that sees cached tokens by its router's own memory. ``block_size``: the engines', in tokens."""

    def __init__(self, picker: Picker, tracker: InFlightTracker, rule: MemoryRule, block_size: int) -> None:
        self._picker, self._tracker, self._rule = picker, tracker, rule
        self._block_size = block_size
        self._held: list[OrderedDict[int, None]] = []
        self._running: dict[int, tuple[int, Request]] = {}
        self._predicted: deque[tuple[float, int, Request]] = deque()
        self._cost = PromptCost()

    def held(self, row: int) -> Collection[int]:
        """The hashes of the blocks that it remembers of an endpoint."""
        return self._held[row].keys()

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The pick of the policy, from what its router would know."""
        request = self._tracker.observe(view)
        self._held += [OrderedDict() for _ in range(len(view.table.addresses) - len(self._held))]
        self._remember_ended()
        cached = self._cached(view, request)
        uncached = np.maximum(view.request.input_tokens - cached, 0.0)
        demand = Demand(cached, self._cost.work(uncached, cached))
        pick = self._picker.pick(msgspec.structs.replace(view, demand=demand), rng=rng)
        row = pick.rows[0]
        if self._rule.by == "sent":
            self._remember(view, row, request)
        elif self._rule.by == "ended":
            self._running[request.key] = (row, request)
        else:
            self._predicted.append((view.now_s + PREDICTED_S, row, request))
        return pick

    def _cached(self, view: View, request: Request) -> Floats:
        usable = request.text.hashes[: (request.tokens - 1) // self._block_size]
        cached = np.zeros(len(self._held))
        if self._rule.by == "events":
            for address, engine in self._tracker.engines.items():
                cached[self._tracker.row_of(view.table, address)] = len(engine.pool.match(usable))
            self._add_predicted(cached, usable, view.now_s)
        else:
            for row, held in enumerate(self._held):
                cached[row] = _matched(held, usable)
        return cached * self._block_size

    def _add_predicted(self, cached: Floats, usable: list[int], now_s: float) -> None:
        while self._predicted and self._predicted[0][0] < now_s:
            self._predicted.popleft()
        for _, row, sent in self._predicted:
            pairs = zip(sent.text.hashes, usable, strict=False)
            same = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
            cached[row] = max(cached[row], min(len(sent.text.hashes), len(usable)) if same is None else same)

    def _remember_ended(self) -> None:
        for key in [key for key, (_, request) in self._running.items() if request.is_done]:
            self._add(*self._running.pop(key))

    def _remember(self, view: View, row: int, request: Request) -> None:
        self._add(row, request)
        capacity = int(view.table.kv_capacity_tokens[row]) // self._block_size
        if self._rule.is_bounded and capacity:
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
