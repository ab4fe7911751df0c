# SPDX-License-Identifier: Apache-2.0
"""Step times of Dynamo's mocked engines, to compare our simulator with theirs.

    prefill, ms = 16.50 + 0.01518 t + 4.21e-7 t^2
    decode, ms  = max(1, 5.74 + 54.01 u - 25.74 u^2)

``t``: uncached tokens of the step. ``u``: share of the KV cache in use, 0 to 1. Source: ai-dynamo/dynamo,
``lib/mocker``, its default polynomials, which were fitted to Dynamo's own profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.engine.step_time import StepBatch


class MockerTime:
    """A StepTime. ``kv_tokens``: capacity of the KV cache."""

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens

    def seconds(self, batch: StepBatch) -> float:
        """A step with prefill and decode takes the sum of both."""
        tokens = batch.tokens - batch.decodes
        prefill_ms = 16.50 + 0.01518 * tokens + 4.21e-7 * tokens * tokens if tokens else 0.0
        used = min(1.0, batch.read / self._kv_tokens)
        decode_ms = max(1.0, 5.74 + 54.01 * used - 25.74 * used * used) if batch.decodes else 0.0
        return (prefill_ms + decode_ms) / 1000

    def growth_s(self, decodes: int) -> None:
        """None: the growth is not constant."""
        del decodes
