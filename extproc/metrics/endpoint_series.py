# SPDX-License-Identifier: Apache-2.0
"""Series by endpoint, read from the endpoint tables while Prometheus reads the page"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from extproc.core.breakers import breakers_of
from extproc.metrics.exposition import MetricFamily, PiecewiseCollector, escape_label, format_number
from extproc.scheduling.plugins.label_plugins import ROLE_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from extproc.endpoints.health import EndpointHealth
    from extproc.endpoints.table import EndpointTable
    from extproc.scheduling.pool import Pool

    # one for each of the rows; None: no sample
    _Values = Sequence[float | None]
    _Column = Callable[[Pool, list[int]], _Values]

# It could not be reached or answered nothing, which needs no comparison with others.
_NO_ANSWER: Final = "no_answer"
_LABELS: Final = ("server", "endpoint")
_AVOIDED: Final = MetricFamily(
    "attache_endpoint_avoided",
    "1 while it is avoided, by how it fails; no series otherwise.",
    (*_LABELS, "reason"),
)
_SINCE: Final = MetricFamily("attache_endpoint_avoided_since_timestamp_seconds", "Since when it is avoided.", _LABELS)
_BREAKER: Final = MetricFamily(
    "attache_breaker_state",
    "Of a breaker that has ever opened: 0 closed, 1 half-open, 2 open; of the ModelServer where `endpoint` is empty.",
    _LABELS,
)
_MISSING: Final = MetricFamily(
    "attache_engine_model_missing",
    "1 while it lists models and not the ModelServer's (`model`); no series otherwise.",
    (*_LABELS, "model"),
)
_ROLE: Final = MetricFamily(
    "attache_endpoint_role",
    "1: its stages by `pdGroup` or the label llm-d.ai/role, such as `prefill`; no series if it has no role.",
    (*_LABELS, "role"),
)
# Of a value of that label, joined by hyphens.
_STAGES: Final = frozenset({"encode", "prefill", "decode", "both"})
_INTERVAL: Final = MetricFamily(
    "attache_engine_report_interval_seconds",
    "Between two reads of an engine's metrics; no series if never.",
    ("server",),
)


class EndpointSeries(PiecewiseCollector):
    """They end when the endpoint leaves the configuration."""

    def __init__(
        self, pools: Callable[[], Iterable[Pool]], clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        """``clock``: the one that endpoint tables go by."""
        self._pools = pools
        self._clock = clock
        self._wall_clock = wall_clock
        self._columns: tuple[tuple[MetricFamily, _Column], ...] = (
            (_series("attache_in_flight", "Requests picked and not over."), _of(lambda table: table.in_flight)),
            (
                _series("attache_prefill_tokens_per_second", "Learned speed of prefill."),
                _of(lambda table: table.prefill_rate),
            ),
            (
                _series("attache_prompt_tokens", "Prompt tokens, as engines report.", "counter"),
                _of(lambda table: table.prompt_tokens),
            ),
            (
                _series("attache_cached_tokens", "Prompt tokens found in the cache.", "counter"),
                _of(lambda table: table.cached_tokens),
            ),
            (_series("attache_cached_token_ratio", "Cached share of all prompt tokens."), _cached_ratio),
            (_series("attache_prefix_blocks", "Blocks in the approximate prefix index."), _blocks),
            (
                _series("attache_kv_blocks", "Blocks in the precise prefix index, of all ranks; no series if none."),
                _kv_blocks,
            ),
            (
                _series("attache_engine_waiting", "Waiting requests, as the engine says."),
                _reported(lambda table: table.waiting),
            ),
            (
                _series("attache_engine_running", "Running requests, as the engine says."),
                _reported(lambda table: table.running),
            ),
            (
                _series("attache_engine_kv_usage", "Share of the KV cache in use, 0 to 1."),
                _reported(lambda table: table.kv_usage),
            ),
            (_series("attache_engine_report_age_seconds", "Age of what the engine says."), self._age),
            (
                _series("attache_provider_load", "How full a provider says that its engines are, 0 to 1."),
                _reported(lambda table: table.load, of_providers=True),
            ),
            (_series("attache_endpoint_ttft_seconds", "Recent mean time to first token; no series if unknown."), _ttft),
            (
                _series("attache_endpoint_failed_ratio", "Failed share of its last 50 answers or so, the latest most."),
                _failed,
            ),
        )
        self.families = (
            *(family for family, _ in self._columns),
            _AVOIDED,
            _SINCE,
            _BREAKER,
            _MISSING,
            _ROLE,
            _INTERVAL,
        )

    def exposition_chunks(self) -> Iterator[str]:
        """One sample an endpoint and family. Values are those of the moment when their piece is written."""
        pools = list(self._pools())
        for family, column in self._columns:
            yield from family.exposition_chunks(
                line for pool in pools for line in _lines(family.sample_name, pool, column)
            )
        yield from _AVOIDED.exposition_chunks(line for pool in pools for line in _avoided_lines(pool))
        yield from _SINCE.exposition_chunks(
            line for pool in pools for line in _lines(_SINCE.sample_name, pool, self._avoided_since)
        )
        now = self._clock()
        yield from _BREAKER.exposition_chunks(line for pool in pools for line in _breaker_lines(pool, now))
        yield from _MISSING.exposition_chunks(
            line for pool in pools if pool.may_lack_model for line in _missing_lines(pool)
        )
        yield from _ROLE.exposition_chunks(line for pool in pools for line in _role_lines(pool))
        yield from _INTERVAL.exposition_chunks(
            _INTERVAL.line((pool.name,), pool.report_interval_s) for pool in pools if pool.report_interval_s
        )

    def _age(self, pool: Pool, rows: list[int]) -> _Values:
        now, is_provider = self._clock(), pool.spec.provider is not None
        return _reported(lambda table: now - table.reported_at_s, of_providers=is_provider)(pool, rows)

    def _avoided_since(self, pool: Pool, rows: list[int]) -> _Values:
        table, ahead_s = pool.table, self._wall_clock() - self._clock()
        return [ahead_s + breaker.since_s if (breaker := table.breakers[row]).trips else None for row in rows]


def _series(name: str, text: str, kind: str = "gauge") -> MetricFamily:
    return MetricFamily(name, text, _LABELS, kind)


def _lines(series: str, pool: Pool, column: _Column) -> Iterator[str]:
    """Of one ModelServer. An address needs no escape; the rest of the labels is the same in every line."""
    head, tail = f'{series}{{endpoint="', f'",server="{escape_label(pool.name)}"}} '
    addresses, values = pool.table.active_addresses, column(pool, pool.table.active_rows)
    for address, value in zip(addresses, values, strict=True):
        yield "" if value is None else f"{head}{address}{tail}{format_number(value)}\n"


def _avoided_lines(pool: Pool) -> Iterator[str]:
    table = pool.table
    for address, row in zip(table.active_addresses, table.active_rows, strict=True):
        reasons = _reasons(table.healths[row]) if table.trips[row] else ()
        yield "".join([_AVOIDED.line((pool.name, address, reason), 1) for reason in reasons])


def _breaker_lines(pool: Pool, now: float) -> Iterator[str]:
    for address, breaker in breakers_of(pool):
        if breaker.generation:
            yield _BREAKER.line((pool.name, address), breaker.state(now))


def _missing_lines(pool: Pool) -> Iterator[str]:
    table = pool.table
    for address, row in zip(table.active_addresses, table.active_rows, strict=True):
        if model := table.healths[row].lacks_model:
            yield _MISSING.line((pool.name, address, model), 1)


def _role_lines(pool: Pool) -> Iterator[str]:
    """``pdGroup`` decides for its stages; it has none that encodes."""
    table, stages = pool.table, pool.prefill_decode_rows()
    prefills, decodes = ((), ()) if stages is None else (stages[0].tolist(), stages[1].tolist())
    for address, row in zip(table.active_addresses, table.active_rows, strict=True):
        role = table.configs[row].labels.get(ROLE_LABEL, "")
        if stages is not None and (prefills[row] or decodes[row]):
            role = "-".join(["prefill"] * prefills[row] + ["decode"] * decodes[row])
        if _STAGES.issuperset(role.split("-")):
            yield _ROLE.line((pool.name, address, role), 1)


def _of(column: Callable[[EndpointTable], NDArray[Any]]) -> _Column:
    return lambda pool, rows: column(pool.table)[rows].tolist()


def _reported(column: Callable[[EndpointTable], NDArray[Any]], *, of_providers: bool = False) -> _Column:
    """Of engines that have reported, or of providers."""

    def values(pool: Pool, rows: list[int]) -> _Values:
        if (pool.spec.provider is not None) is not of_providers:
            return [None] * len(rows)
        found = column(pool.table)[rows].tolist()
        return [value if pool.table.has_reported(row) else None for row, value in zip(rows, found, strict=True)]

    return values


def _cached_ratio(pool: Pool, rows: list[int]) -> _Values:
    prompt, cached = pool.table.prompt_tokens[rows], pool.table.cached_tokens[rows]
    ratios: _Values = (cached / np.maximum(prompt, 1)).tolist()
    return ratios


def _blocks(pool: Pool, rows: list[int]) -> _Values:
    return [pool.caches.index.blocks_held(row) for row in rows]


def _kv_blocks(pool: Pool, rows: list[int]) -> _Values:
    index = pool.caches.kv_index
    return [None if index is None else index.blocks_held(row) for row in rows]


def _ttft(pool: Pool, rows: list[int]) -> _Values:
    return [seconds or None for seconds in pool.table.ttft_s[rows].tolist()]


def _failed(pool: Pool, rows: list[int]) -> _Values:
    healths = [pool.table.healths[row] for row in rows]
    return [one.failed / one.answers if one.answers else 0.0 for one in healths]


def _reasons(health: EndpointHealth) -> list[str]:
    """How an endpoint that is avoided fails."""
    return sorted(one.name.lower() for one in health.reasons) or [_NO_ANSWER]
