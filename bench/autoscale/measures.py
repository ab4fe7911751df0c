# SPDX-License-Identifier: Apache-2.0
"""From requests and orders of a run to what policies are compared by."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.lab.measures import LatencyObjective
    from bench.reporting.results import RequestResult

WINDOWS: Final = 12


class Window(msgspec.Struct, frozen=True, array_like=True):
    """``due``: requests of a part of the run. ``met``: those of them that met both targets."""

    due: int
    met: int


def met_by_window(
    due_at_s: Iterable[float],
    results: Iterable[RequestResult],
    objective: LatencyObjective,
    *,
    since_s: float,
    until_s: float,
) -> list[Window]:
    """Parts of equal length, so that those of two policies have the same requests. ``due_at_s``: of all requests: one
    that has no result is lost, and missed. Those before ``since_s`` do not count.
    """
    due, met = [0] * WINDOWS, [0] * WINDOWS

    def window(at_s: float) -> int:
        return min(WINDOWS - 1, int(WINDOWS * (at_s - since_s) / (until_s - since_s)))

    for at_s in due_at_s:
        if at_s >= since_s:
            due[window(at_s)] += 1
    for one in results:
        if one.due_at_s < since_s:
            continue
        is_met = not one.error and one.ttft_s <= objective.ttft_s and one.tpot_s <= objective.tpot_s
        met[window(one.due_at_s)] += is_met
    return [Window(*both) for both in zip(due, met, strict=True)]


def reversals(totals: Sequence[float]) -> int:
    """How often orders changed direction. ``totals``: after each change."""
    directions = [later > before for before, later in itertools.pairwise(totals) if later != before]
    return sum(one != other for one, other in itertools.pairwise(directions))


def overload_to_order_s(need: Sequence[float], orders: Sequence[tuple[float, float]]) -> list[float]:
    """For each time in which more was needed than was ordered: how long until the next larger order.

    ``need``: by second; the first second is not judged. ``orders``: instants and totals, in the same unit, by time. A
    time that ends without an order is left out: the load has gone by itself.
    """
    delays: list[float] = []
    began_at_s: float | None = None
    index, ordered = 0, orders[0][1]
    for second, wanted in enumerate(need):
        while index + 1 < len(orders) and orders[index + 1][0] <= second:
            index += 1
            at_s, total = orders[index]
            if total > ordered and began_at_s is not None:
                delays.append(max(0.0, at_s - began_at_s))
                began_at_s = None
            ordered = total
        if wanted <= ordered:
            began_at_s = None
        elif began_at_s is None:
            began_at_s = float(second)
    return delays
