# SPDX-License-Identifier: Apache-2.0
"""What clients asked for over time, by the merged counts of all gateways.

Rates and latencies of any window come from it.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from extproc.api.status_pages import TPOT_BOUNDS_S, TTFT_BOUNDS_S, percentile


class Totals(msgspec.Struct, frozen=True):
    """Sums over gateways since the first sample; they only grow. ``ttft`` and ``tpot``: requests by bucket, as in
    ``extproc.api.status_pages``. The other fields are those of ``Counted``.
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
    def counters(self, at: int) -> Totals:
        """The sums of one point without its histograms, which take long to make."""


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

    def latencies_s(self, percent: float, window_s: float, until_s: float) -> tuple[float | None, float | None]:
        """``ttft_s`` and ``tpot_s`` at once, which takes half as long."""
        new, old = self.at(until_s), self.at(until_s - window_s)
        if new is None:
            return None, None
        ttft = _since(new.ttft, old.ttft if old is not None else ())
        tpot = _since(new.tpot, old.tpot if old is not None else ())
        return percentile(ttft, TTFT_BOUNDS_S, percent), percentile(tpot, TPOT_BOUNDS_S, percent)

    @property
    def times(self) -> Sequence[float]:
        """Of the points."""
        return self.points.times if isinstance(self.points, Points) else [one.at_s for one in self.points]

    def counters(self, at: int) -> Totals:
        """The sums of one point; histograms may be left out."""
        return self.points.counters(at) if isinstance(self.points, Points) else self.points[at].totals

    def at(self, at_s: float) -> Totals | None:
        """The sums at an instant: those of the last point that is not later; None before the first."""
        index = self._known(at_s)
        return self.points[index - 1].totals if index else None

    def rates(self, window_s: float, until_s: float) -> Rates | None:
        """Means of the last ``window_s``, or of as much of it as is known; None without two points in it."""
        last = self._known(until_s) - 1
        first = max(0, self._known(until_s - window_s) - 1)
        if last <= first:
            return None
        new, old = self.counters(last), self.counters(first)
        span_s = self._time(last) - self._time(first)
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

    def _time(self, at: int) -> float:
        return self.points.times[at] if isinstance(self.points, Points) else self.points[at].at_s

    def _known(self, at_s: float) -> int:
        """How many points are not later."""
        if isinstance(self.points, Points):
            return bisect_right(self.points.times, at_s)
        return bisect_right(self.points, at_s, key=lambda one: one.at_s)

    def _histogram(self, name: str, window_s: float, until_s: float) -> tuple[int, ...]:
        new, old = self.at(until_s), self.at(until_s - window_s)
        if new is None:
            return ()
        return _since(getattr(new, name), getattr(old, name) if old is not None else ())


def _since(counts: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    known = len(before)
    return tuple(count - (before[index] if index < known else 0) for index, count in enumerate(counts))
