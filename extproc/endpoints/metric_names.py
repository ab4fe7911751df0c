# SPDX-License-Identifier: Apache-2.0
"""What each engine calls its metrics, and where its page is."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class MetricNames(msgspec.Struct, frozen=True):
    """The names of an engine's metric families, tried in order; histograms without ``_sum`` and ``_count``.

    With one label in braces, ``name{label="value"}``: only the samples that have it.
    The cache's size is in the labels ``block_label`` and ``blocks_label`` of ``cache_info``, or in the gauges
    ``block_size`` and ``blocks``. ``path``: where the engine's own server shows the page.
    """

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    kv_usage: tuple[str, ...]
    ttft: tuple[str, ...]
    tpot: tuple[str, ...]
    cache_info: str = ""
    block_label: str = ""
    blocks_label: str = ""
    block_size: str = ""
    blocks: str = ""
    loras: str = ""
    path: str = "/metrics"


NAMES: Final[Mapping[str, MetricNames]] = MappingProxyType(
    {
        "vLLM": MetricNames(
            waiting=("vllm:num_requests_waiting",),
            running=("vllm:num_requests_running",),
            kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            ttft=("vllm:time_to_first_token_seconds",),
            tpot=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            cache_info="vllm:cache_config_info",
            block_label="block_size",
            blocks_label="num_gpu_blocks",
            loras="vllm:lora_requests_info",
        ),
        "SGLang": MetricNames(
            waiting=("sglang:num_queue_reqs",),
            running=("sglang:num_running_reqs",),
            kv_usage=("sglang:token_usage",),
            ttft=("sglang:time_to_first_token_seconds",),
            tpot=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
            cache_info="sglang:cache_config_info",
            block_label="page_size",
            blocks_label="num_pages",
        ),
        "TensorRT-LLM": MetricNames(
            # the second ones are those of Triton's backend
            waiting=("trtllm_num_requests_waiting", 'nv_trt_llm_request_metrics{request_type="waiting"}'),
            running=("trtllm_num_requests_running", 'nv_trt_llm_request_metrics{request_type="scheduled"}'),
            kv_usage=(
                "trtllm_kv_cache_utilization",
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',
            ),
            ttft=("trtllm_time_to_first_token_seconds",),
            tpot=("trtllm_time_per_output_token_seconds", "trtllm_inter_token_latency_seconds"),
            block_size="trtllm_kv_cache_tokens_per_block",
            blocks="trtllm_kv_cache_max_blocks",
            # /metrics of trtllm-serve is a list of iterations in JSON
            path="/prometheus/metrics",
        ),
    }
)
