# SPDX-License-Identifier: Apache-2.0
"""Our pickers: the default one, pairs of a prefill and a decode engine, least work, and round robin.

The default picker takes the endpoint with the least cost in seconds to all requests.

    cost(e) = (backlog(e) + work(e) * (1 + others + behind * queued(e) + interference * running(e))) / rate(e)
              + decode * decode_s_per_token * tokens(e) + request_cost_s * running(e)

=========================  ==========  ===============================================================
symbol                     unit        meaning
=========================  ==========  ===============================================================
``backlog(e)``             tokens      prefill work that waits at endpoint e
``work(e)``                tokens      prefill work of this request at e: uncached tokens and attention
``queued(e)``              requests    requests at e without a first token
``running(e)``             requests    requests in flight at e
``tokens(e)``              tokens      prompt and answer tokens in flight at e
``rate(e)``                tokens/s    learned prefill rate of e
``decode_s_per_token``     s/token     time that this answer takes longer for each token in flight
=========================  ==========  ===============================================================

The first token waits for the backlog and for the request's own prefill work. That work also delays others: the one
request expected behind this one, the requests that arrive later (an endpoint with a long queue now will have one
then), and the answers that are being decoded, which stop for as long. The second line is the cost of decoding: each
step of the answer reads the KV cache of all requests in flight. Prefill rates, the cost of attention and of decoding,
and the content of the caches are learned from answers; nothing is profiled in advance.

The weight of the queue on the own work separates long prompts from short ones under load. Where many requests wait, a
long prompt delays all of them, so it goes where few wait; short prompts cost little and follow the smallest backlog.
In overload, the many short prompts therefore do not wait behind the few long ones; with short queues the term hardly
matters.

The terms follow Preble's E2 (ICLR 2025) and Mooncake's Conductor (FAST 2025), which estimate the time to the first
token, and LMetric (arXiv 2603.15202), which multiplies it by the batch size. The externality of a job in a queue with
a known backlog is from Hyytiä et al., "Size- and state-aware dispatching" (2012).

Pairs: one endpoint prefills, another of its group decodes. For each decode endpoint, what costs less decides whether
it prefills by itself (``disaggregation.py``); then the endpoint that costs least is picked. The decode endpoint is
chosen first, so a group without a ready one is never picked; a group without a ready prefill endpoint serves its
requests whole. The endpoints of a group share the fast network over which KV caches are transferred (Kthena's
``pdGroup``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_requests_of_others
from extproc.endpoints.in_flight import backlogs, requests_in_backlog
from extproc.endpoints.learned_speeds import service_times
from extproc.refusals import BadRequest, NoEndpoint
from extproc.request.prefill_protocols import WHOLE
from extproc.scheduling.disaggregation import PrefillCosts, TransferTimes, choose_decode
from extproc.scheduling.endpoint_masks import label_groups, rows_with_labels
from extproc.scheduling.picker import Pick, Reasons, ScorerValues, rows_of

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from extproc.endpoints.table import Bools, EndpointTable, Floats
    from extproc.scheduling.disaggregation import DisaggregationRule
    from extproc.scheduling.picker import RequestDemandByRow, View

# Larger than any real cost: an endpoint comes after all of a lower rank.
_RANK_COST_S: Final = 1e6
# Up to this size a full sort is cheaper than a partition.
_MAX_FULL_SORT: Final = 512
_ZERO: Final = np.zeros(())
SENT_ON = "prefill sent on"
CACHED = "cached where it is decoded"
LOCAL = "cheaper where it is decoded"
NO_PREFILL = "no prefill engine is ready in the group"


class PrefixAwareParameters(msgspec.Struct, frozen=True):
    """Weights of the module's formula. A second of waiting for the first token has weight 1.

    ==================  =======  =====================================================================
    field               default  meaning
    ==================  =======  =====================================================================
    ``others``          1.0      weight of the one request expected behind this one
    ``behind``          0.7      requests that will wait behind this one, for each that is queued now
    ``interference``    0.05     weight of a second by which prefill work stops a running answer
    ``decode``          0.2      weight of a second by which this answer is decoded more slowly
    ``request_cost_s``  0.005    cost of each request in flight, in seconds; balances free prompts
    ``tie_s``           0.001    absolute tolerance for ties, in seconds
    ``tie_share``       0.02     relative tolerance for ties; both add up. Ties are decided at random
                                 between endpoints that have as much of the prompt cached
    ==================  =======  =====================================================================
    """

    others: float = 1.0
    behind: float = 0.7
    interference: float = 0.05
    decode: float = 0.2
    request_cost_s: float = 0.005
    tie_s: float = 0.001
    tie_share: float = 0.02


class PrefixAware:
    """Picks the endpoint with the least cost."""

    def __init__(self, parameters: PrefixAwareParameters) -> None:
        self._parameters = parameters
        # as arrays: converting a Python number takes numpy as long as the arithmetic of a whole column
        self._behind, self._interference = np.array(parameters.behind), np.array(parameters.interference)
        self._request_cost_s, self._expected = np.array(parameters.request_cost_s), np.array(1 + parameters.others)

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The cheapest endpoint, then the next ones as fallbacks."""
        return self.pick_cheapest("PrefixAware", self.costs(view.table, view.demand, view.now_s), view, rng)

    def pick_cheapest(self, name: str, cost: Floats, view: View, rng: random.Random) -> Pick:
        """By the cost of each row. ``name``: of the picker, for explanations."""
        cost, endpoints = _ranked(cost, view), len(view.table)
        if view.eligible is not None or not endpoints:
            candidates = view.candidates()
            cost[~candidates] = np.inf
            endpoints = int(np.count_nonzero(candidates))
        rows = self.cheapest_rows(cost, view.demand.cached_tokens, min(view.choices, endpoints), rng)
        reasons = (explain_costs(name, cost, view),) if view.wants_reasons else ()
        return Pick(rows, float(cost[rows[0]]), reasons=reasons)

    def costs(self, table: EndpointTable, demand: RequestDemandByRow, now: float) -> Floats:
        """The cost in seconds by row, infinite for rows without an endpoint."""
        cost = self._prefill_costs(table, demand, now, self._interference * table.in_flight)
        cost += self.load_costs(table, demand, now)
        return cost

    def prefill_costs(self, table: EndpointTable, demand: RequestDemandByRow, now: float) -> Floats:
        """The same of endpoints that only prefill: they have no answers to stop or to slow down."""
        cost = self._prefill_costs(table, demand, now, _ZERO)
        cost += table.absence_cost_s
        return cost

    def _prefill_costs(self, table: EndpointTable, demand: RequestDemandByRow, now: float, stopped: Floats) -> Floats:
        """``stopped``: by row, the weighted answers that wait as long as the own work takes."""
        backlog = backlogs(table, now)
        # few array operations: each call costs more than its arithmetic
        waiters = requests_in_backlog(table, backlog)
        waiters *= self._behind
        waiters += stopped
        waiters += self._expected
        cost: Floats = demand.work * waiters
        cost += backlog
        cost /= table.prefill_rate
        return cost

    def load_costs(self, table: EndpointTable, demand: RequestDemandByRow, now: float) -> Floats:
        """The second line of the formula; infinite for rows without an endpoint."""
        cost: Floats = table.in_flight * self._request_cost_s
        cost += (self._parameters.decode * demand.decode_s_per_token) * table.in_flight_tokens
        if table.has_foreign_requests:
            cost += self._request_cost_s * estimated_requests_of_others(table, now)
        cost += table.absence_cost_s
        return cost

    def cheapest_rows(self, cost: Floats, cached_tokens: Floats, count: int, rng: random.Random) -> list[int]:
        """The ``count`` cheapest rows, cheapest first. Ties for the first are broken at random."""
        # one more than needed: a tied row may replace the first
        others = _cheapest(cost, min(count + 1, cost.size))
        first = others[0]
        best = float(cost[first])
        limit = best * (1 + self._parameters.tie_share) + self._parameters.tie_s
        if len(others) > 1 and cost[others[1]] <= limit:
            equal = (cost <= limit).nonzero()[0]
            equal = equal[cached_tokens[equal] >= cached_tokens[first]]
            first = int(equal[rng.randrange(equal.size)])
        return [first, *[row for row in others if row != first]][:count]


