# SPDX-License-Identifier: Apache-2.0
"""Two readings of metrics to a picture of what goes on: engines, queues, tenants."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    }
)
_REFUSED: Final = ("rate_limited", "queue_full", "queue_timeout", "shed", "limits_unavailable", "no_endpoint")


class Sample:
    """Samples of one moment, added up over processes."""

    def __init__(self) -> None:
        self._values: dict[str, dict[_Labels, float]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """One sample."""
        series = self._values.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        known = series.get(key, 0.0)
        series[key] = max(known, value) if name in _SEEN_BY_ALL else known + value

    def sum(self, name: str, **labels: str) -> float:
        """Over all series that have these labels."""
        queued = set(labels.items())
        return sum(value for key, value in self._values.get(name, {}).items() if queued <= set(key))

    def values_of(self, name: str, *labels: str) -> list[tuple[str, ...]]:
        """All values of some labels, in order."""
        keys = self._values.get(name, {})
        return sorted({tuple(dict(key).get(label, "") for label in labels) for key in keys})


def render(before: Sample, now: Sample, *, seconds: float, tenants: int) -> str:
    """Counters become rates over the ``seconds`` between the two."""

    rate = partial(_rate, before, now, seconds)
    lines = [
        f"{rate('attache_picks_total'):.1f} picks/s, {now.sum('attache_open_streams'):.0f} requests open, "
        f"{rate('attache_requests_total', outcome='rate_limited'):.1f} rate-limited/s, "
        f"{now.sum('attache_queue_waiting'):.0f} waiting",
        "",
    ]
    engines = [
        [
            server,
            endpoint,
            f"{now.sum('attache_in_flight', server=server, endpoint=endpoint):.0f}",
            f"{now.sum('attache_engine_running', server=server, endpoint=endpoint):.0f}",
            f"{now.sum('attache_engine_waiting', server=server, endpoint=endpoint):.0f}",
            f"{now.sum('attache_engine_kv_usage', server=server, endpoint=endpoint):.0%}",
            f"{rate('attache_prompt_tokens_total', server=server, endpoint=endpoint):,.0f}",
            f"{now.sum('attache_cached_token_ratio', server=server, endpoint=endpoint):.0%}",
        ]
        for server, endpoint in now.values_of("attache_in_flight", "server", "endpoint")
    ]
    heads = ["SERVER", "ENGINE", "IN FLIGHT", "RUNNING", "WAITING", "KV", "PROMPT TOK/S", "CACHED"]
    lines += _table(heads, engines)
    queues = [
        [
            server,
            band,
            f"{now.sum('attache_queue_waiting', server=server, band=band):.0f}",
            f"{rate('attache_queue_wait_seconds_count', server=server, band=band):.1f}",
            _mean_wait(before, now, server, band),
            f"{rate('attache_queue_waits_total', server=server, band=band, outcome='queue_timeout'):.1f}",
            f"{rate('attache_queue_waits_total', server=server, band=band, outcome='left'):.1f}",
            f"{now.sum('attache_saturation', server=server):.0%}",
        ]
        for server, band in now.values_of("attache_queue_waiting", "server", "band")
    ]
    if queues:
        lines += _table(
            ["SERVER", "BAND", "WAITING", "SENT/S", "MEAN WAIT", "TIMEOUTS/S", "LEFT/S", "SATURATION"], queues
        )
    lines += _tenants(before, now, seconds, tenants)
    return "\n".join(lines)


def _rate(before: Sample, now: Sample, seconds: float, name: str, **labels: str) -> float:
    return max(0.0, now.sum(name, **labels) - before.sum(name, **labels)) / seconds


def _tenants(before: Sample, now: Sample, seconds: float, most: int) -> list[str]:
    names = [name for (name,) in now.values_of("attache_tenant_requests_total", "tenant")]

    rate = partial(_rate, before, now, seconds)
    service = {name: rate("attache_tenant_service_tokens_total", tenant=name) for name in names}
    whole = sum(service.values())
    rows = [
        [
            name,
            f"{rate('attache_tenant_requests_total', tenant=name, outcome='picked'):.1f}",
            f"{service[name]:,.0f}",
            f"{service[name] / whole:.0%}" if whole else "-",
            f"{rate('attache_tenant_wait_seconds_total', tenant=name):.2f}",
            f"{sum(rate('attache_tenant_requests_total', tenant=name, outcome=one) for one in _REFUSED):.1f}",
        ]
        for name in sorted(names, key=lambda name: -service[name])[:most]
    ]
    return _table(["TENANT", "SENT/S", "SERVICE TOK/S", "SHARE", "WAITING", "REFUSED/S"], rows) if rows else []


def _mean_wait(before: Sample, now: Sample, server: str, band: str) -> str:
    count, total = (
        now.sum(name, server=server, band=band) - before.sum(name, server=server, band=band)
        for name in ("attache_queue_wait_seconds_count", "attache_queue_wait_seconds_sum")
    )
    return f"{total / count:.2f}s" if count > 0 else "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, text to the left and numbers to the right, and an empty line."""
    widths = [max([len(head), *(len(row[index]) for row in rows)]) for index, head in enumerate(heads)]
    is_text = [head in {"SERVER", "ENGINE", "BAND", "TENANT"} for head in heads]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(cells, widths, is_text, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return [line(heads), *map(line, rows), ""]
