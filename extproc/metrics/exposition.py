# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, written in pieces, and counters and histograms that cost next to nothing to write.

prometheus_client makes an object of every sample and the page in one go, which takes seconds at two hundred thousand
lines. Here values are read while the page is written, a bounded number for each piece, and the caller may serve
requests between two pieces. Nothing of the page is kept.

Its own counters take a lock and look labels up for every event, which at several events a request is a tenth of what a
decision costs. Here one thread writes, and it is the one that reads.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)
_FAMILIES: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
# A piece takes a millisecond or less.
_LINES: Final = 1_000
# From there on Go writes exponents.
_PLAIN_BELOW: Final = 1e6
# 16 KB of each series.
_MOST_PENDING: Final = 512
# Of labels: of several that have no series of their own, and of none.
_NO_NAMES: Final = ("(others)", "")


class MetricFamily(msgspec.Struct, frozen=True):
    """One metric family. ``name``: without the ``_total`` of counters. ``labels``: names."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"

    @property
    def sample_name(self) -> str:
        """The name of its samples."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def head(self) -> str:
        """The two lines before its samples."""
        text = self.text.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {self.sample_name} {text}\n# TYPE {self.sample_name} {self.kind}\n"

    def line(self, values: Sequence[str], value: float) -> str:
        """A sample with these label values."""
        return f"{self.sample_name}{format_labels(self.labels, values)} {format_number(value)}\n"

    def exposition_chunks(self, lines: Iterable[str]) -> Iterator[str]:
        """Head and ``lines``. One may be several, or empty where there is no sample: the search for samples takes time,
        too, so a piece may be empty.
        """
        yield self.head
        remaining = iter(lines)
        while piece := list(islice(remaining, _LINES)):
            yield "".join(piece)


class PiecewiseCollector(Collector):
    """Series that are written in pieces. ``families``: all that it may write."""

    families: tuple[MetricFamily, ...] = ()

    def exposition_chunks(self) -> Iterator[str]:
        """All families, each piece a number of whole lines."""
        raise NotImplementedError

    def retain_only(self, label: str, names: Collection[str]) -> None:
        """End the series with another ``label`` than one of ``names``. Nothing to do for what keeps no series."""

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for clashes."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The same as the library's objects, for readers of single samples; pages are not made of them."""
        labels = {one.name: one.labels for one in self.families}
        for parsed in text_string_to_metric_families("".join(self.exposition_chunks())):
            family = _FAMILIES[parsed.type](parsed.name, parsed.documentation, labels=labels[parsed.name])
            family.samples = parsed.samples
            yield family


class Registry(CollectorRegistry):
    """A registry whose page comes in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._in_order: list[Collector] = []
        self.names = StaleSeriesRemover(self)

    def register(self, collector: Collector) -> None:
        """As the library's."""
        super().register(collector)
        self._in_order.append(collector)

    def retain_only(self, label: str, names: Collection[str]) -> None:
        """End the series of all families with this ``label`` and another value than one of ``names``."""
        for collector in self._in_order:
            if isinstance(collector, PiecewiseCollector):
                collector.retain_only(label, names)

    def exposition_chunks(self) -> Iterator[str]:
        """The page. Families of the library's own collectors have a handful of samples, and are one piece each."""
        for collector in self._in_order:
            if isinstance(collector, PiecewiseCollector):
                yield from collector.exposition_chunks()
            else:
                yield generate_latest(collector).decode()


class StaleSeriesRemover(PiecewiseCollector):
    """Ends series of what has left the configuration, before each page: what began before may still add to them."""

    def __init__(self, registry: Registry) -> None:
        self._names: Callable[[], Mapping[str, Collection[str]]] = dict
        self._registry = registry
        registry.register(self)

    def set_source(self, names: Callable[[], Mapping[str, Collection[str]]]) -> None:
        """``names``: those in use, by label. Series of other labels are left alone, and so are those whose value is
        empty or ``(others)``.
        """
        self._names = names

    def names_in_use(self, label: str) -> Collection[str] | None:
        """None: it is not known which."""
        return self._names().get(label)

    def exposition_chunks(self) -> Iterator[str]:
        """None."""
        for label, names in self._names().items():
            self._registry.retain_only(label, {*names, *_NO_NAMES})
        return iter(())


def format_labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Labels in braces, sorted by name; nothing if there are none."""
    if not names:
        return ""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join([f'{name}="{escape_label(value)}"' for name, value in pairs]) + "}"


def escape_label(value: str) -> str:
    """A label's value, without the quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def format_number(value: float) -> str:
    """As Go writes it."""
    # floatToGoString costs as much as all the rest of a line
    if -_PLAIN_BELOW < value < _PLAIN_BELOW:
        return repr(float(value))
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # the library leaves its annotation out
    return text


