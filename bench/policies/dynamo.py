"""NVIDIA Dynamo's KV router: the least ``prefill blocks + decode blocks`` with this request.

    cost = max(active prefill tokens + own tokens - overlap, 0) / block + active decode blocks, own ones included

Prefill tokens are active until the first token; blocks that running requests share count once. Temperature 0, credit 1. Source: ai-dynamo/dynamo,
``lib/llm/src/kv_router/scheduler.rs`` and ``docs/router``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.policies.choosing import least

if TYPE_CHECKING:
    import random

    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View


class KvRouter:
    """``block_size``: the engines', in tokens."""

    def __init__(self, books: InFlightTracker, block_size: int) -> None:
        self._books = books
        self._block_size = block_size

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        books = self._books
        request = books.sees(view)
        tokens = books.prefill_tokens + view.request.input_tokens - view.demand.cached_tokens
        cost = np.maximum(tokens, 0.0) / self._block_size + books.blocks_with(request)
        return least(view, cost, rng)
