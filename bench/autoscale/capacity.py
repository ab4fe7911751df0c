# SPDX-License-Identifier: Apache-2.0
"""What requests cost an engine, by its own step times: how loads are sized, and what the oracle knows.

With r requests a second of P seconds of prefill and O tokens of output each, an engine makes ``s = (1 - r P) / T + r``
steps a second: r compute prompts, the others only write and take T, which depends on the batch; the batch is
``r O / s`` requests, because each gets a token in each step. The largest r with ``s >= 1 / tpot_s`` whose batch fits
into the cache is the capacity; what prefill leaves of a second at this rate is the cost of the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.engine.step_time import StepBatch, prefill_s

if TYPE_CHECKING:
    from bench.virtual.engines import EngineKind

_STEPS: Final = 60


class Mean(msgspec.Struct, frozen=True):
    """Lengths in tokens: of the uncached part of a prompt, of its cached part, of the answer."""

    uncached: float
    cached: float
    output: float


class Capacity(msgspec.Struct, frozen=True):
    """What one engine can do at its TPOT. ``requests_per_s``: of the mean request. ``output_token_s``: engine time of a
    token of output.
    """

    requests_per_s: float
    output_token_s: float


def capacity(kind: EngineKind, mean: Mean, tpot_s: float) -> Capacity:
    """The largest rate of mean requests at which steps are short enough, and no more than all of the time is used."""
    low, high = 0.0, 1 / max(1e-9, prefill_of(kind, mean.uncached, mean.cached))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _has_steps(kind, mean, tpot_s, middle):
            low = middle
        else:
            high = middle
    left = 1 - low * prefill_of(kind, mean.uncached, mean.cached)
    return Capacity(low, left / max(1e-9, low * mean.output))


def prefill_of(kind: EngineKind, uncached: float, cached: float) -> float:
    """Engine time of one prompt."""
    return prefill_s(kind.speed, max(1, round(uncached)), round(cached), budget=kind.limits.max_num_batched_tokens)


def _has_steps(kind: EngineKind, mean: Mean, tpot_s: float, rate: float) -> bool:
    """Whether the batch at this rate settles where its steps are short enough and its tokens fit into the cache."""
    left = 1 - rate * prefill_of(kind, mean.uncached, mean.cached)
    if left <= 0:
        return False
    held = mean.uncached + mean.cached + mean.output / 2
    room = min(float(kind.limits.max_num_seqs), kind.limits.num_gpu_blocks * kind.limits.block_size / held)
    batch, steps = 1.0, 0.0
    for _ in range(_STEPS):
        count = max(1, round(batch))
        one = StepBatch(requests=count, tokens=count, pairs=0.0, read=round(batch * held), decodes=count)
        steps = left / kind.speed.seconds(one) + rate
        batch = rate * mean.output / steps
        if batch > room:
            return False
    return steps >= 1 / tpot_s
