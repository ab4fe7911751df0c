# SPDX-License-Identifier: Apache-2.0
"""What was counted in each of the newest bins of time, which windows of several lengths are made of."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from controller.autoscaler.decision.traffic import Totals, Traffic

BINS_PER_WINDOW: Final = 3
# Windows of 1, 2, 4, 8 and 16 times the shortest.
_DOUBLINGS: Final = 4
MOST_BINS: Final = BINS_PER_WINDOW * 2**_DOUBLINGS


class Bins(msgspec.Struct, frozen=True):
    """``edges``: the sums at the ends of bins, the oldest first, one more than there are bins. ``is_still``: they are
    all the same.
    """

    bin_s: float
    edges: Sequence[Totals]
    is_still: bool

    @staticmethod
    def of(traffic: Traffic, times: Sequence[float], *, bin_s: float, now_s: float) -> Bins | None:
        """The newest ones, as many as the longest window has. ``times``: of the points. None without two points."""
        last = bisect_right(times, now_s) - 1
        if last < 1:
            return None
        most, end_s = MOST_BINS, times[last]
        # a point more, as that before the first bin's begin counts
        first = max(0, bisect_right(times, end_s - most * bin_s) - 1)
        span_s = end_s - times[first]
        if span_s <= 0:
            return None
        old, new = traffic.counters(first), traffic.counters(last)
        # sums only grow
        is_still = (old.arrivals, old.refused, old.finished) == (new.arrivals, new.refused, new.finished)
        if span_s < bin_s:
            return Bins(span_s, (old, new), is_still)
        count = min(most, int(span_s / bin_s + 1e-6))
        if is_still:
            return Bins(bin_s, (old,) * (count + 1), is_still)
        ends = (max(times[0], end_s - bin_s * (count - index)) for index in range(count + 1))
        known: dict[int, Totals] = {}
        return Bins(bin_s, [_sums_at(traffic, times, end, bin_s, known) for end in ends], is_still)

    def differences(self, value: Callable[[Totals], float]) -> list[float]:
        """What was counted in each bin."""
        values = [value(edge) for edge in self.edges]
        return [new - old for old, new in itertools.pairwise(values)]


def _sums_at(traffic: Traffic, times: Sequence[float], at_s: float, bin_s: float, known: dict[int, Totals]) -> Totals:
    """Of the last point, or where points are further apart than bins, between two of them. ``known``: by index."""
    index = bisect_right(times, at_s + 1e-6) - 1
    if index not in known:
        known[index] = traffic.counters(index)
    old = known[index]
    if index + 1 >= len(times) or times[index + 1] - times[index] <= bin_s:
        return old
    if index + 1 not in known:
        known[index + 1] = traffic.counters(index + 1)
    new, share = known[index + 1], (at_s - times[index]) / (times[index + 1] - times[index])
    return Totals(
        arrivals=old.arrivals + share * (new.arrivals - old.arrivals),
        refused=old.refused + share * (new.refused - old.refused),
        finished=old.finished + share * (new.finished - old.finished),
        prompt_tokens=old.prompt_tokens + share * (new.prompt_tokens - old.prompt_tokens),
        output_tokens=old.output_tokens + share * (new.output_tokens - old.output_tokens),
        prefill_work=old.prefill_work + share * (new.prefill_work - old.prefill_work),
    )


def windows(bins: int) -> list[int]:
    """Lengths in bins, the shortest first; the last one is what there is."""
    lengths = [BINS_PER_WINDOW * 2**power for power in range(_DOUBLINGS + 1)]
    return [length for length in lengths if length < bins] + [bins] if bins < lengths[-1] else lengths
