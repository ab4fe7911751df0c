# SPDX-License-Identifier: Apache-2.0
"""The in-flight ledger: a request counts at its endpoint from the pick to its end.

It counts from the pick, not from the answer, because other requests are picked in between. The backlog of prefill work
is a leaky bucket: a pick adds the work that the engine will have to do, and the learned prefill rate drains it. Bounds
from the engine's queue length (``prefill_queue.py``) correct the backlog.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from extproc.endpoints.table import EndpointRef

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable, Floats

_MEAN_WEIGHT: Final = 0.05
# An array: converting a Python number takes numpy as long as the arithmetic of a whole column.
_ZERO: Final = np.zeros(())


def begin_request(table: EndpointTable, row: int, *, work: float, now: float, tokens: float = 0.0) -> EndpointRef:
    """Count a request that is sent to ``row``; returns a reference to pass at its end.

    ``work``: prefill tokens that the endpoint must compute, attention included. ``tokens``: of its prompt and
    expected answer.
    """
    table.in_flight[row] += 1
    table.in_flight_tokens[row] += tokens
    number = 0
    if work:
        table.mean_work += _MEAN_WEIGHT * (work - table.mean_work)
        backlog, queue = backlog_of(table, row, now) + work, table.prefill_queues[row]
        _set_backlog(table, row, backlog=backlog, requests=len(queue.requests) + 1, now=now)
        number = queue.add(work, now)
    return EndpointRef(table.addresses[row], row, table.epochs[row], number, table.passes[row])


def end_request(table: EndpointTable, endpoint: EndpointRef, now: float, tokens: float = 0.0) -> None:
    """Remove a request that has ended, for whatever reason. No effect if its endpoint was removed meanwhile."""
    if not table.is_current(endpoint):
        return
    row = endpoint.row
    table.in_flight[row] -= 1
    table.in_flight_tokens[row] -= tokens
    queue = table.prefill_queues[row]
    if table.in_flight[row] == 0:
        # do not accumulate rounding errors
        table.in_flight_tokens[row] = 0.0
    queue.remove(endpoint.prefill_number)
    # the backlog cannot exceed the work of the requests that still wait
    backlog = min(backlog_of(table, row, now), queue.work)
    _set_backlog(table, row, backlog=backlog, requests=len(queue.requests), now=now)


def finish_prefill(table: EndpointTable, endpoint: EndpointRef, now: float) -> None:
    """The request has received its first token, and so have all that were sent there before it."""
    if table.is_current(endpoint) and endpoint.prefill_number:
        queue = table.prefill_queues[endpoint.row]
        queue.on_first_token(endpoint.prefill_number)
        backlog = min(backlog_of(table, endpoint.row, now), queue.work)
        _set_backlog(table, endpoint.row, backlog=backlog, requests=len(queue.requests), now=now)


def reconcile_backlog(
    table: EndpointTable, row: int, *, waiting: float, now: float, first_tokens: float | None = None
) -> None:
    """Correct the backlog by the queue length that the engine reports.

    ``waiting``: requests in its queue, which are the last that were sent. ``first_tokens``: requests that received
    their first token since the last report, None if unknown. Requests that we did not send count with the mean work
    of ours.

    Without this, a rate learned too high would empty the bucket while the engine's queue grows, and one too low would
    keep it full for an idle engine.
    """
    queue = table.prefill_queues[row]
    bounds = queue.reconcile(int(waiting), now, first_tokens)
    others = max(0.0, waiting - bounds.known)
    unknown = others * table.mean_work
    # one more of the foreign requests may be in computation
    most = bounds.most + unknown + (table.mean_work if others else 0.0)
    backlog = min(max(backlog_of(table, row, now), bounds.least + unknown), most)
    _set_backlog(table, row, backlog=backlog, requests=len(queue.requests) + others, now=now)


def _set_backlog(table: EndpointTable, row: int, *, backlog: float, requests: float, now: float) -> None:
    table.backlog_tokens[row], table.backlog_at_s[row] = backlog, now
    table.backlog_per_request[row] = max(1.0, backlog / requests) if requests else 1.0


def backlog_of(table: EndpointTable, row: int, now: float) -> float:
    """Prefill work that waits at one endpoint, in tokens."""
    drained = (now - table.backlog_at_s[row]) * table.prefill_rate[row]
    return max(0.0, float(table.backlog_tokens[row] - drained))


def backlogs(table: EndpointTable, now: float) -> Floats:
    """Prefill work that waits, in tokens, by row."""
    drained = (now - table.backlog_at_s) * table.prefill_rate
    return np.maximum(table.backlog_tokens - drained, _ZERO)


def requests_in_backlog(table: EndpointTable, backlog: Floats) -> Floats:
    """Estimated requests without a first token, by row. ``backlog``: the result of ``backlogs``."""
    return backlog / table.backlog_per_request
