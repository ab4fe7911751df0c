# SPDX-License-Identifier: Apache-2.0
"""What a fleet costs, how orders are judged, and what frontiers say."""

from __future__ import annotations

import pytest

from bench.autoscale.report import PolicyPoint, cost_at, dominates, extra_cost
from bench.autoscale.simulated_fleet import Replica, choose_replicas_to_remove, fleet_cost
from bench.autoscale.trial import WindowAttainment, attainment_by_window, direction_changes, overload_to_order_s
from bench.lab.measures import LatencyObjective
from bench.reporting.request_results import RequestResult


def replica(name: str, created_at_s: float, **times: float) -> Replica:
    return Replica(name=name, target="a", address=name, cost=2.0, accelerators=4, created_at_s=created_at_s, **times)


def test_a_replica_costs_from_its_order_to_its_end_and_only_serving_is_not_wasted() -> None:
    served = replica("one", 100.0, ready_at_s=160.0, draining_at_s=3600.0, gone_at_s=3700.0)
    found = fleet_cost([served], 0.0, 10_000.0)
    assert found.replica_hours == pytest.approx(1.0)
    assert found.cost == pytest.approx(2.0)
    assert found.wasted_gpu_s == pytest.approx(4 * (60 + 100))


def test_a_replica_that_never_served_is_wasted_whole() -> None:
    assert fleet_cost([replica("one", 0.0, gone_at_s=30.0)], 0.0, 100.0).wasted_gpu_s == pytest.approx(120.0)


def test_what_comes_after_the_run_is_not_paid() -> None:
    assert fleet_cost([replica("one", 50.0, ready_at_s=60.0)], 0.0, 86.0).replica_hours == pytest.approx(0.01)


def test_what_comes_before_the_count_is_not_paid() -> None:
    found = fleet_cost([replica("one", 0.0, ready_at_s=50.0)], 40.0, 400.0)
    assert found.replica_hours == pytest.approx(0.1)
    assert found.wasted_gpu_s == pytest.approx(40.0)


def test_those_that_start_go_first_the_newest_before_older_ones_then_the_least_busy() -> None:
    old, new = replica("old", 10.0), replica("new", 20.0)
    busy, idle = replica("busy", 0.0, ready_at_s=0.0), replica("idle", 0.0, ready_at_s=0.0)
    chosen = choose_replicas_to_remove([busy, old, idle, new], 3, {"busy": 3, "idle": 1})
    assert [one.name for one in chosen] == ["new", "old", "idle"]


def test_reversals_count_turns_and_not_steps() -> None:
    assert direction_changes([2, 3, 5, 4, 3, 6]) == 2
    assert direction_changes([2, 2, 3]) == 0


def test_overload_ends_with_a_larger_order_or_by_itself() -> None:
    need = [2.0] * 10 + [5.0] * 10 + [2.0] * 10 + [9.0] * 5 + [2.0] * 5
    assert overload_to_order_s(need, [(0.0, 3.0), (14.0, 6.0)]) == [4.0]


def test_an_order_that_is_not_enough_begins_the_next_overload() -> None:
    assert overload_to_order_s([5.0] * 30, [(0.0, 1.0), (5.0, 3.0), (15.0, 5.0)]) == [5.0, 10.0]


def test_refused_lost_and_slow_requests_are_missed() -> None:
    results = [
        RequestResult(1.0, 1.5, 2.5, 10, 0, 11),
        RequestResult(2.0, 5.0, 6.0, 10, 0, 11),
        RequestResult(3.0, 3.5, 9.0, 10, 0, 11),
        RequestResult(4.0, 4.0, 4.0, 0, 0, 0, error="refused"),
    ]
    found = attainment_by_window(
        [0.5, 1.0, 2.0, 3.0, 4.0, 5.0], results, LatencyObjective(2.0, 0.2), since_s=1.0, until_s=13.0
    )
    assert sum(one.due for one in found) == 5
    assert sum(one.met for one in found) == 1
    assert found[0] == WindowAttainment(1, 1)


def spot(attainment: float, cost: float, policy: str = "baseline") -> PolicyPoint:
    return PolicyPoint(policy, "load", 1.0, attainment, attainment, attainment, cost)


def test_equal_attainment_is_interpolated_on_the_settings_that_none_surpasses() -> None:
    frontier = [spot(0.8, 4.0), spot(0.9, 6.0), spot(0.85, 7.0)]
    assert cost_at(frontier, 0.85) == pytest.approx(5.0)
    assert cost_at(frontier, 0.5) == pytest.approx(4.0)
    assert cost_at(frontier, 0.95) is None
    assert extra_cost(spot(0.85, 4.0), frontier) == pytest.approx(-0.2)
    assert extra_cost(spot(0.95, 4.0), frontier) is None


def test_only_more_attainment_for_less_cost_dominates() -> None:
    assert dominates(spot(0.9, 4.0), spot(0.8, 5.0))
    assert not dominates(spot(0.9, 5.0), spot(0.8, 5.0))
