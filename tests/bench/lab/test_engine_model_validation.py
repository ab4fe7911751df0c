# SPDX-License-Identifier: Apache-2.0
"""The model of measured kernels against numbers worked out by hand."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

from bench.engine.hardware import PER_REQUEST_S, PER_STEP_S
from bench.engine.scheduler import EngineLimits
from bench.engine.step_time import StepWork, step_batch
from bench.lab.engine_model_validation import (
    InterpolatedCurve,
    InterpolatedSurface,
    MeasuredStepTime,
    RecordedRequest,
    measured_latencies,
    simulate_latencies,
)
from bench.virtual.engines import EngineProfile

if TYPE_CHECKING:
    from pathlib import Path


def test_between_measurements_a_line_and_beyond_the_last_one_the_same_line() -> None:
    curve = InterpolatedCurve([(10, 1.0), (20, 3.0), (40, 4.0)])
    assert [curve.at(x) for x in (10, 15, 20, 30, 60)] == [1.0, 2.0, 3.0, 3.5, 5.0]
    assert InterpolatedCurve([(5, 2.0)]).at(99) == 2.0
    surface = InterpolatedSurface([(0, 0, 0.0), (0, 10, 10.0), (10, 0, 100.0), (10, 10, 110.0)])
    assert surface.at(5, 5) == 55.0


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    def write(name: str, text: str) -> None:
        (tmp_path / f"vllm_profile_x.{name}.csv.gz").write_bytes(gzip.compress(text.encode()))

    layers = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    dense = "".join(f"{layer},1,10\n{layer},1001,1010\n" for layer in (*layers, "embedding", "final_layernorm"))
    write("dense", f"layer,tokens,time_us\n{dense}")
    write("per_sequence", "layer,sequences,time_us\nlm_head,1,500\nlm_head,101,600\nsampler,1,20\n")
    attention = "".join(f"{chunk},{kv},0,0,{chunk + kv}\n" for chunk in (100, 1000) for kv in (0, 1000))
    attention += "".join(f"0,0,{count},{kv},{count * kv / 100}\n" for count in (1, 10) for kv in (0, 1000))
    # together 1.5 times what they take apart
    attention += "100,1000,10,1000,1800\n"
    write("attention", f"prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n{attention}")
    return tmp_path


def test_a_step_is_its_kernels_layer_by_layer_and_once(profiles: Path) -> None:
    model = MeasuredStepTime(profiles, "x", layers=2)
    # 8 dense kernels a layer and 2 once, each tokens + 9 us; lm_head and sampler; attention of two layers
    decodes = model.seconds(step_batch([StepWork(1, 500)] * 10))
    assert decodes == pytest.approx((18 * 19 + 509 + 20 + 2 * 50) / 1e6 + PER_STEP_S + 10 * PER_REQUEST_S)
    chunk = model.seconds(step_batch([StepWork(400, 600)]))
    assert chunk == pytest.approx((18 * 409 + 500 + 20 + 2 * 1000) / 1e6 + PER_STEP_S + PER_REQUEST_S)
    mixed = model.seconds(step_batch([StepWork(391, 600), *[StepWork(1, 500)] * 9]))
    assert mixed == pytest.approx((18 * 409 + 509 + 20 + 2 * 1.5 * (991 + 45)) / 1e6 + PER_STEP_S + 10 * PER_REQUEST_S)


def test_chunks_of_several_requests_are_taken_one_by_one(profiles: Path) -> None:
    model = MeasuredStepTime(profiles, "x", layers=1)
    two = model.seconds(step_batch([StepWork(200, 0), StepWork(200, 0)]))
    # the kernel of 200 twice: 2 * 200 us
    assert two == pytest.approx((10 * 409 + 501 + 20 + 400) / 1e6 + PER_STEP_S + 2 * PER_REQUEST_S)


def test_a_run_is_played_at_its_own_times(profiles: Path) -> None:
    run = [RecordedRequest(100, 5, 50.0, 50.2, 51.0), RecordedRequest(300, 3, 60.0, 60.5, 62.5)]
    was = measured_latencies(run)
    assert was.ttft_s.mean == pytest.approx(0.35)
    assert was.tpot_s.mean == pytest.approx((0.2 + 1.0) / 2)
    assert was.makespan_s == 12.5
    found = simulate_latencies(
        run, EngineProfile(MeasuredStepTime(profiles, "x", layers=2), EngineLimits(num_gpu_blocks=100))
    )
    assert 10.0 < found.makespan_s < 10.1
    assert 0 < found.tpot_s.mean < found.ttft_s.mean < 0.02
