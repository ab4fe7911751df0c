# SPDX-License-Identifier: Apache-2.0
"""The load on a stage: arrivals a second, their trend, and the work of one request.

A short window follows load at once but mistakes noise for change; a long one does the opposite. So several windows are
compared, each twice as long as the one before, and the longest counts whose mean agrees with those of all shorter ones
within ``_SIGMAS`` standard errors. Under constant load the estimate comes from many minutes and is steady; after a step
it comes from the shortest window at once, and a steep rise from a few seconds.

The spread of arrivals is measured, as traffic is often burstier than Poisson's: the median absolute difference between
neighbouring bins, which a step or a slow trend hardly changes. It is never taken for less than Poisson's.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from controller.autoscaler.decision.traffic import Traffic, TrafficTotals

if TYPE_CHECKING:
    from collections.abc import Callable


BINS_PER_WINDOW: Final = 3
# Windows of 1, 2, 4, 8 and 16 times the shortest.
_DOUBLINGS: Final = 4
MOST_BINS: Final = BINS_PER_WINDOW * 2**_DOUBLINGS
# Differences of fewer standard errors than this are noise: one in 370 by chance.
_SIGMAS: Final = 3.0
# Of the newer part of a window, before more counts than its mean.
_RISE_SIGMAS: Final = 1.5
# Seconds in which a burst is searched for, and standard errors that make one; many seconds are tested, so the bound is
# high.
_BURSTS: Final = ((3.0, 5.0), (10.0, 4.0))
# The newest part of a trend may be steeper or flatter than all of it by so many.
_STILL_ON_LINE: Final = 2.0
# The share of a trend that goes on.
_DAMPED: Final = 0.7
# Of the difference of two equal normal values: median absolute value over their standard deviation.
_MEDIAN_OF_DIFFERENCE: Final = 0.9539
# Tokens of requests vary about as much as they are large.
_VARIATION_OF_TOKENS: Final = 1.0
# Spans in which a trend is searched for; each is cut into so many groups.
_TREND_BINS: Final = (12, 24, 48)
_TREND_GROUPS: Final = 12
# The sum of squares of the groups' places, counted from their middle.
_TREND_SPREAD: Final = _TREND_GROUPS * (_TREND_GROUPS**2 - 1) / 12
# Means over requests that have ended need longer windows: after a rise of load the short answers end first.
_FEWEST_BINS_OF_ENDS: Final = 12
# Fewer bins give no estimate of the spread.
_FEWEST_BINS: Final = 5


class TrafficBins(msgspec.Struct, frozen=True):
    """``edges``: the sums at the ends of bins, the oldest first, one more than there are bins. ``is_still``: they are
    all the same.
    """

    bin_s: float
    edges: Sequence[TrafficTotals]
    is_still: bool

    @staticmethod
    def from_traffic(traffic: Traffic, times: Sequence[float], *, bin_s: float, now_s: float) -> TrafficBins | None:
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
            return TrafficBins(span_s, (old, new), is_still)
        count = min(most, int(span_s / bin_s + 1e-6))
        if is_still:
            return TrafficBins(bin_s, (old,) * (count + 1), is_still)
        ends = (max(times[0], end_s - bin_s * (count - index)) for index in range(count + 1))
        known: dict[int, TrafficTotals] = {}
        return TrafficBins(bin_s, [_sums_at(traffic, times, end, bin_s, known) for end in ends], is_still)

    def counts_per_bin(self, value: Callable[[TrafficTotals], float]) -> list[float]:
        """What was counted in each bin."""
        values = [value(edge) for edge in self.edges]
        return [new - old for old, new in itertools.pairwise(values)]


def _sums_at(
    traffic: Traffic, times: Sequence[float], at_s: float, bin_s: float, known: dict[int, TrafficTotals]
) -> TrafficTotals:
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
    return TrafficTotals(
        arrivals=old.arrivals + share * (new.arrivals - old.arrivals),
        refused=old.refused + share * (new.refused - old.refused),
        finished=old.finished + share * (new.finished - old.finished),
        prompt_tokens=old.prompt_tokens + share * (new.prompt_tokens - old.prompt_tokens),
        output_tokens=old.output_tokens + share * (new.output_tokens - old.output_tokens),
        prefill_work=old.prefill_work + share * (new.prefill_work - old.prefill_work),
    )


def window_lengths(bins: int) -> list[int]:
    """Lengths in bins, the shortest first; the last is at most the number of bins."""
    lengths = [BINS_PER_WINDOW * 2**power for power in range(_DOUBLINGS + 1)]
    return [length for length in lengths if length < bins] + [bins] if bins < lengths[-1] else lengths


class MeanRequestWork(msgspec.Struct, frozen=True):
    """Means over requests. ``prefill_work``: in tokens of a short prompt. ``prompt_tokens``: cached ones included.
    ``output_tokens``: written.
    """

    prefill_work: float
    prompt_tokens: float
    output_tokens: float


class OfferedLoad(msgspec.Struct, frozen=True):
    """``arrivals_per_s``: requests that were not refused; ``seen_s``: the span in which they arrived. ``mean_per_s``:
    over ``window_s``, the window that agrees with all shorter ones. ``slope``: by how much arrivals a second grow each
    second; 0 if no trend is significant. ``newest_per_s``: over the shortest window, and ``newest_error`` its standard
    error. ``dispersion``: variance of arrivals over Poisson's. ``per_request``: None if no request has finished.
    """

    arrivals_per_s: float
    seen_s: float
    mean_per_s: float
    window_s: float
    slope: float
    newest_per_s: float
    newest_error: float
    dispersion: float
    per_request: MeanRequestWork | None

    def predicted_arrivals_per_s(self, ahead_s: float) -> float:
        """Arrivals a second so far ahead. Falling load is not foreseen.

        A trend counts from the middle of the window, but no further than the newest arrivals bear out: it may be over.
        And it is damped, as trends end (Gardner and McKenzie, 1985).
        """
        if self.slope <= 0:
            return self.arrivals_per_s
        now = min(self.mean_per_s + self.slope * self.window_s / 2, self.newest_per_s + self.newest_error)
        return max(self.arrivals_per_s, now + self.slope * _DAMPED * ahead_s)


def estimate_offered_load(traffic: Traffic, *, window_s: float, now_s: float) -> OfferedLoad | None:
    """``window_s``: the shortest window. None without two points."""
    times = traffic.times
    bins = TrafficBins.from_traffic(traffic, times, bin_s=window_s / BINS_PER_WINDOW, now_s=now_s)
    if bins is None:
        return None
    if bins.is_still:
        # the code below has the same result at a far higher cost: most ModelServers are idle most of the time
        longest_s = min(len(bins.edges) - 1, MOST_BINS) * bins.bin_s
        return OfferedLoad(
            arrivals_per_s=0.0,
            seen_s=longest_s,
            mean_per_s=0.0,
            window_s=longest_s,
            slope=0.0,
            newest_per_s=0.0,
            newest_error=0.0,
            dispersion=1.0,
            per_request=None,
        )
    counts = bins.counts_per_bin(_admitted)
    dispersion = _dispersion(counts)
    used = _settled_bins(counts, dispersion)
    mean, window_s = max(0.0, sum(counts[-used:])) / (used * bins.bin_s), used * bins.bin_s
    rate, seen_s = _risen(counts[-used:], dispersion, bins.bin_s, mean) or (mean, window_s)
    rate, seen_s = _burst(traffic, times[: bisect_right(times, now_s)], rate, dispersion) or (rate, seen_s)
    newest_s = min(BINS_PER_WINDOW, len(counts)) * bins.bin_s
    newest = max(0.0, sum(counts[-BINS_PER_WINDOW:])) / newest_s
    return OfferedLoad(
        arrivals_per_s=rate,
        seen_s=seen_s,
        mean_per_s=mean,
        window_s=window_s,
        slope=_slope(counts, dispersion, bins.bin_s),
        newest_per_s=newest,
        newest_error=math.sqrt(dispersion * newest / newest_s),
        dispersion=dispersion,
        per_request=_per_request(bins, counts),
    )


def _dispersion(counts: Sequence[float]) -> float:
    """The variance of a bin's count over its mean; at least 1."""
    mean = sum(counts) / len(counts)
    if len(counts) < _FEWEST_BINS or mean <= 0:
        return 1.0
    typical = median(abs(new - old) for old, new in itertools.pairwise(counts)) / _MEDIAN_OF_DIFFERENCE
    return max(1.0, typical * typical / mean)


