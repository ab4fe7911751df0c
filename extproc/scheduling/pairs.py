# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation: one endpoint prefills, another of its group decodes.

    cost_s(d) = load(d) + min cost_s(p) over prefill endpoints p of d's group     if the prefill is remote
    cost_s(d) = the default picker's cost                                         if d prefills itself

A decode endpoint prefills by itself if it lacks fewer than ``min_uncached_tokens`` of the prompt: the transfer of the
KV cache would cost more than the work (llm-d's ``prefix-based-pd-decider``). The decode endpoint is chosen first, so
a group without a ready one is never picked; a group without a ready prefill endpoint serves its requests whole. The
endpoints of a group share the fast network over which KV caches are transferred (Kthena's ``pdGroup``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extproc.errors import NoEndpoint
from extproc.scheduling.labels import has_labels, label_groups
from extproc.scheduling.picker import Pick
from extproc.scheduling.prefix_aware import PrefixAware, explain_costs

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

SENT_ON = "prefill sent on"
CACHED = "cached where it is decoded"
NO_PREFILL = "no prefill engine is ready in the group"


class PairParameters(msgspec.Struct, frozen=True):
    """How endpoints form pairs.

    ``group_key``: the label whose value names an endpoint's group; empty: all are one group. ``prefill_labels``,
    ``decode_labels``: an endpoint that has all of them has the role. ``min_uncached_tokens``: see the module.
    """

    group_key: str
    prefill_labels: Mapping[str, str]
    decode_labels: Mapping[str, str]
    min_uncached_tokens: float


class PrefillDecodePairs:
    """The default picker for endpoints in two roles."""

    def __init__(self, parameters: PairParameters, costs: PrefixAware) -> None:
        """``costs``: computes the costs of the module's formula."""
        self._parameters = parameters
        self._costs = costs

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """A decode endpoint, fallbacks in its group, and a prefill endpoint if the prefill is remote."""
        table, demand = view.table, view.demand
        ready = view.candidates()
        if table.has_failures:
            # a longer wait is better than a pair with an endpoint that has just failed
            well = ready & (table.retry_at_s <= view.now_s)
            ready = well if self._decoding(view, well).any() else ready
        decode = self._decoding(view, ready)
        if not decode.any():
            raise NoEndpoint("No decode engine is ready for this model; start one, or mend its ModelServer's labels.")
        group = label_groups(table, self._parameters.group_key)
        local_cost = self._costs.costs(table, demand, view.now_s)
        prefill_cost, has_prefill = self._least_by_group(local_cost, self._prefilling(view, ready), group)
        uncached = view.request.input_tokens - demand.cached_tokens
        is_short = uncached < self._parameters.min_uncached_tokens
        is_remote = has_prefill[group] & ~is_short
        load = self._costs.load_costs(table, demand, view.now_s)
        cost = np.where(is_remote, load + prefill_cost[group], local_cost)
        cost[~decode] = np.inf
        order = self._costs.order(cost, demand.cached_tokens, int(np.count_nonzero(decode)), rng)
        first = order[0]
        rows = [row for row in order if group[row] == group[first]][: view.choices]
        reasons = (explain_costs("decode", cost, view),) if view.wants_reasons else ()
        if not is_remote[first]:
            return Pick(rows, float(cost[first]), stage=CACHED if is_short[first] else NO_PREFILL, reasons=reasons)
        partners = local_cost.copy()
        partners[~(self._prefilling(view, ready) & (group == group[first]))] = np.inf
        (prefill,) = self._costs.order(partners, demand.cached_tokens, 1, rng)
        if view.wants_reasons:
            reasons = (*reasons, explain_costs("prefill", partners, view))
        return Pick(rows, float(cost[first]), prefill_row=prefill, stage=SENT_ON, reasons=reasons)

    def _decoding(self, view: View, candidates: Bools) -> Bools:
        return candidates & has_labels(view.table, self._parameters.decode_labels)

    def _prefilling(self, view: View, candidates: Bools) -> Bools:
        return candidates & has_labels(view.table, self._parameters.prefill_labels)

    def _least_by_group(self, cost: Floats, prefill: Bools, group: NDArray[np.intp]) -> tuple[Floats, Bools]:
        least = np.full(int(group.max(initial=0)) + 1, np.inf)
        np.minimum.at(least, group[prefill], cost[prefill])
        return least, np.isfinite(least)
