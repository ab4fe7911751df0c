"""Step times of Dynamo's mocked engines, to hold our simulator against theirs.

Prefill in milliseconds ``16.50 + 0.01518 t + 4.21e-7 t^2`` of a step's ``t`` uncached tokens; decode ``max(1, 5.74 + 54.01 u - 25.74 u^2)`` with ``u`` of the KV cache in use. Source:
ai-dynamo/dynamo, ``lib/mocker``: its default polynomial, fitted to their own profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.engine.step_time import Batch


class MockerTime:
    """``capacity``: tokens of the KV cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def seconds(self, batch: Batch) -> float:
        """See the module; a step that does both takes both."""
        tokens = batch.tokens - batch.decodes
        prefill_ms = 16.50 + 0.01518 * tokens + 4.21e-7 * tokens * tokens if tokens else 0.0
        used = min(1.0, batch.read / self._capacity)
        decode_ms = max(1.0, 5.74 + 54.01 * used - 25.74 * used * used) if batch.decodes else 0.0
        return (prefill_ms + decode_ms) / 1000

    def growth_s(self, decodes: int) -> None:
        """Not a constant."""
        del decodes
