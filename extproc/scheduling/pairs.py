"""Prefill/decode pairs: one engine computes the prompt, another of the same group writes the answer.

    cost_s(d) = load(d) + least cost_s(p) over prefill engines p of d's group     if the prompt's prefill is sent on
    cost_s(d) = the default picker's cost                                         if d computes it itself

A decode engine computes what it has to itself if less than ``min_uncached_tokens`` of the prompt are missing there: the
transfer would cost more than the work (llm-d's ``prefix-based-pd-decider``). Decode engines come first, so a group without
a ready one is never picked; one without a ready prefill engine serves its requests whole. Groups share the fast network over
which KV caches are sent (Kthena's ``pdGroup``).
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
    """Labels that tell who does what; ``group_key``: the label whose value makes a group, empty for one group of all."""

    group_key: str
    prefill_labels: Mapping[str, str]
    decode_labels: Mapping[str, str]
    min_uncached_tokens: float


class PrefillDecodePairs:
    """The default picker for engines in two roles."""

    def __init__(self, parameters: PairParameters, costs: PrefixAware) -> None:
        self._parameters = parameters
        self._costs = costs

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """A decode engine with fallbacks in its group, and the prefill engine if there is to be one."""
        table, demand = view.table, view.demand
        ready = view.candidates()
        if table.has_failures:
            # a pair with an engine that just failed is worse than a longer wait
            well = ready & (table.retry_at_s <= view.now_s)
            ready = well if self._decoding(view, well).any() else ready
        decode = self._decoding(view, ready)
        if not decode.any():
            raise NoEndpoint("No decode engine is ready for this model; start one, or mend its ModelServer's labels.")
        group = label_groups(table, self._parameters.group_key)
        alone = self._costs.costs(table, demand, view.now_s)
        prefill_cost, has_prefill = self._least_by_group(alone, self._prefilling(view, ready), group)
        missing = view.request.input_tokens - demand.cached_tokens
        is_short = missing < self._parameters.min_uncached_tokens
        sends_on = has_prefill[group] & ~is_short
        load = self._costs.load_costs(table, demand, view.now_s)
        cost = np.where(sends_on, load + prefill_cost[group], alone)
        cost[~decode] = np.inf
        order = self._costs.order(cost, demand.cached_tokens, int(np.count_nonzero(decode)), rng)
        first = order[0]
        rows = [row for row in order if group[row] == group[first]][: view.choices]
        reasons = (explain_costs("decode", cost, view),) if view.wants_reasons else ()
        if not sends_on[first]:
            return Pick(rows, float(cost[first]), stage=CACHED if is_short[first] else NO_PREFILL, reasons=reasons)
        partners = alone.copy()
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
