# SPDX-License-Identifier: Apache-2.0
"""Bounds by time, across time zones and changes of clocks."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.api.autoscaling import Schedule, schedule_mistakes
from controller.autoscaler.decision.behavior import ReplicaBounds, scheduled_bounds
from extproc.api.quantities import Duration


def schedule(
    start: str, duration: str, zone: str = "UTC", least: int | None = None, most: int | None = None
) -> Schedule:
    """A window."""
    return Schedule(start=start, duration=Duration(duration), time_zone=zone, min_replicas=least, max_replicas=most)


def at(text: str) -> float:
    """Seconds since 1970 of a time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


OFFICE = schedule("0 8 * * 1-5", "10h", "Europe/Berlin", least=4)


@pytest.mark.parametrize(
    ("when", "least"),
    [
        ("2026-01-12T06:59:59", None),
        ("2026-01-12T07:00:00", 4),
        ("2026-01-12T16:59:59", 4),
        ("2026-01-12T17:00:00", None),
        # in summer an hour earlier
        ("2026-07-13T06:00:00", 4),
        ("2026-07-13T16:00:00", None),
        # a Saturday
        ("2026-01-10T10:00:00", None),
    ],
)
def test_office_hours_are_those_of_their_zone(when: str, least: int | None) -> None:
    assert scheduled_bounds((OFFICE,), at(when)).least == least


def test_a_time_that_the_clocks_skip_begins_at_once_after_the_change() -> None:
    # on 29 March 2026 Berlin's clocks go from 2:00 to 3:00, at 1:00 UTC
    night = schedule("30 2 * * *", "1h", "Europe/Berlin", least=2)
    assert scheduled_bounds((night,), at("2026-03-29T00:59:59")).least is None
    assert scheduled_bounds((night,), at("2026-03-29T01:00:00")).least == 2
    assert scheduled_bounds((night,), at("2026-03-29T02:00:00")).least is None


def test_a_time_that_comes_twice_counts_once_and_its_duration_is_real_time() -> None:
    # on 25 October 2026 Berlin's clocks go from 3:00 to 2:00, at 1:00 UTC; 2:30 comes first at 0:30 UTC
    night = schedule("30 2 * * *", "30m", "Europe/Berlin", least=2)
    assert scheduled_bounds((night,), at("2026-10-25T00:30:00")).least == 2
    assert scheduled_bounds((night,), at("2026-10-25T01:00:00")).least is None
    assert scheduled_bounds((night,), at("2026-10-25T01:30:00")).least is None


def test_windows_that_overlap_keep_the_largest_minimum_and_the_smallest_maximum() -> None:
    both = (
        schedule("0 0 * * *", "24h", least=2, most=20),
        schedule("0 8 * * *", "10h", least=5, most=10),
    )
    assert scheduled_bounds(both, at("2026-05-05T09:00:00")) == ReplicaBounds(5, 10, at("2026-05-05T18:00:00"))
    assert scheduled_bounds(both, at("2026-05-05T20:00:00")) == ReplicaBounds(2, 20, at("2026-05-06T00:00:00"))


def test_a_minimum_above_a_maximum_is_cut_to_it() -> None:
    both = (schedule("0 0 * * *", "24h", least=9), schedule("0 0 * * *", "24h", most=3))
    found = scheduled_bounds(both, at("2026-05-05T09:00:00"))
    assert (found.least, found.most) == (3, 3)


def test_a_window_longer_than_its_period_never_ends() -> None:
    assert scheduled_bounds((schedule("0 0 * * *", "48h", least=2),), at("2026-05-05T00:00:00")).least == 2


@pytest.mark.parametrize(
    ("line", "zone"),
    [
        ("every monday", "UTC"),
        ("0 8 * *", "UTC"),
        ("0 8 * * *", "Mars/Olympus"),
        ("0 8 * * *", "America"),
        ("0 8 * * *", "a" * 500),
        ("0 8 * * *", "../../../etc/passwd"),
    ],
)
def test_what_cannot_be_read_is_told_and_the_rest_holds(line: str, zone: str) -> None:
    schedules = schedule(line, "1h", zone, least=3), schedule("0 0 * * *", "24h", least=2)
    assert scheduled_bounds(schedules, at("2026-05-05T09:00")).least == 2
    (mistake,) = schedule_mistakes(schedules)
    assert line in mistake


def test_without_schedules_there_is_no_bound_and_no_end() -> None:
    assert scheduled_bounds((), at("2026-05-05T09:00:00")) == ReplicaBounds(None, None, math.inf)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 59), st.integers(0, 23), st.integers(1, 72), st.none() | st.integers(0, 9), st.integers(0, 9)
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(int(at("2026-01-01")), int(at("2027-01-01"))),
)
def test_bounds_never_contradict_and_hold_until_they_say(
    lines: list[tuple[int, int, int, int | None, int]], now_s: int
) -> None:
    schedules = tuple(
        schedule(f"{minute} {hour} * * *", f"{hours}h", "America/New_York", least, most)
        for minute, hour, hours, least, most in lines
    )
    found = scheduled_bounds(schedules, float(now_s))
    if found.least is not None and found.most is not None:
        assert found.least <= found.most
    assert found.until_s > now_s
    between = scheduled_bounds(schedules, (now_s + found.until_s) / 2 - 1e-3)
    assert (between.least, between.most) == (found.least, found.most) or (now_s + found.until_s) / 2 - 1e-3 < now_s
