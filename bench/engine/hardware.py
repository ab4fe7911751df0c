# SPDX-License-Identifier: Apache-2.0
"""Named models on named GPUs and links: numbers behind the step times, each with its source.

GPU peaks: the vendors' data sheets (dense bf16), as in BLIS's hardware_config. Model shapes: their published
config.json. Efficiencies: where three independent sets of measurements agree (BLIS's trained coefficients, Vidur's
A100 kernels, LLMServingSim's profiles inside vLLM).

Tensor parallelism sums activations twice a layer. Each of these all-reduces takes
``latency_s + 2 (n - 1) / n * bytes / bandwidth`` between ``n`` GPUs (a ring; nccl-tests call the bandwidth ``busbw``).

| link | bandwidth from | latency from |
|---|---|---|
| `nvlink3`, `nvlink5` | 77% of the data sheet's 300 and 900 GB/s in each direction, as was measured on `nvlink4` | as
`nvlink4` |
| `nvlink4` | nccl-tests on 4 H100: 366 GB/s, 77% or more of 450 | nccl-tests on 2 H100, small messages: 6 us
(NVIDIA/nccl, issue 1259) |
| `pcie5` | vLLM 0.28, 32B on 2 RTX PRO 6000 | NCCL's all-gather and reduce-scatter between 2 GPUs, 8 us each
(flashinfer, pull request 5023) |
| `pcie4` | half of the `pcie5` link, as its lanes are half as fast | as `pcie5` |

The bandwidth of `pcie5`: in that run (LLMServingSim, bench/examples/RTXPRO6000/Qwen3-32B) steps with 2,048 tokens of
prefill took 0.272 s. Kernels of the same GPUs take 0.183 s of it, and 128 all-reduces of 21 MB the rest: 30 GB/s, half
of what the lanes carry (peer-to-peer copies reach 54 GB/s).
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
# The same for a mixture of experts, whose matrices are small: fitted to llm-d's 39,065 tokens/s of gpt-oss-120b on one
# H100.
MOE_GEMM: Final = 0.5
# The same for prefill attention: about 0.4 (LLMServingSim's attention profiles).
PREFILL_ATTENTION: Final = 0.4
# Overheads that do not depend on the work (BLIS's coefficients b5, b6 and alpha).
PER_LAYER_S: Final = 32e-6
PER_STEP_S: Final = 126e-6
PER_REQUEST_S: Final = 4.4e-6
API_S: Final = 15.6e-3
# The share of GPU memory that vLLM takes (its default), and what activations and CUDA graphs take of that.
MEMORY_SHARE: Final = 0.9
ACTIVATIONS_BYTES: Final = 2 * 2**30
BYTES_PER_VALUE: Final = 2  # bf16


class GpuLink(msgspec.Struct, frozen=True):
    """``bandwidth``: of all-reduces, bytes/s. ``latency_s``: of one all-reduce of a few bytes."""

    bandwidth: float
    latency_s: float

    def all_reduce_s(self, gpus: int, size: float) -> float:
        """The time of one all-reduce of ``size`` bytes between ``gpus`` GPUs; 0 for one GPU."""
        return self.latency_s + 2 * (gpus - 1) / gpus * size / self.bandwidth if gpus > 1 else 0.0


LINKS: Final[Mapping[str, GpuLink]] = MappingProxyType(
    {
        "nvlink3": GpuLink(bandwidth=230e9, latency_s=6e-6),
        "nvlink4": GpuLink(bandwidth=366e9, latency_s=6e-6),
        "nvlink5": GpuLink(bandwidth=690e9, latency_s=6e-6),
        "pcie4": GpuLink(bandwidth=15e9, latency_s=17e-6),
        "pcie5": GpuLink(bandwidth=30e9, latency_s=17e-6),
    }
)
# What kernels measured one by one do not include.
NO_EXCHANGE: Final = GpuLink(bandwidth=float("inf"), latency_s=0.0)


class Gpu(msgspec.Struct, frozen=True):
    """``flops``: dense bf16, 1/s. ``bandwidth``: bytes/s. ``memory``: bytes. ``per_layer_s``: overhead of each layer.

    ``link``: to the other GPUs of its engine.

    ``weight_streaming``, ``kv_reading`` and ``prefill_gemm``: shares of the peaks that kernels reach. The defaults
    are those of data-centre GPUs in general.
    """

    flops: float
    bandwidth: float
    memory: float
    link: GpuLink = LINKS["pcie5"]
    weight_streaming: float = WEIGHT_STREAMING
    kv_reading: float = KV_READING
    prefill_gemm: float = PREFILL_GEMM
    per_layer_s: float = PER_LAYER_S


class ModelShape(msgspec.Struct, frozen=True):
    """A decoder-only transformer with grouped-query attention, dense or a mixture of experts.

    ``active_parameters``: those that compute a token, if not all. ``experts``: in a layer, of which
    ``experts_per_token`` compute a token. ``experts_share``: the share of all parameters that belongs to experts, 0
    to 1.
    """

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    active_parameters: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    experts_share: float = 0.0
    bytes_per_parameter: float = BYTES_PER_VALUE

    @property
    def active_parameter_count(self) -> float:
        """Parameters that compute a token."""
        return self.parameters if self.active_parameters is None else self.active_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
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

    def all_reduce_s(self, tokens: int) -> float:
        """The all-reduces of a step with ``tokens`` tokens: two a layer, of all tokens' activations."""
        size = tokens * self.model.hidden * BYTES_PER_VALUE
        return 2 * self.model.layers * self.gpu.link.all_reduce_s(self.gpus, size)

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
        return self.model.parameters * self.model.bytes_per_parameter

    def kv_tokens(self) -> int:
        """Tokens of the KV cache that fit beside weights and activations; not above 0 if the model does not fit."""
        free = self.gpus * (self.gpu.memory * MEMORY_SHARE - ACTIVATIONS_BYTES) - self.weight_bytes
        return int(free // self.model.kv_bytes_per_token)


GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        "h100": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9, link=LINKS["nvlink4"]),
        "h200": Gpu(flops=989e12, bandwidth=4.8e12, memory=141e9, link=LINKS["nvlink4"]),
        "a100": Gpu(flops=312e12, bandwidth=2.04e12, memory=80e9, link=LINKS["nvlink3"]),
        "l40s": Gpu(flops=362e12, bandwidth=0.864e12, memory=48e9, link=LINKS["pcie4"]),
        "a10g": Gpu(flops=70e12, bandwidth=0.6e12, memory=24e9, link=LINKS["pcie4"]),
        # From LLMServingSim's profiles inside vLLM 0.19, which runs decodes as CUDA graphs: no overhead of layers.
        "rtx4090": Gpu(
            flops=165.2e12,
            bandwidth=1.008e12,
            memory=24e9,
            link=LINKS["pcie4"],
            weight_streaming=0.96,
            kv_reading=0.43,
            prefill_gemm=1.0,
            per_layer_s=0.0,
        ),
        "rtxpro6000": Gpu(
            flops=503.8e12,
            bandwidth=1.792e12,
            memory=96e9,
            link=LINKS["pcie5"],
            weight_streaming=0.82,
            kv_reading=0.49,
            prefill_gemm=0.79,
            per_layer_s=0.0,
        ),
    }
)
MODELS: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        # Llama 2 7B: no grouped-query attention, so four times the KV cache of Llama 3.1 8B
        "7b": ModelShape(parameters=6.74e9, layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128),
        # Qwen2.5 7B, of which DeepSeek-R1-Distill-Qwen-7B is made
        "qwen-7b": ModelShape(parameters=7.62e9, layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128),
        # Llama 3.1 8B and 70B
        "8b": ModelShape(parameters=8.03e9, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128),
        "70b": ModelShape(parameters=70.6e9, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128),
        # Qwen3 32B
        "32b": ModelShape(parameters=32.8e9, layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128),
        # gpt-oss-120b: 128 experts in 4-bit floats, 4 for each token
        "120b-a5b": ModelShape(
            parameters=116.8e9,
            layers=36,
            hidden=2880,
            heads=64,
            kv_heads=8,
            head_dim=64,
            active_parameters=5.1e9,
            experts=128,
            experts_per_token=4,
            experts_share=0.98,
            bytes_per_parameter=0.55,
        ),
        # Qwen3 30B-A3B
        "30b-a3b": ModelShape(
            parameters=30.5e9,
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            active_parameters=3.3e9,
            experts=128,
            experts_per_token=8,
            experts_share=0.95,
        ),
    }
)
PRESETS: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "h100-llama-3.1-8b": Hardware(MODELS["8b"], GPUS["h100"]),
        "h100x4-llama-3.1-70b": Hardware(MODELS["70b"], GPUS["h100"], gpus=4),
        "a100-llama-3.1-8b": Hardware(MODELS["8b"], GPUS["a100"]),
        "l40s-llama-3.1-8b": Hardware(MODELS["8b"], GPUS["l40s"]),
    }
)