def _settled_bins(counts: Sequence[float], dispersion: float) -> int:
    """How many of the newest bins count: see the module."""
    lengths = window_lengths(len(counts))
    means = [sum(counts[-length:]) / length for length in lengths]
    chosen = 0
    for longer in range(1, len(lengths)):
        for shorter in range(longer):
            error = math.sqrt(dispersion * max(0.0, means[longer]) / lengths[shorter])
            if abs(means[shorter] - means[longer]) > _SIGMAS * error:
                return lengths[chosen]
        chosen = longer
    return lengths[chosen]


def _risen(counts: Sequence[float], dispersion: float, bin_s: float, rate: float) -> tuple[float, float] | None:
    """Arrivals a second, and their span, where a newer part has more than the whole by more than ``_RISE_SIGMAS``.

    Too few replicas cost more than too many, so a rise need not be proven: what is left of it counts at once.
    """
    found = None
    for length in window_lengths(len(counts))[:-1]:
        mean = sum(counts[-length:]) / length
        least = (mean - _RISE_SIGMAS * math.sqrt(dispersion * max(0.0, mean) / length)) / bin_s
        if least > (found or (rate,))[0]:
            found = (least, length * bin_s)
    return found


def _burst(traffic: Traffic, times: Sequence[float], rate: float, dispersion: float) -> tuple[float, float] | None:
    """Arrivals a second, and the span in which they came, where some seconds have many more than ``rate`` explains.

    One standard error is subtracted from these arrivals: later seconds show how many of them were chance.
    """
    found = None
    last = len(times) - 1
    for span_s, sigmas in _BURSTS:
        first = max(0, bisect_right(times, times[last] - span_s + 1e-6) - 1)
        seen_s = times[last] - times[first]
        if not 0 < seen_s <= 2 * span_s:
            continue
        number = _admitted(traffic.counters(last)) - _admitted(traffic.counters(first))
        expected = rate * seen_s
        if number > expected + sigmas * math.sqrt(dispersion * max(1.0, expected)):
            least = (number - math.sqrt(dispersion * number)) / seen_s
            found = max(found or (rate, 0.0), (least, seen_s))
    return found


