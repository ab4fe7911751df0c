"""AIBrix's ``prefix-cache`` and ``least-kv-cache``.

``prefix-cache``: if running counts are more than 8 apart, only the least loaded stay. Then the best match first, fewer running
first among equals; the first whose running count is at most the mean and one standard deviation; nobody: the least running.
Source: vllm-project/aibrix 0.7, ``pkg/plugins/gateway/algorithms`` (the chart sets 16 and two deviations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.choosing import in_flight, least, match_ratio

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import Pick, View

_APART: Final = 8
_DEVIATIONS: Final = 1.0


class PrefixCache:
    """With the code's defaults."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        may, load = view.candidates(), in_flight(view)
        if float(load[may].max() - load[may].min()) > _APART:
            return least(view, load, rng)
        matched = np.trunc(100 * match_ratio(view))
        # the mean and deviation of all, not only of who matches
        bearable = may & (load <= load[may].mean() + _DEVIATIONS * load[may].std()) & (matched > 0)
        if not bearable.any():
            return least(view, load, rng)
        return least(view, -matched + load / (1 + load.max()), rng, bearable)


class LeastKvCache:
    """The lowest usage of the KV cache, as engines say."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """As old as the last scrape."""
        return least(view, view.table.kv_usage, rng)
