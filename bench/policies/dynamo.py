# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's KV router: the least ``prefill blocks + decode blocks``.

    cost = max(active prefill tokens + own tokens - overlap, 0) / block size + active decode blocks, own ones included

Prefill tokens are active until the first token; a block that several running requests share counts once. Temperature 0,
credit 1. Source: ai-dynamo/dynamo, ``lib/llm/src/kv_router/scheduler.rs`` and ``docs/router``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.policies.least_cost import least_cost

if TYPE_CHECKING:
    import random

    from bench.policies.in_flight import InFlightTracker
    from extproc.scheduling.picker import Pick, View


class KvRouter:
    """``block_size``: the engines', in tokens."""

    def __init__(self, tracker: InFlightTracker, block_size: int) -> None:
        self._tracker = tracker
        self._block_size = block_size

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        tracker = self._tracker
        request = tracker.observe(view)
        tokens = tracker.prefill_tokens + view.request.input_tokens - view.demand.cached_tokens
        cost = np.maximum(tokens, 0.0) / self._block_size + tracker.blocks_with(request)
        return least_cost(view, cost, rng)
