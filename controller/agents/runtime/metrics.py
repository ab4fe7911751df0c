# SPDX-License-Identifier: Apache-2.0
"""Metrics: the engine's page by its dialect's names, the agent's counters, and the agent's own page of both."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.engines.dialects import FAMILIES, MetricName
from extproc.engines.prometheus_text import metric_lines, sample_labels, sample_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from extproc.engines.dialects import Dialect, EngineMetricFamily

# Of one name. A page of 4 MiB, and no longer one is read, has hardly more.
_MOST_SERIES: Final = 65_536
_WHY_UNLOADED: Final = ("evicted", "asked", "removed", "replaced", "idle")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class HistogramBuckets:
    """Observations counted by upper bound."""

    def __init__(self, *bounds: float) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def histogram(self) -> CumulativeHistogram:
        """As on the page."""
        *counts, count = accumulate(self._counts)
        bounds = zip(map(_number, self._bounds), counts, strict=True)
        return CumulativeHistogram((*bounds, ("+Inf", count)), self._total, count)


@dataclass
class BatchCounters:
    """``requests``: ``joined`` with others, sent ``alone``, ``passed`` on as they came, or ``refused`` as too many
    wait. ``rows``: of the calls that the batcher made. ``delays``: seconds that requests waited for others.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("joined", "alone", "passed", "refused"), 0))
    failed_batches: int = 0
    rows: HistogramBuckets = field(default_factory=lambda: HistogramBuckets(1, 2, 4, 8, 16, 32, 64, 128, 256))
    delays: HistogramBuckets = field(
        default_factory=lambda: HistogramBuckets(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
    )

    def on_batch(self, rows: int, delays_s: Iterable[float]) -> None:
        """One leaves."""
        self.rows.observe(rows)
        for one in delays_s:
            self.delays.observe(one)


@dataclass
class AgentCounters:
    """``loads``: by result. ``unloads``: by reason. Times are sums in seconds. ``batches``: of an agent that joins
    requests.
    """

    loads: dict[str, int] = field(default_factory=lambda: {"loaded": 0, "failed": 0, "refused": 0})
    unloads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_WHY_UNLOADED, 0))
    load_s: float = 0.0
    adapters: int = 0
    probes: dict[str, int] = field(default_factory=lambda: {"good": 0, "bad": 0})
    warm_up_s: float = 0.0
    warm_up_failures: int = 0
    starts: int = 0
    batches: BatchCounters | None = None


class CumulativeHistogram(msgspec.Struct, frozen=True):
    """Cumulative counts by upper bound, as written on the page."""

    buckets: tuple[tuple[str, float], ...]
    total: float
    count: float


class AdapterUseReport(msgspec.Struct, frozen=True):
    """``in_use``: adapters with requests now. ``idle_s``: seconds since each was last in use. ``slots``: 0 if not
    reported.
    """

    in_use: frozenset[str] = frozenset()
    idle_s: dict[str, float] = {}
    slots: int = 0


class EngineMetricsPage(msgspec.Struct, frozen=True):
    """``values`` and ``histograms``: by family and model ("" if the engine names none). ``adapters``: None if not
    reported.
    """

    values: dict[str, dict[str, float]]
    histograms: dict[str, dict[str, CumulativeHistogram]]
    adapters: AdapterUseReport | None = None

    def total(self, family: str) -> float | None:
        """Sum over models; None if the page has no such series."""
        found = self.values.get(family)
        return sum(found.values()) if found else None

    @property
    def progress_counters(self) -> tuple[float | None, ...]:
        """Changes whenever the engine computes, and only then; empty if it does not count tokens."""
        if self.total("generation_tokens_total") is None:
            return ()
        counted = ("prompt_tokens_total", "generation_tokens_total", "finished_requests_total")
        return tuple(self.total(family) for family in (*counted, "kv_cache_usage_ratio"))


