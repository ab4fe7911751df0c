# SPDX-License-Identifier: Apache-2.0
"""Shapes of load over time, in engines' worth, and arrivals that follow them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

# Of a day in the life of a service, by hour; scaled to a mean of 1.
_DAY: Final = (3, 2, 2, 2, 2, 3, 4, 6, 9, 11, 12, 12, 10, 11, 13, 13, 12, 10, 8, 7, 7, 6, 5, 4)


class Shape(Protocol):
    """Load by time."""

    @property
    def peak(self) -> float:
        """Never exceeded."""
        ...

    def at(self, at_s: float) -> float:
        """Engines' worth of requests at an instant."""
        ...


class Lines(msgspec.Struct, frozen=True):
    """Straight lines between ``points`` of time and load; the first and the last level go on. Two points at one instant
    are a step.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        """The highest point."""
        return max(load for _, load in self.points)

    def at(self, at_s: float) -> float:
        """By interpolation."""
        after = bisect_right(self.points, at_s, key=lambda one: one[0])
        if after == 0:
            return self.points[0][1]
        if after == len(self.points):
            return self.points[-1][1]
        (begin_s, low), (end_s, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * (at_s - begin_s) / (end_s - begin_s)


class Sines(msgspec.Struct, frozen=True):
    """``mean`` and ``waves`` of a period and an amplitude each; never below 0."""

    mean: float
    waves: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        """All waves at once."""
        return self.mean + sum(amplitude for _, amplitude in self.waves)

    def at(self, at_s: float) -> float:
        """The sum at an instant."""
        waves = (amplitude * math.sin(2 * math.pi * at_s / period_s) for period_s, amplitude in self.waves)
        return max(0.0, self.mean + sum(waves))


def steps(*levels: tuple[float, float]) -> Lines:
    """``levels``: from when on which load."""
    points = [levels[0]]
    for begin_s, load in levels[1:]:
        points += [(begin_s, points[-1][1]), (begin_s, load)]
    return Lines(tuple(points))


def spikes(base: float, *found: tuple[float, float, float]) -> Lines:
    """``found``: when, for how long, and up to which load."""
    levels = [(0.0, base)]
    for begin_s, length_s, load in found:
        levels += [(begin_s, load), (begin_s + length_s, base)]
    return steps(*levels)


def days(mean: float, day_s: float, begins_at: float = 0.0) -> Lines:
    """A day in ``day_s``, twice, so that any excerpt of one day can begin at the hour ``begins_at``."""
    hours = [mean * len(_DAY) * load / sum(_DAY) for load in _DAY]
    hour_s = day_s / len(hours)
    return Lines(tuple(((number - begins_at) * hour_s, load) for number, load in enumerate([*hours, *hours])))


def arrivals(shape: Shape, per_engine: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Instants of a Poisson process whose rate follows the shape, by thinning (Lewis and Shedler, 1979).

    ``per_engine``: requests a second that are one engine's worth.
    """
    highest = shape.peak * per_engine
    at_s = 0.0
    for _ in itertools.count():
        at_s += rng.expovariate(highest)
        if at_s >= duration_s:
            return
        if rng.random() * highest < shape.at(at_s) * per_engine:
            yield at_s
