# SPDX-License-Identifier: Apache-2.0
"""Kthena's defaults: ``least-request`` as a filter, then three scores of equal weight.

The scores are least-request, least-latency and prefix-cache, whole numbers from 0 to 100. The prefix score covers the
first 8 KiB of a prompt (128 blocks of 64 bytes) and the best five pods, and knows a prompt when its answer has ended.
Where the filter (fewer than 10 waiting) leaves no pod, Kthena answers with an error; here all stay, because a refused
request has no latency to compare. Source: volcano-sh/kthena, ``scheduler/plugins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from bench.policies.least_cost import least_cost, match_ratio
from extproc.endpoints.engine_reports import estimated_waiting
from extproc.scheduling.plugins.latency import LeastLatency
from extproc.scheduling.plugins.load_scorers import LeastRequestScorer

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

_MOST_WAITING: Final = 10
_SEEN_TOKENS: Final = 8192 / 4
_BEST: Final = 5


class KthenaMeasured:
    """What Kthena's published comparison ran (docs blog, 2025-09-09).

    The least-request score of that time, ``running + 100 * waiting`` as scraped once a second with nothing added
    since, alone or with a prefix score of the same weight.
    """

    def __init__(self, *, prefix: Literal["", "seen", "whole"] = "") -> None:
        """``prefix``: "" no prefix score; "seen" of the first 8 KiB; "whole" of all, as ``kvcache-aware`` by KV
        events.
        """
        self._prefix = prefix

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The highest sum of the scores, each from 0 to 100."""
        among, table = view.candidates(), view.table
        base = table.running + 100 * table.waiting
        most = float(base[among].max())
        score = np.trunc(100 * (most - base) / most) if most else np.full(base.size, 100.0)
        if self._prefix:
            score = score + np.trunc(100 * (_prefix(view) if self._prefix == "seen" else match_ratio(view)))
        return least_cost(view, -score, rng, among)


class KthenaDefault:
    """The sum of three scores."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        among = view.candidates()
        short = among & (estimated_waiting(view.table, view.now_s) < _MOST_WAITING)
        among = short if short.any() else among
        score = np.trunc(100 * LeastRequestScorer().score(view, among))
        score += np.trunc(100 * LeastLatency().score(view, among))
        score += np.trunc(100 * _prefix(view))
        return least_cost(view, -score, rng, among)


def _prefix(view: View) -> Floats:
    seen = min(view.request.input_tokens, _SEEN_TOKENS)
    ratio: Floats = np.minimum(view.demand.cached_tokens, seen) / max(seen, 1.0)
    if ratio.size > _BEST:
        ratio[ratio < np.partition(ratio, -_BEST)[-_BEST]] = 0.0
    return ratio
