# SPDX-License-Identifier: Apache-2.0
"""Bounds by time: windows that begin at a cron line's times and hold for a duration.

Cron lines are read in their own time zone. Where clocks change, they do what Debian's cron does: a time that does not
exist is taken at once after the change, and a time that exists twice counts once. A duration is time that passes,
whatever clocks show.

Where windows overlap, the largest minimum and the smallest maximum hold. Where these contradict, the maximum does: it
is the one that limits what is spent.
"""

from __future__ import annotations

import math
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

import msgspec
from cronsim import CronSim, CronSimError

from controller.api.autoscaling_mistakes import mistake_of, zone_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.api.autoscaling import Schedule


class Bounds(msgspec.Struct, frozen=True):
    """``least`` and ``most``: replicas; None: no bound. ``until_s``: they hold until then. ``problems``: schedules that
    cannot be read.
    """

    least: int | None = None
    most: int | None = None
    until_s: float = math.inf
    problems: tuple[str, ...] = ()


def bounds_at(schedules: Sequence[Schedule], now_s: float) -> Bounds:
    """``now_s``: since 1970."""
    least: list[int] = []
    most: list[int] = []
    until_s, problems = math.inf, []
    for schedule in schedules:
        try:
            began_s, next_s = _neighbours(schedule.start, zone_of(schedule.time_zone), now_s)
        except (CronSimError, ValueError) as error:
            problems.append(mistake_of(schedule, error))
            continue
        until_s = min(until_s, next_s)
        ends_s = began_s + schedule.duration
        if now_s < ends_s:
            until_s = min(until_s, ends_s)
            least += [schedule.min_replicas] if schedule.min_replicas is not None else []
            most += [schedule.max_replicas] if schedule.max_replicas is not None else []
    highest = min(most) if most else None
    lowest = max(least) if least else None
    if lowest is not None and highest is not None:
        lowest = min(lowest, highest)
    return Bounds(lowest, highest, until_s, tuple(problems))


def _neighbours(line: str, zone: tzinfo, now_s: float) -> tuple[float, float]:
    """The last time that is not later than ``now_s``, and the next one; infinite where there is none."""
    now = datetime.fromtimestamp(now_s, zone)
    # backwards, a fraction of a second makes the present second count
    past = _first(line, now.replace(microsecond=1), -math.inf, reverse=True)
    return past, _first(line, now, math.inf, reverse=False)


def _first(line: str, now: datetime, otherwise: float, *, reverse: bool) -> float:
    times = CronSim(line, now, reverse=reverse)
    found = next(times, None)
    return found.timestamp() if found is not None else otherwise
