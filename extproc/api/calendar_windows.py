# SPDX-License-Identifier: Apache-2.0
"""Calendars of time zones: hours, days, weeks and months as instants, whatever clocks do meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Literal
from zoneinfo import ZoneInfo

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

WindowKind = Literal["Hour", "Day", "Week", "Month"]
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


@lru_cache(maxsize=256)
def parse_time_zone(name: str) -> tzinfo:
    """Raises ValueError. Zones are files, and some names are those of folders, or longer than a file's may be."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        msg = f"'{name[:64]}' is no time zone that this machine knows; write a name such as Europe/Berlin, or UTC"
        raise ValueError(msg) from None


class CalendarWindow(msgspec.Struct, frozen=True):
    """A calendar window: from ``start_s`` on, until before ``end_s``, seconds since 1970."""

    start_s: int
    end_s: int


def calendar_window(at_s: float, kind: WindowKind, zone: tzinfo) -> CalendarWindow:
    """The window of ``kind`` in which the instant ``at_s`` is.

    A day begins at the first instant of its date, whether the clocks skip midnight or strike it twice; weeks and months
    begin with their first day. So days of 23 and 25 hours are whole. An hour ends where its clock changes.
    """
    at = int(at_s // 1)
    if kind == "Hour":
        return _hour(at, zone)
    local = datetime.fromtimestamp(at, zone).date()
    first = _first_date(local.year, local.month, local.day, kind)
    start_s = _begin(first, zone)
    following = _next_date(first, kind)
    end_s = _begin(following, zone)
    if at >= end_s:
        # the clock was set back over midnight: the date began, and is shown as the day before once more
        return CalendarWindow(end_s, _begin(_next_date(following, kind), zone))
    return CalendarWindow(start_s, end_s)


def _first_date(year: int, month: int, day: int, kind: WindowKind) -> datetime:
    date = datetime(year, month, day)  # noqa: DTZ001 - a date; its zone decides when it begins
    if kind == "Month":
        return date.replace(day=1)
    return date - timedelta(days=date.weekday()) if kind == "Week" else date


def _next_date(first: datetime, kind: WindowKind) -> datetime:
    if kind == "Month":
        return first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return first + timedelta(days=7 if kind == "Week" else 1)


def _begin(date: datetime, zone: tzinfo) -> int:
    """The first instant at which the clocks show ``date`` or later."""
    first, second = (int(date.replace(tzinfo=zone, fold=fold).timestamp()) for fold in (0, 1))
    if first <= second:
        # midnight is once, or twice
        return first
    # the clocks skip midnight: the instant at which they do
    return _first_instant(second, first, lambda at: datetime.fromtimestamp(at, zone).replace(tzinfo=None) >= date)


def _hour(at: int, zone: tzinfo) -> CalendarWindow:
    local = datetime.fromtimestamp(at, zone)
    offset = utc_offset_s(at, zone)
    start_s = at - local.minute * 60 - local.second
    end_s = start_s + _HOUR_S
    if utc_offset_s(start_s, zone) != offset:
        start_s = _first_instant(start_s, at, lambda one: utc_offset_s(one, zone) == offset)
    if utc_offset_s(end_s - 1, zone) != offset:
        end_s = _first_instant(at, end_s - 1, lambda one: utc_offset_s(one, zone) != offset)
    return CalendarWindow(start_s, end_s)


def utc_offset_s(at: int, zone: tzinfo) -> int:
    """Seconds that local time is ahead of UTC."""
    return round((datetime.fromtimestamp(at, zone).utcoffset() or timedelta()).total_seconds())


def utc_offset_changes(zone: tzinfo, start_s: int, end_s: int) -> list[tuple[int, int]]:
    """``utc_offset_s`` with the instant from which it holds: at ``start_s``, and at each change until ``end_s``."""
    found, at = [(start_s, utc_offset_s(start_s, zone))], start_s
    while at < end_s:
        following, known = min(at + _DAY_S, end_s), found[-1][1]
        if utc_offset_s(following, zone) != known:
            following = _first_instant(at, following, partial(_has_changed, known, zone))
            found.append((following, utc_offset_s(following, zone)))
        at = following
    return found


def _has_changed(known: int, zone: tzinfo, at: int) -> bool:
    return utc_offset_s(at, zone) != known


def _first_instant(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first instant after ``low``, and until ``high``, at which ``holds``; it does from some instant on."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