class _Sample(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    value: float


def parse_engine_metrics(page: bytes, dialect: Dialect, *, unix_s: float) -> EngineMetricsPage:
    """Raises PageRefused. ``unix_s``: the time now, because vLLM reports by Unix time when adapters were in use."""
    values: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, CumulativeHistogram]] = {}
    for family in FAMILIES:
        for source in dialect.sources.get(family.name, ()):
            if family.kind == "histogram":
                found = _histograms(page, source, dialect.model_label)
                if found:
                    histograms[family.name] = found
                    break
            else:
                numbers = _by_model(_samples(page, source), dialect.model_label, is_mean=family.kind == "ratio")
                if numbers:
                    values[family.name] = numbers
                    break
    adapters = _adapter_use(_samples(page, MetricName(dialect.lora_info)), unix_s) if dialect.lora_info else None
    return EngineMetricsPage(values, histograms, adapters)


def _samples(page: bytes, source: MetricName, suffix: str = "") -> list[_Sample]:
    lines = metric_lines(page, f"{source.name}{suffix}".encode(), most=_MOST_SERIES)
    found = [_Sample(sample_labels(line), value) for line in lines if (value := sample_value(line)) is not None]
    if source.where is None:
        return found
    label, wanted = source.where
    return [one for one in found if one.labels.get(label) == wanted]


def _by_model(samples: Iterable[_Sample], model_label: str, *, is_mean: bool = False) -> dict[str, float]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for one in samples:
        numbers[one.labels.get(model_label, "")].append(one.value)
    return {model: sum(each) / (len(each) if is_mean else 1) for model, each in numbers.items()}


def _histograms(page: bytes, source: MetricName, model_label: str) -> dict[str, CumulativeHistogram]:
    totals, counts = (_by_model(_samples(page, source, suffix), model_label) for suffix in ("_sum", "_count"))
    buckets: dict[str, dict[str, float]] = {model: {} for model in counts}
    for one in _samples(page, source, "_bucket") if counts else ():
        of_model = buckets.get(one.labels.get(model_label, ""))
        if of_model is not None and (bound := one.labels.get("le", "")):
            of_model[bound] = of_model.get(bound, 0.0) + one.value
    return {
        model: CumulativeHistogram(tuple(buckets[model].items()), totals.get(model, 0.0), count)
        for model, count in counts.items()
    }


def _adapter_use(series: Iterable[_Sample], unix_s: float) -> AdapterUseReport:
    """Each set of running and waiting adapters is a series of its own; its value is the Unix time at which it was last
    current.
    """
    listed = sorted(series, key=lambda one: one.value)
    if not listed:
        return AdapterUseReport()
    idle_s: dict[str, float] = {}
    for one in listed:
        for name in _names(one):
            idle_s[name] = max(unix_s - one.value, 0.0)
    slots = listed[-1].labels.get("max_lora", "")
    return AdapterUseReport(_names(listed[-1]), idle_s, int(slots) if slots.isascii() and slots.isdigit() else 0)


def _names(one: _Sample) -> frozenset[str]:
    both = f"{one.labels.get('running_lora_adapters', '')},{one.labels.get('waiting_lora_adapters', '')}"
    return frozenset(name for part in both.split(",") if (name := part.strip()))


class AgentState(msgspec.Struct, frozen=True):
    """``drain_s``: how long the drain has lasted, or did; None without one."""

    dialect: str
    is_ready: bool
    is_alive: bool
    has_answered: bool
    drain_s: float | None
    file_is_good: bool
    coming: int
    limit: int


def render_agent_metrics(page: EngineMetricsPage | None, state: AgentState, counters: AgentCounters) -> str:
    """Prometheus' text format. Without the engine's page its metrics are missing, and ``..._metrics_up`` is 0."""
    lines: list[str] = []
    if page is not None:
        for family in FAMILIES:
            lines += _engine_lines(family, page)
    lines += _own_lines(state, counters, has_page=page is not None)
    return "\n".join(lines) + "\n"


def _engine_lines(family: EngineMetricFamily, page: EngineMetricsPage) -> Iterator[str]:
    name = f"attache_engine_{family.name}"
    values, histograms = page.values.get(family.name), page.histograms.get(family.name)
    if values:
        yield from _head(name, family.help, "counter" if family.kind == "counter" else "gauge")
        for model, value in values.items():
            yield f"{name}{_labels(model=model)} {_number(value)}"
    if histograms:
        yield from _head(name, family.help, "histogram" if _has_buckets(histograms) else "summary")
        for model, one in histograms.items():
            yield from _histogram_lines(name, one, model)


