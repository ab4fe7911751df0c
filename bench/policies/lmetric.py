# SPDX-License-Identifier: Apache-2.0
"""LMetric (arXiv 2603.15202): the least product of prefill tokens and batch size.

Prefill tokens: uncached tokens of queued requests and of this one. There are no parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.policies.least_cost import least_cost, requests_in_flight

if TYPE_CHECKING:
    import random

    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View


class LMetric:
    """The batch includes this request."""

    def __init__(self, tracker: InFlightTracker) -> None:
        self._tracker = tracker

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        self._tracker.observe(view)
        tokens = self._tracker.prefill_tokens + view.request.input_tokens - view.demand.cached_tokens
        return least_cost(view, tokens * (1 + requests_in_flight(view)), rng)
