# SPDX-License-Identifier: Apache-2.0
"""How full endpoints are: whether a request can be dispatched now, and to which.

The pressure on an endpoint is the largest of these, each as a fraction of its limit: requests waiting in the engine
and its KV cache in use (as llm-d's saturation detector has them), requests and tokens in flight, and the wait until a
new prompt would start; of a provider that reports it, its own saturation. An endpoint with a pressure of 1 is full.
Saturation is the mean pressure, with each endpoint counted as at most 1, so it is 1 only when no endpoint has room.

Between two reports of an engine, requests dispatched since the last one count as waiting for as long as their prefill
is not done by our own accounting. Otherwise a burst would overload engines that looked empty a moment ago (llm-d-router
issue 2066). The weight of a report falls with its age and our own counts take its place, so a missing report never
stops requests (issues 2100, 2408, 2514).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from extproc.endpoints.breaker_ranks import least_ranked
from extproc.endpoints.engine_reports import report_trust
from extproc.endpoints.in_flight import backlogs
from extproc.endpoints.table import Bools

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.admission.flow_queues import QueuedRequest
    from extproc.api.admission import FlowControl, SaturationLimits
    from extproc.endpoints.table import EndpointTable, Floats

# Requests in flight at which an endpoint is full without a report and a limit: half of vLLM's batch.
_ASSUMED_BATCH: Final = 128
# An endpoint whose report is trusted less than this counts as stale.
_STALE: Final = 0.5
_ROUNDING_S: Final = 1e-4
# Recompute the capacity at least this often: trust in reports fades without an event.
RECHECK_S: Final = 1.0
# llm-d's dispatcher checks its bands once a millisecond; a band's pace is counted in these checks.
LOOK_S: Final = 0.001


class PrefillDecodeMasks(msgspec.Struct, frozen=True):
    """The rows of prefill and of decode endpoints, and the ``group`` of each row; a pair must be in one group."""

    prefill: Bools
    decode: Bools
    group: NDArray[np.intp]

    def rows_in_complete_groups(self, rows: Bools) -> Bools:
        """The ``rows`` in groups that have both a prefill and a decode endpoint among ``rows``."""
        prefill, decode = rows & self.prefill, rows & self.decode
        both = np.intersect1d(self.group[prefill], self.group[decode])
        return (prefill | decode) & np.isin(self.group, both)


class EndpointHeadroom:
    """Which endpoints have room at one moment.

    ``pressure``: by row, 1 is full. ``open``: the rows that have room and are not set aside. ``saturation``: from 0
    to 1. ``stale_endpoints``: how many have no recent report.
    """

    def __init__(
        self, table: EndpointTable, limits: SaturationLimits, now: float, stages: PrefillDecodeMasks | None = None
    ) -> None:
        """``stages``: set if a request needs a prefill and a decode endpoint."""
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

    def rows_with_headroom_for(self, queued: QueuedRequest) -> Bools | None:
        """The endpoints that can take the request now; None if there are none."""
        rows = self._fitting(self.open, queued)
        if not rows.any():
            return None
        # once one endpoint has room, a slightly fuller one with a cached prefix may be worth the wait
        return rows | self._fitting(self._allowed, queued) if queued.most_cached_tokens else rows

    def reserve_for(self, queued: QueuedRequest) -> None:
        """Keep the endpoint that will first have room for ``queued`` free from the requests behind it."""
        candidates = self._eligible(self._candidates, queued)
        if candidates.any():
            fullness = np.maximum(self.pressure, self._table.in_flight_tokens / self._limits.max_tokens)
            nearest = int(np.where(candidates, fullness, np.inf).argmin())
            self.open, self._allowed = self.open.copy(), self._allowed.copy()
            self.open[nearest] = self._allowed[nearest] = False

    def next_headroom_at_s(self) -> float:
        """When an endpoint may next get room if no event comes first."""
        waits = self._backlog_s[self._candidates & (self._backlog_s >= self._limits.max_wait_s)]
        # A moment later, so that rounding does not leave it full.
        soonest = float(waits.min()) - self._limits.max_wait_s + _ROUNDING_S if waits.size else RECHECK_S
        return self._now + min(RECHECK_S, soonest)

    def _eligible(self, candidates: Bools, queued: QueuedRequest) -> Bools:
        rows = queued.eligible_rows
        return candidates if rows is None else candidates & rows

    def _fitting(self, candidates: Bools, queued: QueuedRequest) -> Bools:
        rows = self._eligible(candidates, queued)
        max_tokens = self._limits.max_tokens
        if max_tokens < np.inf:
            # A request larger than the limit fits only an idle endpoint.
            fits = (max_tokens - self._table.in_flight_tokens >= queued.total_tokens) | (self._table.in_flight == 0)
            rows = rows & fits
        return rows if self._stages is None else self._stages.rows_in_complete_groups(rows)

    def _saturation(self) -> float:
        """Of the more saturated stage, if there are two. A stage without endpoints is full."""
        stages = self._stages
        parts = (
            [self._candidates]
            if stages is None
            else [self._candidates & stages.prefill, self._candidates & stages.decode]
        )
        counts = [int(np.count_nonzero(part)) for part in parts]
        pressure = np.minimum(self.pressure, 1.0)
        means = (
            float(pressure[part].sum()) / count if count else 1.0 for part, count in zip(parts, counts, strict=True)
        )
        return max(means)

    def _soft(self, trust: Floats) -> Floats:
        """The pressure by engines' reports with what was dispatched since, and by the expected wait."""
        table, limits = self._table, self._limits
        since = table.in_flight - table.in_flight_at_report
        added = np.where((self._backlog_s > 0) | (since < 0), since, 0)
        reported = np.maximum(table.waiting + added, 0.0) / limits.queue_depth
        tokens = np.maximum(table.in_flight_tokens - table.in_flight_tokens_at_report, 0.0)
        more = np.where(table.kv_capacity_tokens > 0, tokens / np.maximum(table.kv_capacity_tokens, 1.0), 0.0)
        reported = np.maximum(np.maximum(reported, (table.kv_usage + more) / limits.kv_usage), table.load)
        pressure: Floats = np.maximum(trust * reported, self._backlog_s / limits.max_wait_s)
        return pressure

    def _hard(self, trust: Floats) -> Floats:
        """The pressure by requests and tokens in flight; without a limit of requests, an assumed one stands in for
        missing reports.
        """
        table, limits = self._table, self._limits
        if limits.max_requests < np.inf:
            pressure = table.in_flight / limits.max_requests
        else:
            pressure = (1 - trust) * table.in_flight / _ASSUMED_BATCH
        if limits.max_tokens < np.inf:
            pressure = np.maximum(pressure, table.in_flight_tokens / limits.max_tokens)
        return pressure