def _keep(series: dict[tuple[str, ...], Any], family: MetricFamily, label: str, names: Collection[str]) -> None:
    if label in family.labels:
        at = family.labels.index(label)
        for gone in [one for one in series if one[at] not in names]:
            del series[gone]


def _forget(series: dict[tuple[str, ...], Any], family: MetricFamily, label: str, names: Collection[str]) -> None:
    at = family.labels.index(label)
    for gone in [one for one in series if one[at] in names]:
        del series[gone]


def _leave_out(name: str, value: float) -> None:
    log.warning("%s: values that are negative or not finite are left out, such as %s", name, value)


class CounterFamily(PiecewiseCollector):
    """One counter family. Its label values come from the configuration and from fixed sets, or are bounded by who
    adds.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._family = MetricFamily(name, text, tuple(labels), "counter")
        self.families = (self._family,)
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(int)
        registry.register(self)

    def add(self, *values: str) -> None:
        """One more under these label values."""
        self._counts[values] += 1

    def add_amount(self, amount: float, *values: str) -> None:
        """So much more; an amount that would spoil the sum is left out, and logged."""
        if 0 <= amount < math.inf:
            self._counts[values] += amount
        else:
            _leave_out(self._family.name, amount)

    def items(self) -> list[tuple[tuple[str, ...], float]]:
        """All label values, and what is counted under them."""
        return list(self._counts.items())

    def forget(self, label: str, names: Collection[str]) -> None:
        """End the series with one of ``names`` as their ``label``. To add them up elsewhere would count them twice in
        ``increase()``.
        """
        _forget(self._counts, self._family, label, names)

    def retain_only(self, label: str, names: Collection[str]) -> None:
        """As ``forget``, of all other names."""
        _keep(self._counts, self._family, label, names)

    def add_series(self, *values: str) -> None:
        """A series that is there from the start, at 0."""
        self._counts.setdefault(values, 0)

    def describe(self) -> Iterable[Metric]:
        """Its name, so that a second one of that name is refused."""
        return [CounterMetricFamily(self._family.name, self._family.text, labels=self._family.labels)]

    def exposition_chunks(self) -> Iterator[str]:
        """All series."""
        # of one moment: events go on between two pieces, and series end
        return self._family.exposition_chunks(self._family.line(values, count) for values, count in self.items())


class DeferredHistogramFamily(PiecewiseCollector):
    """One histogram family. ``bounds``: upper bounds of its buckets, in seconds."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._family = MetricFamily(name, text, tuple(labels), "histogram")
        self.families = (self._family,)
        self._bounds = np.array(bounds)
        self._series: dict[tuple[str, ...], _Buckets] = {}
        registry.register(self)

    def observe(self, seconds: float, *values: str) -> None:
        """One more value under these label values; one that would spoil their sum is left out, and logged."""
        if not 0 <= seconds < math.inf:
            _leave_out(self._family.name, seconds)
            return
        buckets = self._series.get(values)
        if buckets is None:
            buckets = self._series[values] = _Buckets(self._bounds)
        buckets.observe(seconds)

    def forget(self, label: str, names: Collection[str]) -> None:
        """End the series with one of ``names`` as their ``label``."""
        _forget(self._series, self._family, label, names)

    def has(self, *values: str) -> bool:
        """Whether there is a series with these label values."""
        return values in self._series

    def __len__(self) -> int:
        """Number of series."""
        return len(self._series)

    def retain_only(self, label: str, names: Collection[str]) -> None:
        """End the series with another ``label`` than one of ``names``."""
        _keep(self._series, self._family, label, names)

    @property
    def pending_count(self) -> int:
        """Values that are not sorted into buckets yet."""
        return sum(buckets.pending for buckets in self._series.values())

    def describe(self) -> Iterable[Metric]:
        """Its name, so that a second one of that name is refused."""
        return [HistogramMetricFamily(self._family.name, self._family.text, labels=self._family.labels)]

    def exposition_chunks(self) -> Iterator[str]:
        """All series."""
        return self._family.exposition_chunks(
            line for values, buckets in list(self._series.items()) for line in self._lines(values, buckets)
        )

    def _lines(self, values: tuple[str, ...], buckets: _Buckets) -> Iterator[str]:
        name, labels = self._family.name, self._family.labels
        counts, total = buckets.cumulated()
        for bound, count in counts:
            yield f"{name}_bucket{format_labels((*labels, 'le'), (*values, bound))} {format_number(count)}\n"
        own = format_labels(labels, values)
        yield f"{name}_count{own} {format_number(counts[-1][1])}\n{name}_sum{own} {format_number(total)}\n"


class DeferredHistogram(DeferredHistogramFamily):
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
        """Cumulative, as in Prometheus' format, and their sum."""
        self._sort()
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, np.cumsum(self._counts).tolist(), strict=True)), self._sum

    def _sort(self) -> None:
        values, self._pending = np.array(self._pending), []
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=self._counts.size)
        self._sum += float(values.sum())
