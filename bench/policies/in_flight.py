"""What a router knows of its own requests when their answers pass through it: which wait for their first token, which run.

Our own picker does not see answers; those routers do, so they get it here without delay.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bench.engine.request import Request
from bench.virtual.observer import REQUEST_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.scheduler import Scheduler
    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.scheduling.picker import View


class _Entry(msgspec.Struct):
    row: int
    uncached: float
    blocks: list[int]
    request: Request
    prefills: bool = True


class InFlightTracker:
    """Follows requests from their pick to their end, by row of the endpoint table.

    ``prefill_tokens``: uncached tokens of requests that have no first token yet. ``blocks``: of prompts of running requests, each counted
    once where several share it, by the engines' own block hashes.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self.engines: Mapping[str, Scheduler] = {}
        self.prefill_tokens: Floats = np.zeros(0)
        self._active: list[Counter[int]] = []
        self._entries: dict[int, _Entry] = {}
        self._last: View | None = None

    def sees(self, view: View) -> Request:
        """Before a policy decides: what it decides on, and for whom."""
        self._last = view
        more = len(view.table.addresses) - self.prefill_tokens.size
        if more > 0:
            self.prefill_tokens = np.pad(self.prefill_tokens, (0, more))
            self._active += [Counter() for _ in range(more)]
        return self._requests[view.request.headers[REQUEST_KEY]]

    def blocks_with(self, request: Request) -> Floats:
        """How many distinct blocks would be active at each endpoint with ``request``, by row."""
        own = request.text.hashes
        return np.array([len(active) + sum(1 for one in own if one not in active) for active in self._active], float)

    def prefilling(self, row: int) -> list[Request]:
        """Requests at this endpoint that have no first token yet, on their way to it included."""
        return [one.request for one in self._entries.values() if one.prefills and one.row == row]

    def row_of(self, table: EndpointTable, address: str) -> int:
        """The row of an endpoint that was picked."""
        row = table.row_of(address)
        assert row is not None
        return row

    def begins(self, engines: Mapping[str, Scheduler]) -> None:
        """Routers do not look into engines; the oracle does."""
        self.engines = engines

    def arrives(self, request: Request, place: tuple[int, int], now: float) -> None:
        """This one will be decided on, now or later."""
        del place, now
        self._requests[str(request.key)] = request

    def sent(self, request: Request, address: str, now: float) -> None:
        """The decision."""
        del now
        self._requests.pop(str(request.key))
        view = self._last
        assert view is not None
        row = self.row_of(view.table, address)
        uncached = max(0.0, view.request.input_tokens - float(view.demand.cached_tokens[row]))
        blocks = list(request.text.hashes)
        self._entries[request.key] = _Entry(row, uncached, blocks, request)
        self.prefill_tokens[row] += uncached
        self._active[row].update(blocks)

    def first_token(self, request: Request, now: float) -> None:
        """Its prefill is over."""
        del now
        self._prefilled(self._entries[request.key])

    def ended(self, request: Request, now: float) -> None:
        """Its last token has come."""
        del now
        entry = self._entries.pop(request.key)
        self._prefilled(entry)
        active = self._active[entry.row]
        for block in entry.blocks:
            active[block] -= 1
            if not active[block]:
                del active[block]

    def _prefilled(self, entry: _Entry) -> None:
        if entry.prefills:
            entry.prefills = False
            self.prefill_tokens[entry.row] -= entry.uncached