def _ranked(cost: Floats, view: View) -> Floats:
    """Very large for endpoints that come after others. Changes ``cost``."""
    by_row = view.ranks
    if by_row is not None:
        cost += _RANK_COST_S * by_row
    return cost


def _cheapest(cost: Floats, count: int) -> list[int]:
    if cost.size <= _MAX_FULL_SORT:
        rows: list[int] = cost.argsort()[:count].tolist()
        return rows
    nearest = cost.argpartition(count - 1)[:count]
    found: list[int] = nearest[cost[nearest].argsort()].tolist()
    return found


def explain_costs(profile: str, cost: Floats, view: View) -> Reasons:
    """The parts of the cost of each row that could be chosen. ``profile``: the name to show."""
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
    # only the cost decides; the other values are shown for information
    scored = tuple(
        ScorerValues(name, -1.0 if name == "cost in seconds" else 0.0, part[candidates]) for name, part in parts.items()
    )
    return Reasons(profile, rows, (), rows, scored)


class PairParameters(msgspec.Struct, frozen=True):
    """How endpoints form pairs.

    ``group_key``: the label whose value names an endpoint's group; empty: all are one group. ``prefill_labels``,
    ``decode_labels``: an endpoint that has all of them has the role. ``decodes_alone``: decode endpoints can prefill.
    """

    group_key: str
    prefill_labels: Mapping[str, str]
    decode_labels: Mapping[str, str]
    decodes_alone: bool = True


