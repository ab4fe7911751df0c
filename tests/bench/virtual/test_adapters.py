# SPDX-License-Identifier: Apache-2.0
"""More adapters than fit, in virtual time: nobody is refused, and loads are few."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import EngineLimits
from bench.stack.loopback_stack import documents
from bench.virtual.engines import roofline_engine
from bench.virtual.simulation import Simulation
from bench.workload.generators import LoraMix
from bench.workload.sessions import Workload
from extproc.api.config_loader import load_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.reporting.request_results import RequestResult

ENGINES = ["10.0.0.1:8000", "10.0.0.2:8000"]
SLOTS = 2
MIX = LoraMix(requests=600, rate=4.0, adapters=10, output=60)


def play(workload: Workload, *, flow_control: bool = False) -> tuple[Simulation, Sequence[RequestResult]]:
    adapters = [{"name": name, "source": f"/adapters/{name}"} for name in workload.adapters]
    more: dict[str, object] = {"adapterLoading": {"adapters": adapters}}
    if flow_control:
        more["flowControl"] = {"saturation": {"maxRequests": 4}}
    text = documents(ENGINES, gateway={}, adapters=workload.adapters, more=more)
    limits = EngineLimits(num_gpu_blocks=20_000, max_loras=SLOTS)
    kind = roofline_engine(PRESETS["h100-llama-3.1-8b"], limits)
    simulation = Simulation(load_snapshot({"all.yaml": text.encode()}), dict.fromkeys(ENGINES, kind))
    return simulation, simulation.run(workload)


def loads_at_random(workload: Workload) -> int:
    """Of engines that are chosen by chance, and forget what they have not used for longest; each request alone."""
    rng, loads = random.Random(0), 0
    engines: list[OrderedDict[str, None]] = [OrderedDict() for _ in ENGINES]
    for session in workload.sessions:
        held = rng.choice(engines)
        loads += session.adapter not in held
        held[session.adapter] = None
        held.move_to_end(session.adapter)
        while len(held) > SLOTS:
            held.popitem(last=False)
    return loads


def test_ten_adapters_on_two_engines_of_two_slots_are_all_served_with_few_loads() -> None:
    workload = Workload("lora", tuple(MIX.generate_sessions(0)))
    simulation, results = play(workload)
    assert [one.error for one in results if one.error] == []
    assert len(results) == 600
    loads = simulation.adapters.loads["loaded"]
    assert simulation.adapters.unloads == loads - len(ENGINES) * SLOTS
    assert set(simulation.adapters.loads) == {"loaded"}
    assert loads < 0.75 * loads_at_random(workload)


def test_a_queue_in_front_of_the_engines_refuses_nobody_for_an_adapter() -> None:
    _, results = play(Workload("lora", tuple(MIX.generate_sessions(1))), flow_control=True)
    assert [one.error for one in results if one.error] == []


def test_adapters_that_all_fit_are_loaded_once_and_a_second_time_where_that_pays() -> None:
    few = LoraMix(requests=200, rate=2.0, adapters=4, output=60)
    simulation, results = play(Workload("lora", tuple(few.generate_sessions(0))))
    assert [one.error for one in results if one.error] == []
    assert simulation.adapters.loads["loaded"] == 4
