# SPDX-License-Identifier: Apache-2.0
"""Where an adapter is loaded when a request needs it, and which one makes room for it

1. An engine where a peer loads it already, so that there is one copy and not two. 2. A free slot; of several, that of
the engine with the fewest requests in flight and loads. 3. The slot of an engine's least recently used adapter that
nothing in flight uses; of several engines, that with the fewest requests in flight. 4. If all are in use: of the
adapters that have been there for long enough, the one with the fewest requests in flight gets no new requests, and
makes room when those are over. Without this, ten adapters with continuous requests would never share four slots.

Where memory is counted in place of slots, one adapter may need the room of several; the least recently used go first,
and no more than have to.

A second copy is worth a slot if the adapter's least loaded engine has more than ``4 + 2 n`` requests in flight, and
another engine ``n``; it takes a free slot, or that of an adapter that was not used for half a minute, and no request
waits for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.breaker_ranks import least_ranked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from extproc.endpoints.adapter_slots import AdapterSlots
    from extproc.endpoints.table import Bools, EndpointTable

_COPY_ABOVE: Final = 4.0
_COPY_FACTOR: Final = 2.0
_COPY_IDLE_S: Final = 30.0
_LONGEST_STAY_S: Final = 2.0


class AdapterPlacement(msgspec.Struct, frozen=True):
    """``row``: of the engine that loads. ``evicts``: the adapters that are unloaded first. ``must_wait``: one of them
    is in use.
    """

    row: int
    evicts: tuple[str, ...] = ()
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
) -> AdapterPlacement | None:
    """The engine of ``rows`` that loads ``adapter``; None: there is no room, and none to be made now.

    ``min_residency_s``: an adapter in use that was loaded that long ago may have to give way. ``idle_s``: one that is
    not in use, if it was not used for that long.
    """
    open_to_it = [row for row in rows if not slots.is_unloading_by_peer(row, adapter)]
    nearest = sorted(open_to_it, key=lambda row: (float(table.in_flight[row]) + slots.loading_count(row), row))
    for row in nearest:
        if slots.is_loading(row, adapter):
            return AdapterPlacement(row)
    size = slots.adapter_size(adapter)
    for row in nearest:
        if slots.free_slots(row) >= size:
            return AdapterPlacement(row)
    for row in nearest:
        idle = [
            (slots.last_used_at_s(row, one), one)
            for one in slots.removable_adapters(row)
            if not slots.is_used(row, one) and now - slots.last_used_at_s(row, one) >= idle_s
        ]
        if evicts := _first_that_suffice(slots, row, size, [one for _, one in sorted(idle)]):
            return AdapterPlacement(row, evicts)
    if not math.isfinite(shortest_stay_s):
        return None
    found = [
        (slots.in_flight_count(row, evicts[-1]), slots.loaded_at_s(row, evicts[-1]), row, evicts)
        for row in nearest
        if (evicts := _first_that_suffice(slots, row, size, _by_use(slots, row, shortest_stay_s, now)))
    ]
    if not found:
        return None
    _, _, row, evicts = min(found)
    return AdapterPlacement(row, evicts, must_wait=True)


def _by_use(slots: AdapterSlots, row: int, shortest_stay_s: float, now: float) -> list[str]:
    """The adapters of an engine that may have to give way: those that nothing uses, then the others by their use."""
    staying = [one for one in slots.removable_adapters(row) if now - slots.loaded_at_s(row, one) >= shortest_stay_s]
    return sorted(
        staying,
        key=lambda one: (slots.is_used(row, one), slots.in_flight_count(row, one), slots.loaded_at_s(row, one), one),
    )


def _first_that_suffice(slots: AdapterSlots, row: int, size: int, candidates: list[str]) -> tuple[str, ...]:
    """The first of ``candidates`` that make room for ``size``; empty if all of them do not."""
    free, chosen = slots.free_slots(row), list[str]()
    for one in candidates:
        if free >= size:
            break
        if slots.adapter_size(one):
            free += slots.adapter_size(one)
            chosen.append(one)
    return tuple(chosen) if free >= size else ()


def min_residency_s(timeout_s: float, *, waiting: int, slots: int) -> float:
    """How long an adapter stays although others wait for its slot: all that wait get a turn in half of their time."""
    return min(_LONGEST_STAY_S, timeout_s / 2 * max(1, slots) / max(1, waiting))


def row_for_second_copy(
    slots: AdapterSlots, table: EndpointTable, adapter: str, holders: Bools, others: Collection[int], now: float
) -> AdapterPlacement | None:
    """Where a second copy of the adapter pays; None: nowhere."""
    if not others:
        return None
    least = float(table.in_flight[holders].min(initial=math.inf))
    calm = [row for row in others if least > _COPY_ABOVE + _COPY_FACTOR * float(table.in_flight[row])]
    return place_adapter(slots, table, adapter, calm, now=now, idle_s=_COPY_IDLE_S) if calm else None


def rows_that_can_load(table: EndpointTable, eligible: Bools | None, now: float) -> Bools:
    """The rows that could load an adapter: not draining, and not avoided; avoided ones if there are no others."""
    rows = table.is_active.copy() if eligible is None else table.is_active & eligible
    if table.has_draining and (rows & table.rows_not_draining()).any():
        rows &= table.rows_not_draining()
    return least_ranked(table, rows, now)


def rows_of_mask(mask: Bools) -> list[int]:
    """The numbers of the rows of a mask."""
    found: list[int] = np.flatnonzero(mask).tolist()
    return found