class PrefillDecodePairs:
    """The default picker for endpoints in two roles. ``decide``: whether another endpoint prefills. ``transfers``:
    learns how long KV caches take between them.
    """

    def __init__(self, parameters: PairParameters, costs: PrefixAware, decide: DisaggregationRule) -> None:
        """``costs``: computes the costs of the module's formula."""
        self._parameters = parameters
        self._costs = costs
        self.decide = decide
        self.transfers = TransferTimes()

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """A decode endpoint, fallbacks in its group, and a prefill endpoint if the prefill is remote."""
        table, demand = view.table, view.demand
        ready = self._ready(view)
        decode = self._decoding(view, ready)
        if not decode.any():
            raise NoEndpoint("No decode engine is ready for this model; start one, or mend its ModelServer's labels.")
        group = label_groups(table, self._parameters.group_key)
        local_cost = _ranked(self._costs.costs(table, demand, view.now_s), view)
        prefill_cost = _ranked(self._costs.prefill_costs(table, demand, view.now_s), view)
        prefill_cost[~self._prefilling(view, ready)] = np.inf
        best = _cheapest_by_group(prefill_cost, group)
        if not self._parameters.decodes_alone and view.request.whole != "no_prompt":
            if view.request.whole:
                raise BadRequest(f"No engine of this model can serve this request: {WHOLE[view.request.whole]}.")
            decode &= np.isfinite(prefill_cost[best])
            if not decode.any():
                raise NoEndpoint("No prefill engine is ready for this model, and its decode engines cannot prefill.")
        uncached = view.request.input_tokens - demand.cached_tokens
        decided = self.decide(self._choices(view, decode, local_cost, prefill_cost, best))
        cost = decided.cost_s
        cost[~decode] = np.inf
        order = self._costs.cheapest_rows(cost, demand.cached_tokens, int(np.count_nonzero(decode)), rng)
        first = order[0]
        rows = [row for row in order if group[row] == group[first]][: view.choices]
        reasons = (explain_costs("decode", cost, view),) if view.wants_reasons else ()
        if not decided.is_remote[first]:
            has_prefill = bool(np.isfinite(prefill_cost[best[first]]))
            stage = _why_local(view, is_short=bool(decided.is_short[first]), has_prefill=has_prefill)
            return Pick(rows, float(cost[first]), stage=stage, reasons=reasons)
        prefill_cost[group != group[first]] = np.inf
        if self.transfers.has_factors:
            typical_s = self.transfers.typical_s(float(uncached[first]))
            for row in np.flatnonzero(np.isfinite(prefill_cost)):
                factor = self.transfers.factor(table.addresses[row], table.addresses[first])
                prefill_cost[row] += (factor - 1) * typical_s
        (prefill,) = self._costs.cheapest_rows(prefill_cost, demand.cached_tokens, 1, rng)
        if view.wants_reasons:
            reasons = (*reasons, explain_costs("prefill", prefill_cost, view))
        return Pick(rows, float(cost[first]), prefill_row=prefill, stage=SENT_ON, reasons=reasons)

    def choose_decode(self, view: View, kept: int | None, *, is_prefilled: bool) -> int:
        """The row that decodes after a prefill by ``view.peer_row``, among the candidates, of which ``kept`` was picked
        before. ``is_prefilled``: the prompt is computed; if not, the decode endpoint computes it.
        """
        table, candidates = view.table, view.candidates()
        best = np.full(len(table.addresses), view.peer_row or 0)
        # no other endpoint prefills from here on
        nobody = np.full(len(table.addresses), np.inf)
        choices = self._choices(
            view, candidates, _ranked(self._costs.costs(table, view.demand, view.now_s), view), nobody, best
        )
        cost_s = choices.transfer_s + choices.load_s if is_prefilled else self.decide(choices).cost_s
        return choose_decode(np.where(candidates, cost_s, np.inf), kept)

    def _choices(
        self, view: View, decode: Bools, local_cost: Floats, prefill_cost: Floats, best: NDArray[np.intp]
    ) -> PrefillCosts:
        """By row, ``decode``: whether it may decode; ``best``: the cheapest prefill endpoint of the row's group."""
        table, demand = view.table, view.demand
        uncached = view.request.input_tokens - demand.cached_tokens
        uncached = np.maximum(uncached, _ZERO)
        transfer_s = self.transfers.typical_s(uncached)
        if self.transfers.has_factors:
            for row in np.flatnonzero(decode):
                transfer_s[row] *= self.transfers.factor(table.addresses[best[row]], table.addresses[row])
        return PrefillCosts(
            uncached_tokens=uncached,
            local_s=local_cost,
            stalled_s=demand.work * (table.in_flight + 1) / table.prefill_rate,
            prefill_s=prefill_cost[best],
            waiting=requests_in_backlog(table, backlogs(table, view.now_s))[best],
            transfer_s=transfer_s,
            load_s=_ranked(self._costs.load_costs(table, demand, view.now_s), view),
        )

    def _ready(self, view: View) -> Bools:
        """A longer wait is better than a pair with an endpoint that has just failed, if there is another one."""
        table, ready = view.table, view.candidates()
        if not table.has_failures:
            return ready
        well = view.preferred(ready)
        decode = self._decoding(view, well)
        if not decode.any() or self._parameters.decodes_alone or view.request.whole:
            return well if decode.any() else ready
        group = label_groups(table, self._parameters.group_key)
        return well if np.isin(group[decode], group[self._prefilling(view, well)]).any() else ready

    def _decoding(self, view: View, candidates: Bools) -> Bools:
        return candidates & rows_with_labels(view.table, self._parameters.decode_labels)

    def _prefilling(self, view: View, candidates: Bools) -> Bools:
        return candidates & rows_with_labels(view.table, self._parameters.prefill_labels) & (not view.request.whole)


