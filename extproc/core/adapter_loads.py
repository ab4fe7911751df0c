# SPDX-License-Identifier: Apache-2.0
"""Loads of adapters that were asked for, and what is remembered of those that failed

Weights that two engines cannot use are taken for broken: for ``BROKEN_S`` nobody asks an engine for them again. An
engine that does not answer is left alone for ``SILENT_S``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.core.effects import Effect, LoadAdapter, Tell
from extproc.core.peer_events import AdapterChanged
from extproc.endpoints.table import EndpointRef
from extproc.errors import AdapterBroken, AdapterUnavailable, Refusal
from extproc.scheduling.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.types import LoadResult
    from extproc.endpoints.adapter_slots import Change
    from extproc.scheduling.adapter_placement import Place

BROKEN_S: Final = 10.0
SILENT_S: Final = 2.0
_RETRY_AFTER_S: Final = 5


class Load(msgspec.Struct, frozen=True):
    """A load that was asked for. ``evicts``: the adapter that makes room."""

    pool: Pool
    endpoint: EndpointRef
    evicts: str | None


class AdapterLoads:
    """Bounded by adapters times endpoints. Effects go to ``out``."""

    def __init__(self, *, has_peers: bool) -> None:
        self.has_peers = has_peers
        # by server, address and adapter
        self._loads: dict[tuple[str, str, str], Load] = {}
        # until when, by server and adapter, and by server and address
        self._broken: dict[tuple[str, str], float] = {}
        self._silent: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, pool: Pool, found: Place, adapter: str, now: float, out: list[Effect]) -> None:
        """Ask for a load."""
        slots, endpoint = pool.slots, pool.table.ref(found.row)
        if slots is None:
            return
        self._loads[pool.name, endpoint.address, adapter] = Load(pool, endpoint, found.evicts)
        if found.evicts is not None:
            self.change(pool, found.row, found.evicts, "gone", now, out)
        self.change(pool, found.row, adapter, "loading", now, out)
        source, timeout_s = slots.sources[adapter], timeout_of(pool)
        out.append(LoadAdapter(pool.name, endpoint.address, adapter, source, found.evicts, timeout_s))

    def end(self, result: LoadResult, pool: Pool | None, now: float, out: list[Effect]) -> int | None:
        """Note what became of it; returns the row of its endpoint, None if that has gone meanwhile."""
        load = self._loads.pop((result.server, result.address, result.adapter), None)
        if load is None or load.pool is not pool or pool.slots is None or not pool.table.is_current(load.endpoint):
            return None
        row = load.endpoint.row
        self.change(pool, row, result.adapter, "loaded" if result.problem is None else "gone", now, out)
        if load.evicts is not None and load.evicts not in result.unloaded:
            self.change(pool, row, load.evicts, "loaded", now, out)
        for adapter in result.unloaded:
            if adapter != load.evicts and adapter in pool.slots.sources:
                self.change(pool, row, adapter, "gone", now, out)
        return row

    def change(self, pool: Pool, row: int, adapter: str, change: Change, now: float, out: list[Effect]) -> None:
        """Note what becomes of an adapter at an engine, and tell the other processes."""
        if pool.slots is not None:
            pool.slots.change(row, adapter, change, now, is_ours=True)
            if self.has_peers:
                out.append(Tell(AdapterChanged(pool.name, pool.table.addresses[row], adapter, change)))

    def is_loading(self, pool: Pool, adapter: str, rows: Iterable[int]) -> bool:
        """Whether one of the engines was asked to load it."""
        return any((pool.name, pool.table.addresses[row], adapter) in self._loads for row in rows)

    def tell_again(self, out: list[Effect]) -> None:
        """Other processes take what is loading for over if they do not hear of it."""
        if self.has_peers:
            out.extend(Tell(AdapterChanged(*key, "loading")) for key in self._loads)

    def mark_broken(self, pool: Pool, adapter: str, now: float) -> None:
        """Its weights cannot be used."""
        self._broken[pool.name, adapter] = now + BROKEN_S

    def mark_silent(self, pool: Pool, address: str, now: float) -> None:
        """The engine, or its agent, does not answer."""
        self._silent[pool.name, address] = now + SILENT_S

    def is_broken(self, pool: Pool, adapter: str, now: float) -> bool:
        """Whether its weights could not be used a moment ago."""
        return self._broken.get((pool.name, adapter), 0.0) > now

    def answering(self, pool: Pool, rows: Iterable[int], now: float) -> list[int]:
        """Those of the rows whose engines have not been silent a moment ago."""
        addresses = pool.table.addresses
        return [row for row in rows if self._silent.get((pool.name, addresses[row]), 0.0) <= now]

    def forget(self, now: float) -> None:
        """Failures that are long ago."""
        for memory in (self._broken, self._silent):
            for key in [key for key, until_s in memory.items() if until_s <= now]:
                del memory[key]


def timeout_of(pool: Pool) -> float:
    """The longest that a request waits for its adapter, in seconds."""
    loading = pool.spec.adapter_loading
    return 0.0 if loading is None else float(loading.timeout)


def unavailable(adapter: str, what: str) -> Refusal:
    """503: try again."""
    return AdapterUnavailable(
        f"The adapter '{adapter}' {what}; try again later.", param="model", retry_after_s=_RETRY_AFTER_S
    )


def unreached(adapter: str) -> Refusal:
    """503: nobody there to load it."""
    return unavailable(adapter, "is not loaded, and no engine that could load it can be reached")


def broken(adapter: str) -> Refusal:
    """502: somebody must look at it."""
    return AdapterBroken(
        f"The adapter '{adapter}' could not be loaded by the engines: its weights are missing, or do not fit the model."
        " Tell the operator of this gateway, whose log says what the engines answered.",
        param="model",
    )
