"""How long one step of continuous batching takes: a roofline over what the step computes and what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.engine.hardware import (
    BYTES_PER_VALUE,
    MOE_GEMM,
    NVLINK,
    PER_REQUEST_S,
    PER_STEP_S,
    PREFILL_ATTENTION,
    Hardware,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


class Work(msgspec.Struct, frozen=True):
    """What one request does in a step: ``tokens`` new ones after a ``history`` that is in the KV cache already."""

    tokens: int
    history: int


class Batch(msgspec.Struct, frozen=True):
    """What a step does in all: ``tokens`` computed for ``requests``.

    ``pairs``: of tokens that prefill attention compares, ``tokens * (history + tokens / 2)`` of each chunk. ``read``: tokens of history that decodes
    read. ``decodes``: of the requests, those with one new token.
    """

    requests: int
    tokens: int
    pairs: float
    read: int
    decodes: int


def batch_of(parts: Iterable[Work]) -> Batch:
    """The sums. One new token is a decode, several are a prefill chunk."""
    requests = tokens = read = decodes = 0
    pairs = 0.0
    for part in parts:
        requests += 1
        tokens += part.tokens
        if part.tokens == 1:
            decodes += 1
            read += part.history
        else:
            pairs += part.tokens * (part.history + part.tokens / 2)
    return Batch(requests, tokens, pairs, read, decodes)


class StepTime(Protocol):
    """A model of an engine's speed."""

    def seconds(self, batch: Batch) -> float:
        """How long this step takes."""
        ...

    def growth_s(self, decodes: int) -> float | None:
        """How much longer each step of so many decodes takes than the one before it; None: that is not a constant."""
        ...


class Roofline:
    """``max(GEMM, weights) + prefill attention + KV reads + all-reduce + overheads``.

    Matrix products and the streaming of weights overlap (roofline: Williams et al., 2009), the attention kernels come between
    them. A pair of tokens is 4 FLOPs for each head dimension. Of a mixture of experts, a step reads those experts that any of
    its tokens is sent to.
    """

    def __init__(self, hardware: Hardware) -> None:
        shape = hardware.model
        self._hardware: Final = hardware
        gpu = hardware.gpu
        efficiency = MOE_GEMM if shape.experts else gpu.prefill_gemm
        self._token_s = 2 * shape.active / (hardware.flops * efficiency)
        self._pair_s = 4 * shape.layers * shape.heads * shape.head_dim / (hardware.flops * PREFILL_ATTENTION)
        self._read_s = shape.kv_bytes_per_token / (hardware.bandwidth * gpu.kv_reading)
        self._byte_s = 1 / (hardware.bandwidth * gpu.weight_streaming)
        self._weights_s = hardware.weight_bytes * self._byte_s
        # two ring all-reduces a layer, each moving 2 (n - 1) / n of the activations through every GPU's links
        count = hardware.gpus
        self._exchange_s = 2 * shape.layers * shape.hidden * BYTES_PER_VALUE * 2 * (count - 1) / count / NVLINK
        self._fixed_s = shape.layers * gpu.per_layer_s + PER_STEP_S

    def seconds(self, batch: Batch) -> float:
        """See the class."""
        weights = self._weights_s if not self._hardware.model.experts else self._weights_read(batch.tokens)
        return (
            max(self._token_s * batch.tokens, weights)
            + self._pair_s * batch.pairs
            + self._read_s * batch.read
            + self._exchange_s * batch.tokens
            + self._fixed_s
            + PER_REQUEST_S * batch.requests
        )

    def growth_s(self, decodes: int) -> float:
        """Every history is one token longer."""
        return self._read_s * decodes

    def _weights_read(self, tokens: int) -> float:
        shape = self._hardware.model
        touched = 1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens
        in_experts = shape.experts_share * self._weights_s
        return self._weights_s - in_experts + touched * in_experts


def step_seconds(hardware: Hardware, parts: Iterable[Work]) -> float:
    """Seconds of a step on ``hardware``, by the roofline."""
    return Roofline(hardware).seconds(batch_of(parts))
