# SPDX-License-Identifier: Apache-2.0
"""The policies in virtual time: what the whole is for, in a second."""

from __future__ import annotations

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import EngineLimits
from bench.reporting.results import Summary, summarize
from bench.stack.stack import documents
from bench.virtual.engines import roofline_engine
from bench.virtual.simulation import Simulation
from bench.workload.generators import Conversations, conversations
from extproc.api.load import load_snapshot

SHAPE = Conversations(sessions=120)


def simulate(picker: str, hardware: str = "h100-llama-3.1-8b") -> Summary:
    engines = [f"10.0.0.{number}:8000" for number in range(1, 5)]
    snapshot = load_snapshot({"all.yaml": documents(engines, picker=picker, gateway={}).encode()})
    kind = roofline_engine(PRESETS[hardware], EngineLimits(num_gpu_blocks=3000))
    simulation = Simulation(snapshot, dict.fromkeys(engines, kind))
    return summarize(simulation.run(conversations(SHAPE)), speed=1.0)


def test_prefix_aware_picking_beats_round_robin_on_ttft_and_cache_hits() -> None:
    aware, round_robin = simulate("PrefixAware"), simulate("RoundRobin")
    assert aware.requests == round_robin.requests == 480
    assert aware.prompt_tokens == round_robin.prompt_tokens
    assert aware.ttft_s.mean < 0.6 * round_robin.ttft_s.mean
    assert aware.ttft_s.p99 < round_robin.ttft_s.p99
    assert aware.cached_token_ratio > 1.8 * round_robin.cached_token_ratio


def test_a_run_can_be_repeated() -> None:
    assert simulate("PrefixAware") == simulate("PrefixAware")
