# SPDX-License-Identifier: Apache-2.0
"""What is read of engines' metrics pages, and what becomes of it on ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import bench.micro
from controller.agents.runtime.metrics import (
    AgentCounters,
    AgentState,
    EngineMetricsPage,
    parse_engine_metrics,
    render_agent_metrics,
)
from extproc.engines.dialects import DIALECTS, FAMILIES
from tests.proportion import takes_time_in_proportion

STATE = AgentState(
    dialect="vLLM",
    is_ready=True,
    is_alive=True,
    has_answered=True,
    drain_s=None,
    file_is_good=True,
    coming=0,
    limit=4,
)
VLLM = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 3.0
vllm:num_requests_running{engine="1",model_name="llama"} 4.0
vllm:num_requests_waiting{engine="0",model_name="llama"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="llama",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="llama"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="llama"} 1000.0
vllm:prompt_tokens_created{engine="0",model_name="llama"} 1.7e9
vllm:generation_tokens_total{engine="0",model_name="llama"} 1e3 1700000000000
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="llama"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.1",model_name="llama"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="llama"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf",model_name="llama"} 1.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="llama"} 2.0
vllm:time_to_first_token_seconds_count{engine="1",model_name="llama"} 1.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="llama"} 0.5
vllm:time_to_first_token_seconds_sum{engine="1",model_name="llama"} 0.05
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters="chat"} 90.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,tags",waiting_lora_adapters=""} 99.0
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="llama",tp_rank="0"} 5
sglang:num_queue_reqs{engine_type="unified",model_name="llama",tp_rank="0"} 2
sglang:token_usage{engine_type="unified",model_name="llama",tp_rank="0"} 0.5
sglang:generation_tokens_total{model_name="llama"} 700
"""
TRTLLM = """\
trtllm_num_requests_running{model_name="llama",engine_type="trtllm"} 5
trtllm_num_requests_waiting{model_name="llama",engine_type="trtllm"} 2
trtllm_kv_cache_utilization{model_name="llama",engine_type="trtllm"} 0.5
trtllm_generation_tokens_total{model_name="llama",engine_type="trtllm"} 700
"""
TRITON_LLM = """\
nv_trt_llm_request_metrics{model="llama",request_type="active",version="1"} 7
nv_trt_llm_request_metrics{model="llama",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="llama",request_type="waiting",version="1"} 2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="llama",version="1"} 0.5
nv_inference_pending_request_count{model="llama",version="1"} 0
nv_inference_request_success{model="llama",version="1"} 12
"""


def read(text: str, dialect: str = "vLLM") -> EngineMetricsPage:
    return parse_engine_metrics(text.encode(), DIALECTS[dialect], unix_s=100.0)


def test_ranks_are_added_up_and_shares_averaged() -> None:
    page = read(VLLM)
    assert page.values["running_requests"] == {"llama": 7.0}
    assert page.values["kv_cache_usage_ratio"] == {"llama": 0.5}
    assert page.total("waiting_requests") == 0.0
    assert page.total("prompt_tokens_total") == 1000.0
    assert page.total("generation_tokens_total") == 1000.0
    ttft = page.histograms["time_to_first_token_seconds"]["llama"]
    assert ttft.buckets == (("0.1", 2.0), ("+Inf", 3.0))
    assert (ttft.count, ttft.total) == (3.0, 0.55)


def test_a_page_that_a_real_vllm_wrote() -> None:
    page = read((Path(bench.micro.__file__).parent / "vllm_metrics.txt").read_text())
    assert page.values == {
        "running_requests": {"tiny": 3.0},
        "waiting_requests": {"tiny": 0.0},
        "kv_cache_usage_ratio": {"tiny": pytest.approx(0.0411, abs=1e-4)},
        "prompt_tokens_total": {"tiny": 1200.0},
        "cached_prompt_tokens_total": {"tiny": 768.0},
        "generation_tokens_total": {"tiny": 892.0},
        "finished_requests_total": {"tiny": 0.0},
        "preemptions_total": {"tiny": 0.0},
    }
    assert set(page.histograms) == {family.name for family in FAMILIES if family.kind == "histogram"}
    assert page.adapters is not None
    assert page.adapters.in_use == {"sql"}


