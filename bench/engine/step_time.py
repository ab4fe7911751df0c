"""How long one step of continuous batching takes: a roofline over what the step computes and what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.engine.hardware import (
    BYTES_PER_VALUE,
    KV_READING,
    NVLINK,
    PER_LAYER_S,
    PER_REQUEST_S,
    PER_STEP_S,
    PREFILL_ATTENTION,
    PREFILL_GEMM,
    WEIGHT_STREAMING,
    Hardware,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Work(msgspec.Struct, frozen=True):
    """What one request does in a step: ``tokens`` new ones after a ``history`` that is in the KV cache already."""

    tokens: int
    history: int


def step_seconds(hardware: Hardware, batch: Sequence[Work]) -> float:
    """Seconds of a step.

    ``max(GEMM, weights) + prefill attention + KV reads + all-reduce + overheads``: matrix products and the streaming of
    weights overlap (roofline: Williams et al., 2009), the attention kernels come between them. One new token is a decode,
    which reads its history; several are a prefill chunk, whose attention computes ``tokens x (history + tokens / 2)``
    pairs of 4 FLOPs for each head dimension.
    """
    shape = hardware.model
    tokens = sum(work.tokens for work in batch)
    pairs = sum(work.tokens * (work.history + work.tokens / 2) for work in batch if work.tokens > 1)
    read = sum(work.history for work in batch if work.tokens == 1)

    gemm = 2 * shape.parameters * tokens / (hardware.flops * PREFILL_GEMM)
    weights = hardware.weight_bytes / (hardware.bandwidth * WEIGHT_STREAMING)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs / (hardware.flops * PREFILL_ATTENTION)
    kv = read * shape.kv_bytes_per_token / (hardware.bandwidth * KV_READING)
    overhead = shape.layers * PER_LAYER_S + PER_STEP_S + len(batch) * PER_REQUEST_S
    return max(gemm, weights) + attention + kv + _all_reduce_seconds(hardware, tokens) + overhead


def _all_reduce_seconds(hardware: Hardware, tokens: int) -> float:
    """Two ring all-reduces a layer, each moving ``2 (n - 1) / n`` of the activations through every GPU's links."""
    shape, count = hardware.model, hardware.gpus
    moved = 2 * shape.layers * tokens * shape.hidden * BYTES_PER_VALUE * 2 * (count - 1) / count
    return moved / NVLINK
