# SPDX-License-Identifier: Apache-2.0
"""Which endpoints requests go to first, by their breakers.

====  ==========================================================================================================
rank  endpoint
====  ==========================================================================================================
0     gets requests
1     after these: it has asked for a pause (429, or 503 with ``retry-after``), or its breaker closed less than 10 s
      ago and it has its part of them, which grows from nothing to the mean of all
2     last: its breaker is open, or half-open and it has its probe
====  ==========================================================================================================

Ranks order endpoints, and remove none: where all have the same, nothing is known that would speak for another.

Panic: if fewer than half of a pool's endpoints are below rank 2, the others would get all of the load, and fail, too.
Then a pick gives each of the rest its turn: one request in as many as there are endpoints. Without that bound, those
that fail fast, which have no load, would look like the best choice for every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from extproc.endpoints.breaker import SLOW_START_S, BreakerPass, BreakerState

if TYPE_CHECKING:
    import random

    from extproc.endpoints.breaker import Breaker, ProbeTurns
    from extproc.endpoints.table import Bools, EndpointRef, EndpointTable, Floats

_WAITS: Final = 1.0
_OPEN: Final = 2.0


def set_breaker(table: EndpointTable, row: int, breaker: Breaker) -> None:
    """Record the state of the row's breaker, and the columns that follow from it."""
    table.breakers[row] = breaker
    table.passes[row] = BreakerPass(breaker.generation)
    table.trips[row], table.retry_at_s[row] = breaker.trips, breaker.reopen_at_s if breaker.trips else 0.0
    table.unsettled.add(row)
    table.has_failures = True
    table.has_tripped = table.has_tripped or bool(breaker.generation)


def refresh_retry_times(table: EndpointTable, now: float, server: str, turns: ProbeTurns) -> None:
    """Bring ``retry_at_s`` up to date with the time: when each row's breaker lets the next request of this process
    through. Called before it is read, where ``has_failures``.
    """
    for row in list(table.unsettled):
        breaker = table.breakers[row]
        if breaker.is_steadily_closed(now):
            table.unsettled.remove(row)
        elif breaker.trips:
            table.retry_at_s[row] = turns.next_probe_at_s(breaker, breaker_key(server, table.addresses[row]), now)
    table.has_failures = bool(table.unsettled)


def breaker_key(server: str, address: str) -> str:
    """Of a breaker, for hashes that all processes compute alike."""
    return f"{server}/{address}"


def begin_probe(table: EndpointTable, row: int, ticket: str, now: float) -> BreakerPass:
    """A request is sent to the endpoint, and is its probe if one may begin (``retry_at_s``). Returns its pass."""
    breaker = table.breakers[row]
    if breaker.state(now) is not BreakerState.HALF_OPEN or table.retry_at_s[row] > now:
        return table.passes[row]
    return record_probe(table, row, BreakerPass(breaker.generation, ticket), now)


def record_probe(table: EndpointTable, row: int, passed: BreakerPass, now: float) -> BreakerPass:
    """A probe has begun, here or in another process. Returns its pass."""
    breaker = table.breakers[row]
    if passed.ticket and breaker.trips and passed.generation == breaker.generation:
        set_breaker(table, row, breaker.with_probe_lease(passed.ticket, now))
        table.retry_at_s[row] = table.breakers[row].leased_until_s(now)
    return passed


def end_probe(table: EndpointTable, endpoint: EndpointRef, now: float) -> None:
    """The stream of a probe has ended; its outcome may come later."""
    if table.is_current(endpoint):
        breaker = table.breakers[endpoint.row]
        if breaker.is_current_result(endpoint.passed, now):
            set_breaker(table, endpoint.row, breaker.after_probe_stream(endpoint.passed.ticket, now))


def breaker_ranks(table: EndpointTable, now: float, rng: random.Random | None = None) -> Floats | None:
    """The module's ranks, by row; None: all are 0. ``rng``: of a pick, in which some rows of rank 2 have their turn."""
    if not table.has_failures:
        return None
    is_open = table.is_active & (table.retry_at_s > now)
    found: Floats = np.where(is_open, _OPEN, 0.0)
    endpoints = len(table)
    if 2 * np.count_nonzero(is_open) > endpoints:
        if rng is None:
            found[:] = 0.0
        else:
            for row in np.flatnonzero(is_open).tolist():
                found[row] = _OPEN if rng.randrange(endpoints) else 0.0
    for row in table.unsettled:
        if not found[row] and (now < table.breakers[row].not_before_s or _has_its_part(table, row, now)):
            found[row] = _WAITS
    return found


def _has_its_part(table: EndpointTable, row: int, now: float) -> bool:
    """Whether the endpoint, which has closed some seconds ago, has as many requests as it may have for now."""
    breaker = table.breakers[row]
    grown = (now - breaker.changed_at_s) / SLOW_START_S
    if breaker.trips or grown >= 1:
        return False
    return bool(table.in_flight[row] > grown * table.in_flight[table.is_active].mean())


def least_ranked(table: EndpointTable, candidates: Bools, now: float) -> Bools:
    """Those of ``candidates`` with the least rank: all, if they have the same."""
    return least_by_row(candidates, breaker_ranks(table, now))


def least_by_row(candidates: Bools, by_row: Floats | None) -> Bools:
    """Those of ``candidates`` with the least rank of ``by_row``."""
    if by_row is None or not candidates.any():
        return candidates
    found: Bools = candidates & (by_row == by_row[candidates].min())
    return found
