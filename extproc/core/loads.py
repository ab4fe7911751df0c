# SPDX-License-Identifier: Apache-2.0
"""What each engine does for this process: counted from the requests, so that engines which are leaving count too."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from extproc.api.status_pages import EndpointLoad
from extproc.core.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.core.record import Record, Run
    from extproc.scheduling.pool import Pool

# Their streams are open: bytes may still flow.
_OPEN = frozenset({State.RUNNING, State.SETTLED})


def loads_in_parts(records: Iterable[Record], pools: Iterable[Pool]) -> Iterator[dict[str, EndpointLoad]]:
    """By address: every configured engine, and every other one that has a request running. In parts, one for each pool,
    so that others may have their turn between two; ``add_part`` puts them together.

    Of a request with fallbacks the first choice counts, and with prefill elsewhere both engines do. One that a fallback
    serves is in that engine's own report.
    """
    running = Counter(
        address
        for record in records
        if record.is_ours and record.run is not None and record.state in _OPEN
        for address in _engines_of(record.run)
    )
    yield {address: EndpointLoad(count) for address, count in running.items()}
    for pool in list(pools):
        table, tokens_held = pool.table, pool.caches.tokens_held
        # a look into a column costs more than the rest of an endpoint
        has = (table.running + table.waiting).round().tolist()
        yield {
            address: EndpointLoad(running[address], tokens_held(row), int(has[row]))
            for address, row in zip(table.active_addresses, table.active_rows, strict=True)
        }


def add_part(found: dict[str, EndpointLoad], part: dict[str, EndpointLoad]) -> None:
    """An engine of several pools has the most that any of them knows."""
    for address, one in part.items():
        known = found.get(address)
        if known is not None:
            one = EndpointLoad(  # noqa: PLW2901 - what both know
                one.in_flight,
                max(known.cached_tokens, one.cached_tokens),
                max(known.reported, one.reported),
            )
        found[address] = one


def loads_of(records: Iterable[Record], pools: Iterable[Pool]) -> dict[str, EndpointLoad]:
    """All parts at once."""
    found: dict[str, EndpointLoad] = {}
    for part in loads_in_parts(records, pools):
        add_part(found, part)
    return found


def _engines_of(run: Run) -> set[str]:
    assignment = run.assignment
    return {one.address for one in (assignment.endpoint, assignment.prefill) if one is not None}
