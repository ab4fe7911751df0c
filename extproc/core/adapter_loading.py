# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for their adapter: each load is requested once for all of them, and all proceed when it is done

A group is all requests that wait for one adapter. It requests a load at the engine that
``scheduling.adapter_placement`` chooses; without one, it tries again whenever a request ends or an engine reports. An
adapter that must make room first gets no new requests, and is unloaded when no request in flight uses it; other
processes are notified, and the unload waits a moment for the notice to arrive. A load that fails is tried at another
engine.

Weights that two engines cannot use count as broken: for ``BROKEN_S`` no load of them is requested, and each time that
they are broken again, for twice as long, up to ``LONGEST_BROKEN_S``. An engine that does not answer gets no load for
``SILENT_S``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.core.effects import AdapterLoadEnded, Broadcast, Effect, LoadAdapter, RequestHeld, WakeAt
from extproc.core.peer_events import AdapterChanged
from extproc.core.request_record import AdapterLoadResult, RequestRecord
from extproc.core.request_states import RequestEvent, RequestState
from extproc.endpoints.table import EndpointRef
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.refusals import AdapterBroken, AdapterUnavailable, NoEndpoint, Refusal
from extproc.scheduling.adapter_placement import (
    AdapterPlacement,
    min_residency_s,
    place_adapter,
    row_for_second_copy,
    rows_of_mask,
    rows_that_can_load,
)
from extproc.scheduling.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from extproc.core.dispatch import Dispatcher
    from extproc.core.flow_control import AdmissionController
    from extproc.core.request_builder import RequestBuilder
    from extproc.endpoints.adapter_slots import AdapterSlots, Change
    from extproc.endpoints.table import Bools

BROKEN_S: Final = 10.0
LONGEST_BROKEN_S: Final = 120.0
SILENT_S: Final = 2.0
_RETRY_AFTER_S: Final = 5
# Engines that must have refused weights before they are taken for broken.
_MOST_BROKEN: Final = 2
# Until other processes have received that an adapter gets no new requests.
_NEWS_S: Final = 0.1
# After this time a load is requested again of an engine that had no room.
_RETRY_S: Final = 0.5
_Key = tuple[str, str, frozenset[str] | None]


class PendingLoad(msgspec.Struct, frozen=True):
    """A load that was asked for. ``evicts``: the adapters that make room."""

    pool: Pool
    endpoint: EndpointRef
    evicts: tuple[str, ...]


class _Broken(msgspec.Struct, frozen=True):
    """Weights at ``source`` that could not be used ``times`` in a row. ``until_s``: no load is requested before."""

    source: str
    times: int
    until_s: float


