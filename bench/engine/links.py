# SPDX-License-Identifier: Apache-2.0
"""Links between the GPUs of one machine, by generation, each number with its source.

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


class Link(msgspec.Struct, frozen=True):
    """``bandwidth``: of all-reduces, bytes/s. ``latency_s``: of one all-reduce of a few bytes."""

    bandwidth: float
    latency_s: float

    def all_reduce_s(self, gpus: int, size: float) -> float:
        """The time of one all-reduce of ``size`` bytes between ``gpus`` GPUs; 0 for one GPU."""
        return self.latency_s + 2 * (gpus - 1) / gpus * size / self.bandwidth if gpus > 1 else 0.0


LINKS: Final[Mapping[str, Link]] = MappingProxyType(
    {
        "nvlink3": Link(bandwidth=230e9, latency_s=6e-6),
        "nvlink4": Link(bandwidth=366e9, latency_s=6e-6),
        "nvlink5": Link(bandwidth=690e9, latency_s=6e-6),
        "pcie4": Link(bandwidth=15e9, latency_s=17e-6),
        "pcie5": Link(bandwidth=30e9, latency_s=17e-6),
    }
)
# What kernels measured one by one do not include.
NO_EXCHANGE: Final = Link(bandwidth=float("inf"), latency_s=0.0)
