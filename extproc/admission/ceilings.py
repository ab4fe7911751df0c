# SPDX-License-Identifier: Apache-2.0
"""How full engines may be for a band of priorities to send its requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.api.admission import FlowControl

# llm-d's dispatcher looks at its bands once a millisecond; its pace is counted in these looks.
LOOK_S: Final = 0.001


class Ceilings(Protocol):
    """Whether a band may send. Bands are numbered, the highest priority first."""

    def asked(self, band: int) -> None:
        """A request of the band has come."""
        ...

    def is_open(self, band: int, saturation: float, now: float) -> bool:
        """Whether the band may send its next request. ``saturation``: of the engines, 1 if all are full."""
        ...

    def sent(self, band: int, saturation: float, now: float) -> None:
        """The band has sent a request."""
        ...

    def opens_at_s(self, bands: Iterable[int], now: float) -> float:
        """When the first of ``bands`` that is closed for a time opens; infinite if there is none."""
        ...


class FixedCeilings:
    """Each band has one, whatever the engines do."""

    def __init__(self, ceilings: Sequence[float]) -> None:
        self._ceilings = ceilings

    def asked(self, band: int) -> None:
        """Nothing depends on it."""

    def is_open(self, band: int, saturation: float, now: float) -> bool:
        """Below its ceiling."""
        del now
        return saturation < self._ceilings[band]

    def sent(self, band: int, saturation: float, now: float) -> None:
        """Nothing depends on it."""

    def opens_at_s(self, bands: Iterable[int], now: float) -> float:
        """No band is closed for a time."""
        del bands, now
        return math.inf


class SoftReflectiveCeilings:
    """llm-d's soft reflective ceilings: ``1 - i * saturation / (N - 1)`` for the i-th of N bands that requests came to.

    At or above its ceiling a band sends one request every ``round(saturation / (1 - saturation))`` looks, and none once
    all engines are full. llm-d looks once a millisecond and at each arrival; here a look is a millisecond.
    """

    def __init__(self, bands: int) -> None:
        self._opens_at_s = [-math.inf] * bands
        self._used = [False] * bands

    def asked(self, band: int) -> None:
        """From now on the band counts."""
        self._used[band] = True

    def is_open(self, band: int, saturation: float, now: float) -> bool:
        """Below its ceiling, or when its time has come."""
        if saturation >= 1:
            return False
        return saturation < self._ceiling(band, saturation) or now >= self._opens_at_s[band]

    def sent(self, band: int, saturation: float, now: float) -> None:
        """At or above its ceiling, the band's next request must wait."""
        if self._ceiling(band, saturation) <= saturation < 1:
            looks = max(1.0, math.floor(saturation / (1 - saturation) + 0.5))
            self._opens_at_s[band] = now + looks * LOOK_S

    def opens_at_s(self, bands: Iterable[int], now: float) -> float:
        """Of those that have sent lately."""
        return min((at_s for band in bands if (at_s := self._opens_at_s[band]) > now), default=math.inf)

    def _ceiling(self, band: int, saturation: float) -> float:
        above, others = sum(self._used[:band]), sum(self._used) - self._used[band]
        return 1 - above * saturation / others if above else 1.0


def ceilings_of(control: FlowControl, bands: Sequence[float]) -> Ceilings:
    """``bands``: the configured ceiling of each, the highest priority first."""
    return SoftReflectiveCeilings(len(bands)) if control.ceilings == "SoftReflective" else FixedCeilings(bands)
