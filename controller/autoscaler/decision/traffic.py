# SPDX-License-Identifier: Apache-2.0
"""Clients' demand over time, from the merged counters of all gateways: rates and latencies of any window.

``TrafficHistory`` has the sums of one ModelServer, packed: a point a second for minutes, fewer of them for hours.
Counters of a point take 56 bytes, its histograms some 100; old points share them, as old latencies are not queried by
the second. So hundreds of servers fit. Totals are made when they are read.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import add
from struct import Struct
from typing import Final, NamedTuple, overload

import msgspec

from extproc.api.status_page_contents import TPOT_BOUNDS_S, TTFT_BOUNDS_S, percentile

# At a tick a second: five minutes of all points, then one of thirty for two hours.
FINE: Final = 300
COARSE: Final = 240
EACH: Final = 30
# Points with histograms of their own, the newest ones. Of older ones so many have those of the first of them.
RECENT: Final = 120
EACH_HISTOGRAM: Final = 30
EACH_OLD_HISTOGRAM: Final = 300
# Of a bucket.
MOST_COUNTED: Final = 2**32 - 1
TTFT_BUCKETS: Final = len(TTFT_BOUNDS_S) + 1
TPOT_BUCKETS: Final = len(TPOT_BOUNDS_S) + 1
# Nothing was counted. They are the same objects each time, and must not be changed.
NONE_OF_TTFT: Final = [0] * TTFT_BUCKETS
NONE_OF_TPOT: Final = [0] * TPOT_BUCKETS
_COUNTERS: Final = 7
# of both histograms: the first bucket that is not empty, and how many there are from there on
_HEAD: Final = Struct("<4B")
_COUNT: Final = "I"


class TrafficTotals(msgspec.Struct, frozen=True):
    """Sums over gateways since the first sample; they only grow. ``ttft`` and ``tpot``: requests by bucket, as in
    ``extproc.api.status_page_contents``. The other fields are those of ``Counted``.
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


class TrafficPoint(msgspec.Struct, frozen=True):
    """The sums at one instant."""

    at_s: float
    totals: TrafficTotals


class TrafficPoints(Sequence[TrafficPoint]):
    """Points that are decoded when they are read; their times need no decoding."""

    @property
    @abstractmethod
    def times(self) -> Sequence[float]:
        """Of the points."""

    @abstractmethod
    def counters(self, at: int) -> TrafficTotals:
        """The sums of one point without its histograms, which take long to make."""


