# SPDX-License-Identifier: Apache-2.0
"""llm-d's default for prefill-bound traffic: prefix affinity, then token load.

The default since August 2026. ``prefix-cache-affinity-filter``: endpoints that hold at least 80% of the prompt,
unless the best of them is more than 18 s behind the best of the others. Then ``token-load-scorer``: the least
``uncached tokens in flight + uncached tokens of this prompt``. Tokens leave the load at the first token; divided by a
calibrated peak throughput they are the estimated TTFT. Source: llm-d-router's plugins of these names, and
llm-d.github.io, "sticky until saturated", 2026-08-17. The older blend is ``configs/llm-d-default.yaml``, the profile
for precise prefixes ``configs/llm-d-precise.yaml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.policies.least_cost import least_cost, match_ratio

if TYPE_CHECKING:
    import random

    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View

_AFFINITY = 0.80
_MAX_PENALTY_S = 18.0


class AffinityWithTokenLoad:
    """``prefill_tokens_per_s``: the peak of one engine, by llm-d's calibration."""

    def __init__(self, tracker: InFlightTracker, prefill_tokens_per_s: float) -> None:
        self._tracker = tracker
        self._prefill_tokens_per_s = prefill_tokens_per_s

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        self._tracker.observe(view)
        may = view.candidates()
        waiting = self._tracker.prefill_tokens
        load = waiting + view.request.input_tokens - view.demand.cached_tokens
        sticky = may & (match_ratio(view) >= _AFFINITY)
        others = may & ~sticky
        if sticky.any() and others.any():
            penalty_s = (float(waiting[sticky].min()) - float(waiting[others].min())) / self._prefill_tokens_per_s

            if penalty_s > _MAX_PENALTY_S:
                sticky = may
        return least_cost(view, load, rng, sticky)
