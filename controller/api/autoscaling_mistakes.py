# SPDX-License-Identifier: Apache-2.0
"""What a schema cannot say of AutoscalingPolicies: cron lines, time zones, metrics' names"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.api.autoscaling import Schedule

GATEWAY_METRICS: Final = (
    "requests_in_flight",
    "requests_queued",
    "requests_running",
    "tokens_in_flight",
    "kv_usage",
    "requests_per_second",
)
"""What gateways tell, by the names that a policy gives."""


def zone_of(name: str) -> tzinfo:
    """Raises ValueError. Zones are files, and some names are those of folders, or longer than a file's may be."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, OSError):
        raise ValueError(f"there is no time zone {name}") from None


def schedule_mistakes(schedules: Iterable[Schedule]) -> Iterator[str]:
    """One for each that cannot be read, and so bounds nothing."""
    for one in schedules:
        try:
            CronSim(one.start, datetime.fromtimestamp(0, UTC).astimezone(zone_of(one.time_zone)))
        except (CronSimError, ValueError) as error:
            yield mistake_of(one, error)


def mistake_of(schedule: Schedule, error: Exception) -> str:
    """In the words of who found it."""
    return f"schedule '{schedule.start}' in {schedule.time_zone}: {error}"
