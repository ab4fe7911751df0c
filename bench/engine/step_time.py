# SPDX-License-Identifier: Apache-2.0
"""How long a step of continuous batching takes: a roofline over its FLOPs and bytes, or Dynamo's polynomials.

The parts of a step are summed up in a StepBatch; a StepTimeModel turns it into seconds.

    prefill, ms = 16.50 + 0.01518 t + 4.21e-7 t^2
    decode, ms  = max(1, 5.74 + 54.01 u - 25.74 u^2)

``t``: uncached tokens of the step. ``u``: share of the KV cache in use, 0 to 1. Source: ai-dynamo/dynamo,
``lib/mocker``, its default polynomials, which were fitted to Dynamo's own profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.engine.hardware import MOE_GEMM, PER_REQUEST_S, PER_STEP_S, PREFILL_ATTENTION, Hardware

if TYPE_CHECKING:
    from collections.abc import Iterable


class StepWork(msgspec.Struct, frozen=True):
    """One request's part of a step: ``tokens`` new tokens after ``history`` tokens that are in the KV cache."""

    tokens: int
    history: int


class StepBatch(msgspec.Struct, frozen=True):
    """All of a step: ``tokens`` computed for ``requests``.

    ``pairs``: pairs of tokens in prefill attention, ``tokens * (history + tokens / 2)`` for each chunk. ``read``:
    tokens of history that decodes read. ``decodes``: requests with one new token.
    """

    requests: int
    tokens: int
    pairs: float
    read: int
    decodes: int


def step_batch(parts: Iterable[StepWork]) -> StepBatch:
    """Sum up the parts of a step. One new token is a decode; several are a prefill chunk."""
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
    return StepBatch(requests=requests, tokens=tokens, pairs=pairs, read=read, decodes=decodes)


class StepTimeModel(Protocol):
    """A model of an engine's speed."""

    def seconds(self, batch: StepBatch) -> float:
        """The duration of a step."""
        ...

    def growth_per_step_s(self, decodes: int) -> float | None:
        """How much longer each step of ``decodes`` decodes takes than the one before it; None: it is not constant."""
        ...


class RooflineStepTime:
    """``max(GEMM, weights) + prefill attention + KV reads + all-reduces + overheads``.

    Matrix products and the streaming of weights overlap (roofline: Williams et al., 2009); attention kernels run
    between them. A pair of tokens costs 4 FLOPs for each head dimension. Of a mixture of experts, a step reads the
    experts to which any of its tokens is sent.
    """

    def __init__(self, hardware: Hardware) -> None:
        shape = hardware.model
        self._hardware: Final = hardware
        gpu = hardware.gpu
        efficiency = MOE_GEMM if shape.experts else gpu.prefill_gemm
        self._token_s = 2 * shape.active_parameter_count / (hardware.flops * efficiency)
        self._pair_s = 4 * shape.layers * shape.heads * shape.head_dim / (hardware.flops * PREFILL_ATTENTION)
        self._read_s = shape.kv_bytes_per_token / (hardware.bandwidth * gpu.kv_reading)
        self._byte_s = 1 / (hardware.bandwidth * gpu.weight_streaming)
        self._weights_s = hardware.weight_bytes * self._byte_s
        # linear in the tokens: a latency for each all-reduce, and their bytes
        latency_s = hardware.all_reduce_s(0)
        self._exchange_s = hardware.all_reduce_s(1) - latency_s
        self._fixed_s = shape.layers * gpu.per_layer_s + latency_s + PER_STEP_S

    def seconds(self, batch: StepBatch) -> float:
        """The duration of a step with this batch."""
        weights = self._weights_s if not self._hardware.model.experts else self._weights_read(batch.tokens)
        return (
            max(self._token_s * batch.tokens, weights)
            + self._pair_s * batch.pairs
            + self._read_s * batch.read
            + self._exchange_s * batch.tokens
            + self._fixed_s
            + PER_REQUEST_S * batch.requests
        )

    def growth_per_step_s(self, decodes: int) -> float:
        """Every history grows by one token."""
        return self._read_s * decodes

    def _weights_read(self, tokens: int) -> float:
        shape = self._hardware.model
        touched = 1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens
        in_experts = shape.experts_share * self._weights_s
        return self._weights_s - in_experts + touched * in_experts


def step_seconds(hardware: Hardware, parts: Iterable[StepWork]) -> float:
    """The duration of a step on ``hardware`` by the roofline."""

    return RooflineStepTime(hardware).seconds(step_batch(parts))


def prefill_s(
    speed: StepTimeModel, tokens: int, history: int, *, budget: int, decodes: int = 0, decodes_read: int = 0
) -> float:
    """The time to prefill ``tokens`` tokens after ``history`` cached ones, in chunks of the budget.

    ``budget``: tokens of a step. ``decodes``: requests that decode in each of the steps, with ``decodes_read`` tokens
    of history.
    """
    seconds = 0.0
    while tokens > 0:
        chunk = min(tokens, max(1, budget - decodes))
        pairs = chunk * (history + chunk / 2)
        seconds += speed.seconds(
            StepBatch(requests=decodes + 1, tokens=decodes + chunk, pairs=pairs, read=decodes_read, decodes=decodes)
        )
        tokens, history = tokens - chunk, history + chunk
    return seconds


class MockerStepTime:
    """A StepTimeModel. ``kv_tokens``: capacity of the KV cache."""

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens

    def seconds(self, batch: StepBatch) -> float:
        """A step with prefill and decode takes the sum of both."""
        tokens = batch.tokens - batch.decodes
        prefill_ms = 16.50 + 0.01518 * tokens + 4.21e-7 * tokens * tokens if tokens else 0.0
        used = min(1.0, batch.read / self._kv_tokens)
        decode_ms = max(1.0, 5.74 + 54.01 * used - 25.74 * used * used) if batch.decodes else 0.0
        return (prefill_ms + decode_ms) / 1000

    def growth_per_step_s(self, decodes: int) -> None:
        """None: the growth is not constant."""
        del decodes
