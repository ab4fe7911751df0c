"""Counters and histograms that cost next to nothing to write, and are put into Prometheus' form when they are read.

prometheus_client's own take a lock and look labels up for every event, which at several events a request is a tenth of what
a decision costs. Here there is one thread that writes, and it is the one that reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_MOST_PENDING: Final = 4096


class Counts(Collector):
    """One counter family. Its label values come from the configuration and from fixed sets."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def add(self, *values: str) -> None:
        """One more under these label values."""
        self._counts[values] = self._counts.get(values, 0) + 1

    def begin(self, *values: str) -> None:
        """A series that is there from the start, at 0."""
        self._counts.setdefault(values, 0)

    def describe(self) -> Iterable[Metric]:
        """Its name, so that a second one of that name is refused."""
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        """All series."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Spread(Collector):
    """One histogram without labels. ``bounds``: upper bounds of its buckets, in seconds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._pending: list[float] = []
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """One more value; they are sorted into buckets many at a time."""
        self._pending.append(seconds)
        if len(self._pending) >= _MOST_PENDING:
            self._sort()

    def describe(self) -> Iterable[Metric]:
        """Its name, so that a second one of that name is refused."""
        return [HistogramMetricFamily(self._name, self._text)]

    def collect(self) -> Iterator[Metric]:
        """The buckets, cumulated as Prometheus wants them."""
        self._sort()
        cumulated = np.cumsum(self._counts).tolist()
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(names, cumulated, strict=True)), self._sum)
        yield family

    def _sort(self) -> None:
        values, self._pending = np.array(self._pending), []
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=self._counts.size)
        self._sum += float(values.sum())
