"""Kthena's defaults: ``least-request`` as a filter, then least-request, least-latency and prefix-cache, each with weight 1.

The prefix score looks at the first 8 KiB of a prompt only (128 blocks of 64 bytes), of the best five pods, and knows a prompt when its answer has
ended. Scores are whole numbers from 0 to 100. Where the filter (fewer than 10 waiting) leaves nobody, Kthena answers with an error; here
all stay, because a request that is refused has no latency to compare. Source: volcano-sh/kthena, ``scheduler/plugins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from bench.policies.choosing import least, match_ratio
from extproc.endpoints.engine_reports import estimated_waiting
from extproc.scheduling.plugins.latency_scorers import LeastLatency
from extproc.scheduling.plugins.load_scorers import LeastRequestScorer

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

_MOST_WAITING: Final = 10
_SEEN_TOKENS: Final = 8192 / 4
_BEST: Final = 5


class KthenaMeasured:
    """What Kthena's published comparison ran (docs blog, 2025-09-09): the least-request score of that time, ``running + 100 * waiting`` as scraped
    once a second and nothing added since, alone or with a score of prefixes of the same weight.
    """

    def __init__(self, *, prefix: Literal["", "seen", "whole"] = "") -> None:
        """``seen``: of the first 8 KiB; ``whole``: of the whole prompt, as ``kvcache-aware`` has it from KV events."""
        self._prefix = prefix

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The higher sum of two scores from 0 to 100."""
        among, table = view.candidates(), view.table
        base = table.running + 100 * table.waiting
        most = float(base[among].max())
        score = np.trunc(100 * (most - base) / most) if most else np.full(base.size, 100.0)
        if self._prefix:
            score = score + np.trunc(100 * (_prefix(view) if self._prefix == "seen" else match_ratio(view)))
        return least(view, -score, rng, among)


class KthenaDefault:
    """Three scores, added."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        among = view.candidates()
        short = among & (estimated_waiting(view.table, view.now_s) < _MOST_WAITING)
        among = short if short.any() else among
        score = np.trunc(100 * LeastRequestScorer().score(view, among))
        score += np.trunc(100 * LeastLatency().score(view, among))
        score += np.trunc(100 * _prefix(view))
        return least(view, -score, rng, among)


def _prefix(view: View) -> Floats:
    seen = min(view.request.input_tokens, _SEEN_TOKENS)
    ratio: Floats = np.minimum(view.demand.cached_tokens, seen) / max(seen, 1.0)
    if ratio.size > _BEST:
        ratio[ratio < np.partition(ratio, -_BEST)[-_BEST]] = 0.0
    return ratio
