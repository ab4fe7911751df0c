# SPDX-License-Identifier: Apache-2.0
"""Metrics pages of three engines, and invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from extproc.engines.dialects import DIALECTS, ENGINE_TYPES
from extproc.engines.metrics import CacheConfig, LoraState, MetricsReader
from extproc.engines.prometheus_text import MetricsPageRefused
from tests.proportion import takes_time_in_proportion

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} {count}
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} {count}
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} {sum}
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 10.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.2
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters="law"} 1.7e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,law",waiting_lora_adapters=""} 1.8e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1000"} 1.0
"""


def page(count: float = 4.0, total: float = 2.0) -> bytes:
    return VLLM.replace("{count}", str(count)).replace("{sum}", str(total)).encode()


def reader(engine: str = "vLLM") -> MetricsReader:
    return MetricsReader(DIALECTS[engine])


@pytest.mark.parametrize("name", ENGINE_TYPES)
def test_a_page_without_anything_is_no_report_of_any_type(name: str) -> None:
    reading = MetricsReader(ENGINE_TYPES[name]).read(b"")
    assert not reading.has_load_metrics
    assert (reading.report.ttft_s, reading.report.tpot_s, reading.report.waiting) == (None, None, None)


def test_a_page_of_vllm() -> None:
    reading = reader().read(page())
    assert (reading.report.waiting, reading.report.running, reading.report.kv_usage) == (1.0, 7.0, 0.5)
    assert reading.report.loras == LoraState(frozenset({"sql", "law"}), max_active=2)
    assert reading.cache == CacheConfig(16, 32_000)


def test_latencies_are_means_since_the_previous_page() -> None:
    one = reader()
    assert one.read(page(4.0, 2.0)).report.ttft_s is None
    # 2 more requests in 0.6 s more
    assert one.read(page(6.0, 2.6)).report.ttft_s == pytest.approx(0.3)
    assert one.read(page(6.0, 2.6)).report.ttft_s is None


def test_latencies_are_of_all_data_parallel_ranks() -> None:
    registry = CollectorRegistry()
    ttft = Histogram("vllm:time_to_first_token_seconds", "Of each rank.", ["engine"], registry=registry)
    for rank in "01":
        ttft.labels(rank).observe(0.1)
    one = reader()
    one.read(generate_latest(registry))
    ttft.labels("0").observe(0.2)
    ttft.labels("1").observe(0.4)
    report = one.read(generate_latest(registry)).report
    assert report.first_tokens == 2.0
    assert report.ttft_s == pytest.approx(0.3)


def test_a_decreasing_counter_is_a_restart() -> None:
    one = reader()
    assert not one.read(page(400.0, 20.0)).has_restarted
    again = one.read(page(2.0, 0.5))
    assert again.has_restarted
    assert again.report.ttft_s == 0.25
    assert not one.read(page(3.0, 0.6)).has_restarted


def test_a_page_of_sglang() -> None:
    text = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.4
sglang:cache_config_info{page_size="1",num_pages="200000"} 1.0
"""
    reading = reader("SGLang").read(text)
    assert (reading.report.waiting, reading.report.running, reading.report.kv_usage) == (2.0, 5.0, 0.4)
    assert reading.cache == CacheConfig(1, 200_000)
    assert reading.report.loras is None


def test_a_page_of_tensorrt_llm() -> None:
    text = b"""trtllm_num_requests_running 6
