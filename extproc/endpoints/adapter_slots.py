# SPDX-License-Identifier: Apache-2.0
"""Adapters on the engines of one ModelServer: where each is loaded, its users, and free slots.

Engines' reports are correct but late: a list of models is read once a second. So changes by this process and its peers
since then are laid over it (``corrected``). ``EndpointTable.loras`` has the result.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from extproc.api.model_server import ModelServerSpec
    from extproc.endpoints.table import Bools, EndpointRef, EndpointTable

# A list of models may have been asked for this long before it is here.
LIST_AGE_S: Final = 2.5
# How long the first requests wait for the lists of models of engines that may have adapters already.
UNREAD_S: Final = 1.0
# A peer's message that it loads or closes an adapter expires after this, unless it is repeated.
PEER_NEWS_S: Final = 2.0
# What a peer unloads is not loaded there meanwhile: the peer's call would unload it again.
LEAVING_S: Final = 0.5

# ``loading``: it takes a slot from now on. ``closed``: it gets no new requests, so that it can be unloaded.
Change = Literal["loading", "loaded", "closed", "gone"]


def make_adapter_slots(spec: ModelServerSpec, table: EndpointTable, known: AdapterSlots | None) -> AdapterSlots | None:
    """By the configuration; the state of adapters stays. None: there are none on demand."""
    loading = spec.adapter_loading
    if loading is None:
        return None
    slots = known or AdapterSlots(table, spec.model)
    slots.sources, slots.slots = {one.name: one.source for one in loading.adapters}, loading.slots
    slots.memory = loading.memory
    slots.sizes = {one.name: one.memory or 0 for one in loading.adapters}
    slots.pinned = frozenset(one.name for one in loading.adapters if one.pinned)
    slots.has_metrics = spec.protocol == "OpenAI"
    slots.is_listed = not slots.has_metrics or spec.scrape_interval > 0
    return slots


class _Changed(msgspec.Struct, frozen=True):
    """A load or unload that an engine's list of models may not show yet."""

    is_there: bool
    at_s: float


