# SPDX-License-Identifier: Apache-2.0
"""The names that each kind of engine uses: paths, APIs, metrics."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["gauge", "ratio", "counter", "histogram"]
# How the model is asked for one token, and how adapters are loaded.
AdapterApi = Literal["lora", "repository", ""]
# Of Triton's backend of TensorRT-LLM.
TRITON_BACKEND: Final = "nv_trt_llm_"
# Of V2 servers, 200 once the model is loaded.
_V2_READY: Final = "/v2/models/{name}/ready"
# Labels of pods that name their engine's type: llm-d's, and its name before llm-d 0.8.
ENGINE_LABELS: Final = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")


class EngineMetricFamily(msgspec.Struct, frozen=True):
    """A metric that each engine has under a name of its own. Series of one model, as of data-parallel ranks, are added
    up; those of a ``ratio`` are averaged.
    """

    name: str
    kind: Kind
    help: str


FAMILIES: Final = (
    EngineMetricFamily("running_requests", "gauge", "Requests that the engine computes."),
    EngineMetricFamily("waiting_requests", "gauge", "Requests that wait in the engine."),
    EngineMetricFamily("kv_cache_usage_ratio", "ratio", "Share of the KV cache in use, 0 to 1."),
    EngineMetricFamily("prompt_tokens_total", "counter", "Prompt tokens."),
    EngineMetricFamily("cached_prompt_tokens_total", "counter", "Prompt tokens that were found in the prefix cache."),
    EngineMetricFamily("generation_tokens_total", "counter", "Generated tokens."),
    EngineMetricFamily("finished_requests_total", "counter", "Requests that ended well."),
    EngineMetricFamily("failed_requests_total", "counter", "Requests that failed in the engine."),
    EngineMetricFamily("preemptions_total", "counter", "Requests that lost their place in the batch to others."),
    EngineMetricFamily("time_to_first_token_seconds", "histogram", "From arrival at the engine to the first token."),
    EngineMetricFamily("inter_token_latency_seconds", "histogram", "Between two tokens of an answer."),
    EngineMetricFamily("request_duration_seconds", "histogram", "From arrival at the engine to the last token."),
    EngineMetricFamily("queue_duration_seconds", "histogram", "From arrival at the engine to the first computation."),
)


class MetricName(msgspec.Struct, frozen=True):
    """An engine's metric. ``where``: only series with this value of a label. Histograms without their suffixes."""

    name: str
    where: tuple[str, str] | None = None


Sources = MappingProxyType[str, tuple[MetricName, ...]]


class Dialect(msgspec.Struct, frozen=True):
    """One kind of engine.

    ========================  =======================================================================================
    field                     meaning
    ========================  =======================================================================================
    ``health``                path of the cheap probe, ``{name}`` in it is the model's name
    ``ready``                 path that answers 200 once the model ``{name}`` is loaded; empty: it is asked for a token
    ``sources``               its metrics by family, tried in order
    ``prefixes``              all names of its metrics begin with one of these
    ``adapters``              how adapters are loaded, at ``load_path`` and ``unload_path``; a repository's: a V2 server
    ``metrics_port``          0 if its own port has the metrics, at ``metrics_path``
    ``model_label``           label of its series that names the model
    ``lora_info``             metric whose labels list the adapters in use
    ``cache_info``            metric whose labels ``block_label`` and ``blocks_label`` have the size of the KV cache
    ``block_size, blocks``    gauges with the same size, in place of ``cache_info``
    ``finishes_requests``     after SIGTERM it waits by itself for running requests, which its metrics do not count
    ``implementations``       of a repository whose models need settings: the class that loads each format of weights
    ``unpaired``              fields of a body to which a prefill or decode engine answers without the other one
    ========================  =======================================================================================
    """

    name: str
    health: str
    sources: Sources
    ready: str = ""
    prefixes: tuple[str, ...] = ()
    adapters: AdapterApi = ""
    load_path: str = ""
    unload_path: str = ""
    metrics_port: int = 0
    metrics_path: str = "/metrics"
    model_label: str = "model_name"
    lora_info: str = ""
    cache_info: str = ""
    block_label: str = ""
    blocks_label: str = ""
    block_size: str = ""
    blocks: str = ""
    finishes_requests: bool = False
    implementations: MappingProxyType[str, str] = MappingProxyType({})
    unpaired: MappingProxyType[str, str | int] = MappingProxyType({})


