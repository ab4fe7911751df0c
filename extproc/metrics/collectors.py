# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that cost next to nothing to write, and are put into Prometheus' form when they are read.

prometheus_client's own take a lock and look labels up for every event, which at several events a request is a tenth of
what a decision costs. Here there is one thread that writes, and it is the one that reads.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from extproc.metrics.exposition import Family, PiecewiseCollector, labelled, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_MOST_PENDING: Final = 4096


class Counters(PiecewiseCollector):
    """One counter family. Its label values come from the configuration and from fixed sets, or are bounded by who
    adds.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._family = Family(name, text, tuple(labels), "counter")
        self.families = (self._family,)
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(int)
        registry.register(self)

    def add(self, *values: str) -> None:
        """One more under these label values."""
        self._counts[values] += 1

    def add_amount(self, amount: float, *values: str) -> None:
        """So much more."""
        self._counts[values] += amount

    def begin(self, *values: str) -> None:
        """A series that is there from the start, at 0."""
        self._counts.setdefault(values, 0)

    def describe(self) -> Iterable[Metric]:
        """Its name, so that a second one of that name is refused."""
        return [CounterMetricFamily(self._family.name, self._family.text, labels=self._family.labels)]

    def pieces(self) -> Iterator[str]:
        """All series."""
        # events go on between two pieces
        names, counts = list(self._counts), self._counts
        return self._family.pieces(self._family.line(values, counts[values]) for values in names)


class DeferredHistograms(PiecewiseCollector):
    """One histogram family. ``bounds``: upper bounds of its buckets, in seconds."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._family = Family(name, text, tuple(labels), "histogram")
        self.families = (self._family,)
        self._bounds = np.array(bounds)
        self._series: dict[tuple[str, ...], _Buckets] = {}
        registry.register(self)

    def observe(self, seconds: float, *values: str) -> None:
        """One more value under these label values."""
        buckets = self._series.get(values)
        if buckets is None:
            buckets = self._series[values] = _Buckets(self._bounds)
        buckets.observe(seconds)

    @property
    def pending(self) -> int:
        """Values that are not sorted into buckets yet."""
        return sum(buckets.pending for buckets in self._series.values())

    def describe(self) -> Iterable[Metric]:
        """Its name, so that a second one of that name is refused."""
        return [HistogramMetricFamily(self._family.name, self._family.text, labels=self._family.labels)]

    def pieces(self) -> Iterator[str]:
        """All series."""
        return self._family.pieces(
            line for values, buckets in list(self._series.items()) for line in self._lines(values, buckets)
        )

    def _lines(self, values: tuple[str, ...], buckets: _Buckets) -> Iterator[str]:
        name, labels = self._family.name, self._family.labels
        counts, total = buckets.cumulated()
        for bound, count in counts:
            yield f"{name}_bucket{labelled((*labels, 'le'), (*values, bound))} {number(count)}\n"
        own = labelled(labels, values)
        yield f"{name}_count{own} {number(counts[-1][1])}\n{name}_sum{own} {number(total)}\n"


class DeferredHistogram(DeferredHistograms):
    """One histogram without labels, which is there from the start."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        super().__init__(name, text, bounds, [], registry)
        self._series[()] = _Buckets(self._bounds)


class _Buckets:
    """One series; values are sorted into buckets many at a time."""

    def __init__(self, bounds: NDArray[np.float64]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._pending: list[float] = []

    @property
    def pending(self) -> int:
        return len(self._pending)

    def observe(self, seconds: float) -> None:
        self._pending.append(seconds)
        if len(self._pending) >= _MOST_PENDING:
            self._sort()

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus wants them, and their sum."""
        self._sort()
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, np.cumsum(self._counts).tolist(), strict=True)), self._sum

    def _sort(self) -> None:
        values, self._pending = np.array(self._pending), []
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=self._counts.size)
        self._sum += float(values.sum())
