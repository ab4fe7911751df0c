"""Kthena's defaults: ``least-request`` as a filter, then least-request, least-latency and prefix-cache, each with weight 1.

The prefix score looks at the first 8 KiB of a prompt only (128 blocks of 64 bytes), of the best five pods, and knows a prompt when its answer has
ended. Scores are whole numbers from 0 to 100. Where the filter (fewer than 10 waiting) leaves nobody, Kthena answers with an error; here
all stay, because a request that is refused has no latency to compare. Source: volcano-sh/kthena, ``scheduler/plugins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.peers.choosing import least
from extproc.endpoints.live import waiting
from extproc.scheduling.plugins.latency_scorers import LeastLatency
from extproc.scheduling.plugins.load_scorers import LeastRequest

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

_MOST_WAITING: Final = 10
_SEEN_TOKENS: Final = 8192 / 4
_BEST: Final = 5


class KthenaDefault:
    """Three scores, added."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        among = view.candidates()
        short = among & (waiting(view.table, view.now_s) < _MOST_WAITING)
        among = short if short.any() else among
        score = np.trunc(100 * LeastRequest().score(view, among))
        score += np.trunc(100 * LeastLatency().score(view, among))
        score += np.trunc(100 * _prefix(view))
        return least(view, -score, rng, among)


def _prefix(view: View) -> Floats:
    seen = min(view.request.input_tokens, _SEEN_TOKENS)
    ratio: Floats = np.minimum(view.demand.cached_tokens, seen) / max(seen, 1.0)
    if ratio.size > _BEST:
        ratio[ratio < np.partition(ratio, -_BEST)[-_BEST]] = 0.0
    return ratio
