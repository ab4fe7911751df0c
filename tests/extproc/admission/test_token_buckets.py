# SPDX-License-Identifier: Apache-2.0
"""Buckets never grant more than their limit in any window, whatever is reserved, settled late, or not at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.token_buckets import Bucket, Limit, Reservation

LIMIT = Limit(rate=10.0, capacity=100.0)


def filled(bucket: Bucket, now: float, limit: Limit = LIMIT) -> Bucket:
    bucket.refill(limit, now)
    return bucket


def test_a_bucket_fills_at_its_rate_up_to_its_capacity() -> None:
    bucket = Bucket(0.0, 0.0)
    assert filled(bucket, 4.0).level == 40.0
    assert filled(bucket, 400.0).level == 100.0


def test_unused_tokens_are_refunded() -> None:
    bucket = Bucket(100.0, 0.0)
    claim = bucket.reserve(80.0)
    bucket.settle(claim, 30.0)
    assert bucket.level == 70.0


def test_inflow_that_would_have_overflowed_is_not_refunded() -> None:
    bucket = Bucket(100.0, 0.0)
    claim = bucket.reserve(100.0)
    # had it taken nothing, the bucket would have been full all the time: 90 flow in, 10 may come back
    filled(bucket, 9.0).settle(claim, 0.0)
    assert bucket.level == pytest.approx(100.0)


def test_a_claim_from_before_a_full_bucket_is_worth_nothing() -> None:
    bucket = Bucket(100.0, 0.0)
    old = bucket.reserve(100.0)
    new = filled(bucket, 10.0).reserve(100.0)
    bucket.settle(old, 0.0)
    assert bucket.level == 0.0
    bucket.settle(new, 60.0)
    assert bucket.level == 40.0


def test_using_more_than_reserved_leaves_a_debt() -> None:
    bucket = Bucket(100.0, 0.0)
    claim = bucket.reserve(100.0)
    bucket.settle(claim, 250.0)
    assert bucket.level == -150.0
    assert filled(bucket, 14.0).shortfall(1.0) > 0
    assert filled(bucket, 16.0).shortfall(1.0) <= 0


class Taken:
    """A reservation and its settlement."""

    def __init__(self, filled_at_s: float, claim: Reservation) -> None:
        self.filled_at_s = filled_at_s
        self.claim = claim
        self.used = claim.amount


@given(
    capacity=st.floats(1, 1000),
    rate=st.floats(0.01, 1000),
    events=st.lists(
        st.tuples(st.floats(0, 30), st.floats(0, 1), st.floats(0, 1), st.integers(0, 40)), min_size=1, max_size=80
    ),
)
def test_no_window_ever_sees_more_than_the_limit_and_the_burst(
    capacity: float, rate: float, events: list[tuple[float, float, float, int]]
) -> None:
    """Each event: time passes, a request reserves, and one from some events ago settles with a share used."""
    limit, bucket, now = Limit(rate, capacity), Bucket(capacity, 0.0), 0.0
    taken: list[Taken] = []
    running: list[Taken] = []
    for passes_s, share, used, age in events:
        now += passes_s
        filled(bucket, now, limit)
        if age < len(running):
            one = running.pop(-1 - age)
            one.used = one.claim.amount * used
            bucket.settle(one.claim, one.used)
        amount = share * capacity
        if bucket.shortfall(amount) <= 0:
            taken.append(Taken(now, bucket.reserve(amount)))
            running.append(taken[-1])
        assert bucket.level + bucket.claims <= capacity * (1 + 1e-9) + 1e-6
    for first, begin in enumerate(taken):
        sum_used = 0.0
        for end in taken[first:]:
            sum_used += end.used
            assert sum_used <= rate * (end.filled_at_s - begin.filled_at_s) + capacity + 1e-3


@pytest.mark.parametrize("amount", [-1.0, -1e15, math.nan, math.inf, -math.inf])
def test_amounts_that_are_none_change_nothing(amount: float) -> None:
    limit, bucket = Limit(rate=1.0, capacity=100.0), Bucket(100.0, 0.0)
    claim = bucket.reserve(60.0)
    odd = bucket.reserve(amount)
    assert (bucket.level, bucket.claims) == (40.0, 60.0)
    bucket.settle(odd, amount)
    bucket.settle(claim, amount)
    assert (bucket.level, bucket.claims) == (100.0, 0.0)
    bucket.refill(limit, 0.0)
    assert (bucket.level, bucket.claims) == (100.0, 0.0)
