# SPDX-License-Identifier: Apache-2.0
"""What metrics pages of one moment say, put together over processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_Labels = tuple[tuple[str, str], ...]
# Every process sees the whole of these, and not a part of it.
_SEEN_BY_ALL: Final = frozenset(
    {
        "attache_engine_waiting",
        "attache_engine_running",
        "attache_engine_kv_usage",
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
    """Samples of one moment, added up over processes."""

    def __init__(self) -> None:
        self._values: dict[str, dict[_Labels, float]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """One sample; one that is no finite number says nothing."""
        if not math.isfinite(value):
            return
        series = self._values.setdefault(name, {})
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
        wanted = set(labels.items())
        return sum(value for key, value in self._values.get(name, {}).items() if wanted <= set(key))

    def get(self, name: str, **labels: str) -> float | None:
        """The sum, or None if no series has these labels."""
        wanted = set(labels.items())
        found = [value for key, value in self._values.get(name, {}).items() if wanted <= set(key)]
        return sum(found) if found else None

    def values_of(self, name: str, *labels: str, **where: str) -> list[tuple[str, ...]]:
        """All values of some labels, in order. ``where``: labels that the series have."""
        wanted = set(where.items())
        keys = [key for key in self._values.get(name, {}) if wanted <= set(key)]
        return sorted({tuple(dict(key).get(label, "") for label in labels) for key in keys})

    @property
    def is_of_extproc(self) -> bool:
        """Whether a page of extproc is among them."""
        return "attache_open_streams" in self._values