def test_the_newest_series_says_which_adapters_are_in_use_and_older_ones_when_they_were() -> None:
    use = read(VLLM).adapters
    assert use is not None
    assert use.in_use == {"sql", "tags"}
    assert use.idle_s == {"sql": 1.0, "chat": 10.0, "tags": 1.0}
    assert use.slots == 4


@pytest.mark.parametrize(("dialect", "text"), [("SGLang", SGLANG), ("TensorRT-LLM", TRTLLM), ("Triton", TRITON_LLM)])
def test_other_engines_have_the_same_names(dialect: str, text: str) -> None:
    page = read(text, dialect)
    assert page.values["running_requests"] == {"llama": 5.0}
    assert page.values["waiting_requests"] == {"llama": 2.0}
    assert page.values["kv_cache_usage_ratio"] == {"llama": 0.5}


def test_a_triton_without_llms_tells_what_waits() -> None:
    page = read('nv_inference_pending_request_count{model="resnet",version="1"} 3\n', "Triton")
    assert page.total("running_requests") is None
    assert page.values["waiting_requests"] == {"resnet": 3.0}


def test_mlservers_probes_are_no_requests() -> None:
    text = 'rest_server_requests_in_progress{app_name="mlserver",method="GET",path="/v2/health/live"} 1\n'
    posts = 'rest_server_requests_in_progress{app_name="mlserver",method="POST",path="/v2/models/a/infer"} 2\n'
    assert read(text, "MLServer").total("running_requests") is None
    assert read(text + posts, "MLServer").total("running_requests") == 2.0


def test_tensorflow_serving_tells_which_requests_ended_well() -> None:
    name = ":tensorflow:serving:request_count"
    lines = [f"# TYPE {name} counter"]
    lines += [f'{name}{{model_name="plus",status="{one}"}} {n}' for one, n in (("OK", 7), ("NOT_FOUND", 2))]
    page = read("\n".join(lines) + "\n", "TensorFlow")
    assert page.values == {"finished_requests_total": {"plus": 7.0}}


def test_an_older_name_is_found_if_the_newer_one_is_not_there() -> None:
    assert read("vllm:gpu_cache_usage_perc 0.5\n").total("kv_cache_usage_ratio") == 0.5


@given(st.text() | st.text(alphabet='vllm:num_requests_running{}=", 0123\n').map(lambda text: VLLM[:200] + text))
def test_any_page_can_be_read(text: str) -> None:
    render_agent_metrics(read(text), STATE, AgentCounters())


def test_every_name_of_a_dialect_is_that_of_a_family() -> None:
    names = {family.name for family in FAMILIES}
    for dialect in DIALECTS.values():
        assert set(dialect.sources) <= names


def test_our_page_can_be_read_by_prometheus() -> None:
    text = render_agent_metrics(read(VLLM), STATE, AgentCounters())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["attache_engine_running_requests"].samples[0].value == 7.0
    assert families["attache_engine_running_requests"].samples[0].labels == {"model_name": "llama"}
    assert families["attache_engine_prompt_tokens"].type == "counter"
    ttft = families["attache_engine_time_to_first_token_seconds"]
    assert ttft.type == "histogram"
    assert [one.labels["le"] for one in ttft.samples if one.name.endswith("_bucket")] == ["0.1", "+Inf"]
    assert families["attache_agent_ready"].samples[0].value == 1.0


def test_without_the_engines_page_ours_says_so() -> None:
    text = render_agent_metrics(None, STATE, AgentCounters())
    assert "attache_agent_metrics_up 0\n" in text
    assert "attache_engine_" not in text


@pytest.mark.parametrize("labels", ['a="b",', "name", 'x="\\', '\\"'])
def test_labels_take_time_in_proportion_to_their_length(labels: str) -> None:
    def line(size: int) -> bytes:
        return ("vllm:lora_requests_info{%s} 1\n" % (labels * (size // len(labels)))).encode()

    assert takes_time_in_proportion(lambda text: parse_engine_metrics(text, DIALECTS["vLLM"], unix_s=0.0), line, 30_000)