class TrafficRates(msgspec.Struct, frozen=True):
    """A second, over ``window_s``. ``arrivals``: requests. ``prompt_tokens``, ``cached_tokens``, ``output_tokens``,
    ``prefill_work``: tokens of finished requests or, where known at arrival, of arrived ones.
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

    points: Sequence[TrafficPoint] = ()

    def latencies_s(self, percent: float, window_s: float, until_s: float) -> tuple[float | None, float | None]:
        """``ttft_s`` and ``tpot_s`` at once, which takes half as long."""
        new, old = self.totals_at(until_s), self.totals_at(until_s - window_s)
        if new is None:
            return None, None
        ttft = _since(new.ttft, old.ttft if old is not None else ())
        tpot = _since(new.tpot, old.tpot if old is not None else ())
        return percentile(ttft, TTFT_BOUNDS_S, percent), percentile(tpot, TPOT_BOUNDS_S, percent)

    @property
    def times(self) -> Sequence[float]:
        """Of the points."""
        return self.points.times if isinstance(self.points, TrafficPoints) else [one.at_s for one in self.points]

    def counters(self, at: int) -> TrafficTotals:
        """The sums of one point; histograms may be left out."""
        return self.points.counters(at) if isinstance(self.points, TrafficPoints) else self.points[at].totals

    def totals_at(self, at_s: float) -> TrafficTotals | None:
        """The sums at an instant: those of the last point that is not later; None before the first."""
        index = self._known(at_s)
        return self.points[index - 1].totals if index else None

    def rates(self, window_s: float, until_s: float) -> TrafficRates | None:
        """Means of the last ``window_s``, or of its part that has points; None without two points in it."""
        last = self._known(until_s) - 1
        first = max(0, self._known(until_s - window_s) - 1)
        if last <= first:
            return None
        new, old = self.counters(last), self.counters(first)
        span_s = self._time(last) - self._time(first)
        return TrafficRates(
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
        return self.points.times[at] if isinstance(self.points, TrafficPoints) else self.points[at].at_s

    def _known(self, at_s: float) -> int:
        """How many points are not later."""
        if isinstance(self.points, TrafficPoints):
            return bisect_right(self.points.times, at_s)
        return bisect_right(self.points, at_s, key=lambda one: one.at_s)

    def _histogram(self, name: str, window_s: float, until_s: float) -> tuple[int, ...]:
        new, old = self.totals_at(until_s), self.totals_at(until_s - window_s)
        if new is None:
            return ()
        return _since(getattr(new, name), getattr(old, name) if old is not None else ())


def _since(counts: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    known = len(before)
    return tuple(count - (before[index] if index < known else 0) for index, count in enumerate(counts))


class TrafficCounters(msgspec.Struct):
    """Counters in the order of ``TrafficTotals``, and buckets; they only grow."""

    counters: list[float] = msgspec.field(default_factory=lambda: [0.0] * 7)
    ttft: list[int] = msgspec.field(default_factory=lambda: [0] * TTFT_BUCKETS)
    tpot: list[int] = msgspec.field(default_factory=lambda: [0] * TPOT_BUCKETS)

    def add(self, more: TrafficCounters, share: float = 1.0) -> None:
        """Add ``share`` of ``more``."""
        if share == 1.0:
            self.counters = list(map(add, self.counters, more.counters))
        else:
            self.counters = [one + share * other for one, other in zip(self.counters, more.counters, strict=True)]
        self.ttft = _added(self.ttft, more.ttft, share)
        self.tpot = _added(self.tpot, more.tpot, share)

    def packed_histograms(self) -> bytes:
        """As few bytes as a point needs."""
        ttft_at, ttft = _trimmed(self.ttft)
        tpot_at, tpot = _trimmed(self.tpot)
        head = _HEAD.pack(ttft_at, len(ttft), tpot_at, len(tpot))
        return head + array(_COUNT, ttft + tpot).tobytes()


class TrafficHistory:
    """``tick`` is called for all servers at the same instants, so that their points can be added up."""

    def __init__(self) -> None:
        # a row each: the thinned ones first
        self._times = array("d")
        self._counters = array("d")
        self._histograms: list[bytes] = []
        self._thinned = 0
        self._latest = TrafficCounters()
        self._latest_histograms = self._latest.packed_histograms()

    def add_point(self, number: int, at_s: float, sums: TrafficCounters | None) -> None:
        """``number``: of the tick, the same for all servers. ``sums``: None if they are as they were."""
        if sums is not None:
            self._latest = TrafficCounters(list(sums.counters), NONE_OF_TTFT, NONE_OF_TPOT)
            self._latest_histograms = sums.packed_histograms()
        self._times.append(at_s)
        self._counters.extend(self._latest.counters)
        self._histograms.append(self._latest_histograms)
        rows = len(self._times)
        if rows - self._thinned > RECENT and (number - RECENT) % EACH_HISTOGRAM:
            self._share(rows - 1 - RECENT)
        if rows - self._thinned > FINE:
            self._thin(number - FINE)

    def _thin(self, number: int) -> None:
        """``number``: of the tick of the oldest row that is not thinned yet."""
        if number % EACH:
            self._drop(self._thinned)
            return
        if number % EACH_OLD_HISTOGRAM:
            self._share(self._thinned)
        if self._thinned == COARSE:
            self._drop(0)
        else:
            self._thinned += 1

    def _share(self, at: int) -> None:
        if at > 0:
            self._histograms[at] = self._histograms[at - 1]

    def _drop(self, at: int) -> None:
        del self._times[at]
        del self._counters[at * _COUNTERS : (at + 1) * _COUNTERS]
        del self._histograms[at]

    def spread_over(self, more: TrafficCounters, since_s: float, until_s: float) -> None:
        """Spread ``more`` evenly over the span since the last point, as the times of its events are unknown."""
        for at in range(bisect_right(self._times, since_s), len(self._times)):
            share = min(1.0, max(0.0, (self._times[at] - since_s) / (until_s - since_s)))
            for index, count in enumerate(more.counters, at * _COUNTERS):
                self._counters[index] += share * count
            self._histograms[at] = _with(self._histograms[at], more, share)

    def points(self, now: float, sums: TrafficCounters) -> PackedPoints:
        """All points, and one of now."""
        times, counters, histograms = self._times[:], self._counters[:], self._histograms[:]
        if times and times[-1] >= now:
            del times[-1], counters[-_COUNTERS:], histograms[-1]
        times.append(now)
        counters.extend(sums.counters)
        histograms.append(sums.packed_histograms())
        return PackedPoints(times, (PackedServerHistory(counters, histograms),))


class PackedServerHistory(NamedTuple):
    """Of one server, by time. ``counters``: seven of each point, one point after the other."""

    counters: array[float]
    histograms: Sequence[bytes]

    def has_point(self, from_end: int) -> bool:
        """``from_end``: -1 is the last one."""
        return len(self.histograms) >= -from_end

    def counters_at(self, from_end: int) -> Sequence[float]:
        """Of one point."""
        begin = len(self.counters) + from_end * _COUNTERS
        return self.counters[begin : begin + _COUNTERS]

    def sums_at(self, from_end: int) -> TrafficCounters:
        """One point."""
        return _unpacked(list(self.counters_at(from_end)), self.histograms[from_end])


class PackedPoints(TrafficPoints):
    """Of one server, or the sums of several; shorter histories count from their first point on."""

    def __init__(self, times: Sequence[float], series: tuple[PackedServerHistory, ...]) -> None:
        """``times``: of the longest of ``series``; the others are as long or shorter, and end with it."""
        self._times = times
        self._series = series

    @property
    def times(self) -> Sequence[float]:
        """Of the points."""
        return self._times

    def counters(self, at: int) -> TrafficTotals:
        """The sums of one point without its histograms."""
        if len(self._series) == 1:
            # as nearly always, and some fifty times in a decision
            counters = self._series[0].counters
            begin = at * _COUNTERS if at >= 0 else len(counters) + at * _COUNTERS
            return _counted(counters[begin : begin + _COUNTERS])
        from_end = at % len(self._times) - len(self._times)
        found = [series.counters_at(from_end) for series in self._series if series.has_point(from_end)]
        return _counted([sum(each) for each in zip(*found, strict=True)])

    def __len__(self) -> int:
        return len(self._times)

    @overload
    def __getitem__(self, at: int) -> TrafficPoint: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TrafficPoint, ...]: ...
    def __getitem__(self, at: int | slice) -> TrafficPoint | tuple[TrafficPoint, ...]:
        if isinstance(at, slice):
            return tuple(self[index] for index in range(*at.indices(len(self))))
        length = len(self._times)
        if not -length <= at < length:
            raise IndexError(at)
        from_end = at % length - length
        found = [series.sums_at(from_end) for series in self._series if series.has_point(from_end)]
        sums = found[0]
        for one in found[1:]:
            sums.add(one)
        return TrafficPoint(self._times[at], _totals(sums))


def sum_traffic(several: Sequence[PackedPoints]) -> PackedPoints:
    """Points of servers that had the same ticks, as one."""
    if len(several) == 1:
        return several[0]
    longest = max((one.times for one in several), key=len, default=())
    return PackedPoints(longest, tuple(series for one in several for series in one._series))  # noqa: SLF001 - its own kind


def _unpacked(counters: list[float], packed: bytes) -> TrafficCounters:
    ttft_at, ttft_length, tpot_at, _ = _HEAD.unpack_from(packed)
    counts = array(_COUNT, packed[_HEAD.size :]).tolist()
    return TrafficCounters(
        counters,
        _padded(ttft_at, counts[:ttft_length], TTFT_BUCKETS),
        _padded(tpot_at, counts[ttft_length:], TPOT_BUCKETS),
    )


def _totals(sums: TrafficCounters) -> TrafficTotals:
    return msgspec.structs.replace(_counted(sums.counters), ttft=tuple(sums.ttft), tpot=tuple(sums.tpot))


def _counted(counters: Sequence[float]) -> TrafficTotals:
    arrivals, refused, finished, prompt_tokens, cached_tokens, output_tokens, prefill_work = counters
    return TrafficTotals(arrivals, refused, finished, prompt_tokens, cached_tokens, output_tokens, prefill_work)


def _with(packed: bytes, more: TrafficCounters, share: float) -> bytes:
    sums = _unpacked([0.0] * _COUNTERS, packed)
    sums.add(more, share)
    return sums.packed_histograms()


def _added(counts: list[int], more: list[int], share: float) -> list[int]:
    if more is NONE_OF_TTFT or more is NONE_OF_TPOT or not any(more):
        return counts
    parts = more if share == 1.0 else [int(share * one) for one in more]
    found = list(map(add, counts, parts))
    return found if max(found) <= MOST_COUNTED else [min(MOST_COUNTED, one) for one in found]


def _trimmed(counts: list[int]) -> tuple[int, list[int]]:
    filled = [at for at, count in enumerate(counts) if count]
    return (filled[0], counts[filled[0] : filled[-1] + 1]) if filled else (0, [])


def _padded(at: int, counts: list[int], length: int) -> list[int]:
    return [0] * at + counts + [0] * (length - at - len(counts))