def _why_local(view: View, *, is_short: bool, has_prefill: bool) -> str:
    if view.request.whole:
        return f"served whole: {WHOLE[view.request.whole]}"
    if not has_prefill:
        return NO_PREFILL
    return CACHED if is_short else LOCAL


def _cheapest_by_group(cost: Floats, group: NDArray[np.intp]) -> NDArray[np.intp]:
    """By row, the cheapest row of its group; the group's first where none has a finite cost."""
    order = np.lexsort((cost, group))
    first = np.searchsorted(group[order], group)
    found: NDArray[np.intp] = order[first]
    return found


class LeastWork:
    """Picks the endpoint that is expected to answer first: ``(1 + in flight) * learned time of a request``.

    For requests without prompts, of which nothing else is known. It is the least expected work left of Finagle's
    balancers, with the time of one request in place of that of an answer: of an engine that serves requests one after
    the other, an answer's time has the queue in it already.
    """

    def __init__(self) -> None:
        # ties, and the order of the others
        self._costs = PrefixAware(PrefixAwareParameters(tie_s=0.0))

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The endpoint of least cost, then the next ones as fallbacks."""
        table, now = view.table, view.now_s
        cost: Floats = (1.0 + table.in_flight) * service_times(table, now)
        cost += table.absence_cost_s
        return self._costs.pick_cheapest("LeastWork", cost, view, rng)


class RoundRobin:
    """Takes endpoints in the order of their rows; those whose breakers are open come last."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The next endpoint, then those after it as fallbacks."""
        del rng  # round robin ignores chance, load and caches
        rows: list[int] = np.flatnonzero(view.candidates()).tolist()
        start = self._turn % len(rows)
        self._turn += 1
        turned = rows[start:] + rows[:start]
        by_row = view.ranks
        if by_row is not None:
            turned.sort(key=lambda row: float(by_row[row]))
        return Pick(turned[: view.choices], 0.0)
