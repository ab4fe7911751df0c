# SPDX-License-Identifier: Apache-2.0
"""Requests in flight, as a router knows them when answers pass through it.

Such a router sees first tokens and ends without delay. Attaché's picker does not: it sees no answers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bench.engine.request import Request
from bench.virtual.observers import REQUEST_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.scheduler import Scheduler
    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.scheduling.picker import View


class _Entry(msgspec.Struct):
    row: int
    uncached_tokens: float
    blocks: list[int]
    request: Request
    is_prefilling: bool = True


class InFlightTracker:
    """A RequestObserver that follows requests from the pick to the end, by row of the endpoint table.

    ``prefill_tokens``: uncached tokens of requests without a first token, by row. ``engines``: by address; only the
    oracle and policies with KV events look at them.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self.engines: Mapping[str, Scheduler] = {}
        self.prefill_tokens: Floats = np.zeros(0)
        self._active: list[Counter[int]] = []
        self._entries: dict[int, _Entry] = {}
        self._last: View | None = None

    def observe(self, view: View) -> Request:
        """Remember the view of a pick, and return the request that it is for. Every policy calls this first."""
        self._last = view
        more = len(view.table.addresses) - self.prefill_tokens.size
        if more > 0:
            self.prefill_tokens = np.pad(self.prefill_tokens, (0, more))
            self._active += [Counter() for _ in range(more)]
        return self._requests[view.request.headers[REQUEST_KEY]]

    def blocks_with(self, request: Request) -> Floats:
        """By row, the distinct blocks of running prompts if ``request`` ran there too."""
        own = request.text.hashes
        return np.array([len(active) + sum(1 for one in own if one not in active) for active in self._active], float)

    def prefilling(self, row: int) -> list[Request]:
        """Requests without a first token at this endpoint or on their way to it."""
        return [one.request for one in self._entries.values() if one.is_prefilling and one.row == row]

    def row_of(self, table: EndpointTable, address: str) -> int:
        """The row of an endpoint that is in the table."""
        row = table.row_of(address)
        assert row is not None
        return row

    def begins(self, engines: Mapping[str, Scheduler]) -> None:
        """Keep the engines."""
        self.engines = engines

    def arrives(self, request: Request, position: tuple[int, int], now: float) -> None:
        """A request will be picked for, now or later."""
        del position, now
        self._requests[str(request.key)] = request

    def sent(self, request: Request, address: str, now: float) -> None:
        """The request goes to the engine at ``address``."""
        del now
        self._requests.pop(str(request.key))
        view = self._last
        assert view is not None
        row = self.row_of(view.table, address)
        uncached_tokens = max(0.0, view.request.input_tokens - float(view.demand.cached_tokens[row]))
        blocks = list(request.text.hashes)
        self._entries[request.key] = _Entry(row=row, uncached_tokens=uncached_tokens, blocks=blocks, request=request)
        self.prefill_tokens[row] += uncached_tokens
        self._active[row].update(blocks)

    def first_token(self, request: Request, now: float) -> None:
        """The prefill is over."""
        del now
        self._prefilled(self._entries[request.key])

    def ended(self, request: Request, now: float) -> None:
        """The last token has come."""
        del now
        entry = self._entries.pop(request.key)
        self._prefilled(entry)
        active = self._active[entry.row]
        for block in entry.blocks:
            active[block] -= 1
            if not active[block]:
                del active[block]

    def _prefilled(self, entry: _Entry) -> None:
        if entry.is_prefilling:
            entry.is_prefilling = False
            self.prefill_tokens[entry.row] -= entry.uncached_tokens
