# SPDX-License-Identifier: Apache-2.0
"""Metrics of thousands of series as text: what prometheus_client writes, without what it costs for each of them.

prometheus_client checks and escapes each label of each sample, some 30 µs; 60,000 samples take seconds. A ``Family``
has its labels as text, made once for all families that share them. To everybody else it is a metric like any other.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Series whose text is made at once.
_AT_ONCE: Final = 1000
# A window of 15 bits with a head and an end as of a file of gzip.
_GZIP: Final = 31
# From there on Go's text of a number differs from Python's.
_PLAIN_BELOW: Final = 1e6


class Labels(NamedTuple):
    """``names`` and ``values``: in this order; ``text``: as the page has them."""

    names: tuple[str, ...]
    values: tuple[str, ...]
    text: str


def labels_of(names: tuple[str, ...], values: tuple[str, ...]) -> Labels:
    """``names``: valid ones, in any order."""
    said = sorted(zip(names, values, strict=True))
    return Labels(names, values, ",".join([f'{name}="{_escaped(value)}"' for name, value in said]))


class Family(Metric):
    """Gauges (``gauge``) or counters (``counter``). ``rows``: labels and value of each series."""

    def __init__(self, name: str, documentation: str, typ: str, rows: Sequence[tuple[Labels, float]]) -> None:
        self._rows = rows
        super().__init__(name, documentation, typ)

    @property
    def _series(self) -> str:
        return f"{self.name}_total" if self.type == "counter" else self.name

    @property
    def samples(self) -> list[Sample]:
        """For those who know no families of this kind."""
        name = self._series
        return [
            Sample(name, dict(zip(labels.names, labels.values, strict=True)), value) for labels, value in self._rows
        ]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """What a metric begins with: none."""

    def parts(self) -> Iterator[bytes]:
        """Its text with its head, as on the page, some thousand series at a time."""
        name = self._series
        said = self.documentation.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {name} {said}\n# TYPE {name} {self.type}\n".encode()
        for first in range(0, len(self._rows), _AT_ONCE):
            rows = self._rows[first : first + _AT_ONCE]
            yield "".join([f"{name}{{{labels.text}}} {_number(value)}\n" for labels, value in rows]).encode()


def page_of(registry: CollectorRegistry, *, gzipped: bool = False) -> bytes:
    """All metrics in Prometheus' text format.

    A page of thousands of series is some MiB, of which compression leaves a twentieth. It is compressed part by part:
    the whole text is never in memory.
    """
    if not gzipped:
        return b"".join(_parts(registry))
    made = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=_GZIP)
    return b"".join([*[made.compress(part) for part in _parts(registry)], made.flush()])


def _parts(registry: CollectorRegistry) -> Iterator[bytes]:
    others = list[Metric]()
    for metric in registry.collect():
        if isinstance(metric, Family):
            yield _by_client(others)
            yield from metric.parts()
            others = []
        else:
            others.append(metric)
    yield _by_client(others)


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _by_client(metrics: list[Metric]) -> bytes:
    if not metrics:
        return b""
    only = CollectorRegistry()
    only.register(_Collected(metrics))
    return generate_latest(only)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if -_PLAIN_BELOW < value < _PLAIN_BELOW:
        return repr(float(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # theirs has no types
