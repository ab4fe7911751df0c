"""Named models on named GPUs: the numbers that latency follows from, each with its source.

Peaks of GPUs: the vendors' data sheets (dense bf16), as in BLIS's hardware_config. Shapes of models: their published
config.json. Efficiencies: where three independent sets of measurements agree (BLIS's trained coefficients, Vidur's A100
kernels, LLMServingSim's profiles inside vLLM).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

# Share of the peak bandwidth at which weights stream: 0.70 to 0.85 (BLIS 0.73, A100 kernels 0.69 to 0.80).
WEIGHT_STREAMING: Final = 0.75
# Share of the peak bandwidth at which decode attention reads the KV cache: BLIS 0.51, LLMServingSim 0.43 to 0.49.
KV_READING: Final = 0.5
# Share of the dense bf16 peak that prefill's matrix products reach: 0.60 to 0.70 on data-centre GPUs (Vidur, llm-d).
PREFILL_GEMM: Final = 0.65
# The same for prefill attention: about 0.4 (LLMServingSim's attention profiles).
PREFILL_ATTENTION: Final = 0.4
# Overheads that do not depend on the work (BLIS's coefficients b5, b6 and alpha).
PER_LAYER_S: Final = 32e-6
PER_STEP_S: Final = 126e-6
PER_REQUEST_S: Final = 4.4e-6
API_S: Final = 15.6e-3
# Effective all-reduce bandwidth between GPUs of one machine over NVLink, bytes/s (llm-d-inference-sim's table).
NVLINK: Final = 600e9
# The share of GPU memory that vLLM takes (its default), and what activations and CUDA graphs take of that.
MEMORY_SHARE: Final = 0.9
ACTIVATIONS_BYTES: Final = 2 * 2**30
BYTES_PER_VALUE: Final = 2  # bf16


class Gpu(msgspec.Struct, frozen=True):
    """``flops``: dense bf16, 1/s. ``bandwidth``: bytes/s. ``memory``: bytes."""

    flops: float
    bandwidth: float
    memory: float


class ModelShape(msgspec.Struct, frozen=True):
    """A dense decoder-only transformer with grouped-query attention."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE


class Hardware(msgspec.Struct, frozen=True):
    """One engine: a model on ``gpus`` GPUs with tensor parallelism."""

    model: ModelShape
    gpu: Gpu
    gpus: int = 1

    @property
    def flops(self) -> float:
        """Of all GPUs together."""
        return self.gpu.flops * self.gpus

    @property
    def bandwidth(self) -> float:
        """Of all GPUs together."""
        return self.gpu.bandwidth * self.gpus

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
        return self.model.parameters * BYTES_PER_VALUE

    def kv_tokens(self) -> int:
        """How many tokens the KV cache holds beside weights and activations."""
        free = self.gpus * (self.gpu.memory * MEMORY_SHARE - ACTIVATIONS_BYTES) - self.weight_bytes
        return int(free // self.model.kv_bytes_per_token)


_H100: Final = Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9)
_A100: Final = Gpu(flops=312e12, bandwidth=2.04e12, memory=80e9)
_L40S: Final = Gpu(flops=362e12, bandwidth=0.864e12, memory=48e9)
_LLAMA_8B: Final = ModelShape(parameters=8.03e9, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128)
_LLAMA_70B: Final = ModelShape(parameters=70.6e9, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128)

PRESETS: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "h100-llama-3.1-8b": Hardware(_LLAMA_8B, _H100),
        "h100x4-llama-3.1-70b": Hardware(_LLAMA_70B, _H100, gpus=4),
        "a100-llama-3.1-8b": Hardware(_LLAMA_8B, _A100),
        "l40s-llama-3.1-8b": Hardware(_LLAMA_8B, _L40S),
    }
)
