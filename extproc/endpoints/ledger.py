"""The in-flight ledger: a request counts for its endpoint from the pick to the end of its stream.

Counted at the pick, not at the answer: between the two, others are picked. Waiting prefill work is a leaky bucket: a pick
pours in what the engine will have to compute, the engine's learned prefill rate drains it. What is known of the queue itself
(``queue.py``) puts that right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointRef, EndpointTable, Floats


_MEAN_WEIGHT: Final = 0.05


def begin_request(table: EndpointTable, row: int, *, work: float, now: float, tokens: float = 0.0) -> EndpointRef:
    """A request with this much uncached input goes to ``row``; ``tokens``: of its prompt and answer."""
    table.in_flight[row] += 1
    table.in_flight_tokens[row] += tokens
    endpoint = table.ref(row)
    if not work:
        return endpoint
    table.mean_work += _MEAN_WEIGHT * (work - table.mean_work)
    backlog = backlog_of(table, row, now) + work
    number = table.prefill_queues[row].add(work, now)
    _note(table, row, backlog, len(table.prefill_queues[row]), now)
    return msgspec.structs.replace(endpoint, prefill_number=number)


def end_request(table: EndpointTable, endpoint: EndpointRef, now: float, tokens: float = 0.0) -> None:
    """The request is over, however it ended. Nothing to do if its endpoint is no longer configured."""
    if not table.is_current(endpoint):
        return
    row = endpoint.row
    table.in_flight[row] -= 1
    table.in_flight_tokens[row] -= tokens
    queue = table.prefill_queues[row]
    if table.in_flight[row] == 0:
        # rounding must not add up
        table.in_flight_tokens[row] = 0.0
    queue.remove(endpoint.prefill_number)
    # what does not wait is no work: the estimate comes back to the truth
    _note(table, row, min(backlog_of(table, row, now), queue.work), len(queue), now)


def finish_prefill(table: EndpointTable, endpoint: EndpointRef, now: float) -> None:
    """The request has had its first token, and so have all that were sent there before it."""
    if table.is_current(endpoint) and endpoint.prefill_number:
        queue = table.prefill_queues[endpoint.row]
        queue.first_token(endpoint.prefill_number)
        _note(table, endpoint.row, min(backlog_of(table, endpoint.row, now), queue.work), len(queue), now)


def reconcile_backlog(
    table: EndpointTable, row: int, *, waiting: float, now: float, first_tokens: float | None = None
) -> None:
    """The engine says how many requests wait in it: the last ones that came, and not what we reckoned.

    Without this, a rate that is learned too high empties the bucket while the engine's queue grows, and one that is too low
    keeps it full before an idle engine. ``first_tokens``: given since the reading before, if the engine says. Requests that are
    not ours count as the mean of ours.
    """
    queue = table.prefill_queues[row]
    bounds = queue.reconcile(int(waiting), now, first_tokens)
    others = max(0.0, waiting - bounds.known)
    unknown = others * table.mean_work
    # what of others is being computed already may be as much as one request
    most = bounds.most + unknown + (table.mean_work if others else 0.0)
    backlog = min(max(backlog_of(table, row, now), bounds.least + unknown), most)
    _note(table, row, backlog, len(queue) + others, now)


def _note(table: EndpointTable, row: int, backlog: float, requests: float, now: float) -> None:
    table.backlog_tokens[row], table.backlog_at_s[row] = backlog, now
    table.backlog_per_request[row] = max(1.0, backlog / requests) if requests else 1.0


def backlog_of(table: EndpointTable, row: int, now: float) -> float:
    """Tokens that wait for prefill at one endpoint."""
    drained = (now - table.backlog_at_s[row]) * table.prefill_rate[row]
    return max(0.0, float(table.backlog_tokens[row] - drained))


def backlogs(table: EndpointTable, now: float) -> Floats:
    """Tokens that wait for prefill, by row."""
    drained = (now - table.backlog_at_s) * table.prefill_rate
    return np.maximum(table.backlog_tokens - drained, 0.0)


def requests_in_backlog(table: EndpointTable, backlog: Floats) -> Floats:
    """How many requests have no first token yet, by row; ``backlog``: tokens that wait now."""
    return backlog / table.backlog_per_request
