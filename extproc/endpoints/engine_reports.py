"""What engines say of themselves, and how far to believe it as it grows old.

A report is believed whole for ``FRESH_S``; after that its weight falls by half every ``_HALF_LIFE_S`` and our own in-flight count
takes over. So a scrape that fails never stops a request: there is always something to go by. Between two reports, what we
sent and what ended since the last one is added to it; a burst must not pile up on the engine that looked idle a moment ago
(llm-d-router issue 2066).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.ledger import reconcile_backlog
from extproc.endpoints.table import LoraState

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable, Floats

FRESH_S: Final = 2.0
_HALF_LIFE_S: Final = 3.0
# The weight of a new mean over the last reports' worth of answers.
_LATENCY_WEIGHT: Final = 0.2


class EngineReport(msgspec.Struct, frozen=True):
    """One reading. None: the engine does not say. Latencies are means over what has ended since the reading before.

    ``first_tokens``: how many requests have had theirs since then.
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    loras: LoraState | None = None
    first_tokens: float | None = None


class CacheConfig(msgspec.Struct, frozen=True):
    """An engine's KV cache, as it says: tokens a block, and tokens in all."""

    block_tokens: int
    total_tokens: int


def apply_report(table: EndpointTable, row: int, state: EngineReport, now: float) -> None:
    """The engine of ``row`` has said how it is."""
    if state.waiting is not None:
        table.waiting[row] = state.waiting
        reconcile_backlog(table, row, waiting=state.waiting, first_tokens=state.first_tokens, now=now)
    if state.running is not None:
        table.running[row] = state.running
    if state.kv_usage is not None:
        table.kv_usage[row] = min(1.0, max(0.0, state.kv_usage))
    table.reported_at_s[row], table.in_flight_at_report[row] = now, table.in_flight[row]
    table.in_flight_tokens_at_report[row] = table.in_flight_tokens[row]
    table.has_foreign_requests = (
        table.has_foreign_requests or table.waiting[row] + table.running[row] > table.in_flight[row]
    )
    record_latency(table, row, ttft_s=state.ttft_s, tpot_s=state.tpot_s)
    if state.loras is not None:
        loras = state.loras
        if loras.served is None:
            loras = msgspec.structs.replace(loras, served=table.loras[row].served)
        table.set_loras(row, loras)


def record_latency(table: EndpointTable, row: int, *, ttft_s: float | None, tpot_s: float | None) -> None:
    """New means, from the engine's own histograms or from answers that passed."""
    for column, value in ((table.ttft_s, ttft_s), (table.tpot_s, tpot_s)):
        if value is not None and value > 0:
            known = float(column[row])
            column[row] = known + _LATENCY_WEIGHT * (value - known) if known else value


def report_trust(table: EndpointTable, now: float) -> Floats:
    """How far each endpoint's last report counts, by row: 1 as long as it is fresh, then ever less."""
    late = np.maximum(now - table.reported_at_s - FRESH_S, 0.0)
    trust: Floats = np.exp2(-late / _HALF_LIFE_S)
    return trust


def estimated_waiting(table: EndpointTable, now: float) -> Floats:
    """Requests in the engines' queues, by row."""
    trust = report_trust(table, now)
    reported = np.where(table.waiting > 0, np.maximum(table.waiting + _since(table), 0.0), 0.0)
    # what is there beyond all that was seen running must be waiting
    own = np.maximum(table.in_flight - table.running, 0.0)
    estimate: Floats = trust * reported + (1 - trust) * own
    return estimate


def estimated_running(table: EndpointTable, now: float) -> Floats:
    """Requests in the engines' batches, by row."""
    trust = report_trust(table, now)
    reported = np.where(table.waiting > 0, table.running, np.maximum(table.running + _since(table), 0.0))
    estimate: Floats = trust * reported + (1 - trust) * table.in_flight
    return estimate


def estimated_kv_usage(table: EndpointTable, now: float) -> Floats:
    """Shares of the KV caches in use, by row. The staler, the more like the fullest: an unknown cache is not an empty one."""
    trust = report_trust(table, now)
    fullest = float((table.kv_usage * trust).max(initial=0.0))
    estimate: Floats = trust * table.kv_usage + (1 - trust) * np.maximum(table.kv_usage, fullest)
    return estimate


def estimated_foreign(table: EndpointTable, now: float) -> Floats:
    """Requests in the engines that are not ours, by row: another gateway's, or this one's before a restart."""
    surplus = np.maximum(table.waiting + table.running - table.in_flight_at_report, 0.0)
    estimate: Floats = report_trust(table, now) * surplus
    return estimate


def _since(table: EndpointTable) -> Floats:
    """Requests of ours that came, less those that ended, since the last report."""
    change: Floats = (table.in_flight - table.in_flight_at_report).astype(np.float64)
    return change
