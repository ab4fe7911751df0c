# SPDX-License-Identifier: Apache-2.0
"""Where an adapter is loaded when a request needs it, and which one makes room for it

1. An engine where a peer loads it already, so that there is one copy and not two. 2. A free slot; of several, that of
the engine with the fewest requests in flight and loads. 3. The slot of an engine's least recently used adapter that
nothing in flight uses; of several engines, that with the fewest requests in flight. 4. If all are in use: of the
adapters that have been there for long enough, the one with the fewest requests in flight gets no new requests, and
makes room when those are over. Without this, ten adapters with continuous requests would never share four slots.

A second copy is worth a slot if the adapter's least loaded engine has more than ``4 + 2 n`` requests in flight, and
another engine ``n``; it takes a free slot, or that of an adapter that was not used for half a minute, and no request
waits for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.avoidance import preferred

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from extproc.endpoints.adapter_slots import AdapterSlots
    from extproc.endpoints.table import Bools, EndpointTable

_COPY_ABOVE: Final = 4.0
_COPY_FACTOR: Final = 2.0
_COPY_IDLE_S: Final = 30.0
_LONGEST_STAY_S: Final = 2.0


class Placement(msgspec.Struct, frozen=True):
    """``row``: of the engine that loads. ``evicts``: the adapter that is unloaded first. ``must_wait``: that one is in
    use.
    """

    row: int
    evicts: str | None = None
    must_wait: bool = False


def place_adapter(
    slots: AdapterSlots,
    table: EndpointTable,
    adapter: str,
    rows: Iterable[int],
    *,
    now: float,
    shortest_stay_s: float = math.inf,
    idle_s: float = 0.0,
) -> Placement | None:
    """The engine of ``rows`` that loads ``adapter``; None: there is no room, and none to be made now.

    ``shortest_stay_s``: an adapter in use that was loaded that long ago may have to give way. ``idle_s``: one that is
    not in use, if it was not used for that long.
    """
    open_to_it = [row for row in rows if not slots.is_leaving(row, adapter)]
    nearest = sorted(open_to_it, key=lambda row: (float(table.in_flight[row]) + slots.loads_at(row), row))
    for row in nearest:
        if slots.is_loading(row, adapter):
            return Placement(row)
    for row in nearest:
        if slots.free_slots(row) >= 1:
            return Placement(row)
    for row in nearest:
        idle = [one for one in slots.removable(row) if not slots.is_used(row, one)]
        oldest = min(idle, key=lambda one: (slots.used_at_s(row, one), one), default=None)
        if oldest is not None and now - slots.used_at_s(row, oldest) >= idle_s:
            return Placement(row, oldest)
    in_use = [
        (slots.in_flight(row, one), slots.loaded_at_s(row, one), row, one)
        for row in nearest
        for one in slots.removable(row)
        if now - slots.loaded_at_s(row, one) >= shortest_stay_s
    ]
    if not in_use:
        return None
    _, _, row, one = min(in_use)
    return Placement(row, one, must_wait=True)


def shortest_stay_s(timeout_s: float, *, waiting: int, slots: int) -> float:
    """How long an adapter stays although others wait for its slot: all that wait get a turn in half of their time."""
    return min(_LONGEST_STAY_S, timeout_s / 2 * max(1, slots) / max(1, waiting))


def row_for_second_copy(
    slots: AdapterSlots, table: EndpointTable, adapter: str, holders: Bools, others: Collection[int], now: float
) -> Placement | None:
    """Where a second copy of the adapter pays; None: nowhere."""
    if not others:
        return None
    least = float(table.in_flight[holders].min(initial=math.inf))
    calm = [row for row in others if least > _COPY_ABOVE + _COPY_FACTOR * float(table.in_flight[row])]
    return place_adapter(slots, table, adapter, calm, now=now, idle_s=_COPY_IDLE_S) if calm else None


def loaders(table: EndpointTable, eligible: Bools | None, now: float) -> Bools:
    """The rows that could load an adapter: not draining, and not avoided; avoided ones if there are no others."""
    rows = table.is_active.copy() if eligible is None else table.is_active & eligible
    if table.has_draining and (rows & table.not_draining()).any():
        rows &= table.not_draining()
    return preferred(table, rows, now)


def rows_in(mask: Bools) -> list[int]:
    """The numbers of the rows of a mask."""
    found: list[int] = np.flatnonzero(mask).tolist()
    return found
