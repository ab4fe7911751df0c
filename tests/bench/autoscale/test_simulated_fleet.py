# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: replicas start late, drain without losing anybody, and are paid for; and one quick run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import main
from bench.autoscale.command import read_kept_results, run_grid
from bench.autoscale.load_profiles import DataSplit
from bench.autoscale.policies import POLICIES
from bench.autoscale.simulated_fleet import ONE, Fleet
from bench.autoscale.trial import Trial, run_trial
from bench.workload.sessions import Session, SessionTurn, Workload, single_piece


def workload(count: int, *, every_s: float) -> Workload:
    turns = [(SessionTurn(single_piece(f"{number}", 500), 200),) for number in range(count)]
    return Workload("test", tuple(Session(number * every_s, turn) for number, turn in enumerate(turns)))


def test_a_replica_serves_its_start_time_after_the_order_and_not_before() -> None:
    fleet = Fleet(ONE, {"a100": 1}, seed=0)
    fleet.simulation.schedule_at(10.0, lambda now: fleet.scale_to({"a100": 3}, now))
    results = fleet.simulation.run(workload(400, every_s=0.5))
    for new in fleet.replicas[1:]:
        assert new.ready_at_s is not None
        assert 54.0 <= new.ready_at_s - 10.0 <= 66.0
        mine = [one for one in results if one.engine == new.address]
        assert mine
        assert all(one.first_token_at_s > new.ready_at_s for one in mine)


def test_draining_loses_no_request_and_is_paid_until_the_last_one_ends() -> None:
    fleet = Fleet(ONE, {"a100": 3}, seed=0)
    sent = workload(300, every_s=0.2)

    def collect(now: float) -> None:
        fleet.remove_drained(now)
        if now < 200.0:
            fleet.simulation.schedule_at(now + 1.0, collect)

    fleet.simulation.schedule_at(20.0, lambda now: fleet.scale_to({"a100": 1}, now))
    fleet.simulation.schedule_at(0.0, collect)
    results = fleet.simulation.run(sent)
    assert len(results) == sent.request_count
    assert not any(one.error for one in results)
    gone = [one for one in fleet.replicas if one.gone_at_s is not None]
    assert len(gone) == 2
    for one in gone:
        mine = [result for result in results if result.engine == one.address]
        assert one.draining_at_s == 20.0
        assert one.gone_at_s is not None
        last_s = max(result.last_token_at_s for result in mine)
        assert 20.0 < last_s <= one.gone_at_s <= last_s + 1.0
        assert max(result.due_at_s for result in mine) <= 20.0


def test_an_order_taken_back_ends_what_was_starting() -> None:
    fleet = Fleet(ONE, {"a100": 1}, seed=0)
    fleet.simulation.schedule_at(10.0, lambda now: fleet.scale_to({"a100": 2}, now))
    fleet.simulation.schedule_at(20.0, lambda now: fleet.scale_to({"a100": 1}, now))
    fleet.simulation.run(workload(20, every_s=5.0))
    assert fleet.replicas[1].ready_at_s is None
    assert fleet.replicas[1].gone_at_s == 20.0
    assert [dict(one.desired) for one in fleet.orders] == [{"a100": 1}, {"a100": 2}, {"a100": 1}]


def test_more_engines_meet_the_targets_more_often_and_cost_more() -> None:
    few, many = (
        run_trial(Trial("ramps", DataSplit.TUNING, "fixed", count, 0, duration_s=110.0), Path()) for count in (1.0, 4.0)
    )
    assert few.attainment < many.attainment
    assert few.bill.cost < many.bill.cost
    assert few.requests == many.requests
    assert [one.due for one in few.windows] == [one.due for one in many.windows]


@pytest.mark.slow
def test_a_quick_run_ends_well_and_keeps_its_trials(tmp_path: Path) -> None:
    policies = "fixed,oracle"
    assert main(["autoscale", "--quick", "--policies", policies, "--out", str(tmp_path), "--jobs", "1"]) == 0
    found = read_kept_results(tmp_path / "quick.jsonl")
    expected = [("quick", "fixed"), ("quick", "oracle"), ("quick-kinds", "fixed"), ("quick-kinds", "oracle")]
    assert sorted((one.load, one.policy) for one in found) == expected
    assert all(not one.lost and not one.refused for one in found.values())


def test_an_unknown_policy_or_load_is_told(tmp_path: Path) -> None:
    assert main(["autoscale", "--policies", "nobody", "--out", str(tmp_path)]) == 2
    assert main(["autoscale", "--loads", "nothing", "--out", str(tmp_path)]) == 2


def test_finished_trials_are_not_run_again_and_a_cut_line_is(tmp_path: Path) -> None:
    trials = [Trial("ramps", DataSplit.TUNING, "fixed", knob, 0, duration_s=80.0) for knob in (2.0, 3.0)]
    file = tmp_path / "trials.jsonl"
    console = Console(quiet=True)
    first = run_grid(trials, file, Path(), console, jobs=1)
    kept = file.read_bytes()
    assert run_grid(trials, file, Path(), console, jobs=1) == first
    assert file.read_bytes() == kept
    file.write_bytes(kept[:-20])
    again = run_grid(trials, file, Path(), console, jobs=1)
    assert [one.attainment for one in again.values()] == [one.attainment for one in first.values()]
    assert len(read_kept_results(file)) == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_plays_within_its_bounds_and_loses_nobody(policy: str) -> None:
    grid = POLICIES[policy].grid
    assert len(grid) == 5
    trial = Trial("noise", DataSplit.HELD, policy, grid[2], 0, start_s=5.0, duration_s=75.0)
    found = run_trial(trial, Path())
    assert found.requests > 30
    assert not found.lost
    assert not found.refused
    assert 0 < found.bill.replica_hours <= ONE[0].max_replicas * found.hours


def test_a_fleet_without_replicas_holds_its_requests_until_one_has_started() -> None:
    fleet = Fleet(ONE, {"a100": 1}, seed=0)
    late = Workload("test", (Session(50.0, (SessionTurn(single_piece("late", 500), 20),)),))
    fleet.simulation.schedule_at(10.0, lambda now: fleet.scale_to({"a100": 0}, now))
    fleet.simulation.schedule_at(51.0, lambda now: fleet.scale_to({"a100": 1}, now))
    (result,) = fleet.simulation.run(late)
    first, second = fleet.replicas
    assert first.gone_at_s == 10.0
    assert not result.error
    assert second.ready_at_s is not None
    assert second.ready_at_s < result.first_token_at_s < second.ready_at_s + 1.0
