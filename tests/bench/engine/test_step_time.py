# SPDX-License-Identifier: Apache-2.0
"""Step times against numbers worked out by hand, and against published measurements."""

from __future__ import annotations

import msgspec
import pytest

from bench.engine.hardware import GPUS, LINKS, MODELS, PRESETS, Gpu, GpuLink, Hardware, ModelShape
from bench.engine.step_time import RooflineStepTime, StepBatch, StepWork, prefill_s, step_seconds

# Round numbers: 1e9 parameters, 2e9 bytes; 10 layers; 2 * 10 * 1 * 50 * 2 = 2,000 bytes of KV a token.
SHAPE = ModelShape(parameters=1e9, layers=10, hidden=100, heads=2, kv_heads=1, head_dim=50)
LINK = GpuLink(bandwidth=100e9, latency_s=10e-6)
ONE = Hardware(SHAPE, Gpu(flops=100e12, bandwidth=1e12, memory=10e9, link=LINK))
OVERHEAD = 10 * 32e-6 + 126e-6


def test_one_decode_waits_for_the_weights_and_its_history() -> None:
    # 2e9 bytes at 0.75e12/s; 1,000 tokens * 2,000 bytes at 0.5e12/s
    expected = 2e9 / 0.75e12 + 2e6 / 0.5e12 + OVERHEAD + 4.4e-6
    assert step_seconds(ONE, [StepWork(1, 1000)]) == pytest.approx(expected)


def test_a_large_prefill_is_computation() -> None:
    # 2 * 1e9 * 8,000 at 65e12/s; pairs 8,000 * 4,000, each 4 * 10 * 2 * 50 FLOPs, at 40e12/s
    expected = 16e12 / 65e12 + 32e6 * 4000 / 40e12 + OVERHEAD + 4.4e-6
    assert step_seconds(ONE, [StepWork(8000, 0)]) == pytest.approx(expected)


def test_history_makes_a_chunk_slower_and_several_gpus_make_it_faster_less_what_they_exchange() -> None:
    assert step_seconds(ONE, [StepWork(1000, 50_000)]) > step_seconds(ONE, [StepWork(1000, 0)])
    two = Hardware(SHAPE, ONE.gpu, gpus=2)
    # twice in each of 10 layers: 10 us, and 8,000 tokens of 200 bytes, of which each GPU sends and gets a half twice
    exchange = 2 * 10 * (10e-6 + 2 * 1 / 2 * 8000 * 100 * 2 / 100e9)
    alone = step_seconds(ONE, [StepWork(8000, 0)]) - OVERHEAD - 4.4e-6
    assert step_seconds(two, [StepWork(8000, 0)]) == pytest.approx(alone / 2 + exchange + OVERHEAD + 4.4e-6)


def test_a_decode_on_two_gpus_waits_twice_a_layer_for_the_latency_of_the_link() -> None:
    slow = msgspec.structs.replace(ONE.gpu, link=GpuLink(bandwidth=100e9, latency_s=110e-6))
    longer = step_seconds(Hardware(SHAPE, slow, 2), [StepWork(1, 0)]) - step_seconds(
        Hardware(SHAPE, ONE.gpu, 2), [StepWork(1, 0)]
    )
    assert longer == pytest.approx(2 * 10 * 100e-6)
    # one GPU sums nothing up
    assert step_seconds(Hardware(SHAPE, slow, 1), [StepWork(1, 0)]) == step_seconds(ONE, [StepWork(1, 0)])


def test_gpus_without_nvlink_are_linked_by_pcie() -> None:
    assert {name for name, gpu in GPUS.items() if gpu.link in (LINKS["pcie4"], LINKS["pcie5"])} == {
        "l40s",
        "a10g",
        "rtx4090",
        "rtxpro6000",
    }
    # 128 all-reduces of 2,048 tokens of 10,240 bytes: 17 us and 0.7 ms each
    of_32b = Hardware(MODELS["32b"], GPUS["rtxpro6000"], 2)
    assert of_32b.all_reduce_s(2048) == pytest.approx(128 * (17e-6 + 2048 * 10_240 / 30e9))


@pytest.mark.parametrize(
    ("preset", "batch", "measured_s"),
    [
        # Vidur's kernels of Llama-3-8B on an A100, attention left out: decode of 1 and 64, prefill of 512 and 2,048
        ("a100-llama-3.1-8b", [StepWork(1, 0)], 9.8e-3),
        ("a100-llama-3.1-8b", [StepWork(1, 0)] * 64, 11.4e-3),
        ("a100-llama-3.1-8b", [StepWork(512, 0)], 35.5e-3),
        ("a100-llama-3.1-8b", [StepWork(2048, 0)], 150e-3),
    ],
)
def test_published_kernel_times_are_met_within_a_fifth(preset: str, batch: list[StepWork], measured_s: float) -> None:
    assert step_seconds(PRESETS[preset], batch) == pytest.approx(measured_s, rel=0.2)


def test_kv_capacities_are_those_that_memory_leaves() -> None:
    # 72 GB less 2 GiB less 16.06 GB of weights, at 131,072 bytes a token
    assert PRESETS["h100-llama-3.1-8b"].kv_tokens() == pytest.approx(410_000, rel=0.01)
    assert PRESETS["h100x4-llama-3.1-70b"].model.kv_bytes_per_token == 327_680


def test_a_long_prefill_goes_in_chunks_of_the_budget_beside_decodes() -> None:
    speed = RooflineStepTime(ONE)
    alone = [StepWork(400, 100), StepWork(400, 500), StepWork(200, 900)]
    expected = sum(step_seconds(ONE, [chunk]) for chunk in alone)
    assert prefill_s(speed, 1000, 100, budget=400) == pytest.approx(expected)
    # two decodes take two tokens of each step's budget, and read 300 tokens of history again in each
    first = StepBatch(requests=3, tokens=400, pairs=398 * (100 + 199), read=300, decodes=2)
    second = StepBatch(requests=3, tokens=104, pairs=102 * (498 + 51), read=300, decodes=2)
    beside = prefill_s(speed, 500, 100, budget=400, decodes=2, decodes_read=300)
    assert beside == pytest.approx(speed.seconds(first) + speed.seconds(second))
    assert prefill_s(speed, 0, 100, budget=400) == 0.0
