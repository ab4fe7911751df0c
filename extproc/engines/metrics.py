# SPDX-License-Identifier: Apache-2.0
"""What extproc reads of an engine's metrics page: load, latencies, cache size, adapters, and configured metrics.

Series of one name, as of data-parallel ranks, are added up; fractions are averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.engines.dialects import MetricName
from extproc.engines.prometheus_text import RARE_PAGES, MetricScanner, MetricsPageRefused, sample_labels, sample_value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.engines.dialects import Dialect

# Of a size of blocks, or a number of blocks or adapters.
_MOST_DIGITS: Final = 12
_MOST_LORA_SERIES: Final = 8_192
# Of the lines whose labels are read: those of caches, or the newest of adapters.
_MOST_LABEL_BYTES: Final = 256 * 1024
_MOST_LORAS: Final = 4_096


class LoraState(msgspec.Struct, frozen=True):
    """The LoRA adapters that an engine reports.

    ``active``: in its batch. ``waiting``: of waiting requests. ``max_active``: how many fit a batch. ``served``: its
    list of models, None if it was not asked. ``base``: those of the list that are no adapters. ``context_tokens``: the
    most that a prompt of those may have, by the list; 0 if unknown.
    """

    active: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    max_active: int = 0
    served: frozenset[str] | None = None
    base: frozenset[str] = frozenset()
    context_tokens: int = 0


class EngineReport(msgspec.Struct, frozen=True):
    """One reading of an engine's metrics. None: the engine does not report it.

    ================  ========  ======================================================
    field             unit      meaning
    ================  ========  ======================================================
    ``waiting``       requests  in the engine's queue
    ``running``       requests  in its batch
    ``kv_usage``      0 to 1    fraction of its KV cache in use
    ``ttft_s``        s         mean time to first token since the last reading
    ``tpot_s``        s         mean time per output token since the last reading
    ``loras``                   its LoRA adapters
    ``first_tokens``  requests  that received their first token since the last reading
    ``attributes``              metrics of its own that were asked for, NaN if missing
    ``load``          0 to 1    of a provider: how full its engines are, 1 if none has room
    ================  ========  ======================================================
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    loras: LoraState | None = None
    first_tokens: float | None = None
    attributes: Mapping[str, float] = {}
    load: float | None = None


class CacheConfig(msgspec.Struct, frozen=True):
    """The KV cache that an engine reports: tokens in a block, and tokens in total."""

    block_tokens: int
    total_tokens: int


class EngineMetrics(msgspec.Struct, frozen=True):
    """The content of one page. ``has_restarted``: a counter decreased, so the engine restarted with an empty cache."""

    report: EngineReport
    cache: CacheConfig | None
    has_restarted: bool

    @property
    def has_load_metrics(self) -> bool:
        """Whether the page has metrics of the engine's load; one without a known name is another program's."""
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

    def __init__(self, dialect: Dialect, *, custom: Iterable[tuple[str, str]] = ()) -> None:
        """``custom``: attributes, each with its metric (``MetricSelector``)."""
        self._custom = [(name, MetricSelector(spec)) for name, spec in custom]

        def sources(family: str) -> tuple[MetricName, ...]:
            """Some engines have none."""
            return dialect.sources.get(family, ())

        self._waiting = MetricScanner(sources("waiting_requests"))
        self._running = MetricScanner(sources("running_requests"))
        self._kv_usage = MetricScanner(sources("kv_cache_usage_ratio"))
        self._ttft = _HistogramMean(sources("time_to_first_token_seconds"))
        self._tpot = _HistogramMean(sources("inter_token_latency_seconds"))
        self._loras = MetricScanner(_named(dialect.lora_info), most_series=_MOST_LORA_SERIES)
        self._cache_info = MetricScanner(_named(dialect.cache_info))
        self._block_size, self._blocks = (
            MetricScanner(_named(dialect.block_size)),
            MetricScanner(_named(dialect.blocks)),
        )
        self._labels = (dialect.block_label, dialect.blocks_label)
        self._pages = 0

    def read(self, page: bytes) -> EngineMetrics:
        """Read a page in Prometheus' text format. What is missing or unreadable is None; raises MetricsPageRefused."""
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
        reads_cache = ttft.ran_backwards or self._pages % RARE_PAGES == 1
        reading = EngineMetrics(report, self._read_cache(page) if reads_cache else None, ttft.ran_backwards)
        if not reading.has_load_metrics:
            # an engine that starts may show its metrics on the next page
            for series in (self._waiting, self._running, self._kv_usage):
                series.search_whole_next_page()
        return reading

    def _read_cache(self, page: bytes) -> CacheConfig | None:
        block_label, blocks_label = self._labels
        if block_label:
            lines = self._cache_info.lines(page)
            _check_labels(lines)
            labels = map(sample_labels, lines)
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
        newest = max(lines, key=lambda line: sample_value(line) or 0.0)
        _check_labels([newest])
        labels = sample_labels(newest)
        return LoraState(
            active=_set_of(labels.get("running_lora_adapters", "")),
            waiting=_set_of(labels.get("waiting_lora_adapters", "")),
            max_active=_whole(labels.get("max_lora")),
        )


class MetricSelector:
    """A metric by ``name`` or ``name{label=value,...}``: the sum of the series that have all of these labels."""

    def __init__(self, spec: str) -> None:
        name, _, labels = spec.partition("{")
        pairs = (pair.partition("=") for pair in labels.rstrip("} ").split(",") if "=" in pair)
        # searched for, not read: a page may have megabytes of labels
        self._labels = [
            re.compile(rb"[{,] ?%b" % re.escape(f'{label.strip()}="{value.strip(chr(32) + chr(34))}"').encode())
            for label, _, value in pairs
        ]
        self._series = MetricScanner(_named(name.strip()))

    def value(self, page: bytes) -> float:
        """NaN if the page has no such series."""
        lines = self._series.lines(page)
        found = [sample_value(line) for line in lines if all(label.search(line) for label in self._labels)]
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

    def __init__(self, sources: tuple[MetricName, ...]) -> None:
        self._sum, self._count = MetricScanner(sources, "_sum"), MetricScanner(sources, "_count")
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


def _named(name: str) -> tuple[MetricName, ...]:
    return (MetricName(name),) if name else ()


def _check_labels(lines: list[bytes]) -> None:
    if sum(map(len, lines)) > _MOST_LABEL_BYTES:
        name = lines[0][: lines[0].find(b"{")].decode(errors="replace")
        raise MetricsPageRefused(
            f"its page has more than {_MOST_LABEL_BYTES} bytes of labels of {name}; use fewer adapters"
        )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and len(text) <= _MOST_DIGITS and text.isdecimal() else 0


def _set_of(text: str) -> frozenset[str]:
    names = text.split(",", _MOST_LORAS)
    if len(names) > _MOST_LORAS:
        raise MetricsPageRefused(f"its page names more than {_MOST_LORAS} adapters; use fewer")
    return frozenset([name for part in names if (name := part.strip())])
