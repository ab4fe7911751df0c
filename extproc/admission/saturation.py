"""How full engines are: when a request may go, and to whom.

A row's pressure is the largest of what is counted, each as a share of its limit: requests waiting in the engine and its KV
cache in use (the roofline of llm-d's detector), requests and tokens in flight, and the wait until a new prompt would begin. At 1 an
engine is full. Saturation is the mean over all engines with each at most 1, so it is 1 only when nobody has room.

Between two reports what was sent since counts as waiting for as long as our books say that its prefill is not done: a burst
must not pour into engines that looked empty a moment ago (llm-d-router issue 2066). A report that is old or was never made
counts less and less, and our own books take over: it can never stop requests from going (issues 2100, 2408, 2514).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from extproc.endpoints.engine_reports import report_trust
from extproc.endpoints.ledger import backlogs
from extproc.endpoints.table import Bools

if TYPE_CHECKING:
    from extproc.admission.queued_request import QueuedRequest
    from extproc.config.admission import SaturationLimits
    from extproc.endpoints.table import EndpointTable, Floats

# In flight, where neither reports nor limits of ours say anything: half of vLLM's default batch.
_ASSUMED_BATCH: Final = 128
# Below this a report says too little.
_STALE: Final = 0.5
_ROUNDING_S: Final = 1e-4
# Looking again costs little, and beliefs that fade change by themselves.
RECHECK_S: Final = 1.0


class Stages(msgspec.Struct, frozen=True):
    """Rows of prefill and of decode engines, and the ``group`` of each row within which both must be."""

    prefill: Bools
    decode: Bools
    group: NDArray[np.intp]

    def complete_pairs(self, rows: Bools) -> Bools:
        """Those of ``rows`` that make whole pairs."""
        prefill, decode = rows & self.prefill, rows & self.decode
        both = np.intersect1d(self.group[prefill], self.group[decode])
        return (prefill | decode) & np.isin(self.group, both)


class Capacity:
    """Who has room at one moment; what is reserved in it is not for those who come later in the order."""

    def __init__(
        self, table: EndpointTable, limits: SaturationLimits, now: float, stages: Stages | None = None
    ) -> None:
        """``stages``: where a request needs a prefill and a decode engine."""
        self._table = table
        self._limits = limits
        self._now = now
        self._stages = stages
        self._candidates = _usable(table, now)
        trust = report_trust(table, now)
        self._backlog_s: Floats = backlogs(table, now) / table.prefill_rate
        soft, hard = self._soft(trust), self._hard(trust)
        self.pressure = np.maximum(soft, hard)
        self.open: Bools = self._candidates & (self.pressure < 1)
        self._allowed: Bools = self._candidates & (hard < 1) & (soft < 1 + limits.headroom)
        self.has_endpoints = len(table) > 0
        self.saturation = self._saturation()
        self.stale_endpoints = int(np.count_nonzero(self._candidates & (trust < _STALE)))

    def rows_for(self, queued: QueuedRequest) -> Bools | None:
        """The endpoints that can take it now; None: nobody."""
        rows = self._fitting(self.open, queued)
        if not rows.any():
            return None
        # where somebody has room, one that is a little too full may be worth its wait for what it has cached
        return rows | self._fitting(self._allowed, queued) if queued.cached_tokens else rows

    def set_aside(self, queued: QueuedRequest) -> None:
        """Nobody behind ``wanted`` may use the endpoint that will first have room for it."""
        candidates = self._eligible(self._candidates, queued)
        if candidates.any():
            fullness = np.maximum(self.pressure, self._table.in_flight_tokens / self._limits.max_tokens)
            nearest = int(np.where(candidates, fullness, np.inf).argmin())
            self.open, self._allowed = self.open.copy(), self._allowed.copy()
            self.open[nearest] = self._allowed[nearest] = False

    def opens_at_s(self) -> float:
        """When to look again, if nothing happens before."""
        over = self._backlog_s[self._candidates & (self._backlog_s >= self._limits.max_wait_s)]
        # a moment later, so that rounding does not find it full still
        soonest = float(over.min()) - self._limits.max_wait_s + _ROUNDING_S if over.size else RECHECK_S
        return self._now + min(RECHECK_S, soonest)

    def _eligible(self, candidates: Bools, queued: QueuedRequest) -> Bools:
        rows = queued.rows
        return candidates if rows is None else candidates & rows

    def _fitting(self, candidates: Bools, queued: QueuedRequest) -> Bools:
        rows = self._eligible(candidates, queued)
        most = self._limits.max_tokens
        if most < np.inf:
            # what is larger than an engine goes to an empty one, and nowhere else
            fits = (most - self._table.in_flight_tokens >= queued.total_tokens) | (self._table.in_flight == 0)
            rows = rows & fits
        return rows if self._stages is None else self._stages.complete_pairs(rows)

    def _saturation(self) -> float:
        """Of the fuller stage, if there are two; one without any engine is full."""
        stages = self._stages
        parts = (
            [self._candidates]
            if stages is None
            else [self._candidates & stages.prefill, self._candidates & stages.decode]
        )
        counts = [int(np.count_nonzero(part)) for part in parts]
        whole = np.minimum(self.pressure, 1.0)
        means = (float(whole[part].sum()) / count if count else 1.0 for part, count in zip(parts, counts, strict=True))
        return max(means)

    def _soft(self, trust: Floats) -> Floats:
        """By what engines say of themselves, with what was sent since; and by the wait that our books expect."""
        table, limits = self._table, self._limits
        since = table.in_flight - table.in_flight_at_report
        coming = np.where((self._backlog_s > 0) | (since < 0), since, 0)
        said = np.maximum(table.waiting + coming, 0.0) / limits.queue_depth
        tokens = np.maximum(table.in_flight_tokens - table.in_flight_tokens_at_report, 0.0)
        more = np.where(table.kv_capacity_tokens > 0, tokens / np.maximum(table.kv_capacity_tokens, 1.0), 0.0)
        said = np.maximum(said, (table.kv_usage + more) / limits.kv_usage)
        pressure: Floats = np.maximum(trust * said, self._backlog_s / limits.max_wait_s)
        return pressure

    def _hard(self, trust: Floats) -> Floats:
        """By our own books: what is in flight. Where nothing limits that, a guess stands in for reports that are missing."""
        table, limits = self._table, self._limits
        if limits.max_requests < np.inf:
            pressure = table.in_flight / limits.max_requests
        else:
            pressure = (1 - trust) * table.in_flight / _ASSUMED_BATCH
        if limits.max_tokens < np.inf:
            pressure = np.where(table.in_flight_tokens >= limits.max_tokens, np.maximum(pressure, 1.0), pressure)
        return pressure


def _usable(table: EndpointTable, now: float) -> Bools:
    """Endpoints that should get something: those that leave or fail only if there are no others."""
    candidates = table.is_active
    if table.has_draining:
        staying = candidates & table.not_draining()
        candidates = staying if staying.any() else candidates
    if table.has_failures:
        well = candidates & (table.retry_at_s <= now)
        candidates = well if well.any() else candidates
    return candidates
