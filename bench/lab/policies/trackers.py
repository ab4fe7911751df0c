# SPDX-License-Identifier: Apache-2.0
"""The data of other routers: requests in flight, their own memory of prompts, the engines' calibration.

Such a router sees first tokens and ends without delay. Attaché's picker does not: it sees no answers.

Blocks are the engines'. Routers differ in when a prompt enters (at the pick, or with the end of its answer) and in what
makes room: nothing, or LRU eviction at the capacity that the engine reports. A router with KV events has the engines'
real blocks; prompts that it sent in the last seconds count as held, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from bench.engine.request import Request
from bench.virtual.observers import REQUEST_KEY, RequestObserver
from extproc.endpoints.learned_speeds import PromptCost
from extproc.scheduling.picker import Picker, RequestDemandByRow

if TYPE_CHECKING:
    import random

    from bench.engine.scheduler import Scheduler
    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.scheduling.picker import Pick, View

# How long a prompt counts as held after its pick, until KV events confirm it.
PREDICTED_S: Final = 5.0


class _TrackedRequest(msgspec.Struct):
    row: int
    uncached_tokens: float
    blocks: list[int]
    request: Request
    is_prefilling: bool = True


class InFlightTracker:
    """A RequestObserver that follows requests from the pick to the end, by row of the endpoint table.

    ``prefill_tokens``: uncached tokens of requests without a first token, by row. ``engines``: by address; only the
    oracle and policies with KV events read them.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self.engines: Mapping[str, Scheduler] = {}
        self.prefill_tokens: Floats = np.zeros(0)
        self._active: list[Counter[int]] = []
        self._entries: dict[int, _TrackedRequest] = {}
        self._last: View | None = None

    def observe(self, view: View) -> Request:
        """Store the view of a pick, and return the request that it is for. Every policy calls this first."""
        self._last = view
        more = len(view.table.addresses) - self.prefill_tokens.size
        if more > 0:
            self.prefill_tokens = np.pad(self.prefill_tokens, (0, more))
            self._active += [Counter() for _ in range(more)]
        return self._requests[view.request.headers[REQUEST_KEY]]

    def distinct_block_counts_with(self, request: Request) -> Floats:
        """By row, the distinct blocks of running prompts if ``request`` ran there too."""
        own = request.text.hashes
        return np.array([len(active) + sum(1 for one in own if one not in active) for active in self._active], float)

    def requests_in_prefill(self, row: int) -> list[Request]:
        """Requests without a first token at this endpoint or on their way to it."""
        return [one.request for one in self._entries.values() if one.is_prefilling and one.row == row]

    def row_of(self, table: EndpointTable, address: str) -> int:
        """The row of an endpoint that is in the table."""
        row = table.row_of(address)
        assert row is not None
        return row

    def on_begin(self, engines: Mapping[str, Scheduler]) -> None:
        """Keep the engines."""
        self.engines = engines

    def on_arrival(self, request: Request, position: tuple[int, int], now: float) -> None:
        """A request will be picked for, now or later."""
        del position, now
        self._requests[str(request.key)] = request

    def on_sent(self, request: Request, address: str, now: float) -> None:
        """The request goes to the engine at ``address``."""
        del now
        self._requests.pop(str(request.key))
        view = self._last
        assert view is not None
        row = self.row_of(view.table, address)
        uncached_tokens = max(0.0, view.request.input_tokens - float(view.demand.cached_tokens[row]))
        blocks = list(request.text.hashes)
        self._entries[request.key] = _TrackedRequest(
            row=row, uncached_tokens=uncached_tokens, blocks=blocks, request=request
        )
        self.prefill_tokens[row] += uncached_tokens
        self._active[row].update(blocks)

    def on_first_token(self, request: Request, now: float) -> None:
        """The prefill is over."""
        del now
        self._prefilled(self._entries[request.key])

    def on_ended(self, request: Request, now: float) -> None:
        """The last token has come."""
        del now
        entry = self._entries.pop(request.key)
        self._prefilled(entry)
        active = self._active[entry.row]
        for block in entry.blocks:
            active[block] -= 1
            if not active[block]:
                del active[block]

    def _prefilled(self, entry: _TrackedRequest) -> None:
        if entry.is_prefilling:
            entry.is_prefilling = False
            self.prefill_tokens[entry.row] -= entry.uncached_tokens


class PrefixMemoryRule(msgspec.Struct, frozen=True):
    """When a prompt enters: ``by`` "sent" at the pick, "ended" with the end of its answer, "events" by KV events.

    ``is_bounded``: LRU eviction at the capacity that the engine reports.
    """

    by: Literal["sent", "ended", "events"] = "sent"
    is_bounded: bool = True


class PrefixMemoryPolicy:
    """A policy that sees cached tokens by its router's own memory. ``block_size``: the engines', in tokens."""

    def __init__(self, picker: Picker, tracker: InFlightTracker, rule: PrefixMemoryRule, block_size: int) -> None:
        self._picker, self._tracker, self._rule = picker, tracker, rule
        self._block_size = block_size
        self._held: list[OrderedDict[int, None]] = []
        self._running: dict[int, tuple[int, Request]] = {}
        self._predicted: deque[tuple[float, int, Request]] = deque()
        self._cost = PromptCost()

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The pick of the policy, from the data that its router would have."""
        request = self._tracker.observe(view)
        self._held += [OrderedDict() for _ in range(len(view.table.addresses) - len(self._held))]
        self._remember_ended()
        cached = self._cached(view, request)
        uncached = np.maximum(view.request.input_tokens - cached, 0.0)
        demand = RequestDemandByRow(cached, self._cost.prefill_work(uncached, cached))
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
                cached[self._tracker.row_of(view.table, address)] = len(engine.pool.match_prefix(usable))
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


class EngineCalibration(msgspec.Struct, frozen=True):
    """What operators of some routers measure on an idle engine. ``block_size``: tokens of a KV block."""

    prefill_tokens_per_s: float
    decode_s_per_token: float
    block_size: int


class PolicySetup(msgspec.Struct, frozen=True):
    """A policy for one trial.

    ``observer``: follows the simulation for it. ``server``: further fields of its ModelServer. ``has_pairs``: engines
    have the roles prefill and decode. ``on_transfer``: see ``Simulation``.
    """

    picker: Picker
    observer: RequestObserver | None = None
    server: Mapping[str, Any] = {}
    has_pairs: bool = False
    on_transfer: Callable[[str, str, int, float], None] | None = None
