# SPDX-License-Identifier: Apache-2.0
"""Ordering within a flow, and that no request is overtaken without bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.flow_queues import (
    ORDERS,
    Deadline,
    FirstCome,
    FlowKey,
    LeastAttained,
    OrderingPolicy,
    QueuedRequest,
    SessionBoost,
    ShortestFirst,
)

AGEING_S = 30.0


def queued(
    arrived_at_s: float, *, uncached: float = 0.0, deadline_at_s: float = math.inf, session: str = ""
) -> QueuedRequest:
    return QueuedRequest(
        "t",
        FlowKey("acme"),
        arrived_at_s,
        arrived_at_s + 60,
        input_tokens=uncached,
        uncached_tokens=uncached,
        deadline_at_s=deadline_at_s,
        session=session,
    )


def first(order: OrderingPolicy, *ones: QueuedRequest) -> int:
    return min(range(len(ones)), key=lambda index: order.order_key(ones[index]))


def test_first_come_is_served_first() -> None:
    assert first(FirstCome(AGEING_S), queued(2.0), queued(1.0), queued(3.0)) == 1


def test_the_earliest_deadline_goes_first_and_without_one_the_ageing_bound_is_due() -> None:
    order = Deadline(AGEING_S)
    assert first(order, queued(0.0), queued(5.0, deadline_at_s=9.0), queued(5.0, deadline_at_s=8.0)) == 2
    assert first(order, queued(0.0), queued(29.0, deadline_at_s=31.0)) == 0


def test_the_shortest_uncached_prompt_goes_first() -> None:
    assert first(ShortestFirst(AGEING_S), queued(0.0, uncached=5000), queued(1.0, uncached=100)) == 1


def test_a_long_prompt_yields_only_to_arrivals_within_the_ageing_bound() -> None:
    order = ShortestFirst(AGEING_S)
    assert first(order, queued(0.0, uncached=1e6), queued(29.0, uncached=100)) == 1
    assert first(order, queued(0.0, uncached=1e6), queued(31.0, uncached=100)) == 0


def test_the_session_that_has_just_ended_a_request_goes_first() -> None:
    order = SessionBoost(AGEING_S)
    order.on_request_ended(queued(0.0, session="old"), 10, 50.0)
    order.on_request_ended(queued(0.0, session="fresh"), 10, 99.0)
    waiting = queued(98.0), queued(100.0, session="old"), queued(100.0, session="fresh")
    assert first(order, *waiting) == 2
    assert first(order, *waiting[:2]) == 0


def test_the_program_with_the_least_service_goes_first() -> None:
    order = LeastAttained(AGEING_S)
    order.on_request_ended(queued(0.0, session="greedy"), 40_000, 50.0)
    order.on_request_ended(queued(0.0, session="modest"), 1_000, 50.0)
    assert first(order, queued(100.0, session="greedy"), queued(101.0, session="modest"), queued(102.0)) == 1


@pytest.mark.parametrize("order", [SessionBoost(AGEING_S), LeastAttained(AGEING_S)])
def test_sessions_are_remembered_in_bounded_number(order: OrderingPolicy) -> None:
    for number in range(10_000):
        order.on_request_ended(queued(0.0, session=f"s{number}"), 1, 0.0)
    (remembered,) = (held for held in vars(order).values() if hasattr(held, "popitem"))
    assert len(remembered) == 4096


@pytest.mark.parametrize("name", sorted(ORDERS))
@given(
    gap_s=st.floats(0.001, 100),
    early=st.tuples(st.floats(0, 1e7), st.floats(-100, 1e6), st.sampled_from(["", "a", "b"])),
    late=st.tuples(st.floats(0, 1e7), st.floats(0, 1e6), st.sampled_from(["", "a", "b"])),
)
def test_no_request_is_overtaken_by_one_beyond_the_ageing_bound(
    name: str, gap_s: float, early: tuple[float, float, str], late: tuple[float, float, str]
) -> None:
    order = ORDERS[name](AGEING_S)
    order.on_request_ended(queued(0.0, session="a"), 1e6, 999.0)
    arrived_at_s = 1000.0
    one = queued(arrived_at_s, uncached=early[0], deadline_at_s=arrived_at_s + early[1], session=early[2])
    late_s = arrived_at_s + AGEING_S + gap_s
    other = queued(late_s, uncached=late[0], deadline_at_s=late_s + late[1], session=late[2])
    assert first(order, other, one) == 1
