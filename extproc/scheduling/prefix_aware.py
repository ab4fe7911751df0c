"""The default picker: the endpoint where a request costs least, in seconds, itself and the others.

    cost(e) = (backlog(e) + work(e) * (1 + others + behind * queued(e) + interference * running(e))) / rate(e)
              + decode * reading_s * tokens(e) + request_cost_s * running(e)

The first token waits for the prefill work that is ahead, and for the request's own: what of its prompt that engine does not hold, attention counted.
Others wait for that work, too: one that would have come anyway; those who come behind it, and an engine where many are queued now will have
many then; and every answer that runs there stands still for as long. The last line is what the answer costs beside others: each of its steps reads
the KV cache of all that are in flight there. Engines' speeds, the price of attention and of reading, and what is in the caches are learned from
answers; nothing is measured before.

That the own work is weighed by the queue is what separates long prompts from short ones under load: where many wait, a long one costs them all, and
goes to where few do; short ones cost little and follow the least backlog. So in overload the many short ones do not stand behind the few long ones,
and as long as queues are short it hardly matters. The terms follow Preble's E2 (ICLR 2025) and Mooncake's Conductor (FAST 2025), which estimate the
time to the first token, and LMetric (arXiv 2603.15202), which multiplies it by the batch; the externality of a job in a queue with a known backlog is
Hyytiä et al., "Size- and state-aware dispatching" (2012).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_foreign
from extproc.endpoints.ledger import backlogs, requests_in_backlog
from extproc.scheduling.picker import Pick, Reasons, ScorerValues, rows_of

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.scheduling.picker import Demand, View

# Larger than any real cost: an endpoint that is avoided comes after all others, one that is gone never.
_AVOIDED_S: Final = 1e6
# Up to here sorting all is cheaper than finding the least first.
_SORTED_WHOLE: Final = 512


class PrefixAwareParameters(msgspec.Struct, frozen=True):
    """Weights of the module's formula, of which only ratios between seconds of different people are a matter of taste.

    ``others``: who would have come anyway. ``behind``: how many come behind for each that is queued. ``interference``: what a second means to an
    answer that runs, against one to somebody who waits for the first token; ``decode`` the same of its own steps. ``request_cost_s``: what keeps
    engines level where prompts cost nothing.

    ``tie_s`` and ``tie_share``: costs this close to the least are equal, and chance decides between endpoints that hold
    as much of the prompt.
    """

    others: float = 1.0
    behind: float = 0.7
    interference: float = 0.05
    decode: float = 0.2
    request_cost_s: float = 0.005
    tie_s: float = 0.001
    tie_share: float = 0.02


class PrefixAware:
    """Least expected seconds to the first token."""

    def __init__(self, parameters: PrefixAwareParameters) -> None:
        self._parameters = parameters

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module's formula."""
        cost = self.costs(view.table, view.demand, view.now_s)
        endpoints = len(view.table)
        if view.eligible is not None or not endpoints:
            candidates = view.candidates()
            cost[~candidates] = np.inf
            endpoints = int(np.count_nonzero(candidates))
        rows = self.order(cost, view.demand.cached_tokens, min(view.choices, endpoints), rng)
        reasons = (explain_costs("PrefixAware", cost, view),) if view.wants_reasons else ()
        return Pick(rows, float(cost[rows[0]]), reasons=reasons)

    def costs(self, table: EndpointTable, demand: Demand, now: float) -> Floats:
        """Seconds by row; infinite where there is no endpoint. Few calls: each costs more than its arithmetic."""
        weights = self._parameters
        backlog = backlogs(table, now)
        waiters = requests_in_backlog(table, backlog)
        waiters *= weights.behind
        waiters += weights.interference * table.in_flight
        waiters += 1 + weights.others
        cost: Floats = demand.work * waiters
        cost += backlog
        cost /= table.prefill_rate
        cost += self.load_costs(table, demand, now)
        return cost

    def load_costs(self, table: EndpointTable, demand: Demand, now: float) -> Floats:
        """The part that is not prefill: what runs there, and whether the endpoint is there and well."""
        cost: Floats = np.multiply(table.in_flight, self._parameters.request_cost_s)
        cost += (self._parameters.decode * demand.decode_s_per_token) * table.in_flight_tokens
        if table.has_foreign_requests:
            cost += self._parameters.request_cost_s * estimated_foreign(table, now)
        cost += table.absence_cost_s
        if table.has_failures:
            cost[table.retry_at_s > now] += _AVOIDED_S
        return cost

    def order(self, cost: Floats, cached_tokens: Floats, count: int, rng: random.Random) -> list[int]:
        """The ``count`` cheapest rows; among those that are as good as the cheapest, chance says which comes first."""
        # one more than is needed: the first choice may be among them
        others = _cheapest(cost, min(count + 1, cost.size))
        first = others[0]
        best = float(cost[first])
        limit = best * (1 + self._parameters.tie_share) + self._parameters.tie_s
        if len(others) > 1 and cost[others[1]] <= limit:
            equal = (cost <= limit).nonzero()[0]
            equal = equal[cached_tokens[equal] >= cached_tokens[first]]
            first = int(equal[rng.randrange(equal.size)])
        return [first, *[row for row in others if row != first]][:count]


def _cheapest(cost: Floats, count: int) -> list[int]:
    if cost.size <= _SORTED_WHOLE:
        rows: list[int] = cost.argsort()[:count].tolist()
        return rows
    nearest = cost.argpartition(count - 1)[:count]
    found: list[int] = nearest[cost[nearest].argsort()].tolist()
    return found


def explain_costs(profile: str, cost: Floats, view: View) -> Reasons:
    """The parts of the cost, in seconds, of the rows that could be chosen."""
    candidates = np.isfinite(cost)
    rows = rows_of(candidates)
    table, demand = view.table, view.demand
    parts = {
        "seconds until the first token": view.ttft_s(),
        "cached tokens": demand.cached_tokens,
        "requests without a first token": requests_in_backlog(table, backlogs(table, view.now_s)),
        "requests in flight": table.in_flight.astype(np.float64),
        "tokens in flight": table.in_flight_tokens,
        "cost in seconds": cost,
    }
    # only the cost decides; the rest is what it was made of
    scored = tuple(
        ScorerValues(name, -1.0 if name == "cost in seconds" else 0.0, part[candidates]) for name, part in parts.items()
    )
    return Reasons(profile, rows_of(view.candidates()), (), rows, scored)
