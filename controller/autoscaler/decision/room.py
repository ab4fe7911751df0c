# SPDX-License-Identifier: Apache-2.0
"""Room for load to come back to where it was: as much as the last hour has seen, within a factor of load now.

Replicas take a minute and more to start, and until then a rise that nobody could foresee is served by those that there
are. Room for a multiple of load pays where load rises again soon, and is wasted at a peak, which is where it costs
most. What load has been is the best guess at how far it may rise. So there is room for ``headroom`` times the load of
now, but not for more than the largest load of the last hour. While no more than minutes are known, all of it is kept.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

_REMEMBERED_S: Final = 3600.0
_PLACE_S: Final = 300.0
# Of an hour, and the one that is leaving it.
MOST_PLACES: Final = 13
# Less is no hint at what load may rise to.
_KNOWN_S: Final = 300.0


class Peak(msgspec.Struct, frozen=True):
    """The highest load of a span of five minutes, in requests a second. ``at_s``: when it began."""

    at_s: float
    per_s: float


class Peaks(msgspec.Struct, frozen=True):
    """The last hour. ``since_s``: since when load is known without a gap of an hour. ``places``: by time."""

    since_s: float
    places: tuple[Peak, ...] = ()

    def seen(self, per_s: float, now_s: float) -> Peaks:
        """With the load of now."""
        places = [one for one in self.places if now_s - _REMEMBERED_S < one.at_s <= now_s]
        since_s = self.since_s if places else now_s
        if places and now_s - places[-1].at_s < _PLACE_S:
            places[-1] = Peak(places[-1].at_s, max(places[-1].per_s, per_s))
        else:
            places.append(Peak(now_s, per_s))
        return Peaks(since_s, tuple(places))

    def most(self, now_s: float) -> float:
        """The highest load; infinite while too little is known."""
        if now_s - self.since_s <= _KNOWN_S:
            return math.inf
        return max((one.per_s for one in self.places), default=math.inf)


def with_room(per_s: float, headroom: float, most: float) -> float:
    """The load that replicas should be able to carry. ``most``: see ``Peaks``."""
    return max(per_s, min(per_s * headroom, most))
