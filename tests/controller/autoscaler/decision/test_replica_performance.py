# SPDX-License-Identifier: Apache-2.0
"""Speeds of targets, from what gateways have learned and what is declared."""

from __future__ import annotations

import pytest

from controller.api.autoscaling import LatencyObjective
from controller.api.autoscaling_binding import EngineCapacity
from controller.autoscaler.decision.offered_load import MeanRequestWork
from controller.autoscaler.decision.replica_performance import (
    estimate_speed,
    replica_seconds_per_request,
    request_work,
    smooth_speed,
)
from controller.autoscaler.decision.situation import ReplicaSpeed
from extproc.api.quantities import Duration
from extproc.api.status_page_contents import EngineDemand

LEARNED = EngineDemand(prefill_tokens_per_s=10_000.0, step_s=0.01, step_s_per_token=5e-7, kv_capacity_tokens=300_000.0)
MEAN = MeanRequestWork(prefill_work=1000.0, prompt_tokens=1000.0, output_tokens=200.0)
SLOW = ReplicaSpeed(prefill_tokens_per_s=5_000.0, step_s=0.02, step_s_per_token=1e-6)
FAST = ReplicaSpeed(prefill_tokens_per_s=10_000.0, step_s=0.01, step_s_per_token=5e-7)


def test_one_engine_that_is_ill_does_not_count() -> None:
    ill = EngineDemand(prefill_tokens_per_s=10.0, step_s=9.0, step_s_per_token=1.0)
    assert estimate_speed(EngineCapacity(), [LEARNED, ill, LEARNED]) == ReplicaSpeed(
        10_000.0, 0.01, 5e-7, 300_000.0, is_measured=True
    )


def test_what_is_learned_comes_before_what_is_declared() -> None:
    declared = EngineCapacity(prefill_tokens_per_second=1.0, step=Duration("1s"), kv_tokens=7.0)
    found = estimate_speed(declared, [EngineDemand(prefill_tokens_per_s=9_000.0)])
    assert found is not None
    assert (found.prefill_tokens_per_s, found.step_s, found.kv_tokens) == (9_000.0, 1.0, 7.0)
    assert found.is_measured


def test_what_is_declared_counts_until_something_is_learned() -> None:
    found = estimate_speed(EngineCapacity(prefill_tokens_per_second=8_000.0), [EngineDemand()])
    assert found is not None
    assert found.prefill_tokens_per_s == 8_000.0
    assert not found.is_measured


def test_nothing_learned_and_nothing_declared_is_no_speed() -> None:
    assert estimate_speed(EngineCapacity(), [EngineDemand()]) is None


@pytest.mark.parametrize(("followed_s", "weight"), [(0.0, 2 / 3), (60.0, 1 / 2), (600.0, 1 / 11)])
def test_speeds_move_the_more_slowly_the_longer_they_are_known(followed_s: float, weight: float) -> None:
    first = ReplicaSpeed(10_000.0, 0.01, 5e-7, is_measured=True, followed_s=followed_s)
    second = ReplicaSpeed(20_000.0, 0.01, 5e-7, is_measured=True)
    found = smooth_speed(first, second, 60.0)
    assert found is not None
    assert found.prefill_tokens_per_s == pytest.approx(10_000 * 2**weight)
    assert found.followed_s == min(600.0, followed_s + 60.0)


def test_the_first_measurement_replaces_what_was_declared() -> None:
    measured = ReplicaSpeed(20_000.0, 0.01, 5e-7, is_measured=True)
    assert smooth_speed(ReplicaSpeed(10_000.0, 0.01, 5e-7), measured, 5.0) == measured


def test_a_speed_that_is_not_known_any_more_is_kept() -> None:
    assert smooth_speed(FAST, None, 5.0) == FAST


def test_work_by_stage() -> None:
    both = request_work(MEAN, FAST, "Both")
    assert (both.prefill_s, both.decode_s) == pytest.approx((0.1, 0.11))
    assert request_work(MEAN, FAST, "Prefill").decode_s == 0
    assert request_work(MEAN, FAST, "Decode").prefill_s == 0


def test_slower_steps_leave_less_for_the_objective() -> None:
    objective = LatencyObjective(tpot=Duration("40ms"))
    # twice as slow: twice the work, in half of the time instead of three quarters
    slow = replica_seconds_per_request(MEAN, SLOW, "Both", objective)
    assert slow / replica_seconds_per_request(MEAN, FAST, "Both", objective) == pytest.approx(2 * 0.75 / 0.5)