def _sources(names: Mapping[str, str | MetricName | tuple[str | MetricName, ...]]) -> Sources:
    def several(one: str | MetricName | tuple[str | MetricName, ...]) -> tuple[MetricName, ...]:
        listed = one if isinstance(one, tuple) else (one,)
        return tuple(each if isinstance(each, MetricName) else MetricName(each) for each in listed)

    return MappingProxyType({family: several(one) for family, one in names.items()})


_SCHEDULED: Final = MetricName("nv_trt_llm_request_metrics", ("request_type", "scheduled"))
_WAITING: Final = MetricName("nv_trt_llm_request_metrics", ("request_type", "waiting"))
_KV_FRACTION: Final = MetricName("nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "fraction"))

_VLLM: Final = Dialect(
    name="vLLM",
    health="/health",
    adapters="lora",
    load_path="/v1/load_lora_adapter",
    unload_path="/v1/unload_lora_adapter",
    lora_info="vllm:lora_requests_info",
    cache_info="vllm:cache_config_info",
    block_label="block_size",
    blocks_label="num_gpu_blocks",
    prefixes=("vllm:",),
    sources=_sources(
        {
            "running_requests": "vllm:num_requests_running",
            "waiting_requests": "vllm:num_requests_waiting",
            "kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            "prompt_tokens_total": "vllm:prompt_tokens_total",
            "cached_prompt_tokens_total": "vllm:prefix_cache_hits_total",
            "generation_tokens_total": "vllm:generation_tokens_total",
            "finished_requests_total": "vllm:request_success_total",
            "preemptions_total": "vllm:num_preemptions_total",
            "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
            "inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            "request_duration_seconds": "vllm:e2e_request_latency_seconds",
            "queue_duration_seconds": "vllm:request_queue_time_seconds",
        }
    ),
)
_SGLANG: Final = Dialect(
    name="SGLang",
    health="/health",
    # FAKE_BOOTSTRAP_HOST, as SGLang's own warm-up has it: nothing is transferred
    unpaired=MappingProxyType({"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}),
    adapters="lora",
    load_path="/load_lora_adapter",
    unload_path="/unload_lora_adapter",
    cache_info="sglang:cache_config_info",
    block_label="page_size",
    blocks_label="num_pages",
    prefixes=("sglang:",),
    sources=_sources(
        {
            "running_requests": "sglang:num_running_reqs",
            "waiting_requests": "sglang:num_queue_reqs",
            "kv_cache_usage_ratio": "sglang:token_usage",
            "prompt_tokens_total": "sglang:prompt_tokens_total",
            "cached_prompt_tokens_total": "sglang:cached_tokens_total",
            "generation_tokens_total": "sglang:generation_tokens_total",
            "finished_requests_total": "sglang:num_requests_total",
            "failed_requests_total": "sglang:num_aborted_requests_total",
            "time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
            "inter_token_latency_seconds": (
                "sglang:inter_token_latency_seconds",
                "sglang:time_per_output_token_seconds",
            ),
            "request_duration_seconds": "sglang:e2e_request_latency_seconds",
            "queue_duration_seconds": "sglang:queue_time_seconds",
        }
    ),
)
_TRTLLM: Final = Dialect(
    name="TensorRT-LLM",
    health="/health",
    # with return_perf_metrics; /metrics is a list of iterations in JSON
    metrics_path="/prometheus/metrics",
    block_size="trtllm_kv_cache_tokens_per_block",
    blocks="trtllm_kv_cache_max_blocks",
    prefixes=("trtllm_", TRITON_BACKEND),
    sources=_sources(
        {
            # the second ones are those of Triton's backend
            "running_requests": ("trtllm_num_requests_running", _SCHEDULED),
            "waiting_requests": ("trtllm_num_requests_waiting", _WAITING),
            "kv_cache_usage_ratio": ("trtllm_kv_cache_utilization", _KV_FRACTION),
            "prompt_tokens_total": "trtllm_prompt_tokens_total",
            "generation_tokens_total": "trtllm_generation_tokens_total",
            "finished_requests_total": "trtllm_request_success_total",
            "time_to_first_token_seconds": "trtllm_time_to_first_token_seconds",
            "inter_token_latency_seconds": (
                "trtllm_time_per_output_token_seconds",
                "trtllm_inter_token_latency_seconds",
            ),
            "request_duration_seconds": "trtllm_e2e_request_latency_seconds",
            "queue_duration_seconds": "trtllm_request_queue_time_seconds",
        }
    ),
)
_TRITON: Final = Dialect(
    name="Triton",
    health="/v2/health/live",
    ready=_V2_READY,
    adapters="repository",
    metrics_port=8002,
    model_label="model",
    finishes_requests=True,
    sources=_sources(
        {
            # the TensorRT-LLM backend counts what it computes, other backends do not
            "running_requests": _SCHEDULED,
            "waiting_requests": (
                _WAITING,
                "nv_inference_pending_request_count",
            ),
            "kv_cache_usage_ratio": _KV_FRACTION,
            "finished_requests_total": "nv_inference_request_success",
            "failed_requests_total": "nv_inference_request_failure",
        }
    ),
)
_MLSERVER: Final = Dialect(
    name="MLServer",
    health="/v2/health/live",
    ready=_V2_READY,
    adapters="repository",
    metrics_port=8082,
    model_label="model",
    implementations=MappingProxyType(
        {
            "sklearn": "mlserver_sklearn.SKLearnModel",
            "xgboost": "mlserver_xgboost.XGBoostModel",
            "lightgbm": "mlserver_lightgbm.LightGBMModel",
            "mlflow": "mlserver_mlflow.MLflowRuntime",
            "huggingface": "mlserver_huggingface.HuggingFaceRuntime",
        }
    ),
    sources=_sources(
        {
            # its probes are GET
            "running_requests": MetricName("rest_server_requests_in_progress", ("method", "POST")),
            "finished_requests_total": "model_infer_request_success_total",
            "failed_requests_total": "model_infer_request_failure_total",
        }
    ),
)
_KSERVE: Final = Dialect(
    name="KServe",
    health="/v2/health/live",
    ready=_V2_READY,
    sources=_sources({"request_duration_seconds": "request_predict_seconds"}),
)
_TENSORFLOW: Final = Dialect(
    name="TensorFlow",
    health="/v1/models/{name}",
    # the model's state is 200 while it loads, its signatures are 404 until it is loaded
    ready="/v1/models/{name}/metadata",
    metrics_path="/monitoring/prometheus/metrics",
    sources=_sources({"finished_requests_total": MetricName(":tensorflow:serving:request_count", ("status", "OK"))}),
)
_OTHER: Final = Dialect(name="OpenAI", health="/v1/models", sources=_sources({}))

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {one.name: one for one in (_VLLM, _SGLANG, _TRTLLM, _TRITON, _MLSERVER, _KSERVE, _TENSORFLOW, _OTHER)}
)


# llm-d's types of engines. Triton's own page has the metrics of its backend of TensorRT-LLM.
ENGINE_TYPES: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        "vllm": _VLLM,
        "sglang": _SGLANG,
        "trtllm-serve": _TRTLLM,
        "triton-tensorrt-llm": msgspec.structs.replace(_TRTLLM, metrics_path="/metrics"),
        "triton": _TRITON,
    }
)


def parse_metric_name(spec: str) -> MetricName:
    """llm-d's ``name`` or ``name{label=value}``."""
    name, _, labels = spec.partition("{")
    label, _, value = labels.rstrip("} ").partition(",")[0].partition("=")
    return MetricName(name.strip(), (label.strip(), value.strip(' "')) if value else None)


def engine_with_metric(metric: str) -> str | None:
    """The engine among those that a ModelServer may have whose metrics have such names."""
    return next((one.name for one in (_VLLM, _SGLANG, _TRTLLM) if metric.startswith(one.prefixes)), None)