class AdapterSlots:
    """Adapters that may be loaded, by row of the endpoint table. Bounded by adapters times endpoints.

    ``sources``: where the weights of each are. ``slots``: how many an engine may hold, None: as it reports. ``memory``:
    in place of slots, the bytes that all of an engine may take together; ``sizes``: of each. ``pinned``: make no room
    for others. ``is_listed``: engines, or their agents, report what they hold; ``has_metrics``: beside their
    metrics. ``fixed``: other adapters that routes name, which engines always have. ``waiting``: requests
    that wait for an adapter.
    """

    def __init__(self, table: EndpointTable, base_model: str) -> None:
        self.sources: Mapping[str, str] = {}
        self.slots: int | None = None
        self.memory: int | None = None
        self.sizes: Mapping[str, int] = {}
        self.pinned: frozenset[str] = frozenset()
        self.is_listed = self.has_metrics = False
        self.waiting = 0
        self._first_asked_at_s: float | None = None
        self.fixed: frozenset[str] = frozenset()
        self._table = table
        self._base_model = base_model
        self._in_flight: Counter[tuple[int, str]] = Counter()
        self._used_at_s: dict[tuple[int, str], float] = {}
        self._ended_at_s: dict[tuple[int, str], float] = {}
        self._loaded_at_s: dict[tuple[int, str], float] = {}
        self._changed: dict[tuple[int, str], _Changed] = {}
        # until when, by row and adapter; infinite: this process ends it itself
        self._loading: dict[tuple[int, str], float] = {}
        self._closed: dict[tuple[int, str], float] = {}
        # until when it must not be loaded there: a peer is unloading it
        self._leaving: dict[tuple[int, str], float] = {}
        # by row, of engines that do not report it
        self._learned: dict[int, int] = {}

    def forget(self, row: int) -> None:
        """The endpoint has left the configuration, or its engine has restarted: it holds nothing on demand."""
        marks = (self._changed, self._loading, self._closed, self._leaving)
        for column in (self._used_at_s, self._ended_at_s, self._loaded_at_s, *marks):
            for key in [key for key in column if key[0] == row]:
                del column[key]
        self._learned.pop(row, None)

    def drop_row(self, row: int) -> None:
        """The row is another endpoint's from now on."""
        self.forget(row)
        for key in [key for key in self._in_flight if key[0] == row]:
            del self._in_flight[key]

    def on_engine_restart(self, row: int) -> None:
        """Its engine has lost what was loaded into it."""
        self.forget(row)
        self._set_served(row, self._served(row) - self.sources.keys())

    def drop_expired_changes(self, now: float) -> None:
        """Drop changes that peers reported too long ago, and those that lists of models now include."""
        for column in (self._loading, self._closed, self._leaving):
            for key in [key for key, until_s in column.items() if until_s <= now]:
                del column[key]
        for key in [key for key, one in self._changed.items() if now - one.at_s > LIST_AGE_S]:
            del self._changed[key]

    def rows_with(self, adapter: str) -> Bools:
        """The rows whose engine has the adapter and takes requests for it."""
        loras = self._table.loras
        found: Bools = self._table.is_active & self._table.cached_column(
            ("has", adapter),
            lambda: np.fromiter((one.served is not None and adapter in one.served for one in loras), np.bool_),
        )
        for row, closed in self._closed:
            if closed == adapter:
                found[row] = False
        return found

    def has_unread_rows(self, rows: Iterable[int], now: float) -> bool:
        """Whether one of these engines may have adapters that are not known yet, as this process has just started."""
        if self._first_asked_at_s is None:
            self._first_asked_at_s = now
        if now - self._first_asked_at_s >= UNREAD_S:
            return False
        table = self._table
        return any(
            table.loras[row].served is None or (self.has_metrics and not table.has_reported(row)) for row in rows
        )

    def adapters_held(self, row: int) -> set[str]:
        """The adapters that take a slot there, those that are being loaded included."""
        served = self._served(row)
        there = {one for one in served if one in self.sources or one in self.fixed}
        return there | {one for at, one in self._loading if at == row}

    def is_loading(self, row: int, adapter: str) -> bool:
        """Whether this process or a peer loads it there."""
        return (row, adapter) in self._loading

    def is_unloading_by_peer(self, row: int, adapter: str) -> bool:
        """Whether a peer has just begun to unload it there."""
        return (row, adapter) in self._leaving

    def is_loaded_on(self, row: int, adapter: str) -> bool:
        """Whether the engine has it, closed or not."""
        return adapter in self._served(row)

    def loading_count(self, row: int) -> int:
        """How many adapters are being loaded there."""
        return sum(1 for at, _ in self._loading if at == row)

    def adapter_size(self, adapter: str) -> int:
        """What it takes of an engine, in the unit of ``free_slots``."""
        return 1 if self.memory is None else self.sizes.get(adapter, 0)

    def free_slots(self, row: int) -> float:
        """How many more adapters fit, or how many bytes of them; infinite if that is not known."""
        slots = self.memory or self.slots or self._table.loras[row].max_active or self._learned.get(row)
        return math.inf if slots is None else slots - sum(map(self.adapter_size, self.adapters_held(row)))

    def removable_adapters(self, row: int) -> Iterator[str]:
        """Adapters there that can be loaded again, are not pinned or being loaded, and take requests."""
        for one in (self._served(row) & self.sources.keys()) - self.pinned:
            if (row, one) not in self._loading and (row, one) not in self._closed:
                yield one

    def in_flight_count(self, row: int, adapter: str) -> int:
        """Requests of this process and its peers that were sent there for the adapter."""
        return self._in_flight[row, adapter]

    def is_used(self, row: int, adapter: str) -> bool:
        """Whether anything in flight needs it: of ours, or by the engine's report, of others."""
        if self._in_flight[row, adapter]:
            return True
        loras, table = self._table.loras[row], self._table
        if adapter not in loras.active and adapter not in loras.waiting:
            return False
        # a report from before our last request ended shows that request
        is_news = bool(table.reported_at_s[row] > self._ended_at_s.get((row, adapter), -math.inf))
        return is_news or table.has_foreign_requests

    def last_used_at_s(self, row: int, adapter: str) -> float:
        """When a request for it last went there, or it was loaded."""
        return self._used_at_s.get((row, adapter), 0.0)

    def loaded_at_s(self, row: int, adapter: str) -> float:
        """When it was loaded, 0 if that is not known."""
        return self._loaded_at_s.get((row, adapter), 0.0)

    def on_dispatch(self, row: int, adapter: str | None, now: float) -> str | None:
        """A request is sent there; returns its adapter if that is one of those on demand."""
        if adapter is None or adapter not in self.sources:
            return None
        self._in_flight[row, adapter] += 1
        self._used_at_s[row, adapter] = now
        return adapter

    def on_request_ended(self, endpoint: EndpointRef, adapter: str, now: float) -> None:
        """A request for the adapter is over."""
        key = endpoint.row, adapter
        if not self._table.is_current(endpoint) or not self._in_flight[key]:
            return
        self._in_flight[key] -= 1
        self._ended_at_s[key] = now
        if not self._in_flight[key]:
            del self._in_flight[key]

    def record_change(self, row: int, adapter: str, change: Change, now: float, *, is_ours: bool) -> None:
        """Record the load or unload of an adapter. ``is_ours``: by this process, which will record its end."""
        key = row, adapter
        if change in {"loading", "closed"}:
            marked = self._loading if change == "loading" else self._closed
            marked[key] = math.inf if is_ours else max(marked.get(key, 0.0), now + PEER_NEWS_S)
            return
        self._loading.pop(key, None)
        if change == "gone" and not is_ours:
            self._leaving[key] = now + LEAVING_S
        if change == "gone" or is_ours or self._closed.get(key) != math.inf:
            # another process does not open an adapter that this one has closed
            self._closed.pop(key, None)
        self._note(row, adapter, now, is_there=change == "loaded")

    def with_recent_changes(self, row: int, models: frozenset[str], now: float) -> frozenset[str]:
        """An engine's list of models, with what was changed while it was on its way."""
        self.drop_expired_changes(now)
        recent = {one: changed.is_there for (at, one), changed in self._changed.items() if at == row}
        there = {one for one, is_there in recent.items() if is_there}
        return frozenset((models | there) - (recent.keys() - there))

    def mark_full(self, row: int) -> None:
        """The engine refused another adapter because its slots are full, and does not report how many it has."""
        held = len(self.adapters_held(row))
        if held:
            self._learned[row] = held

    def _note(self, row: int, adapter: str, now: float, *, is_there: bool) -> None:
        self._changed[row, adapter] = _Changed(is_there, now)
        served = self._served(row)
        if is_there:
            self._loaded_at_s.setdefault((row, adapter), now)
            self._used_at_s[row, adapter] = now
            self._set_served(row, served | {adapter})
        else:
            self._loaded_at_s.pop((row, adapter), None)
            self._set_served(row, served - {adapter})

    def _served(self, row: int) -> frozenset[str]:
        """The models that the engine lists; before the list was read, at least the base model."""
        return self._table.loras[row].served or frozenset({self._base_model})

    def _set_served(self, row: int, served: frozenset[str]) -> None:
        self._table.set_loras(row, msgspec.structs.replace(self._table.loras[row], served=served))
