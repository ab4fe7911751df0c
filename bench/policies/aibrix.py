# SPDX-License-Identifier: Apache-2.0
"""AIBrix's ``prefix-cache`` and ``least-kv-cache``.

``prefix-cache``: if running counts differ by more than 8, the fewest running. Else the best match among endpoints
whose running count is at most the mean plus one standard deviation, the fewest running among equal matches; without a
match, the fewest running. Source: vllm-project/aibrix 0.7, ``pkg/plugins/gateway/algorithms`` (the chart sets 16 and
two deviations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.least_cost import least_cost, match_ratio, requests_in_flight

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import Pick, View

_APART: Final = 8
_DEVIATIONS: Final = 1.0


class PrefixCache:
    """``prefix-cache`` with the defaults of the code."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        may, load = view.candidates(), requests_in_flight(view)
        if float(load[may].max() - load[may].min()) > _APART:
            return least_cost(view, load, rng)
        matched = np.trunc(100 * match_ratio(view))
        # the mean and deviation of all candidates, not only of those that match
        bearable = may & (load <= load[may].mean() + _DEVIATIONS * load[may].std()) & (matched > 0)
        if not bearable.any():
            return least_cost(view, load, rng)
        return least_cost(view, -matched + load / (1 + load.max()), rng, bearable)


class LeastKvCache:
    """The lowest usage of the KV cache, as engines report it."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The usage is as old as the last scrape."""

        return least_cost(view, view.table.kv_usage, rng)