def _slope(counts: Sequence[float], dispersion: float, bin_s: float) -> float:
    """Growth of arrivals a second in a second, from the span of time with the best evidence; 0 without any.

    A trend has to hold still: shorter spans may not be flatter than it. What is left of a significant slope is as much
    as exceeds its noise (James and Stein's positive part), so the answer does not jump where it becomes significant.
    """
    lines = [_line(counts[-length:], dispersion, bin_s) for length in _TREND_BINS if length <= len(counts)]
    slope = best = 0.0
    for index, line in enumerate(lines):
        evidence = line.slope**2 / line.variance
        is_over = any(
            abs(line.slope - newer.slope) > _STILL_ON_LINE * math.sqrt(newer.variance) for newer in lines[:index]
        )
        if line.is_best and evidence > max(best, _SIGMAS**2) and not is_over:
            slope, best = line.slope * (1 - _SIGMAS**2 / evidence), evidence
    return slope


class _Trend(NamedTuple):
    """``slope``: in arrivals a second, a second; ``variance``: of it. ``is_best``: a step explains the counts worse."""

    slope: float
    variance: float
    is_best: bool


def _line(counts: Sequence[float], dispersion: float, bin_s: float) -> _Trend:
    """Least squares. A step is no trend that could be continued: it is over."""
    group = len(counts) // _TREND_GROUPS
    grouped = [sum(counts[at : at + group]) for at in range(0, group * _TREND_GROUPS, group)]
    total, middle = sum(grouped), (_TREND_GROUPS - 1) / 2
    slope = sum((index - middle) * count for index, count in enumerate(grouped)) / _TREND_SPREAD
    # what a line, and what the best step, takes off the sum of squares
    by_line = slope * slope * _TREND_SPREAD + total * total / _TREND_GROUPS
    before, by_step = 0.0, 0.0
    for index, count in enumerate(grouped[:-1], start=1):
        before += count
        after = total - before
        by_step = max(by_step, before * before / index + after * after / (_TREND_GROUPS - index))
    unit = (group * bin_s) ** 2
    return _Trend(
        slope=slope / unit,
        variance=dispersion * max(total / _TREND_GROUPS, 1.0) / _TREND_SPREAD / unit**2,
        is_best=by_line > by_step,
    )


def _admitted(sums: TrafficTotals) -> float:
    """Requests that were not refused: a tenant's limit keeps them off engines. The work of those refused for lack of
    engines is still part of ``prefill_work``.
    """
    return sums.arrivals - sums.refused


def _per_request(bins: TrafficBins, arrivals: Sequence[float]) -> MeanRequestWork | None:
    """Over the longest window that agrees with the shorter ones; prefill is known at arrival, the rest at the end."""
    finished = bins.counts_per_bin(lambda sums: sums.finished)
    if sum(finished) <= 0:
        return None
    return MeanRequestWork(
        prefill_work=_mean(bins.counts_per_bin(lambda sums: sums.prefill_work), arrivals),
        # counted at the end, once engines have reported how many there were
        prompt_tokens=_mean(bins.counts_per_bin(lambda sums: sums.prompt_tokens), finished, _FEWEST_BINS_OF_ENDS),
        output_tokens=_mean(bins.counts_per_bin(lambda sums: sums.output_tokens), finished, _FEWEST_BINS_OF_ENDS),
    )


def _mean(tokens: Sequence[float], requests_in: Sequence[float], fewest_bins: int = 1) -> float:
    seen: list[tuple[float, float]] = []
    mean = 0.0
    for length in window_lengths(len(requests_in)):
        if length < min(fewest_bins, len(requests_in)):
            continue
        requests = sum(requests_in[-length:])
        if requests <= 0:
            continue
        longer = sum(tokens[-length:]) / requests
        limit = _SIGMAS * _VARIATION_OF_TOKENS * longer
        if any(abs(shorter - longer) > limit / math.sqrt(number) for shorter, number in seen):
            return mean
        mean = longer
        seen.append((longer, requests))
    return mean
