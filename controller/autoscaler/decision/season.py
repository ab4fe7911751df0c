# SPDX-License-Identifier: Apache-2.0
"""What the law Predictive remembers: level, trend, and the profile of a season, which outlives a restart."""

from __future__ import annotations

from typing import Final

import msgspec

# Places of a profile: at most so many, whatever the season and the window.
MOST_PLACES: Final = 288
_DIGITS: Final = 3


class PredictiveMemory(msgspec.Struct, frozen=True):
    """``observed_at_s``: of the last observation. ``count``: of observations. ``level`` and ``trend``: arrivals a
    second, and their growth in a window. ``profile``: arrivals a second by place in the season; negative: never seen.
    ``factor``: of today over the profile. ``season_s``: the season that the profile is of.
    """

    observed_at_s: float
    count: int = 0
    level: float = 0.0
    trend: float = 0.0
    profile: tuple[float, ...] = ()
    factor: float = 1.0
    season_s: float = 0.0


class KeptSeason(msgspec.Struct, frozen=True):
    """``profile``: with three digits, which are more than anybody knows. ``season_s``: of what season."""

    profile: tuple[float, ...]
    season_s: float


def kept_season(memory: object) -> KeptSeason | None:
    """What of a law's memory is slow to learn; None if nothing is."""
    if not isinstance(memory, PredictiveMemory) or max(memory.profile, default=-1.0) < 0:
        return None
    return KeptSeason(tuple(float(f"{one:.{_DIGITS}g}") for one in memory.profile[:MOST_PLACES]), memory.season_s)


def remembered_season(kept: KeptSeason, now_s: float) -> PredictiveMemory:
    """As after a restart: level, trend and how today compares are seen anew, the profile goes on."""
    return PredictiveMemory(now_s, profile=kept.profile, season_s=kept.season_s)
