# SPDX-License-Identifier: Apache-2.0
"""What queues promise, in virtual time on simulated engines. ``make bench`` plays the same scenes at twice the
length.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.lab.fairness import (
    FCFS,
    FLOOD_POLICIES,
    QUANTUM,
    VTC,
    LengthRanges,
    TenantLoad,
    measure_band_shares,
    measure_flood,
    measure_locality,
    measure_queue_orders,
    measure_service_gap,
)
from tests.examples import examples

LENGTHS = st.builds(
    LengthRanges,
    prompt=st.tuples(st.integers(50, 800), st.integers(800, 4000)),
    answer=st.tuples(st.integers(2, 20), st.integers(20, 300)),
)
TENANTS = st.lists(
    st.builds(
        TenantLoad,
        tenant=st.just(""),
        rate=st.floats(2, 25),
        duration_s=st.floats(2, 8),
        begins_at_s=st.floats(0, 4),
        lengths=LENGTHS,
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(loads=TENANTS, seed=st.integers(0, 10_000))
def test_two_that_wait_are_never_further_apart_than_vtcs_theorem_allows(loads: list[TenantLoad], seed: int) -> None:
    named = [
        TenantLoad(f"t{number}", one.rate, one.duration_s, one.begins_at_s, one.lengths)
        for number, one in enumerate(loads)
    ]
    (vtc,) = measure_service_gap(named, policies={"VTC": VTC}, seed=seed)
    assert vtc.widest <= vtc.bound


@pytest.mark.slow
def test_without_counters_two_that_wait_drift_apart_without_bound() -> None:
    loads = [TenantLoad("many", 30, 8, lengths=LengthRanges((100, 2000), (10, 400))), TenantLoad("few", 3, 8)]
    fcfs, vtc = measure_service_gap(loads, policies={"FCFS": FCFS, "VTC": VTC}, seed=0)
    assert fcfs.widest > 2 * fcfs.bound
    # what is charged as a request goes, and corrected soon, keeps far below what the theorem allows
    assert vtc.widest < 0.35 * vtc.bound


def test_a_flood_hardly_touches_the_others_where_it_would_drown_them_without_counters() -> None:
    outcomes = {one.policy: one for one in measure_flood(rate=0.9, duration_s=12, engines=1, policies=FLOOD_POLICIES)}
    assert outcomes["VTC"].slowdown < 1.1
    # and the longer a flood lasts, the worse it gets
    assert outcomes["FCFS"].slowdown > 2.25
    assert outcomes["no queue"].slowdown > 2.25


@pytest.mark.slow
def test_a_flood_of_quiet_engines_costs_the_others_little() -> None:
    policies = {"FCFS": FCFS, "VTC": VTC}
    outcomes = {one.policy: one for one in measure_flood(rate=1.45, duration_s=13, engines=4, policies=policies)}
    assert outcomes["VTC"].slowdown < 1.5
    assert outcomes["FCFS"].during_s > 3 * outcomes["VTC"].during_s


@pytest.mark.slow
def test_deadlines_are_met_by_their_order_and_means_by_the_shortest_first() -> None:
    found = {one.order: one for one in measure_queue_orders(rate=13, duration_s=13, engines=2)}
    first = found["FirstCome"]
    assert found["Deadline"].missed < 0.8 * first.missed
    assert found["ShortestFirst"].mean_ttft_s < 0.9 * first.mean_ttft_s
    # its ageing
    assert found["ShortestFirst"].longest_ttft_s <= first.longest_ttft_s + 10.0


def test_bands_that_all_wait_have_their_shares() -> None:
    found = measure_band_shares(rate=25, duration_s=5, engines=1).by_band
    expected = {"critical": 0.80, "high": 0.15, "standard": 0.04, "best-effort": 0.01}
    assert found == {name: pytest.approx(share, abs=0.02) for name, share in expected.items()}


def test_locality_is_kept_within_the_deficits() -> None:
    found = {one.policy: one for one in measure_locality(rate=3, duration_s=6, engines=2)}
    assert found["DLPM"].cached_token_ratio >= 0.85 * found["no queue"].cached_token_ratio
    assert found["DLPM"].cached_token_ratio > found["FCFS"].cached_token_ratio
    # a quantum, and the largest request with its answer
    assert found["DLPM"].widest_gap <= 2 * (QUANTUM + 5000)
    assert found["FCFS"].widest_gap > 2 * (QUANTUM + 5000)