def _histogram_lines(name: str, one: CumulativeHistogram, model: str = "") -> Iterator[str]:
    for bound, count in one.buckets:
        yield f"{name}_bucket{_labels(model=model, le=bound)} {_number(count)}"
    yield f"{name}_sum{_labels(model=model)} {_number(one.total)}"
    yield f"{name}_count{_labels(model=model)} {_number(one.count)}"


def _has_buckets(histograms: Mapping[str, CumulativeHistogram]) -> bool:
    return all(one.buckets for one in histograms.values())


def _own_lines(state: AgentState, counters: AgentCounters, *, has_page: bool) -> Iterator[str]:
    gauges = (
        ("ready", "Whether the engine should get requests.", state.is_ready),
        ("alive", "Whether the engine need not be started again.", state.is_alive),
        ("has_answered", "Whether the model has answered since the engine started.", state.has_answered),
        ("metrics_up", "Whether the engine's metrics could be read.", has_page),
        ("draining", "Whether the engine is being drained.", state.drain_s is not None),
        ("drain_seconds", "How long the drain has lasted.", state.drain_s or 0.0),
        ("warm_up_seconds", "How long the last warm-up took.", counters.warm_up_s),
        ("adapters_loaded", "Adapters, or models of the repository, in the engine.", counters.adapters),
        ("adapters_coming", "Adapters that are being downloaded or loaded.", state.coming),
        ("adapters_limit", "Adapters that fit; 0 if not known.", state.limit),
        ("adapters_file_good", "Whether the file of adapters could be read.", state.file_is_good),
    )
    counts = (
        ("engine_starts_total", "Starts of the engine that ended with an answer.", counters.starts),
        ("warm_up_failures_total", "Requests of warm-ups that failed.", counters.warm_up_failures),
        ("adapter_load_seconds_total", "Time spent on loading adapters, downloads included.", counters.load_s),
    )
    labelled = (
        ("probes_total", "Questions to the engine by answer.", "answer", counters.probes),
        ("adapter_loads_total", "Loads of adapters by result.", "result", counters.loads),
        ("adapter_unloads_total", "Unloads of adapters by reason.", "reason", counters.unloads),
    )
    yield from _head("attache_agent_info", "The agent.", "gauge")
    yield f"attache_agent_info{_labels(dialect=state.dialect)} 1"
    for kind, group in (("gauge", gauges), ("counter", counts)):
        for name, text, value in group:
            yield from _head(f"attache_agent_{name}", text, kind)
            yield f"attache_agent_{name} {_number(value)}"
    for name, text, label, values in labelled:
        yield from _head(f"attache_agent_{name}", text, "counter")
        for which, count in values.items():
            yield f"attache_agent_{name}{_labels(**{label: which})} {count}"
    if counters.batches is not None:
        yield from _batch_lines(counters.batches)


def _batch_lines(batches: BatchCounters) -> Iterator[str]:
    yield from _head("attache_agent_batch_requests_total", "Requests by what the batcher did with them.", "counter")
    for result, count in batches.requests.items():
        yield f"attache_agent_batch_requests_total{_labels(result=result)} {count}"
    yield from _head("attache_agent_batches_failed_total", "Joined calls whose answer could not be used.", "counter")
    yield f"attache_agent_batches_failed_total {batches.failed_batches}"
    for name, text, buckets in (
        ("attache_agent_batch_rows", "Rows of the calls that the batcher made.", batches.rows),
        ("attache_agent_batch_delay_seconds", "How long requests waited for others.", batches.delays),
    ):
        yield from _head(name, text, "histogram")
        yield from _histogram_lines(name, buckets.histogram())


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _labels(**labels: str) -> str:
    """Labels with an empty value are left out."""
    written = [f'{"model_name" if name == "model" else name}="{value}"' for name, value in labels.items() if value]
    return "{" + ",".join(written) + "}" if written else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
