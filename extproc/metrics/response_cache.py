# SPDX-License-Identifier: Apache-2.0
"""The response cache as metrics: what was looked up, what was kept, and the memory that it takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from extproc.core.effects import CacheLookupResult, CacheStoreAttempted
from extproc.metrics.exposition import CounterFamily

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from extproc.core.response_cache import AnswerStore


class ResponseCacheMetrics:
    """Of all routes of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._store: AnswerStore | None = None
        self._lookups = CounterFamily(
            "attache_response_cache_lookups",
            "Requests of routes with a response cache: hit, miss or bypass, and why they were not looked up.",
            ["route", "result", "reason"],
            registry,
        )
        self._answers = CounterFamily(
            "attache_response_cache_answers",
            "Answers that came for the response cache: stored, not_whole, outdated, or unknown: nobody waits for them.",
            ["result"],
            registry,
        )
        values: tuple[tuple[str, str, Callable[[AnswerStore], int]], ...] = (
            ("bytes", "Memory of the stored answers.", lambda store: store.bytes),
            ("entries", "Stored answers.", len),
            ("evictions", "Stored answers that have made room for others, since the start.", lambda one: one.evicted),
        )
        for name, text, value in values:
            gauge = Gauge(f"attache_response_cache_{name}", text, registry=registry)
            gauge.set_function(partial(self._read, value))

    def set_store(self, store: AnswerStore) -> None:
        """The answers that are kept."""
        self._store = store

    def _read(self, value: Callable[[AnswerStore], int]) -> float:
        return 0 if self._store is None else value(self._store)

    def lookups(self) -> dict[str, tuple[int, int]]:
        """By route: how many requests were looked up, and how many of them were hits."""
        found: dict[str, tuple[int, int]] = {}
        for (route, result, _), number in self._lookups.items():
            if result != "bypass":
                asked, hits = found.get(route, (0, 0))
                found[route] = asked + int(number), hits + (int(number) if result == "hit" else 0)
        return found

    def count(self, effect: CacheLookupResult | CacheStoreAttempted) -> None:
        """A request was looked up, or an answer came."""
        if isinstance(effect, CacheLookupResult):
            self._lookups.add(effect.route, effect.result, effect.why)
        else:
            self._answers.add(effect.result)
