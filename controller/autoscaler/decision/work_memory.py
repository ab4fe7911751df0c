# SPDX-License-Identifier: Apache-2.0
"""What the law Work remembers: its correction, and the load of the last hour, which outlives a restart."""

from __future__ import annotations

from typing import Final

import msgspec

from controller.autoscaler.decision.correction import Correction
from controller.autoscaler.decision.room import MOST_PLACES, Peak, Peaks

# More digits than anybody knows of a load; times are whole seconds.
_DIGITS: Final = 3
_MOST_PER_S: Final = 1e12


class WorkMemory(msgspec.Struct, frozen=True):
    """``at_s``: of the last answer. ``correction``: None before the first one. ``peaks``: None as well."""

    at_s: float
    correction: Correction | None = None
    peaks: Peaks | None = None

    def without_load(self, now_s: float) -> WorkMemory:
        """As of now, after a look at which nothing came: nothing is measured then."""
        correction = self.correction
        if correction is not None:
            correction = msgspec.structs.replace(correction, at_s=now_s, enough_since_s=None)
        return WorkMemory(now_s, correction, self.peaks)


def kept_peaks(memory: object) -> Peaks | None:
    """What of a law's memory is slow to learn; None if nothing is. Without it, a restart would look like a load of
    which nothing is known, and call for room at once.
    """
    if not isinstance(memory, WorkMemory) or memory.peaks is None:
        return None
    places = tuple(Peak(round(one.at_s), float(f"{one.per_s:.{_DIGITS}g}")) for one in memory.peaks.places)
    return Peaks(round(memory.peaks.since_s), places)


def remembered_peaks(kept: Peaks, now_s: float) -> WorkMemory | None:
    """As after a restart; None for what cannot have been seen."""
    times = [kept.since_s, *(one.at_s for one in kept.places)]
    is_seen = times == sorted(times) and times[0] >= 0 and times[-1] <= now_s + 1
    if not is_seen or len(kept.places) > MOST_PLACES or not all(0 <= one.per_s <= _MOST_PER_S for one in kept.places):
        return None
    return WorkMemory(now_s, peaks=kept)
