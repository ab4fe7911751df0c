# SPDX-License-Identifier: Apache-2.0
"""Reads what an engine's metrics page says, by its dialect's names."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.runtime.dialects import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.agents.runtime.dialects import Dialect, Source

# It begins where no name goes on, and no quantifier gives back what it took: the time is linear in any line.
_LABEL: Final = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)="([^"\\]*+(?:\\.[^"\\]*+)*+)"')
# More than any count, number of seconds or Unix time.
_LARGEST: Final = 1e15
_SUFFIXES: Final = ("_bucket", "_sum", "_count")


class Histogram(msgspec.Struct, frozen=True):
    """Cumulative counts by upper bound, as written on the page."""

    buckets: tuple[tuple[str, float], ...]
    total: float
    count: float


class AdapterUse(msgspec.Struct, frozen=True):
    """``in_use``: adapters with requests now. ``idle_s``: seconds since each was last in use. ``slots``: 0 if not
    told.
    """

    in_use: frozenset[str] = frozenset()
    idle_s: dict[str, float] = {}
    slots: int = 0


class EnginePage(msgspec.Struct, frozen=True):
    """``values`` and ``histograms``: by family and model ("" if the engine names none). ``adapters``: None if not
    told.
    """

    values: dict[str, dict[str, float]]
    histograms: dict[str, dict[str, Histogram]]
    adapters: AdapterUse | None = None

    def total(self, family: str) -> float | None:
        """Sum over models; None if the page does not tell."""
        found = self.values.get(family)
        return sum(found.values()) if found else None

    @property
    def progress(self) -> tuple[float | None, ...]:
        """Changes whenever the engine computes, and only then; empty if it does not count tokens."""
        if self.total("generation_tokens_total") is None:
            return ()
        counted = ("prompt_tokens_total", "generation_tokens_total", "finished_requests_total")
        return tuple(self.total(family) for family in (*counted, "kv_cache_usage_ratio"))


class _Sample(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    value: float


def read_page(text: str, dialect: Dialect, *, unix_s: float) -> EnginePage:
    """``unix_s``: the time now, because vLLM tells by Unix time when adapters were in use."""
    samples = _samples(text, _wanted(dialect))
    values: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, Histogram]] = {}
    for family in FAMILIES:
        for source in dialect.sources.get(family.name, ()):
            if family.kind == "histogram":
                found = _histograms(samples, source, dialect.model_label)
                if found:
                    histograms[family.name] = found
                    break
            else:
                numbers = _values(samples, source, dialect.model_label, is_mean=family.kind == "ratio")
                if numbers:
                    values[family.name] = numbers
                    break
    adapters = _adapter_use(samples.get(dialect.lora_info, ()), unix_s) if dialect.lora_info else None
    return EnginePage(values, histograms, adapters)


def _wanted(dialect: Dialect) -> frozenset[str]:
    kinds = {family.name: family.kind for family in FAMILIES}
    names = {dialect.lora_info}
    for family, sources in dialect.sources.items():
        suffixes = _SUFFIXES if kinds[family] == "histogram" else ("",)
        names.update(source.name + suffix for source in sources for suffix in suffixes)
    return frozenset(names)


def _samples(text: str, wanted: frozenset[str]) -> Mapping[str, list[_Sample]]:
    found: dict[str, list[_Sample]] = defaultdict(list)
    for line in text.splitlines():
        name = line[: _end_of_name(line)]
        if name in wanted:
            sample = _sample(line[len(name) :])
            if sample is not None:
                found[name].append(sample)
    return found


def _end_of_name(line: str) -> int:
    brace, space = line.find("{"), line.find(" ")
    return min(brace, space) if brace >= 0 <= space else max(brace, space, 0)


def _sample(rest: str) -> _Sample | None:
    """``{labels} value``, with or without a timestamp; None if it cannot be read."""
    labels, _, numbers = rest.rpartition("}")
    try:
        value = float(numbers.split()[0])
    except (ValueError, IndexError):
        return None
    if not 0 <= value < _LARGEST:
        return None
    return _Sample(dict(_LABEL.findall(labels)), value)


def _of_source(samples: Mapping[str, list[_Sample]], source: Source, suffix: str = "") -> Iterable[_Sample]:
    found = samples.get(source.name + suffix, [])
    if source.where is None:
        return found
    label, value = source.where
    return [one for one in found if one.labels.get(label) == value]


def _values(
    samples: Mapping[str, list[_Sample]], source: Source, model_label: str, *, is_mean: bool
) -> dict[str, float]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for one in _of_source(samples, source):
        numbers[one.labels.get(model_label, "")].append(one.value)
    return {model: sum(each) / (len(each) if is_mean else 1) for model, each in numbers.items()}


def _histograms(samples: Mapping[str, list[_Sample]], source: Source, model_label: str) -> dict[str, Histogram]:
    totals = _values(samples, msgspec.structs.replace(source, name=source.name + "_sum"), model_label, is_mean=False)
    counts = _values(samples, msgspec.structs.replace(source, name=source.name + "_count"), model_label, is_mean=False)
    buckets: dict[str, dict[str, float]] = {model: {} for model in counts}
    for one in _of_source(samples, source, "_bucket"):
        of_model = buckets.get(one.labels.get(model_label, ""))
        if of_model is not None and (bound := one.labels.get("le", "")):
            of_model[bound] = of_model.get(bound, 0.0) + one.value
    return {
        model: Histogram(tuple(buckets[model].items()), totals.get(model, 0.0), count)
        for model, count in counts.items()
    }


def _adapter_use(series: Iterable[_Sample], unix_s: float) -> AdapterUse:
    """Each change of what runs and waits is a new series, whose value is the Unix time at which it was last true."""
    listed = sorted(series, key=lambda one: one.value)
    if not listed:
        return AdapterUse()
    idle_s: dict[str, float] = {}
    for one in listed:
        for name in _names(one):
            idle_s[name] = max(unix_s - one.value, 0.0)
    slots = listed[-1].labels.get("max_lora", "")
    return AdapterUse(_names(listed[-1]), idle_s, int(slots) if slots.isascii() and slots.isdigit() else 0)


def _names(one: _Sample) -> frozenset[str]:
    both = f"{one.labels.get('running_lora_adapters', '')},{one.labels.get('waiting_lora_adapters', '')}"
    return frozenset(name for part in both.split(",") if (name := part.strip()))