def _usable(table: EndpointTable, now: float) -> Bools:
    """Endpoints to use: draining ones and ones whose breakers are open only if there are no others."""
    candidates = table.is_active
    if table.has_draining:
        staying = candidates & table.rows_not_draining()
        candidates = staying if staying.any() else candidates
    return least_ranked(table, candidates, now)


class BandCeilings(Protocol):
    """Whether a band may send. Bands are numbered, the highest priority first."""

    def on_arrival(self, band: int) -> None:
        """A request of the band has arrived."""
        ...

    def is_open(self, band: int, saturation: float, now: float) -> bool:
        """Whether the band may send its next request. ``saturation``: of the engines, 1 if all are full."""
        ...

    def on_dispatch(self, band: int, saturation: float, now: float) -> None:
        """The band has sent a request."""
        ...

    def next_open_at_s(self, bands: Iterable[int], now: float) -> float:
        """When the first of ``bands`` that is closed for a time opens; infinite if there is none."""
        ...


class FixedCeilings:
    """A constant ceiling for each band."""

    def __init__(self, ceilings: Sequence[float]) -> None:
        self._ceilings = ceilings

    def on_arrival(self, band: int) -> None:
        """Nothing depends on it."""

    def is_open(self, band: int, saturation: float, now: float) -> bool:
        """Whether saturation is below the band's ceiling."""
        del now
        return saturation < self._ceilings[band]

    def on_dispatch(self, band: int, saturation: float, now: float) -> None:
        """Nothing depends on it."""

    def next_open_at_s(self, bands: Iterable[int], now: float) -> float:
        """No band is closed for a time."""
        del bands, now
        return math.inf


class SoftReflectiveCeilings:
    """llm-d's soft reflective ceilings: ``1 - i * saturation / (N - 1)`` for the i-th of N bands that requests came to.

    At or above its ceiling a band sends one request every ``round(saturation / (1 - saturation))`` checks, and none
    once all engines are full. llm-d checks once a millisecond and at each arrival; here a check is a millisecond.
    """

    def __init__(self, bands: int) -> None:
        self._opens_at_s = [-math.inf] * bands
        self._used = [False] * bands

    def on_arrival(self, band: int) -> None:
        """Count the band among those that requests came to."""
        self._used[band] = True

    def is_open(self, band: int, saturation: float, now: float) -> bool:
        """Whether saturation is below the band's ceiling, or the band's pause is over."""
        if saturation >= 1:
            return False
        return saturation < self._ceiling(band, saturation) or now >= self._opens_at_s[band]

    def on_dispatch(self, band: int, saturation: float, now: float) -> None:
        """Begin the band's pause, if saturation is at or above its ceiling."""
        if self._ceiling(band, saturation) <= saturation < 1:
            looks = max(1.0, math.floor(saturation / (1 - saturation) + 0.5))
            self._opens_at_s[band] = now + looks * LOOK_S

    def next_open_at_s(self, bands: Iterable[int], now: float) -> float:
        """The earliest end of the pauses of ``bands``."""
        return min((at_s for band in bands if (at_s := self._opens_at_s[band]) > now), default=math.inf)

    def _ceiling(self, band: int, saturation: float) -> float:
        above, others = sum(self._used[:band]), sum(self._used) - self._used[band]
        return 1 - above * saturation / others if above else 1.0


def make_ceilings(control: FlowControl, bands: Sequence[float]) -> BandCeilings:
    """``bands``: the configured ceiling of each, the highest priority first."""
    return SoftReflectiveCeilings(len(bands)) if control.ceilings == "SoftReflective" else FixedCeilings(bands)
