# SPDX-License-Identifier: Apache-2.0
"""What each engine does for this process: counted from the requests, so that engines which are leaving count too."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from extproc.config.loads import EndpointLoad
from extproc.core.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.record import Record, Run
    from extproc.scheduling.pool import Pool

# Their streams are open: bytes may still flow.
_OPEN = frozenset({State.RUNNING, State.SETTLED})


def loads_of(records: Iterable[Record], pools: Iterable[Pool]) -> dict[str, EndpointLoad]:
    """By address: every configured engine, and every other one that has a request running.

    Of a request with fallbacks the first choice counts, and with prefill elsewhere both engines do. One that a fallback
    serves is in that engine's own report.
    """
    running = Counter(
        address
        for record in records
        if record.is_ours and record.run is not None and record.state in _OPEN
        for address in _engines_of(record.run)
    )
    cached: dict[str, int] = {}
    reported: dict[str, int] = {}
    for pool in pools:
        for row in pool.table.active_rows:
            address = pool.table.addresses[row]
            cached[address] = max(cached.get(address, 0), pool.caches.tokens_held(row))
            has = round(float(pool.table.running[row] + pool.table.waiting[row]))
            reported[address] = max(reported.get(address, 0), has)
    return {
        address: EndpointLoad(running[address], cached.get(address, 0), reported.get(address, 0))
        for address in {*running, *cached}
    }


def _engines_of(run: Run) -> set[str]:
    assignment = run.assignment
    return {one.address for one in (assignment.endpoint, assignment.prefill) if one is not None}
