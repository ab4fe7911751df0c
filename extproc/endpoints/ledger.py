"""The in-flight ledger: a request counts for its endpoint from the pick to the end of its stream.

Counted at the pick, not at the answer: between the two, others are picked. Waiting prefill work is a leaky bucket: a pick
pours in what the engine will have to compute, the engine's learned prefill rate drains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable, Floats, Place


# The context at which attention costs as much as all else in a prefill: 19,000 tokens for an 8B model on an H100, 33,000
# for a 70B one, by FLOPs and the efficiencies that kernels reach (0.65 of the peak for matrix products, 0.4 for attention).
_ATTENTION_TOKENS: Final = 20_000.0

_MEAN_WEIGHT: Final = 0.05

Number = TypeVar("Number", float, "Floats")


def prefill_work(uncached: Number, cached: Number) -> Number:
    """What a prefill costs, in tokens of a short prompt: every token also attends to all before it.

    ``uncached * (1 + (cached + uncached / 2) / 20,000)``: a prompt of 100,000 tokens costs as much as 35 of 10,000 would
    without the second term, and whoever counts it as 10 sends ten others to wait behind it.
    """
    return uncached * (1 + (cached + uncached / 2) / _ATTENTION_TOKENS)


def charge(table: EndpointTable, row: int, *, prefill_tokens: float, now: float, tokens: float = 0.0) -> Place:
    """A request with this much uncached input goes to ``row``; ``tokens``: of its prompt and answer."""
    table.in_flight[row] += 1
    table.in_flight_tokens[row] += tokens
    if prefill_tokens:
        table.mean_work += _MEAN_WEIGHT * (prefill_tokens - table.mean_work)
    table.backlog_tokens[row] = backlog_of(table, row, now) + prefill_tokens
    table.backlog_at_s[row] = now
    return table.place(row)


def release(table: EndpointTable, place: Place, tokens: float = 0.0) -> None:
    """The request is over, however it ended. Nothing to do if its endpoint is no longer configured."""
    if not table.holds(place):
        return
    table.in_flight[place.row] -= 1
    table.in_flight_tokens[place.row] -= tokens
    if table.in_flight[place.row] == 0:
        # rounding must not add up
        table.in_flight_tokens[place.row] = 0.0
        # no request, no work: the estimate starts from the truth again
        table.backlog_tokens[place.row] = 0.0


def correct_backlog(table: EndpointTable, row: int, *, waiting: float, now: float) -> None:
    """The engine says how many requests wait in it: so much work waits, and not what we reckoned.

    Without this, a rate that is learned too high empties the bucket while the engine's queue grows, and one that is too low
    keeps it full before an idle engine. What is being computed already may be as much as one request.
    """
    reckoned = backlog_of(table, row, now)
    waits = waiting * table.mean_work
    table.backlog_tokens[row] = min(max(reckoned, waits), waits + table.mean_work)
    table.backlog_at_s[row] = now


def backlog_of(table: EndpointTable, row: int, now: float) -> float:
    """Tokens that wait for prefill at one endpoint."""
    drained = (now - table.backlog_at_s[row]) * table.prefill_rate[row]
    return max(0.0, float(table.backlog_tokens[row] - drained))


def backlogs(table: EndpointTable, now: float) -> Floats:
    """Tokens that wait for prefill, by row."""
    drained = (now - table.backlog_at_s) * table.prefill_rate
    return np.maximum(table.backlog_tokens - drained, 0.0)
