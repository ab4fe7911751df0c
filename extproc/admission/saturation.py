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

from extproc.endpoints.ledger import backlogs
from extproc.endpoints.live import belief
from extproc.endpoints.table import Bools

if TYPE_CHECKING:
    from extproc.admission.waiting import Wanted
    from extproc.config.admission import Saturation
    from extproc.endpoints.table import EndpointTable, Floats

# In flight, where neither reports nor limits of ours say anything: half of vLLM's default batch.
_ASSUMED_BATCH: Final = 128
# Below this a report says too little.
_STALE: Final = 0.5
# Looking again costs little, and beliefs that fade change by themselves.
LOOK_AGAIN_S: Final = 1.0


class Stages(msgspec.Struct, frozen=True):
    """Rows of prefill and of decode engines, and the ``group`` of each row within which both must be."""

    prefill: Bools
    decode: Bools
    group: NDArray[np.intp]

    def pairs(self, rows: Bools) -> Bools:
        """Those of ``rows`` that make whole pairs."""
        prefill, decode = rows & self.prefill, rows & self.decode
        both = np.intersect1d(self.group[prefill], self.group[decode])
        return (prefill | decode) & np.isin(self.group, both)


class Room:
    """Who has room at one moment; what is reserved in it is not for those who come later in the order."""

    def __init__(self, table: EndpointTable, limits: Saturation, now: float, stages: Stages | None = None) -> None:
        """``stages``: where a request needs a prefill and a decode engine."""
        self._table = table
        self._limits = limits
        self._now = now
        self._among = _usable(table, now)
        trust = belief(table, now)
        self._backlog_s: Floats = backlogs(table, now) / table.prefill_rate
        soft, hard = np.maximum(self._reported(trust), self._waits()), self._counts(trust)
        self.pressure = np.maximum(soft, hard)
        self.open: Bools = self._among & (self.pressure < 1)
        self._allowed: Bools = self._among & (hard < 1) & (soft < 1 + limits.headroom)
        self._stages = stages
        self.has_endpoints = bool(self._among.any())
        whole = np.minimum(self.pressure, 1.0)
        parts = [self._among] if stages is None else [self._among & stages.prefill, self._among & stages.decode]
        # the fuller stage counts; one without any engine is full
        self.saturation = max(float(whole[part].mean()) if part.any() else 1.0 for part in parts)
        self.stale_endpoints = int(np.count_nonzero(self._among & (trust < _STALE)))

    def rows_for(self, wanted: Wanted) -> Bools | None:
        """The endpoints that can take it now; None: nobody."""
        rows = self.open if wanted.rows is None else self.open & wanted.rows
        if self._limits.max_tokens is not None:
            left = self._limits.max_tokens - self._table.in_flight_tokens
            # what is larger than an engine goes to an empty one, and nowhere else
            rows = rows & ((left >= wanted.tokens) | (self._table.in_flight == 0))
        if self._stages is not None:
            rows = self._stages.pairs(rows)
        if not rows.any():
            return None
        # where somebody has room, one that is a little too full may be worth its wait
        return rows if wanted.uncached_tokens == wanted.input_tokens else rows | self._worth_waiting(wanted)

    def _worth_waiting(self, wanted: Wanted) -> Bools:
        rows = self._allowed if wanted.rows is None else self._allowed & wanted.rows
        if self._limits.max_tokens is not None:
            rows = rows & (self._limits.max_tokens - self._table.in_flight_tokens >= wanted.tokens)
        return rows if self._stages is None else self._stages.pairs(rows)

    def reserve(self, wanted: Wanted) -> None:
        """Nobody behind ``wanted`` may use the endpoint that will first have room for it."""
        among = self._among if wanted.rows is None else self._among & wanted.rows
        if among.any():
            nearest = int(np.where(among, self._fullness(), np.inf).argmin())
            self.open, self._allowed = self.open.copy(), self._allowed.copy()
            self.open[nearest] = self._allowed[nearest] = False

    def opens_at_s(self) -> float:
        """When to look again, if nothing happens before."""
        wait_s = self._limits.max_wait_s
        if wait_s is None:
            return self._now + LOOK_AGAIN_S
        over = self._backlog_s[self._among & (self._backlog_s >= wait_s)] - wait_s
        # a moment later, so that rounding does not find it full still
        soonest = float(over.min()) + 1e-4 if over.size else LOOK_AGAIN_S
        return self._now + min(LOOK_AGAIN_S, soonest)

    def _fullness(self) -> Floats:
        if self._limits.max_tokens is None:
            return self.pressure
        return np.maximum(self.pressure, self._table.in_flight_tokens / self._limits.max_tokens)

    def _reported(self, trust: Floats) -> Floats:
        """By what engines say of themselves, and what was sent since."""
        table, limits = self._table, self._limits
        pressure = np.zeros(len(table.addresses))
        since = table.in_flight - table.seen_in_flight
        if limits.queue_depth is not None:
            coming = np.where((self._backlog_s > 0) | (since < 0), since, 0)
            pressure = trust * np.maximum(table.waiting + coming, 0.0) / limits.queue_depth
        if limits.kv_usage is not None:
            tokens = np.maximum(table.in_flight_tokens - table.seen_in_flight_tokens, 0.0)
            known = np.maximum(table.kv_tokens, 1.0)
            more = np.where(table.kv_tokens > 0, tokens / known, 0.0)
            pressure = np.maximum(pressure, trust * (table.kv_usage + more) / limits.kv_usage)
        return pressure

    def _waits(self) -> Floats:
        """By our own books: until an engine would begin with a new prompt."""
        wait_s = self._limits.max_wait_s
        return self._backlog_s / wait_s if wait_s else np.zeros(len(self._table.addresses))

    def _counts(self, trust: Floats) -> Floats:
        """By our own books: what is in flight."""
        table, limits = self._table, self._limits
        pressure: Floats = (1 - trust) * table.in_flight / _ASSUMED_BATCH
        if limits.max_requests is not None:
            pressure = table.in_flight / limits.max_requests
        if limits.max_tokens is not None:
            pressure = np.maximum(pressure, np.where(table.in_flight_tokens >= limits.max_tokens, 1.0, 0.0))
        return pressure


def _usable(table: EndpointTable, now: float) -> Bools:
    """Endpoints that should get something: those that leave or fail only if there are no others."""
    among = table.is_active
    if table.has_draining:
        staying = table.remembered("staying", lambda: np.array([not one.is_draining for one in table.traits]))
        among = among & staying if (among & staying).any() else among
    if table.has_failures:
        well = among & (table.avoid_until_s <= now)
        among = well if well.any() else among
    return among
