# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from bench.micro.compared_servers import BenchmarkCase
from bench.micro.overhead import ALONE, BUSY, WHOLE, CaseResult, OverheadResult, PhaseMeasurement
from bench.micro.overhead_figures import Spread, server_figures


def load(rate: float = 1000.0, *, p50_ms: float = 1.0, cpu_us: float = 100.0) -> PhaseMeasurement:
    return PhaseMeasurement(rate, p50_ms, 2 * p50_ms, cpu_us, {"main": cpu_us}, busy=0.5)


def measured(alone: list[PhaseMeasurement], busy: list[PhaseMeasurement]) -> OverheadResult:
    return OverheadResult(1.0, 2**20, {ALONE.name: alone, BUSY.name: busy, WHOLE.name: busy})


def found() -> CaseResult:
    alone = {"engine": [0.5, 0.25], "no-op": [1.5, 2.25], "extproc": [2.5, 2.75]}
    busy = {"no-op": [(1000.0, 200.0), (500.0, 400.0)], "extproc": [(500.0, 500.0), (400.0, 600.0)]}
    servers = {
        name: measured([load(p50_ms=ms) for ms in times], [load(rate, cpu_us=us) for rate, us in busy.get(name, [])])
        for name, times in alone.items()
    }
    return CaseResult(BenchmarkCase(2_000, 8), servers)


def test_latency_is_added_to_the_engine_and_to_the_no_op_server_of_the_same_round() -> None:
    _, extproc = server_figures(found())
    assert extproc.added_p50_ms == Spread(2.25, 2.25, 2.0, 2.5)
    assert extproc.added_p90_ms == Spread(4.5, 4.5, 4.0, 5.0)
    assert extproc.added_to_noop_p50_ms == Spread(0.75, 1.0, 0.5, 1.0)


def test_ratios_are_those_of_each_round_and_of_the_best_rounds() -> None:
    _, extproc = server_figures(found())
    busy = extproc.phases[BUSY.name]
    assert busy.rate_ratio == Spread(0.65, 0.5, 0.5, 0.8)
    assert busy.cpu_ratio == Spread(2.0, 2.5, 1.5, 2.5)


def test_the_baseline_is_the_baseline_of_itself() -> None:
    noop, _ = server_figures(found())
    assert noop.server == "no-op"
    assert noop.phases[WHOLE.name].cpu_ratio == Spread(1.0, 1.0, 1.0, 1.0)


def test_a_case_is_found_by_its_name() -> None:
    assert BenchmarkCase(100_000, 8).name == "100 KB, 8"
    assert BenchmarkCase(2_000, 100, renamed=False, in_pieces=True).name == "2 KB, 100, own name, in pieces"