class AdapterLoads:
    """Bounded by adapters times endpoints. Effects go to ``out``."""

    def __init__(self, *, has_peers: bool) -> None:
        self.has_peers = has_peers
        # by server, address and adapter
        self._loads: dict[tuple[str, str, str], PendingLoad] = {}
        # by server and adapter
        self._broken: dict[tuple[str, str], _Broken] = {}
        # until when, by server and address
        self._silent: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def start_load(self, pool: Pool, found: AdapterPlacement, adapter: str, now: float, out: list[Effect]) -> None:
        """Request a load."""
        slots, endpoint = pool.slots, pool.table.endpoint_ref(found.row)
        if slots is None:
            return
        self._loads[pool.name, endpoint.address, adapter] = PendingLoad(pool, endpoint, found.evicts)
        for one in found.evicts:
            self.record_change(pool, found.row, one, "gone", now, out)
        self.record_change(pool, found.row, adapter, "loading", now, out)
        source, timeout_s = slots.sources[adapter], load_timeout_s(pool)
        out.append(LoadAdapter(pool.name, endpoint.address, adapter, source, found.evicts, timeout_s))

    def finish_load(self, result: AdapterLoadResult, pool: Pool | None, now: float, out: list[Effect]) -> int | None:
        """Correct which adapters the engine has: ``start_load`` took those to be evicted as gone. Returns the row of
        its endpoint, None if that has gone meanwhile.
        """
        load = self._loads.pop((result.server, result.address, result.adapter), None)
        if load is None or load.pool is not pool or pool.slots is None or not pool.table.is_current(load.endpoint):
            return None
        row, is_loaded = load.endpoint.row, result.problem is None
        if is_loaded:
            self._broken.pop((pool.name, result.adapter), None)
        not_evicted = [one for one in load.evicts if one not in result.unloaded]
        also_evicted = [one for one in result.unloaded if one not in load.evicts and one in pool.slots.sources]
        self.record_change(pool, row, result.adapter, "loaded" if is_loaded else "gone", now, out)
        for adapter in not_evicted:
            self.record_change(pool, row, adapter, "loaded", now, out)
        for adapter in also_evicted:
            self.record_change(pool, row, adapter, "gone", now, out)
        return row

    def record_change(self, pool: Pool, row: int, adapter: str, change: Change, now: float, out: list[Effect]) -> None:
        """Record a change of an adapter at an engine, and broadcast it to the other processes."""
        if pool.slots is not None:
            pool.slots.record_change(row, adapter, change, now, is_ours=True)
            if self.has_peers:
                out.append(Broadcast(AdapterChanged(pool.name, pool.table.addresses[row], adapter, change)))

    def is_loading(self, pool: Pool, adapter: str, rows: Iterable[int]) -> bool:
        """Whether one of the engines was asked to load it."""
        return any((pool.name, pool.table.addresses[row], adapter) in self._loads for row in rows)

    def broadcast_loading(self, out: list[Effect]) -> None:
        """Broadcast the loads in progress: other processes count a load as over if it is not repeated."""
        if self.has_peers:
            out.extend(Broadcast(AdapterChanged(*key, "loading")) for key in self._loads)

    def mark_broken(self, pool: Pool, adapter: str, now: float) -> None:
        """Its weights cannot be used."""
        key, source = (pool.name, adapter), _source(pool, adapter)
        before = self._broken.get(key)
        times = before.times + 1 if before is not None and before.source == source else 1
        pause_s = min(BROKEN_S * 2.0 ** min(times - 1, 10), LONGEST_BROKEN_S)
        self._broken[key] = _Broken(source, times, now + pause_s)

    def mark_unresponsive(self, pool: Pool, address: str, now: float) -> None:
        """The engine, or its agent, does not answer."""
        self._silent[pool.name, address] = now + SILENT_S

    def is_broken(self, pool: Pool, adapter: str, now: float) -> bool:
        """Whether its weights could not be used a moment ago."""
        broken = self._broken.get((pool.name, adapter))
        return broken is not None and broken.until_s > now and broken.source == _source(pool, adapter)

    def responsive_rows(self, pool: Pool, rows: Iterable[int], now: float) -> list[int]:
        """The rows whose engine did not fail to answer within the last ``SILENT_S`` seconds."""
        addresses = pool.table.addresses
        return [row for row in rows if self._silent.get((pool.name, addresses[row]), 0.0) <= now]

    def forget_old_failures(self, now: float) -> None:
        """Failures that are long ago."""
        for key in [key for key, until_s in self._silent.items() if until_s <= now]:
            del self._silent[key]
        # for some time more: weights that are broken again are tried less often
        for key in [key for key, one in self._broken.items() if one.until_s + LONGEST_BROKEN_S <= now]:
            del self._broken[key]


def _source(pool: Pool, adapter: str) -> str:
    return "" if pool.slots is None else pool.slots.sources.get(adapter, "")


def load_timeout_s(pool: Pool) -> float:
    """The longest that a request waits for its adapter, in seconds."""
    loading = pool.spec.adapter_loading
    return 0.0 if loading is None else float(loading.timeout)


def adapter_unavailable_refusal(pool: Pool, adapter: str, what: str) -> Refusal:
    """503: try again."""
    return AdapterUnavailable(
        f"The {_kind(pool)} '{adapter}' {what}; try again later.", param="model", retry_after_s=_RETRY_AFTER_S
    )


def engine_unreachable_refusal(pool: Pool, adapter: str) -> Refusal:
    """503: no engine can load it."""
    return adapter_unavailable_refusal(pool, adapter, "is not loaded, and no engine that could load it can be reached")


def adapter_load_failed_refusal(pool: Pool, adapter: str) -> Refusal:
    """502: an operator must correct it."""
    why = "do not fit the model" if pool.spec.protocol == "OpenAI" else "cannot be read by them"
    return AdapterBroken(
        f"The {_kind(pool)} '{adapter}' could not be loaded by the engines: its weights are missing, or {why}."
        " Tell the operator of this gateway, whose log says what the engines answered.",
        param="model",
    )


