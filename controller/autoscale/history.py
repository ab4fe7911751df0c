# SPDX-License-Identifier: Apache-2.0
"""The sums of one ModelServer over time, packed: a point a second for minutes, fewer of them for hours.

A point takes some 200 bytes, and next to nothing while the sums stand still, so that hundreds of servers fit. Totals are
made when somebody looks.
"""

from __future__ import annotations

from array import array
from collections import deque
from operator import add
from struct import Struct
from typing import TYPE_CHECKING, Final, overload

import msgspec

from controller.autoscale.traffic import Point, Points, Totals
from extproc.config.demand import TPOT_BOUNDS_S, TTFT_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Sequence

# At a tick a second: five minutes of all points, then one of thirty for two hours.
FINE: Final = 300
COARSE: Final = 240
EACH: Final = 30
# Of a bucket.
MOST_COUNTED: Final = 2**32 - 1

TTFT_BUCKETS: Final = len(TTFT_BOUNDS_S) + 1
TPOT_BUCKETS: Final = len(TPOT_BOUNDS_S) + 1
# Nothing was counted. They are the same objects each time, and must not be changed.
NONE_OF_TTFT: Final = [0] * TTFT_BUCKETS
NONE_OF_TPOT: Final = [0] * TPOT_BUCKETS

# the counters, then of both histograms: the first bucket that is not empty, and how many there are from there on
_HEAD: Final = Struct("<7d4B")
_COUNT: Final = "I"
_COUNT_BYTES: Final = array(_COUNT).itemsize


class Sums(msgspec.Struct):
    """Counters in the order of ``Totals``, and buckets; they only grow."""

    counters: list[float] = msgspec.field(default_factory=lambda: [0.0] * 7)
    ttft: list[int] = msgspec.field(default_factory=lambda: [0] * TTFT_BUCKETS)
    tpot: list[int] = msgspec.field(default_factory=lambda: [0] * TPOT_BUCKETS)

    def add(self, more: Sums, share: float = 1.0) -> None:
        """Add ``share`` of ``more``."""
        if share == 1.0:
            self.counters = list(map(add, self.counters, more.counters))
        else:
            self.counters = [one + share * other for one, other in zip(self.counters, more.counters, strict=True)]
        self.ttft = _added(self.ttft, more.ttft, share)
        self.tpot = _added(self.tpot, more.tpot, share)

    def packed(self) -> bytes:
        """As few bytes as a point needs."""
        ttft_at, ttft = _trimmed(self.ttft)
        tpot_at, tpot = _trimmed(self.tpot)
        head = _HEAD.pack(*self.counters, ttft_at, len(ttft), tpot_at, len(tpot))
        return head + array(_COUNT, ttft + tpot).tobytes()


class History:
    """``tick`` is called for all servers at the same instants, so that their points can be added up."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._packed: deque[bytes] = deque()
        self._old_times: deque[float] = deque(maxlen=COARSE)
        self._old_packed: deque[bytes] = deque(maxlen=COARSE)
        self._latest = Sums().packed()

    def tick(self, number: int, at_s: float, sums: Sums | None) -> None:
        """``number``: of the tick, the same for all servers. ``sums``: None if they are as they were."""
        if sums is not None:
            self._latest = sums.packed()
        self._times.append(at_s)
        self._packed.append(self._latest)
        if len(self._times) > FINE:
            time, packed = self._times.popleft(), self._packed.popleft()
            if (number - FINE) % EACH == 0:
                self._old_times.append(time)
                self._old_packed.append(packed)

    def spread(self, more: Sums, since_s: float, until_s: float) -> None:
        """``more`` was counted at some time in between, nobody knows when: evenly."""
        for at in range(len(self._times) - 1, -1, -1):
            time = self._times[at]
            if time <= since_s:
                return
            self._packed[at] = _with(self._packed[at], more, (time - since_s) / (until_s - since_s))
        for at in range(len(self._old_times) - 1, -1, -1):
            time = self._old_times[at]
            if time <= since_s:
                return
            self._old_packed[at] = _with(self._old_packed[at], more, (time - since_s) / (until_s - since_s))

    def points(self, now: float, sums: Sums) -> PackedPoints:
        """All points, and one of now."""
        times, packed = (*self._old_times, *self._times), (*self._old_packed, *self._packed)
        if times and times[-1] >= now:
            times, packed = times[:-1], packed[:-1]
        return PackedPoints((*times, now), ((*packed, sums.packed()),))


class PackedPoints(Points):
    """Of one server, or the sums of several; those that are known for less long count from their first point on."""

    def __init__(self, times: tuple[float, ...], packed: tuple[tuple[bytes, ...], ...]) -> None:
        """``times``: of the longest of ``packed``; the others are as long or shorter, and end with it."""
        self._times = times
        self._series = packed

    @property
    def times(self) -> Sequence[float]:
        """Of the points."""
        return self._times

    def counters(self, at: int) -> Totals:
        """The sums of one point without its histograms."""
        from_end = at % len(self._times) - len(self._times)
        heads = [_HEAD.unpack_from(series[from_end])[:7] for series in self._series if len(series) >= -from_end]
        return _counters(heads[0] if len(heads) == 1 else [sum(each) for each in zip(*heads, strict=True)])

    def __len__(self) -> int:
        return len(self._times)

    @overload
    def __getitem__(self, at: int) -> Point: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Point, ...]: ...
    def __getitem__(self, at: int | slice) -> Point | tuple[Point, ...]:
        if isinstance(at, slice):
            return tuple(self[index] for index in range(*at.indices(len(self))))
        length = len(self._times)
        if not -length <= at < length:
            raise IndexError(at)
        from_end = at % length - length
        found = [series[from_end] for series in self._series if len(series) >= -from_end]
        if len(found) == 1:
            return Point(self._times[at], _totals(_unpacked(found[0])))
        sums = Sums()
        for one in found:
            sums.add(_unpacked(one))
        return Point(self._times[at], _totals(sums))


def summed(several: Sequence[PackedPoints]) -> PackedPoints:
    """Points of servers that had the same ticks, as one."""
    if len(several) == 1:
        return several[0]
    longest = max((one.times for one in several), key=len, default=())
    return PackedPoints(tuple(longest), tuple(series for one in several for series in one._series))  # noqa: SLF001 - its own kind


def _unpacked(packed: bytes) -> Sums:
    *counters, ttft_at, ttft_length, tpot_at, _ = _HEAD.unpack_from(packed)
    counts = array(_COUNT, packed[_HEAD.size :]).tolist()
    return Sums(
        counters,
        _padded(ttft_at, counts[:ttft_length], TTFT_BUCKETS),
        _padded(tpot_at, counts[ttft_length:], TPOT_BUCKETS),
    )


def _totals(sums: Sums) -> Totals:
    arrivals, refused, finished, prompt_tokens, cached_tokens, output_tokens, prefill_work = sums.counters
    return Totals(
        arrivals,
        refused,
        finished,
        prompt_tokens,
        cached_tokens,
        output_tokens,
        prefill_work,
        tuple(sums.ttft),
        tuple(sums.tpot),
    )


def _counters(values: Sequence[float]) -> Totals:
    arrivals, refused, finished, prompt_tokens, cached_tokens, output_tokens, prefill_work = values
    return Totals(arrivals, refused, finished, prompt_tokens, cached_tokens, output_tokens, prefill_work)


def _with(packed: bytes, more: Sums, share: float) -> bytes:
    sums = _unpacked(packed)
    sums.add(more, min(1.0, max(0.0, share)))
    return sums.packed()


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
