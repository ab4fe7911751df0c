"""The default picker: the endpoint where the first token is expected soonest, at least expense to those who come after.

    cost_s(e) = (backlog(e) + (1 + others) * work(input - cached(e))) / prefill_rate(e) + in_flight(e) * request_cost_s

This request waits for the prefill of those ahead and for its own; those behind wait for its own too, which is why that
counts again. All is in seconds, so load and prefix need no weights against each other, and unequal GPUs are told apart
by their learned rates. The last term stands for what each running request adds to everyone's decode steps. Counting
uncached tokens in seconds instead of requests follows Preble's E2 (ICLR 2025) and Mooncake's Conductor (FAST 2025), both
of which choose by the estimated time to first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.ledger import backlogs, prefill_work
from extproc.errors import NoEndpoint
from extproc.scheduling.picker import Pick

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import EndpointTable, Floats

# Larger than any real cost: an endpoint that is avoided comes after all others, one that is gone never.
_AVOIDED_S: Final = 1e6
# Up to here sorting all is cheaper than finding the least first.
_SORTED_WHOLE: Final = 512


class PrefixAwareParameters(msgspec.Struct, frozen=True):
    """``others``: how many of those behind wait for a request's prefill. ``request_cost_s``: 0.1 ms a decode step (batch 1
    to 64 on an H100, 8B) times some 200 tokens.

    ``tie_s`` and ``tie_share``: costs this close to the least are equal, and chance decides between endpoints that hold
    as much of the prompt. Learned rates differ by as much between equal engines, and the one that seems fastest must not
    get everything. ``choices``: the length of the list, fallbacks included.
    """

    others: float = 1.0
    request_cost_s: float = 0.02
    tie_s: float = 0.001
    tie_share: float = 0.1
    choices: int = 4


class PrefixAware:
    """Least expected seconds to the first token."""

    def __init__(self, parameters: PrefixAwareParameters) -> None:
        self._parameters = parameters

    def pick(
        self, table: EndpointTable, *, input_tokens: float, cached_tokens: Floats, now: float, rng: random.Random
    ) -> Pick:
        """See the module's formula."""
        if not len(table):
            raise NoEndpoint("No engine is configured for this model; add endpoints to its ModelServer.")
        cost = self.costs(table, input_tokens=input_tokens, cached_tokens=cached_tokens, now=now)
        cheapest = int(cost.argmin())
        best = float(cost[cheapest])
        is_equal = cost <= best * (1 + self._parameters.tie_share) + self._parameters.tie_s
        equal = (is_equal & (cached_tokens >= cached_tokens[cheapest])).nonzero()[0]
        first = int(equal[rng.randrange(equal.size)]) if equal.size > 1 else int(equal[0])
        rows = [first, *(row for row in self._cheapest(cost, len(table)) if row != first)]
        return Pick(rows[: self._parameters.choices], best)

    def costs(self, table: EndpointTable, *, input_tokens: float, cached_tokens: Floats, now: float) -> Floats:
        """Seconds by row; infinite where there is no endpoint."""
        own = prefill_work(np.maximum(input_tokens - cached_tokens, 1.0), cached_tokens)
        waiting = backlogs(table, now) + (1 + self._parameters.others) * own
        cost: Floats = waiting / np.maximum(table.prefill_rate, 1.0) + self._parameters.request_cost_s * table.in_flight
        cost[table.avoid_until_s > now] += _AVOIDED_S
        cost[~table.is_active] = np.inf
        return cost

    def _cheapest(self, cost: Floats, endpoints: int) -> list[int]:
        """One more than is needed: the first choice may be among them."""
        count = min(self._parameters.choices + 1, endpoints)
        if cost.size <= _SORTED_WHOLE:
            nearest = cost.argsort()[:count]
        else:
            nearest = cost.argpartition(count - 1)[:count]
            nearest = nearest[cost[nearest].argsort()]
        return [int(row) for row in nearest]
