# SPDX-License-Identifier: Apache-2.0
"""Reports of engines about themselves, and how far to trust them as they age.

A report is fully trusted until the next one is overdue, and for ``FRESH_S`` at least: trust that fell before would
favour engines by the time at which they were read. After that its weight halves every ``_HALF_LIFE_S``, and our own
in-flight count takes its place, so a failed scrape never stops a request. Between two reports, the requests dispatched
and ended since the last one are added to it. Otherwise a burst would pile up on an engine that looked idle a moment ago
(llm-d-router issue 2066).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.in_flight import reconcile_backlog
from extproc.endpoints.table import FRESH_S

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.engines.metrics import EngineReport

_HALF_LIFE_S: Final = 3.0
# Of intervals: they vary by a tenth, every fourth read may be of the list of models, and an answer takes time.
_OVERDUE: Final = 2.5
# The weight of a new latency in the running mean.
_LATENCY_WEIGHT: Final = 0.2


def set_report_interval(table: EndpointTable, interval_s: float) -> None:
    """Engines are read once in ``interval_s``."""
    table.fresh_s = max(FRESH_S, _OVERDUE * interval_s)


def apply_report(table: EndpointTable, row: int, report: EngineReport, now: float) -> None:
    """Record a report of the engine of ``row``."""
    if report.waiting is not None:
        table.waiting[row] = report.waiting
        reconcile_backlog(table, row, waiting=report.waiting, first_tokens=report.first_tokens, now=now)
    if report.running is not None:
        table.running[row] = report.running
    if report.load is not None:
        # of requests it tells no number
        table.load[row], table.running[row] = report.load, table.in_flight[row]
    if report.kv_usage is not None:
        table.kv_usage[row] = min(1.0, max(0.0, report.kv_usage))
    table.reported_at_s[row], table.in_flight_at_report[row] = now, table.in_flight[row]
    table.in_flight_tokens_at_report[row] = table.in_flight_tokens[row]
    table.has_foreign_requests = (
        table.has_foreign_requests or table.waiting[row] + table.running[row] > table.in_flight[row]
    )
    record_latency(table, row, ttft_s=report.ttft_s, tpot_s=report.tpot_s)
    if report.attributes:
        table.attributes.record(row, report.attributes, len(table.addresses))
    if report.loras is not None:
        loras = report.loras
        if loras.served is None:
            known = table.loras[row]
            loras = msgspec.structs.replace(
                loras, served=known.served, base=known.base, context_tokens=known.context_tokens
            )
        table.set_loras(row, loras)


def record_latency(table: EndpointTable, row: int, *, ttft_s: float | None, tpot_s: float | None) -> None:
    """Update the running mean latencies from an engine's report or from one answer; None: unknown."""
    for column, value in ((table.ttft_s, ttft_s), (table.tpot_s, tpot_s)):
        if value is not None and value > 0:
            known = float(column[row])
            column[row] = known + _LATENCY_WEIGHT * (value - known) if known else value


def report_trust(table: EndpointTable, now: float) -> Floats:
    """The weight of each endpoint's last report, by row: 1 while it is fresh, then falling towards 0."""
    late = np.maximum(now - table.reported_at_s - table.fresh_s, 0.0)
    trust: Floats = np.exp2(-late / _HALF_LIFE_S)
    return trust


def estimated_waiting(table: EndpointTable, now: float) -> Floats:
    """Estimated requests in the engines' queues, by row."""
    trust = report_trust(table, now)
    reported = np.where(table.waiting > 0, np.maximum(table.waiting + _since(table), 0.0), 0.0)
    # requests in flight beyond those reported as running must be waiting
    own = np.maximum(table.in_flight - table.running, 0.0)
    estimate: Floats = trust * reported + (1 - trust) * own
    return estimate


def estimated_running(table: EndpointTable, now: float) -> Floats:
    """Estimated requests in the engines' batches, by row."""
    trust = report_trust(table, now)
    reported = np.where(table.waiting > 0, table.running, np.maximum(table.running + _since(table), 0.0))
    estimate: Floats = trust * reported + (1 - trust) * table.in_flight
    return estimate


def estimated_kv_usage(table: EndpointTable, now: float) -> Floats:
    """Estimated fractions of the KV caches in use, by row.

    A stale value approaches that of the fullest engine: an unknown cache must not look empty.
    """
    trust = report_trust(table, now)
    fullest = float((table.kv_usage * trust).max(initial=0.0))
    estimate: Floats = trust * table.kv_usage + (1 - trust) * np.maximum(table.kv_usage, fullest)
    return estimate


def trusted_provider_load(table: EndpointTable, now: float) -> Floats:
    """How full the engines of providers are, by row; 0 where a provider does not report it, or has not for long."""
    load: Floats = report_trust(table, now) * table.load
    return load


def estimated_requests_of_others(table: EndpointTable, now: float) -> Floats:
    """Estimated requests that we did not send, by row: another gateway's, or our own before a restart."""
    surplus = np.maximum(table.waiting + table.running - table.in_flight_at_report, 0.0)
    estimate: Floats = report_trust(table, now) * surplus
    return estimate


def _since(table: EndpointTable) -> Floats:
    """Our requests dispatched minus those ended since the last report, by row."""
    change: Floats = table.in_flight - table.in_flight_at_report
    return change
