# SPDX-License-Identifier: Apache-2.0
"""What metrics pages of one moment say, put together over processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_Labels = tuple[tuple[str, str], ...]
_Names = tuple[str, ...]
_Series = tuple[dict[str, str], float]
_Index = dict[tuple[str, ...], list[_Series]]
# Every process sees the whole of these, and not a part of it.
_SEEN_BY_ALL: Final = frozenset(
    {
        "attache_engine_waiting",
        "attache_engine_running",
        "attache_engine_kv_usage",
        "attache_engine_report_interval_seconds",
        "attache_in_flight",
        "attache_saturation",
        "attache_cached_token_ratio",
        "attache_endpoint_avoided",
        "attache_endpoint_failed_ratio",
        "attache_endpoint_ttft_seconds",
    }
)
# One process is enough that has a fresh report, or that knew first.
_LEAST: Final = frozenset({"attache_engine_report_age_seconds", "attache_endpoint_avoided_since_timestamp_seconds"})


class Sample:
    """Samples of one moment, added up over processes.

    A question is answered from an index by the labels that it names, which is built once for each set of label names:
    a screen of many engines asks of each of them, and must not look through the series of all others each time.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[_Labels, float]] = {}
        self._indexes: dict[str, dict[_Names, _Index]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """One sample; one that is no finite number says nothing."""
        if not math.isfinite(value):
            return
        series = self._values.setdefault(name, {})
        self._indexes.pop(name, None)
        key = tuple(sorted(labels.items()))
        known = series.get(key)
        if known is None:
            series[key] = value
        elif name in _SEEN_BY_ALL:
            series[key] = max(known, value)
        elif name in _LEAST:
            series[key] = min(known, value)
        else:
            series[key] = known + value

    def sum(self, name: str, **labels: str) -> float:
        """Over all series that have these labels."""
        return sum(value for _, value in self._having(name, labels))

    def get(self, name: str, **labels: str) -> float | None:
        """The sum, or None if no series has these labels."""
        found = self._having(name, labels)
        return sum(value for _, value in found) if found else None

    def values_of(self, name: str, *labels: str, **where: str) -> list[tuple[str, ...]]:
        """All values of some labels, in order. ``where``: labels that the series have."""
        return sorted({tuple(series.get(label, "") for label in labels) for series, _ in self._having(name, where)})

    @property
    def is_of_extproc(self) -> bool:
        """Whether a page of extproc is among them."""
        return "attache_open_streams" in self._values

    def _having(self, name: str, labels: Mapping[str, str]) -> Sequence[_Series]:
        """The series that have these labels, and maybe others."""
        indexes = self._indexes.setdefault(name, {})
        names = tuple(labels)
        index = indexes.get(names)
        if index is None:
            index = indexes[names] = _index(self._values.get(name, {}), names)
        return index.get(tuple(labels.values()), ())


def _index(values: Mapping[_Labels, float], names: _Names) -> _Index:
    """Series by their values of these labels; those that lack one of them are left out."""
    index: _Index = {}
    for key, value in values.items():
        labels = dict(key)
        if all(name in labels for name in names):
            index.setdefault(tuple(labels[name] for name in names), []).append((labels, value))
    return index
