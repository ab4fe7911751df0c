# SPDX-License-Identifier: Apache-2.0
"""Attainment of an objective, its error budget and burn rate, by what processes have counted hour by hour."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from extproc.api.status_page_contents import SloObjectiveCounts

if TYPE_CHECKING:
    from collections.abc import Iterable


class Attainment(msgspec.Struct):
    """One objective, over all processes. ``hours``: good and bad requests by hour since 1970."""

    counts: SloObjectiveCounts
    hours: dict[int, tuple[int, int]]

    @property
    def requests(self) -> int:
        """Those that count."""
        return sum(good + bad for good, bad in self.hours.values())

    @property
    def missed_requests(self) -> int:
        """Those that missed it."""
        return sum(bad for _, bad in self.hours.values())

    @property
    def budget_left(self) -> float:
        """The share of the error budget that is left; negative if more requests missed than may."""
        allowed = (1.0 - self.counts.share) * self.requests
        return 1.0 - self.missed_requests / allowed if allowed else 1.0

    def burn_rate(self, hour: int) -> float | None:
        """Of this hour and the one before: 1 uses the error budget up in exactly the window; None: no requests."""
        recent = [self.hours[one] for one in (hour - 1, hour) if one in self.hours]
        requests = sum(map(sum, recent))
        return sum(bad for _, bad in recent) / requests / (1.0 - self.counts.share) if requests else None

    def worst_hours(self, most: int) -> list[tuple[int, int, int]]:
        """The hours in which most requests missed it: hour, missed, all."""
        missed = [(hour, bad, good + bad) for hour, (good, bad) in self.hours.items() if bad]
        return sorted(missed, key=_by_missed)[:most]


def _by_missed(hour: tuple[int, int, int]) -> tuple[int, int]:
    return -hour[1], -hour[0]


def merge_attainments(counts: Iterable[SloObjectiveCounts]) -> list[Attainment]:
    """The sum over processes, in the order of names. Targets are those that came last."""
    found: dict[tuple[str, str, str], Attainment] = {}
    for one in counts:
        key = (one.route, one.name, one.objective)
        known = found.get(key)
        hours = defaultdict(lambda: (0, 0), {} if known is None else known.hours)
        for hour, good, bad in one.hours:
            hours[hour] = hours[hour][0] + good, hours[hour][1] + bad
        excluded = one.excluded + (0 if known is None else known.counts.excluded)
        found[key] = Attainment(msgspec.structs.replace(one, excluded=excluded), dict(hours))
    return [found[key] for key in sorted(found)]
