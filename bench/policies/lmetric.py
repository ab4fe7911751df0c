"""LMetric (arXiv 2603.15202): the least product of new prefill tokens, queued and own, and the batch; nothing to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.policies.choosing import in_flight, least

if TYPE_CHECKING:
    import random

    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View


class LMetric:
    """An empty engine counts as a batch of one: this request's."""

    def __init__(self, books: InFlightTracker) -> None:
        self._books = books

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        self._books.sees(view)
        tokens = self._books.prefill_tokens + view.request.input_tokens - view.demand.cached_tokens
        return least(view, tokens * (1 + in_flight(view)), rng)
