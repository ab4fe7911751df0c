# SPDX-License-Identifier: Apache-2.0
"""What clients asked for over time: merged counts of all gateways, from which rates and latencies of any window come."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from extproc.config.demand import TPOT_BOUNDS_S, TTFT_BOUNDS_S, percentile


class Totals(msgspec.Struct, frozen=True):
    """Sums over gateways since the first sample; they only grow. ``ttft`` and ``tpot``: requests by bucket, as in
    ``extproc.config.demand``. The other fields are those of ``Counted``.
    """

    arrivals: float = 0.0
    refused: float = 0.0
    finished: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    prefill_work: float = 0.0
    ttft: tuple[int, ...] = ()
    tpot: tuple[int, ...] = ()


class Point(msgspec.Struct, frozen=True):
    """The sums at one instant."""

    at_s: float
    totals: Totals


class Points(Sequence[Point]):
    """Points that are made when somebody looks at them; their times are known without."""

    @property
    @abstractmethod
    def times(self) -> Sequence[float]:
        """Of the points."""

    @abstractmethod
    def counted(self, at: int) -> Totals:
        """The sums of a point without its histograms, which are most of the work. ``at``: from 0."""


class Rates(msgspec.Struct, frozen=True):
    """A second, over ``window_s``. ``arrivals``: requests. ``prompt_tokens``, ``cached_tokens``, ``output_tokens``,
    ``prefill_work``: tokens of what finished or, where known sooner, arrived.
    """

    window_s: float
    arrivals: float
    finished: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    prefill_work: float


class Traffic(msgspec.Struct, frozen=True):
    """``points``: by time, the last one the newest."""

    points: Sequence[Point] = ()

    def at(self, at_s: float) -> Totals | None:
        """The sums at an instant: those of the last point that is not later; None before the first."""
        index = self.known(at_s)
        return self.points[index - 1].totals if index else None

    @property
    def times(self) -> Sequence[float]:
        """Of the points."""
        points = self.points
        return points.times if isinstance(points, Points) else [one.at_s for one in points]

    def counted(self, index: int) -> Totals:
        """The sums of a point, possibly without its histograms. ``index``: from 0."""
        points = self.points
        return points.counted(index) if isinstance(points, Points) else points[index].totals

    def rates(self, window_s: float, until_s: float) -> Rates | None:
        """Means of the last ``window_s``, or of as much of it as is known; None without two points in it."""
        times = self.times
        last = bisect_right(times, until_s) - 1
        first = max(0, bisect_right(times, until_s - window_s) - 1)
        if last <= first:
            return None
        new, old = self.counted(last), self.counted(first)
        span_s = times[last] - times[first]
        return Rates(
            window_s=span_s,
            arrivals=(new.arrivals - old.arrivals) / span_s,
            finished=(new.finished - old.finished) / span_s,
            prompt_tokens=(new.prompt_tokens - old.prompt_tokens) / span_s,
            cached_tokens=(new.cached_tokens - old.cached_tokens) / span_s,
            output_tokens=(new.output_tokens - old.output_tokens) / span_s,
            prefill_work=(new.prefill_work - old.prefill_work) / span_s,
        )

    def ttft_s(self, percent: float, window_s: float, until_s: float) -> float | None:
        """The percentile of times to first token that became known in the window; None without any."""
        return percentile(self._histogram("ttft", window_s, until_s), TTFT_BOUNDS_S, percent)

    def tpot_s(self, percent: float, window_s: float, until_s: float) -> float | None:
        """The percentile of times per output token that became known in the window; None without any."""
        return percentile(self._histogram("tpot", window_s, until_s), TPOT_BOUNDS_S, percent)

    def known(self, at_s: float) -> int:
        """How many points are not later."""
        if isinstance(self.points, Points):
            return bisect_right(self.points.times, at_s)
        return bisect_right(self.points, at_s, key=lambda one: one.at_s)

    def _histogram(self, name: str, window_s: float, until_s: float) -> tuple[int, ...]:
        new, old = self.at(until_s), self.at(until_s - window_s)
        if new is None:
            return ()
        counts: tuple[int, ...] = getattr(new, name)
        before: tuple[int, ...] = getattr(old, name) if old is not None else ()
        return tuple(count - (before[index] if index < len(before) else 0) for index, count in enumerate(counts))
