# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, written in pieces: a page of two hundred thousand lines must not hold up requests.

prometheus_client makes an object of every sample and the page in one go, which takes seconds at that size. Here
values are read while the page is written, a bounded number for each piece, and the caller may do other things between
two pieces. Nothing of the page is kept.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

_FAMILIES: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
# A piece takes a millisecond or less.
_LINES: Final = 1_000
# From there on Go writes exponents.
_PLAIN_BELOW: Final = 1e6


class Family(msgspec.Struct, frozen=True):
    """One metric family. ``name``: without the ``_total`` of counters. ``labels``: names."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"

    @property
    def series(self) -> str:
        """The name of its samples."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def head(self) -> str:
        """The two lines before its samples."""
        text = self.text.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {self.series} {text}\n# TYPE {self.series} {self.kind}\n"

    def line(self, values: Sequence[str], value: float) -> str:
        """A sample with these label values."""
        return f"{self.series}{labelled(self.labels, values)} {number(value)}\n"

    def pieces(self, lines: Iterable[str]) -> Iterator[str]:
        """Head and ``lines``. One may be several, or empty where there is no sample: looking for it took time, too, so
        that a piece may be empty.
        """
        yield self.head
        remaining = iter(lines)
        while piece := list(islice(remaining, _LINES)):
            yield "".join(piece)


class PiecewiseCollector(Collector):
    """Series that are written in pieces. ``families``: all that it may write."""

    families: tuple[Family, ...] = ()

    def pieces(self) -> Iterator[str]:
        """All families, each piece a number of whole lines."""
        raise NotImplementedError

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for clashes."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The same as the library's objects, for readers of single samples; pages are not made of them."""
        labels = {one.name: one.labels for one in self.families}
        for parsed in text_string_to_metric_families("".join(self.pieces())):
            family = _FAMILIES[parsed.type](parsed.name, parsed.documentation, labels=labels[parsed.name])
            family.samples = parsed.samples
            yield family


class Registry(CollectorRegistry):
    """A registry whose page comes in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._in_order: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """As the library's."""
        super().register(collector)
        self._in_order.append(collector)

    def pieces(self) -> Iterator[str]:
        """The page. Families of the library's own collectors have a handful of samples, and are one piece each."""
        for collector in self._in_order:
            if isinstance(collector, PiecewiseCollector):
                yield from collector.pieces()
            else:
                yield generate_latest(collector).decode()


def labelled(names: Sequence[str], values: Sequence[str]) -> str:
    """Labels in braces, sorted by name; nothing if there are none."""
    if not names:
        return ""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join([f'{name}="{escaped(value)}"' for name, value in pairs]) + "}"


def escaped(value: str) -> str:
    """A label's value, without the quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """As Go writes it."""
    # floatToGoString costs as much as all the rest of a line
    if -_PLAIN_BELOW < value < _PLAIN_BELOW:
        return repr(float(value))
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # the library leaves its annotation out
    return text
