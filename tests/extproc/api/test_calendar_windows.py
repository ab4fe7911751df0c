# SPDX-License-Identifier: Apache-2.0
"""Calendar windows: against an oracle that walks from minute to minute, and on the days on which clocks are set."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.api.calendar_windows import (
    CalendarWindow,
    WindowKind,
    calendar_window,
    parse_time_zone,
    utc_offset_changes,
    utc_offset_s,
)
from tests.examples import examples

KINDS: tuple[WindowKind, ...] = ("Hour", "Day", "Week", "Month")
# clocks that skip midnight, strike it twice, are set by half an hour, and a day that does not exist (Apia, 2011-12-30)
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",
    "America/Havana",
    "America/St_Johns",
    "Australia/Lord_Howe",
    "Asia/Beirut",
    "Asia/Kathmandu",
    "Pacific/Apia",
    "Africa/Cairo",
)
_1975, _2060 = 157_766_400, 2_840_140_800


def first_day(of: date, kind: WindowKind) -> date:
    match kind:
        case "Week":
            return of - timedelta(days=of.weekday())
        case "Month":
            return of.replace(day=1)
    return of


def label(at_s: int, kind: WindowKind, zone: tzinfo) -> object:
    """What calendar and clock show: instants with one label are in one window."""
    local = datetime.fromtimestamp(at_s, zone)
    if kind == "Hour":
        return local.date(), local.hour, local.utcoffset()
    return first_day(local.date(), kind)


def walked_end(at_s: int, kind: WindowKind, zone: tzinfo) -> int:
    """The first minute after ``at_s`` at which a later window is shown; clocks that go back do not begin it anew."""
    own, minute = label(at_s, kind, zone), at_s // 60 * 60
    step = 60 if kind in ("Hour", "Day") else 900
    while True:
        minute += step
        other = label(minute, kind, zone)
        if other != own if kind == "Hour" else other > own:  # type: ignore[operator] # both are dates
            return minute


@settings(max_examples=examples(300))
@given(st.sampled_from(ZONES), st.sampled_from(KINDS), st.integers(_1975, _2060))
def test_windows_tile_time(name: str, kind: WindowKind, at_s: int) -> None:
    zone = parse_time_zone(name)
    window = calendar_window(at_s, kind, zone)
    assert window.start_s <= at_s < window.end_s
    assert calendar_window(window.start_s, kind, zone) == window
    assert calendar_window(window.end_s - 1 + 0.999, kind, zone) == window
    assert calendar_window(window.end_s, kind, zone).start_s == window.end_s
    assert calendar_window(window.start_s - 1, kind, zone).end_s == window.start_s


@settings(max_examples=examples(60))
@given(st.sampled_from(ZONES), st.sampled_from(("Hour", "Day", "Week")), st.integers(_1975, _2060))
def test_a_window_ends_when_calendars_show_the_next_one(name: str, kind: WindowKind, at_s: int) -> None:
    zone = parse_time_zone(name)
    # from its beginning, where the walk cannot be inside of an hour that is shown twice
    start_s = calendar_window(at_s, kind, zone).start_s
    assert calendar_window(at_s, kind, zone).end_s == walked_end(start_s, kind, zone)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


@pytest.mark.parametrize(
    ("zone", "kind", "inside", "start", "end"),
    [
        # 23 and 25 hours
        ("Europe/Berlin", "Day", "2026-03-29T12:00+02:00", "2026-03-29T00:00+01:00", "2026-03-30T00:00+02:00"),
        ("Europe/Berlin", "Day", "2026-10-25T12:00+01:00", "2026-10-25T00:00+02:00", "2026-10-26T00:00+01:00"),
        # the hour from two to three twice: two windows of an hour
        ("Europe/Berlin", "Hour", "2026-10-25T02:30+02:00", "2026-10-25T02:00+02:00", "2026-10-25T02:00+01:00"),
        ("Europe/Berlin", "Hour", "2026-10-25T02:30+01:00", "2026-10-25T02:00+01:00", "2026-10-25T03:00+01:00"),
        # months that end, a leap year, a week over the new year
        ("UTC", "Month", "2028-02-29T23:59+00:00", "2028-02-01T00:00+00:00", "2028-03-01T00:00+00:00"),
        ("UTC", "Month", "2026-12-31T23:59+00:00", "2026-12-01T00:00+00:00", "2027-01-01T00:00+00:00"),
        ("Europe/Berlin", "Month", "2026-03-31T22:30+00:00", "2026-04-01T00:00+02:00", "2026-05-01T00:00+02:00"),
        ("UTC", "Week", "2027-01-01T12:00+00:00", "2026-12-28T00:00+00:00", "2027-01-04T00:00+00:00"),
        # midnight that was skipped, and midnight that came twice
        ("America/Sao_Paulo", "Day", "2018-11-04T12:00-02:00", "2018-11-04T01:00-02:00", "2018-11-05T00:00-02:00"),
        ("America/Havana", "Day", "2026-11-01T00:30-05:00", "2026-11-01T00:00-04:00", "2026-11-02T00:00-05:00"),
        # set back at one minute past midnight, until the evening before: the day has begun
        ("America/St_Johns", "Day", "2010-11-06T23:30-03:30", "2010-11-07T00:00-02:30", "2010-11-08T00:00-03:30"),
        # by half an hour
        ("Australia/Lord_Howe", "Hour", "2026-04-05T01:45+10:30", "2026-04-05T01:30+10:30", "2026-04-05T02:00+10:30"),
    ],
)
def test_days_on_which_clocks_are_set(zone: str, kind: WindowKind, inside: str, start: str, end: str) -> None:
    assert calendar_window(at(inside), kind, parse_time_zone(zone)) == CalendarWindow(at(start), at(end))


@pytest.mark.parametrize("name", ["Europe/Nowhere", "../../etc/passwd", "/etc/passwd", "Europe", "", "a" * 300, "a\0b"])
def test_a_zone_that_is_none_is_a_mistake(name: str) -> None:
    with pytest.raises(ValueError, match="no time zone that this machine knows"):
        parse_time_zone(name)


def test_utc_needs_no_file() -> None:
    assert parse_time_zone("UTC") is UTC


@settings(max_examples=examples(30))
@given(st.sampled_from(ZONES), st.integers(_1975, _2060), st.integers(1, 400 * 86_400))
def test_changes_of_the_offset_are_those_that_a_walk_finds(name: str, start_s: int, length_s: int) -> None:
    zone, end_s = parse_time_zone(name), start_s + length_s
    changes = utc_offset_changes(zone, start_s, end_s)
    assert changes[0] == (start_s, utc_offset_s(start_s, zone))
    for at_s, offset in changes[1:]:
        assert utc_offset_s(at_s, zone) == offset != utc_offset_s(at_s - 1, zone)
    for at_s in range(start_s, end_s, 21_600):
        assert [offset for since_s, offset in changes if since_s <= at_s][-1] == utc_offset_s(at_s, zone)
