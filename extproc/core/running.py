# SPDX-License-Identifier: Apache-2.0
"""Dispatched requests, until the stream is closed and the outcome known; and each engine's load by them."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from extproc.api.status_pages import EndpointLoad
from extproc.core.demand import count_end, count_outcome
from extproc.core.dispatch import repeat
from extproc.core.effects import Effect, Fault, Settled, Tell
from extproc.core.feedback import judge, learn, lost_adapter
from extproc.core.peers import Ended
from extproc.core.states import Event, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.admission.queue import Gate
    from extproc.core.accounts import Accounts
    from extproc.core.record import Outcome, Record, Run
    from extproc.scheduling.pool import Pool, RequestStarted

# Outcomes that never come must not pile up: beyond this many ended requests, the oldest are given up.
MOST_ENDED: Final = 65_536


class RunningRequests:
    """The second half of a request's life, over the one table of ``records``."""

    def __init__(self, records: dict[str, Record], accounts: Accounts, *, has_peers: bool) -> None:
        self._records = records
        self._accounts = accounts
        self._has_peers = has_peers
        # tickets in the order in which their streams closed; some have had their outcome since
        self._ended: deque[str] = deque()

    def repeat(self, event: RequestStarted, origin: str, pool: Pool | None, gate: Gate | None, now: float) -> bool:
        """Count a request that the process ``origin`` has sent; whether it could be counted."""
        if pool is None or event.ticket in self._records:
            return False
        record = repeat(event, origin, pool, gate, now)
        if record is not None:
            self._records[event.ticket] = record
        return record is not None

    def finish(self, record: Record, run: Run, now: float, out: list[Effect]) -> None:
        """Its stream is closed: its endpoint is free of it."""
        self._free(record, run, now, out)
        if record.state is State.SETTLED:
            self._remove(record)
            return
        record.become(State.ENDED)
        self._ended.append(record.ticket)
        if len(self._ended) > MOST_ENDED:
            self._forget(self._ended.popleft(), now, out)

    def finish_elsewhere(self, tickets: Iterable[str], now: float, out: list[Effect]) -> None:
        """Requests of another process are over."""
        for ticket in tickets:
            record = self._records.get(ticket)
            if record is not None and record.run is not None and record.happens(Event.FINISHED):
                self.finish(record, record.run, now, out)

    def undo(self, record: Record, run: Run, now: float, out: list[Effect]) -> None:
        """Its client went away before the decision reached the gateway: no engine got it, and it costs nothing."""
        self._remove(record)
        self._free(record, run, now, out)
        self._accounts.close(record, None, 0.0, now, out)

    def settle(self, outcome: Outcome, now: float, out: list[Effect]) -> None:
        """Learn from what became of a request, and correct what it was charged."""
        record = self._records.get(outcome.ticket)
        if record is None or record.run is None or not record.happens(Event.OUTCOME):
            return
        run = record.run
        if record.state is State.ENDED:
            self._remove(record)
        else:
            record.become(State.SETTLED)
        try:
            judge(run, outcome, now, out)
            learn(run, outcome, now, is_ours=record.is_ours, has_limits=bool(record.grants))
            if run.assignment.adapter is not None:
                lost_adapter(run, outcome, now)
            count_outcome(record, run, outcome)
        except Exception as error:  # noqa: BLE001 - what is learned is an estimate; what was granted must be settled
            out.append(Fault("an outcome could not be learned from", error))
        service = 0.0
        if run.gate is not None or record.grants:
            used = run.used(outcome)
            if run.gate is not None:
                cached = run.assignment.cached_tokens if outcome.cached_tokens is None else outcome.cached_tokens
                service = run.gate.service(used, float(cached))
            self._accounts.close(record, used, service, now, out)
        queued = None if run.gate is None else record.queued
        out.append(Settled(run.pool.name, run.assignment, outcome, record.is_ours, queued, service))

    def here(self) -> list[str]:
        """The tickets of this process that are in flight."""
        return [one.ticket for one in self._records.values() if one.is_ours and one.state in _IN_FLIGHT]

    def _remove(self, record: Record) -> None:
        record.become(State.ABSENT)
        del self._records[record.ticket]

    def _free(self, record: Record, run: Run, now: float, out: list[Effect]) -> None:
        run.pool.release(run.assignment, now)
        count_end(record, run)
        if self._has_peers and record.is_ours:
            out.append(Tell(Ended(record.ticket)))

    def _forget(self, ticket: str, now: float, out: list[Effect]) -> None:
        record = self._records.get(ticket)
        # its outcome may have come, and a late message of its process may have started it anew
        if record is None or record.run is None or record.state is not State.ENDED:
            return
        record.happens(Event.FORGOTTEN)
        self._remove(record)
        self._accounts.close(record, record.run.reserved, record.run.charged, now, out)


_IN_FLIGHT: Final = frozenset({State.RUNNING, State.SETTLED})

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
