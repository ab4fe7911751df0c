# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics pages of vLLM, SGLang and TensorRT-LLM.

A page has hundreds of lines, of which a dozen matter. Each is searched for near its position on the previous page, so
a reading takes microseconds. Series of one name, as of data-parallel ranks, are added up; fractions are averaged.

An engine may write what it likes, so what is read of a page is bounded, and the time grows with its length alone.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.endpoints.engine_reports import CacheConfig, EngineReport
from extproc.endpoints.table import LoraState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.endpoints.metric_names import MetricNames

# Bytes by which a line may move from page to page, as numbers get longer.
_DRIFT: Final = 1024
# Of a size of blocks, or a number of blocks or adapters.
_MOST_DIGITS: Final = 12
# More than any count, number of seconds or Unix time.
_LARGEST: Final = 1e15
# Every how many pages to look for what hardly ever changes or was missing.
_RARE_PAGES: Final = 20
# Of one name. Data-parallel ranks have one each; each change of what adapters run leaves one behind.
_MOST_SERIES: Final = 1_024
_MOST_LORA_SERIES: Final = 8_192
# Of the lines whose labels are read: those of caches, or the newest of adapters.
_MOST_LABEL_BYTES: Final = 256 * 1024
_MOST_LORAS: Final = 4_096
# It begins where no name goes on, and no quantifier gives back what it took: the time is linear in any line.
_LABEL: Final = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)="([^"\\]*+(?:\\.[^"\\]*+)*+)"')


class PageRefused(ValueError):
    """A page has more of something than any engine's; the message says what, and what to do."""


class EngineMetrics(msgspec.Struct, frozen=True):
    """The content of one page. ``has_restarted``: a counter decreased, so the engine restarted with an empty cache."""

    report: EngineReport
    cache: CacheConfig | None
    has_restarted: bool

    @property
    def is_report(self) -> bool:
        """Whether the page says anything of the engine's load; one without a known name is another program's."""
        report = self.report
        return not (report.waiting is None and report.running is None and report.kv_usage is None)


class MetricsReader:
    """Reads successive pages of one engine."""

    __slots__ = (
        "_block_size",
        "_blocks",
        "_cache_info",
        "_custom",
        "_kv_usage",
        "_labels",
        "_loras",
        "_pages",
        "_running",
        "_tpot",
        "_ttft",
        "_waiting",
    )

    def __init__(self, names: MetricNames, *, custom: Iterable[tuple[str, str]] = ()) -> None:
        """``custom``: attributes, each with its metric (``OneMetric``)."""
        self._custom = [(name, OneMetric(spec)) for name, spec in custom]
        self._waiting, self._running = _Family(names.waiting), _Family(names.running)
        self._kv_usage = _Family(names.kv_usage)
        self._ttft, self._tpot = _HistogramMean(names.ttft), _HistogramMean(names.tpot)
        self._loras = _Family((names.loras,) if names.loras else (), most_series=_MOST_LORA_SERIES)
        self._cache_info = _Family((names.cache_info,) if names.cache_info else ())
        self._block_size, self._blocks = _Family((names.block_size,)), _Family((names.blocks,))
        self._labels = (names.block_label, names.blocks_label)
        self._pages = 0

    def read(self, page: bytes) -> EngineMetrics:
        """Read a page in Prometheus' text format. What is missing or unreadable is None; raises PageRefused."""
        page = b"\n" + page if not page.startswith(b"#") else page
        ttft = self._ttft.since(page)
        report = EngineReport(
            waiting=self._waiting.total(page),
            running=self._running.total(page),
            kv_usage=self._kv_usage.mean(page),
            ttft_s=ttft.mean,
            tpot_s=self._tpot.since(page).mean,
            loras=self._read_loras(page),
            first_tokens=ttft.count,
            attributes={name: metric.value(page) for name, metric in self._custom} if self._custom else {},
        )
        self._pages += 1
        # the cache size does not change while the engine runs
        reads_cache = ttft.ran_backwards or self._pages % _RARE_PAGES == 1
        reading = EngineMetrics(report, self._read_cache(page) if reads_cache else None, ttft.ran_backwards)
        if not reading.is_report:
            # an engine that starts may show its metrics on the next page
            for family in (self._waiting, self._running, self._kv_usage):
                family.search_again()
        return reading

    def _read_cache(self, page: bytes) -> CacheConfig | None:
        block_label, blocks_label = self._labels
        if block_label:
            lines = self._cache_info.lines(page)
            _check_labels(lines)
            labels = map(_labels, lines)
            sizes = [(_whole(one.get(block_label)), _whole(one.get(blocks_label))) for one in labels]
        else:
            sizes = [(int(self._block_size.mean(page) or 0), int(self._blocks.total(page) or 0))]
        known = [(block, blocks) for block, blocks in sizes if block and blocks]
        return CacheConfig(known[0][0], sum(block * blocks for block, blocks in known)) if known else None

    def _read_loras(self, page: bytes) -> LoraState | None:
        lines = self._loras.lines(page)
        if not lines:
            return None
        # each change starts a new series, whose value is the time of the change
        newest = max(lines, key=lambda line: _value(line) or 0.0)
        _check_labels([newest])
        labels = _labels(newest)
        return LoraState(
            active=_set_of(labels.get("running_lora_adapters", "")),
            waiting=_set_of(labels.get("waiting_lora_adapters", "")),
            max_active=_whole(labels.get("max_lora")),
        )


class _Family:
    """The samples of a metric family: the first of several names found on the page. They are adjacent lines."""

    # there are ten of an engine, and may be 20,000 engines
    __slots__ = ("_label", "_misses", "_most_series", "_needle", "_needles", "_offset")

    def __init__(self, names: tuple[str, ...], suffix: str = "", *, most_series: int = _MOST_SERIES) -> None:
        self._most_series = most_series
        self._needles = _needles_of(names, suffix)
        self._needle = self._label = b""
        self._offset = 0
        self._misses = 0

    def total(self, page: bytes) -> float | None:
        values = self._values(page)
        return sum(values) if values else None

    def mean(self, page: bytes) -> float | None:
        values = self._values(page)
        return sum(values) / len(values) if values else None

    def lines(self, page: bytes) -> list[bytes]:
        found: list[bytes] = []
        start = self._find(page)
        while start >= 0:
            if len(found) == self._most_series:
                raise PageRefused(
                    f"its page has more than {self._most_series} series of {self._needle[1:-1].decode()}; "
                    "start the engine again, or have it write fewer"
                )
            end = page.find(b"\n", start + 1)
            found.append(page[start + 1 :] if end < 0 else page[start + 1 : end])
            start = end if end >= 0 and page.startswith(self._needle, end) else -1
        return found

    def search_again(self) -> None:
        """Search all of the next page, although the family was missing lately."""
        self._misses = 0

    def _values(self, page: bytes) -> list[float]:
        # every line has the empty label
        return [value for line in self.lines(page) if self._label in line and (value := _value(line)) is not None]

    def _find(self, page: bytes) -> int:
        offset = self._offset
        if self._needle:
            start = page.find(self._needle, offset - _DRIFT if offset > _DRIFT else 0, offset + _DRIFT)
            if start >= 0:
                self._offset = start
                return start
        elif self._misses:
            # searching a whole page for a missing family costs more than everything else
            self._misses -= 1
            return -1
        for needle, label in self._needles:
            start = page.find(needle)
            if start >= 0:
                self._needle, self._label, self._offset = needle, label, start
                return start
        self._needle, self._misses = b"", _RARE_PAGES
        return -1


@lru_cache
def _needles_of(names: tuple[str, ...], suffix: str) -> tuple[tuple[bytes, bytes], ...]:
    """Each with the preceding line end and the following character, so that only whole names match; and the label."""
    return tuple(
        (f"\n{name}{suffix}{end}".encode(), label.rstrip("}").encode())
        for name, _, label in (one.partition("{") for one in names if one)
        for end in "{ "
    )


class OneMetric:
    """A metric by ``name`` or ``name{label=value,...}``: the sum of the series that have all of these labels."""

    def __init__(self, spec: str) -> None:
        name, _, labels = spec.partition("{")
        pairs = (pair.partition("=") for pair in labels.rstrip("} ").split(",") if "=" in pair)
        # searched for, not read: a page may have megabytes of labels
        self._labels = [
            re.compile(rb"[{,] ?%b" % re.escape(f'{label.strip()}="{value.strip(chr(32) + chr(34))}"').encode())
            for label, _, value in pairs
        ]
        self._family = _Family((name.strip(),))

    def value(self, page: bytes) -> float:
        """NaN if the page has no such series."""
        lines = self._family.lines(page)
        found = [_value(line) for line in lines if all(label.search(line) for label in self._labels)]
        values = [value for value in found if value is not None]
        return sum(values) if values else math.nan


class _HistogramChange(msgspec.Struct, frozen=True):
    """The change of a histogram between two pages: mean and number of new observations, None if unknown."""

    mean: float | None = None
    count: float | None = None
    ran_backwards: bool = False


class _HistogramMean:
    """Computes the mean of a histogram's observations between two pages."""

    __slots__ = ("_before", "_count", "_sum")

    def __init__(self, names: tuple[str, ...]) -> None:
        self._sum, self._count = _Family(names, "_sum"), _Family(names, "_count")
        self._before: tuple[float, float] | None = None

    def since(self, page: bytes) -> _HistogramChange:
        """The change since the previous page."""
        count = self._count.total(page)
        if count is None:
            return _HistogramChange()
        if self._before is not None and count == self._before[0]:
            return _HistogramChange(count=0.0)
        total = self._sum.total(page)
        if total is None:
            return _HistogramChange()
        before, self._before = self._before, (count, total)
        if before is None:
            return _HistogramChange()
        if count < before[0]:
            return _HistogramChange(total / count if count else None, count, ran_backwards=True)
        added = count - before[0]
        return _HistogramChange((total - before[1]) / added, added)


def _value(line: bytes) -> float | None:
    """The value in ``name{labels} value`` or ``name value``, with or without a timestamp; None if unreadable."""
    rest = line[line.rfind(b"}") + 1 :] if b"}" in line else line[line.find(b" ") :]
    try:
        value = float(rest)
    except ValueError:
        parts = rest.split(None, 1)
        return _value(b" " + parts[0]) if len(parts) > 1 else None
    # counts, sums and shares: what is negative, infinite or no number is no reading
    return value if 0 <= value < _LARGEST else None


def _labels(line: bytes) -> dict[str, str]:
    text = line[line.find(b"{") + 1 : line.rfind(b"}")].decode(errors="replace")
    return dict(_LABEL.findall(text))


def _check_labels(lines: list[bytes]) -> None:
    if sum(map(len, lines)) > _MOST_LABEL_BYTES:
        name = lines[0][: lines[0].find(b"{")].decode(errors="replace")
        raise PageRefused(f"its page has more than {_MOST_LABEL_BYTES} bytes of labels of {name}; use fewer adapters")


def _whole(text: str | None) -> int:
    return int(text) if text is not None and len(text) <= _MOST_DIGITS and text.isdecimal() else 0


def _set_of(text: str) -> frozenset[str]:
    names = text.split(",", _MOST_LORAS)
    if len(names) > _MOST_LORAS:
        raise PageRefused(f"its page names more than {_MOST_LORAS} adapters; use fewer")
    return frozenset([name for part in names if (name := part.strip())])
