# SPDX-License-Identifier: Apache-2.0
"""The bounds against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from controller.autoscaler.decision.replica_performance import (
    RequestWork,
    replicas_for_cache,
    replicas_for_tpot,
    replicas_for_ttft,
    utilization_for_tpot,
)

WORK = RequestWork(prefill_s=0.1, decode_s=0.11, output_tokens=200.0, context_tokens=1100.0)


@pytest.mark.parametrize(("step_s", "tpot_s", "share"), [(0.01, 0.04, 0.75), (0.01, 0.011, 0.3), (0.001, 0.1, 0.9)])
def test_steps_leave_work_what_the_objective_allows(step_s: float, tpot_s: float, share: float) -> None:
    assert utilization_for_tpot(step_s, tpot_s) == pytest.approx(share)


def test_tpot_leaves_room_for_the_noise_of_the_pool() -> None:
    # 10 requests of 0.21 s: 2.1 engines' work. 8 s of decoding: deviation sqrt(2 * 2.1 * 0.21 / 8) = 0.332
    replicas = replicas_for_tpot(10.0, WORK, step_s=0.01, tpot_s=0.04, percent=90.0)
    assert replicas == pytest.approx((2.1 + 1.2816 * 0.33204) / 0.75, rel=1e-4)


def test_at_the_median_no_room_is_left_for_noise() -> None:
    assert replicas_for_tpot(10.0, WORK, step_s=0.01, tpot_s=0.04, percent=50.0) == pytest.approx(2.1 / 0.75)


def test_a_large_pool_needs_less_room_in_proportion() -> None:
    one = replicas_for_tpot(10.0, WORK, step_s=0.01, tpot_s=0.04, percent=90.0)
    hundred = replicas_for_tpot(1000.0, WORK, step_s=0.01, tpot_s=0.04, percent=90.0)
    assert hundred < 90 * one


def test_ttft_bounds_the_time_in_prefill() -> None:
    replicas = replicas_for_ttft(10.0, WORK, ttft_s=0.3, percent=90.0, replicas=1.0)
    busy = 1.0 / (replicas - 1.1)
    # the bound itself: x ** 2 * exp(-(1 - x) * wait / own) = 0.1, own = 0.1 / 0.9, wait = 0.3 - own
    own_s = 0.1 / 0.9
    assert busy**2 * math.exp(-(1 - busy) * (0.3 - own_s) / own_s) == pytest.approx(0.1, rel=1e-3)


def test_a_long_ttft_lets_engines_be_busy() -> None:
    assert replicas_for_ttft(10.0, WORK, ttft_s=30.0, percent=90.0, replicas=3.0) == pytest.approx(
        1.0 / 0.9 + 1.1, rel=1e-3
    )


def test_decode_has_no_wait_for_prefill() -> None:
    decode = RequestWork(prefill_s=0.0, decode_s=0.11, output_tokens=200.0, context_tokens=1100.0)
    assert replicas_for_ttft(10.0, decode, ttft_s=0.1, percent=90.0, replicas=1.0) == 0


def test_caches_hold_what_littles_law_says() -> None:
    # 10 a second for 0.1 + 200 * 0.04 = 8.1 s, of 1,100 tokens: 89,100
    assert replicas_for_cache(10.0, WORK, kv_tokens=50_000.0, tpot_s=0.04) == pytest.approx(89_100 / 45_000)