def _kind(pool: Pool) -> str:
    """V2 servers load whole models as others load adapters."""
    return "adapter" if pool.spec.protocol == "OpenAI" else "model"


class _Closing(msgspec.Struct):
    """Adapters that are to make room. ``since_s``: since then they get no new requests."""

    endpoint: EndpointRef
    adapters: tuple[str, ...]
    since_s: float


class _Group(msgspec.Struct):
    """All requests that wait for an adapter.

    ``deadlines``: by ticket, in order of arrival. ``subset``: addresses that their gateway allows. ``refused``: by row,
    until when no load is requested of the engine. ``broken``: rows whose engines cannot use the weights.
    """

    pool: Pool
    adapter: str
    subset: Collection[str] | None
    deadlines: dict[str, float] = {}
    closing: _Closing | None = None
    refused: dict[int, float] = {}
    broken: set[int] = set()


class AdapterWaitStage:
    """Records in state LOADING: they wait for their adapter. Also the loads that were asked for."""

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        admission: AdmissionController,
        dispatcher: Dispatcher,
        proceed: Callable[[RequestRecord, float, list[Effect]], None],
        *,
        has_peers: bool,
    ) -> None:
        """``proceed``: takes on a request whose adapter is there."""
        self._records = records
        self._admission = admission
        self._dispatcher = dispatcher
        self._proceed = proceed
        self._groups: dict[_Key, _Group] = {}
        self._loads = AdapterLoads(has_peers=has_peers)

    @property
    def is_empty(self) -> bool:
        """Whether no request waits here."""
        return not self._groups

    def may_hold(self, pool: Pool) -> bool:
        """Whether requests of the ModelServer may wait here."""
        return pool.slots is not None

    def admit(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestHeld | None:
        """Hold the request until an engine has its adapter; None: it need not wait. Raises a Refusal."""
        arrival = record.arrival_before_dispatch
        adapter, pool, subset, slots = arrival.adapter, arrival.pool, record.attachment.subset, arrival.pool.slots
        if adapter is None or slots is None or adapter not in slots.sources:
            return None
        slots.drop_expired_changes(now)
        rows = rows_that_can_load(pool.table, pool.rows_that_may_serve(None, subset), now)
        holders, key = slots.rows_with(adapter) & rows, _key(pool, adapter, subset)
        is_broken = self._loads.is_broken(pool, adapter, now)
        if holders.any():
            if key not in self._groups and not is_broken:
                self._copy(pool, slots, adapter, rows_of_mask(rows & ~holders), now, out)
            return None
        if not rows.any():
            # the picker reports the reason
            return None
        if is_broken:
            raise adapter_load_failed_refusal(pool, adapter)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(pool, adapter, subset)
        group.deadlines[record.ticket] = min(now + load_timeout_s(pool), record.answer_by_s)
        slots.waiting += 1
        self._dispatcher.add_record(record, RequestState.LOADING, now)
        out.append(WakeAt(now))
        return self._admission.make_held_effect(record, now)

    def withdraw(self, record: RequestRecord, now: float) -> None:  # noqa: ARG002 - as other waits
        """The request does not wait here any more; the others of its group are unaffected."""
        arrival = record.arrival_before_dispatch
        group = self._groups.get(_key(arrival.pool, arrival.destination.model, record.attachment.subset))
        if group is not None:
            _remove(group, record.ticket)

    def on_adapter_load(self, result: AdapterLoadResult, pool: Pool | None, now: float, out: list[Effect]) -> None:
        """An engine has loaded an adapter, or has not. The next ``tick`` sends its requests on."""
        out += [AdapterLoadEnded(result), WakeAt(now)]
        row = self._loads.finish_load(result, pool, now, out)
        if pool is not None and row is not None and result.problem is not None:
            self._failed(result, result.problem, pool, row, now)

    def tick(self, now: float, out: list[Effect]) -> None:
        """Send on those whose adapter is loaded, request loads, and refuse those that have waited too long."""
        # they go first: the adapter of an engine gives way to another's if nothing uses it
        for record in self._ready(now):
            record.begin_transition(RequestEvent.GRANTED)
            self._proceed(record, now, out)
        for key, group in list(self._groups.items()):
            for ticket in [one for one, at_s in group.deadlines.items() if at_s <= now]:
                self._refuse(group, ticket, self._too_late(group), now, out)
            slots = group.pool.slots
            if group.deadlines and slots is not None:
                slots.drop_expired_changes(now)
                self._load_for(group, slots, now, out)
            if not group.deadlines:
                self._reopen(group, now, out)
                self._groups.pop(key, None)
        self._schedule_tick(now, out)
        self._loads.forget_old_failures(now)

    def on_config_change(self, builder: RequestBuilder, now: float, out: list[Effect]) -> None:
        """After a change of configuration: refuse those whose server or adapter is not there any more."""
        for group in self._groups.values():
            pool = group.pool
            is_there = (
                builder.pools.get(pool.name) is pool and pool.slots is not None and group.adapter in pool.slots.sources
            )
            if not is_there:
                gone = NoEndpoint(f"'{pool.name}' does not load the adapter '{group.adapter}' any more.")
                self._refuse_all(group, gone, now, out)

    def _ready(self, now: float) -> list[RequestRecord]:
        """Remove and return those whose adapter is there."""
        found = list[RequestRecord]()
        for group in self._groups.values():
            slots = group.pool.slots
            if slots is not None and (slots.rows_with(group.adapter) & self._rows(group, now)).any():
                found += [self._records[ticket] for ticket in list(group.deadlines) if _remove(group, ticket)]
        return found

    def _rows(self, group: _Group, now: float) -> Bools:
        return rows_that_can_load(group.pool.table, group.pool.rows_that_may_serve(None, group.subset), now)

    def _load_for(self, group: _Group, slots: AdapterSlots, now: float, out: list[Effect]) -> None:
        pool, loads = group.pool, self._loads
        answering = loads.responsive_rows(pool, rows_of_mask(self._rows(group, now)), now)
        if loads.is_broken(pool, group.adapter, now):
            self._refuse_all(group, adapter_load_failed_refusal(pool, group.adapter), now, out)
        elif not answering:
            self._refuse_all(group, engine_unreachable_refusal(pool, group.adapter), now, out)
        elif slots.is_listed and slots.has_unread_rows(answering, now):
            # an engine may have it: its list of models comes within a second
            return
        elif not loads.is_loading(pool, group.adapter, answering):
            self._find_place(group, slots, [row for row in answering if group.refused.get(row, 0.0) <= now], now, out)

    def _find_place(self, group: _Group, slots: AdapterSlots, rows: list[int], now: float, out: list[Effect]) -> None:
        """Load now where there is room or an idle adapter; else make an adapter that is in use give way."""
        pool, table, has_peers = group.pool, group.pool.table, self._loads.has_peers
        closing = group.closing
        if closing is not None and not (table.is_current(closing.endpoint) and closing.endpoint.row in rows):
            self._reopen(group, now, out)
            closing = None
        elif closing is not None and not all(slots.is_loaded_on(closing.endpoint.row, one) for one in closing.adapters):
            # another process was faster, and its adapter has the slot
            self._reopen(group, now, out)
            closing = None
        found = place_adapter(slots, table, group.adapter, rows, now=now)
        if found is not None and not (found.evicts and has_peers):
            self._reopen(group, now, out)
            self._loads.start_load(pool, found, group.adapter, now, out)
        elif closing is not None:
            row, is_used = closing.endpoint.row, _are_used(slots, closing.endpoint.row, closing.adapters)
            if not is_used and (not has_peers or now - closing.since_s >= _NEWS_S):
                group.closing = None
                self._loads.start_load(pool, AdapterPlacement(row, closing.adapters), group.adapter, now, out)
        else:
            self._close_one(group, slots, found or self._in_use(group, slots, rows, now), now, out)

    def _in_use(self, group: _Group, slots: AdapterSlots, rows: list[int], now: float) -> AdapterPlacement | None:
        """The adapter to unload although it is in use."""
        held = sum(len(slots.adapters_held(row)) for row in rows)
        stay_s = min_residency_s(load_timeout_s(group.pool), waiting=len(self._groups), slots=held)
        return place_adapter(slots, group.pool.table, group.adapter, rows, now=now, shortest_stay_s=stay_s)

    def _close_one(
        self, group: _Group, slots: AdapterSlots, found: AdapterPlacement | None, now: float, out: list[Effect]
    ) -> None:
        if found is not None and found.evicts:
            group.closing = _Closing(group.pool.table.endpoint_ref(found.row), found.evicts, now)
            for one in found.evicts:
                self._loads.record_change(group.pool, found.row, one, "closed", now, out)
            if not _are_used(slots, found.row, found.evicts):
                out.append(WakeAt(now + _NEWS_S))

    def _copy(
        self, pool: Pool, slots: AdapterSlots, adapter: str, others: list[int], now: float, out: list[Effect]
    ) -> None:
        """Load a second copy, where that pays."""
        if self._loads.is_loading(pool, adapter, others) or any(slots.is_loading(row, adapter) for row in others):
            # one at a time
            return
        found = row_for_second_copy(slots, pool.table, adapter, slots.rows_with(adapter), others, now)
        # for a copy, nothing is closed and waited for
        if found is not None and not (found.evicts and (found.must_wait or self._loads.has_peers)):
            self._loads.start_load(pool, found, adapter, now, out)

    def _failed(self, result: AdapterLoadResult, problem: AdapterLoadProblem, pool: Pool, row: int, now: float) -> None:
        """Record the failure, for requests that wait and for later ones."""
        groups = [one for one in self._groups.values() if one.pool is pool and one.adapter == result.adapter]
        match problem:
            case AdapterLoadProblem.BUSY:
                if pool.slots is not None:
                    pool.slots.mark_full(row)
                for group in groups:
                    group.refused[row] = now + _RETRY_S
            case AdapterLoadProblem.UNREACHABLE:
                self._loads.mark_unresponsive(pool, result.address, now)
            case AdapterLoadProblem.BROKEN:
                for group in groups:
                    group.refused[row] = now + BROKEN_S
                    group.broken.add(row)
                most = min(_MOST_BROKEN, len(pool.table))
                if max((len(one.broken) for one in groups), default=most) >= most:
                    self._loads.mark_broken(pool, result.adapter, now)

    def _schedule_tick(self, now: float, out: list[Effect]) -> None:
        """Schedule the next check, and broadcast again the state that still holds."""
        loads = self._loads
        soonest = [at_s for group in self._groups.values() for at_s in group.deadlines.values()]
        if self._groups or (loads.has_peers and len(loads)):
            soonest.append(now + _RETRY_S)
        loads.broadcast_loading(out)
        for group in self._groups.values():
            closing = group.closing
            if closing is not None and loads.has_peers:
                soonest.append(max(now + _NEWS_S / 2, closing.since_s + _NEWS_S))
                name, address = group.pool.name, closing.endpoint.address
                out.extend(Broadcast(AdapterChanged(name, address, one, "closed")) for one in closing.adapters)
        if soonest:
            out.append(WakeAt(min(soonest)))

    def _reopen(self, group: _Group, now: float, out: list[Effect]) -> None:
        """Open the adapters that were to make room for requests again, those that are still there."""
        closing, slots, group.closing = group.closing, group.pool.slots, None
        if closing is None or slots is None or not group.pool.table.is_current(closing.endpoint):
            return
        for one in closing.adapters:
            if slots.is_loaded_on(closing.endpoint.row, one):
                self._loads.record_change(group.pool, closing.endpoint.row, one, "loaded", now, out)

    def _too_late(self, group: _Group) -> Refusal:
        if self._loads.is_loading(group.pool, group.adapter, group.pool.table.active_rows):
            text = f"takes longer to load than {load_timeout_s(group.pool):g} s"
        else:
            others = f"{_kind(group.pool)}s"
            text = f"has no room at any engine: all slots are in use by other {others}"
        return adapter_unavailable_refusal(group.pool, group.adapter, text)

    def _refuse_all(self, group: _Group, refusal: Refusal, now: float, out: list[Effect]) -> None:
        for ticket in list(group.deadlines):
            self._refuse(group, ticket, refusal, now, out)

    def _refuse(self, group: _Group, ticket: str, refusal: Refusal, now: float, out: list[Effect]) -> None:
        _remove(group, ticket)
        self._dispatcher.refuse_held(self._records[ticket], refusal, now, out)


def _remove(group: _Group, ticket: str) -> bool:
    """The request waits no more; returns whether it did."""
    if group.deadlines.pop(ticket, None) is None:
        return False
    if group.pool.slots is not None:
        group.pool.slots.waiting -= 1
    return True


def _are_used(slots: AdapterSlots, row: int, adapters: Iterable[str]) -> bool:
    return any(slots.is_used(row, one) for one in adapters)


def _key(pool: Pool, adapter: str, subset: Collection[str] | None) -> _Key:
    return pool.name, adapter, None if subset is None else frozenset(subset)