trtllm_num_requests_waiting 3
trtllm_kv_cache_utilization 0.9
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 5000
"""
    reading = reader("TensorRT-LLM").read(text)
    assert (reading.report.waiting, reading.report.running, reading.report.kv_usage) == (3.0, 6.0, 0.9)
    assert reading.cache == CacheConfig(32, 160_000)


def test_a_page_of_tritons_backend_of_tensorrt_llm() -> None:
    text = b"""# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="llama",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="llama",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="llama",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="llama",request_type="max",version="1"} 512
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="llama",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="llama",version="1"} 64
"""
    reads = reader("TensorRT-LLM")
    for _ in range(2):
        reading = reads.read(text)
        assert (reading.report.waiting, reading.report.running, reading.report.kv_usage) == (2.0, 5.0, 0.5)
    assert reading.has_load_metrics


def test_moved_lines_are_found_again() -> None:
    one = reader()
    one.read(page())
    moved = b"# a new comment\n" * 5000 + page(5.0, 2.1)
    assert one.read(moved).report.ttft_s == pytest.approx(0.1)
    assert one.read(page(7.0, 2.5)).report.ttft_s == pytest.approx(0.2)


@pytest.mark.parametrize("text", [b"", b"<html>", b"vllm:num_requests_waiting", b"vllm:num_requests_waiting{", b"\n\n"])
def test_an_invalid_page_reports_nothing(text: bytes) -> None:
    reading = reader().read(text)
    assert reading.report.waiting is None
    assert reading.cache is None


def test_invalid_values_are_ignored() -> None:
    assert reader().read(b"vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting x\n").report.kv_usage is None
    assert reader().read(b"vllm:num_requests_waiting 7 1700000000\n").report.waiting == 7


@given(st.binary(max_size=300), st.integers(0, 2000))
def test_no_input_raises(noise: bytes, cut: int) -> None:
    one = reader()
    one.read(page()[:cut] + noise)
    one.read(noise + page()[cut:])


@pytest.mark.parametrize("value", ["-1", "1e300", "+Inf", "-Inf", "NaN", "x"])
def test_a_number_that_cannot_be_is_no_reading(value: str) -> None:
    reading = reader().read(f"vllm:num_requests_waiting {value}\nvllm:num_requests_running {value}\n".encode())
    assert (reading.report.waiting, reading.report.running) == (None, None)
    assert not reading.has_load_metrics


def test_a_cache_of_absurd_size_is_unknown() -> None:
    line = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % ("9" * 5000)
    assert reader().read(line.encode()).cache is None


def test_an_engine_that_shows_its_metrics_later_is_read_at_once() -> None:
    one = reader()
    assert not one.read(b"# nothing yet\n").has_load_metrics
    assert one.read(page()).has_load_metrics


LOAD = b"vllm:num_requests_waiting 1\n"


@pytest.mark.parametrize(
    "labels",
    [b'a="b",', b"name", b'x="\\', b'="', b'",', b'a="\\",', b"a=", b'\\"'],
)
@pytest.mark.parametrize("name", [b"vllm:lora_requests_info", b"vllm:cache_config_info"])
def test_labels_take_time_in_proportion_to_their_length(name: bytes, labels: bytes) -> None:
    def line(size: int) -> bytes:
        return LOAD + b"%b{%b} 1\n" % (name, labels * (size // len(labels)))

    assert takes_time_in_proportion(lambda text: reader().read(text), line, 60_000)


def test_labels_with_escapes_are_read() -> None:
    line = (
        rb'vllm:cache_config_info{config="{\"block_size\":\"1\"}",path="\\\\",block_size="16",num_gpu_blocks="100"} 1'
    )
    assert reader().read(LOAD + line).cache == CacheConfig(16, 1600)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (LOAD * 1024, "more than 1024 series of vllm:num_requests_waiting"),
        (b"vllm:time_to_first_token_seconds_count{} 1\n" * 1025, "more than 1024 series"),
        (b"vllm:lora_requests_info{} 1\n" * 8193, "more than 8192 series"),
        (b'vllm:lora_requests_info{a="%b"} 1\n' % (b"x" * 300_000), "more than 262144 bytes of labels"),
        (b'vllm:cache_config_info{a="%b"} 1\n' % (b"x" * 999) * 300, "more than 262144 bytes of labels"),
        (b'vllm:lora_requests_info{running_lora_adapters="%b"} 1\n' % (b"a," * 5000), "more than 4096 adapters"),
    ],
)
def test_a_page_with_more_than_any_engine_has_is_refused(more: bytes, why: str) -> None:
    with pytest.raises(MetricsPageRefused, match=why):
        reader().read(LOAD + more)


PIECES = st.lists(
    st.sampled_from(
        [
            *(b"vllm:num_requests_waiting", b"vllm:lora_requests_info{", b"vllm:cache_config_info{", b"} 1\n", b"\n"),
            *(
                b'running_lora_adapters="',
                b'block_size="',
                b'"',
                b"\\",
                b",",
                b"=",
                b"{",
                b"}",
                b" ",
                b"1e400",
                b"-0",
                b"#",
            ),
        ]
    )
    | st.binary(max_size=6),
    max_size=40,
).map(b"".join)


@given(st.lists(PIECES, max_size=4))
def test_no_page_that_looks_like_an_engines_raises(pages: list[bytes]) -> None:
    one = MetricsReader(DIALECTS["vLLM"], custom=[("mine", 'vllm:num_requests_waiting{a="b"}')])
    for text in pages:
        waiting = one.read(text).report.waiting
        assert waiting is None or waiting >= 0
