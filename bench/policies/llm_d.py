"""llm-d's default since August 2026 for prefill-bound traffic: stay with who holds the prompt, else the least tokens waiting.

``prefix-cache-affinity-filter``: endpoints that hold at least 80% of the prompt, unless the best of these is more than
``max_penalty_s`` behind the best of the others; then ``token-load-scorer``: the least ``uncached tokens in flight + uncached tokens of this
prompt``. Tokens in flight are freed at the first token; over a calibrated peak throughput they are the estimated TTFT. Source: llm-d-router's
plugins of these names, and llm-d.github.io, "sticky until saturated", 2026-08-17. (The older blend is ``configs/llm-d-default.yaml``,
the profile of precise prefixes ``configs/llm-d-precise.yaml``.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.policies.choosing import least, match_ratio

if TYPE_CHECKING:
    import random

    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View

_AFFINITY = 0.80
_MAX_PENALTY_S = 18.0


class AffinityWithTokenLoad:
    """``peak_prefill``: tokens a second, by llm-d's calibration of one engine."""

    def __init__(self, books: InFlightTracker, peak_prefill: float) -> None:
        self._books = books
        self._peak_prefill = peak_prefill

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        self._books.sees(view)
        may = view.candidates()
        waiting = self._books.prefill_tokens
        load = waiting + view.request.input_tokens - view.demand.cached_tokens
        sticky = may & (match_ratio(view) >= _AFFINITY)
        others = may & ~sticky
        if sticky.any() and others.any():
            penalty_s = (float(waiting[sticky].min()) - float(waiting[others].min())) / self._peak_prefill
            if penalty_s > _MAX_PENALTY_S:
                sticky = may
        return least(view, load, rng, sticky)
