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

from extproc.endpoints.ledger import backlogs
from extproc.errors import NoEndpoint
from extproc.scheduling.picker import Pick

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.scheduling.picker import Demand, View

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

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module's formula."""
        table, demand = view.table, view.demand
        if not len(table):
            raise NoEndpoint("No engine is configured for this model; add endpoints to its ModelServer.")
        cost = self.costs(table, demand, view.now_s)
        cheapest = int(cost.argmin())
        best = float(cost[cheapest])
        equal = (cost <= best * (1 + self._parameters.tie_share) + self._parameters.tie_s).nonzero()[0]
        first = cheapest
        if equal.size > 1:
            holding = demand.cached_tokens[equal] >= demand.cached_tokens[cheapest]
            equal = equal[holding]
            first = int(equal[rng.randrange(equal.size)])
        rows = [first, *(row for row in self._cheapest(cost, len(table)) if row != first)]
        return Pick(rows[: self._parameters.choices], best)

    def costs(self, table: EndpointTable, demand: Demand, now: float) -> Floats:
        """Seconds by row; infinite where there is no endpoint. Few calls: each costs more than its arithmetic."""
        cost: Floats = (1 + self._parameters.others) * demand.work
        cost += backlogs(table, now)
        cost /= table.prefill_rate
        cost += self._parameters.request_cost_s * table.in_flight
        cost += table.absence_s
        if table.has_failures:
            cost[table.avoid_until_s > now] += _AVOIDED_S
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
