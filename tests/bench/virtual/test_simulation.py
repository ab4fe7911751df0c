# SPDX-License-Identifier: Apache-2.0
"""The policies in virtual time: what the whole is for, in a second."""

from __future__ import annotations

import pytest

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import EngineLimits
from bench.reporting.request_results import Summary, summarize
from bench.stack.loopback_stack import documents
from bench.virtual.engines import roofline_engine
from bench.virtual.simulation import DisaggregationSettings, Simulation
from bench.workload.generators import Conversations, conversation_workload
from extproc.api.config_loader import load_snapshot

SHAPE = Conversations(sessions=120)


def simulate(picker: str, hardware: str = "h100-llama-3.1-8b") -> Summary:
    engines = [f"10.0.0.{number}:8000" for number in range(1, 5)]
    snapshot = load_snapshot({"all.yaml": documents(engines, picker=picker, gateway={}).encode()})
    kind = roofline_engine(PRESETS[hardware], EngineLimits(num_gpu_blocks=3000))
    simulation = Simulation(snapshot, dict.fromkeys(engines, kind))
    return summarize(simulation.run(conversation_workload(SHAPE)), speed=1.0)


def test_prefix_aware_picking_beats_round_robin_on_ttft_and_cache_hits() -> None:
    aware, round_robin = simulate("PrefixAware"), simulate("RoundRobin")
    assert aware.requests == round_robin.requests == 480
    assert aware.prompt_tokens == round_robin.prompt_tokens
    assert aware.ttft_s.mean < 0.6 * round_robin.ttft_s.mean
    assert aware.ttft_s.p99 < round_robin.ttft_s.p99
    assert aware.cached_token_ratio > 1.8 * round_robin.cached_token_ratio


def pair_of(leg: str, *, engine: str = "vLLM", connector: str = "NixlConnector") -> Simulation:
    engines = {"10.0.0.1:8000": "prefill", "10.0.0.2:8000": "decode"}
    group = {"prefillLabels": {"role": "prefill"}, "decodeLabels": {"role": "decode"}, "decideBy": "UncachedTokens"}
    more = {
        "engine": engine,
        "pdGroup": {**group, "minUncachedTokens": 0, "leg": leg, "connector": connector},
        "endpoints": [{"address": address, "labels": {"role": role}} for address, role in engines.items()],
    }
    snapshot = load_snapshot({"all.yaml": documents([*engines], gateway={}, more=more).encode()})
    kind = roofline_engine(PRESETS["h100-llama-3.1-8b"], EngineLimits(num_gpu_blocks=3000))
    return Simulation(snapshot, dict.fromkeys(engines, kind), pairing=DisaggregationSettings(pushes=engine == "SGLang"))


def test_a_leg_beside_its_request_takes_as_long_as_a_sidecars_and_its_end_is_known() -> None:
    gateway = pair_of("Gateway", engine="SGLang", connector="bootstrap_room")
    sidecar, shape = pair_of("Sidecar", engine="SGLang"), Conversations(sessions=12)
    ours, theirs = gateway.run(conversation_workload(shape)), sidecar.run(conversation_workload(shape))
    assert len(ours) == len(theirs) == 48
    assert not any(one.error for one in ours)
    assert {one.prefilled_by for one in ours} == {"10.0.0.1:8000"}
    for one, other in zip(ours, theirs, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s)
    (pool,) = gateway.core.pools.values()
    assert not pool.table.in_flight.any()
    assert not gateway.core._dispatcher.beside
    assert not gateway._beside


def test_a_leg_that_extproc_makes_takes_as_long_as_a_sidecars_and_teaches_what_the_transfer_takes() -> None:
    gateway, sidecar = pair_of("Gateway"), pair_of("Sidecar")
    shape = Conversations(sessions=12)
    ours, theirs = gateway.run(conversation_workload(shape)), sidecar.run(conversation_workload(shape))
    assert len(ours) == len(theirs) == 48
    assert {one.prefilled_by for one in ours} == {"10.0.0.1:8000"}
    assert not any(one.error for one in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s)
    (pool,), (other_pool,) = gateway.core.pools.values(), sidecar.core.pools.values()
    assert pool.transfers is not None
    assert pool.transfers.has_factors
    assert other_pool.transfers is not None
    assert not other_pool.transfers.has_factors
    for table in (pool.table, other_pool.table):
        assert not table.in_flight.any()


def test_a_run_can_be_repeated() -> None:
    assert simulate("PrefixAware") == simulate("PrefixAware")
