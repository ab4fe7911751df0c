# SPDX-License-Identifier: Apache-2.0
"""All requests of a process: they arrive, may wait, run, end, and their outcomes teach.

There is one record for each request, in one table. Each verb takes the time in seconds, changes the table and what
depends on it, and returns the effects that its caller is to perform. There is no clock, no event loop and no network
here: the same core runs under Envoy, in tests and in virtual time. ``states.py`` says which event is legal when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.admission.access import Access
from extproc.admission.identity import CacheIsolation, Identities
from extproc.admission.limits import Grant
from extproc.api.snapshot import scrape_stretch
from extproc.core.accounts import Accounts
from extproc.core.activation import AwaitingRequests
from extproc.core.adapter_load import LoadingRequests
from extproc.core.demand import DemandMeter
from extproc.core.dispatch import Dispatcher
from extproc.core.effects import Effect, Tell
from extproc.core.explaining import Asked, explain_arrival
from extproc.core.feedback import take_change, take_report
from extproc.core.level_exchange import LevelExchange
from extproc.core.peers import AdapterChanged, Alive, AskLevels, Ended, EngineSaid, Learned, Levels, Mirror, Spent
from extproc.core.pipeline import EnteringRequests
from extproc.core.queue import AdmissionController, WaitingRequests
from extproc.core.record import BUNDLE, Record
from extproc.core.request_builder import Intake, WhoMay
from extproc.core.running import RunningRequests, loads_in_parts, loads_of
from extproc.core.states import Event, IllegalEvent, State
from extproc.llmd.pickers import PickerMaker, pickers_for
from extproc.prefix.index import blocks_of_each
from extproc.routing.resolve import RoutingTable
from extproc.scheduling.pool import Pool, RequestStarted

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from extproc.api.snapshot import Snapshot
    from extproc.api.status_pages import Demand, EndpointLoad
    from extproc.core.activation import ZeroDemand
    from extproc.core.effects import RequestEffect
    from extproc.core.explanation import Explanation
    from extproc.core.peers import EventBatch
    from extproc.core.pipeline import Answer
    from extproc.core.record import Arrival, Attachment, LoadResult, Outcome
    from extproc.llmd.pickers import MadePicker, MakePicker


class Core:
    """All requests of one process, and the pools that they go to."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        rng: random.Random,
        ticket_prefix: str,
        make_picker: MakePicker | None = None,
        machine: str | None = None,
    ) -> None:
        """``ticket_prefix``: unique to this process, and its name among others. ``machine``: its processes share local
        limits; None: no peers.
        """
        self.pools: dict[str, Pool] = {}
        self.admission = AdmissionController(rng=rng)
        self.mirror = Mirror()
        self.snapshot = snapshot
        # of the configuration in use
        self.intake: Intake
        # whether anything depends on who asks
        self.asks_who = False
        # whether anything depends on what our bundle says of a stream
        self.asks_origin = False
        self._make_picker = make_picker or PickerMaker()
        self._pickers: dict[str, MadePicker] = {}
        self._routing: RoutingTable | None = None
        self._rng = rng
        self._ticket_prefix = ticket_prefix
        self._tickets = 0
        self._machine = machine
        self._accounts = Accounts(self.admission.limits, machine=machine, peers=lambda: self.mirror.peers)
        self.levels = LevelExchange(self.admission.limits, machine=machine, origin=ticket_prefix)
        self._records: dict[str, Record] = {}
        self.meter = DemandMeter(ticket_prefix)
        dispatcher = Dispatcher(self._records, self._accounts, self.meter, rng=rng, has_peers=machine is not None)
        self._loading = LoadingRequests(self._records, dispatcher, has_peers=machine is not None)
        self._waiting = WaitingRequests(self._records, self.admission, self._loading, dispatcher)
        self._awaiting = AwaitingRequests(self._waiting, self._loading, dispatcher)
        self._entering = EnteringRequests(
            self.admission,
            self._accounts,
            self._waiting,
            self._loading,
            self._awaiting,
            dispatcher,
            lambda: self.intake,
        )
        self._running = RunningRequests(self._records, self._accounts, has_peers=machine is not None)
        self.apply(snapshot, 0.0)

    def apply(self, snapshot: Snapshot, now: float) -> list[Effect]:
        """Switch to another configuration; what is known of servers that stay is kept.

        Raises ConfigInvalid, with nothing changed, if a picker's file is wrong.
        """
        pickers = pickers_for(snapshot, self._pickers, self._make_picker)
        routing = RoutingTable(snapshot, self._routing)
        identities, access = Identities(snapshot), Access(snapshot)
        isolation = CacheIsolation(snapshot)
        pools: dict[str, Pool] = {}
        stretch = scrape_stretch(snapshot.servers)
        most_blocks = blocks_of_each(sum(len(server.spec.endpoints) for server in snapshot.servers))
        for server in snapshot.servers:
            name = server.metadata.key
            picker, known = pickers[name].picker, self.pools.get(name)
            # the loader gives what has not changed again, as the same object
            if known is not None and (known.spec is not server.spec or known.picker is not picker):
                known.update(server.spec, picker)
            pools[name] = known or Pool(name, server.spec, picker)
            pools[name].name_adapters(routing.adapters_of(name))
            pools[name].expect_reports(stretch)
            pools[name].caches.limit_blocks(most_blocks)
        gates, out = self.admission.gates, list[Effect]()
        self.pools, self.snapshot, self._pickers = pools, snapshot, pickers
        self._routing = routing
        self.admission.apply(snapshot, pools)
        self.asks_who = bool(
            self.admission.gates
            or snapshot.picker_files
            or self.admission.routes
            or isolation.asks_who
            or access.restricts
        )
        self.claims = access.claims
        self.asks_origin = bool(snapshot.http_routes or snapshot.gateway.listeners)
        who_may = WhoMay(access, identities, routing)
        self.intake = Intake(routing, identities, isolation, who_may, pools, self.admission, self._rng)
        self._awaiting.go_back(self._records.values(), pools, now, out)
        self._awaiting.move(pools, self.intake.elsewhere, now, out)
        self._loading.move(pools, now, out)
        self._waiting.move(gates, pools, now, out)
        self._waiting.wake(now, out)
        return out

    def arrive(
        self, arrival: Arrival, now: float, attachment: Attachment = BUNDLE, *, wants_reasons: bool = False
    ) -> tuple[RequestEffect, list[Effect]]:
        """A request has arrived. ``wants_reasons``: explain its Decision.

        Returns the effect that is about the request itself, and all others.
        """
        self._tickets += 1
        record = Record(f"{self._ticket_prefix}-{self._tickets:x}", arrival=arrival)
        record.attachment, record.wants_reasons = attachment, wants_reasons
        record.happens(Event.ARRIVED)
        self.meter.arrived(record, arrival, now)
        out = list[Effect]()
        try:
            own = self._entering.begin(record, arrival, now, out)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must leave nothing behind
            own = self._entering.fail(record, error, now, out)
        return own, out

    def resume(self, ticket: str, answer: Answer, now: float) -> tuple[RequestEffect | None, list[Effect]]:
        """What the request asked for is here. Returns as ``arrive`` does; None if its client has disconnected."""
        record, out = self._records.get(ticket), list[Effect]()
        if record is None:
            if isinstance(answer, Grant):
                self._accounts.settle_grants((answer,), None, now, out)
            return None, out
        record.happens(Event.ANSWERED)
        try:
            own = self._entering.resume(record, answer, now, out)
        except IllegalEvent:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it must leave nothing behind
            own = self._entering.fail(record, error, now, out)
        return own, out

    def tick(self, now: float) -> list[Effect]:
        """Held requests that can go are sent, and those that have waited too long are refused."""
        out = list[Effect]()
        self._awaiting.tick(now, out, lambda record: self._entering.started(record, now, out))
        for record in self._loading.ready(now):
            self._entering.loaded(record, now, out)
        self._loading.tick(now, out)
        self._waiting.tick(now, out)
        return out

    def take_load(self, result: LoadResult, now: float) -> list[Effect]:
        """A load that was asked for has ended."""
        out = list[Effect]()
        self._loading.ended(result, self.pools.get(result.server), now, out)
        return out

    def leave(self, ticket: str, now: float) -> list[Effect]:
        """The client of a request went away before it was answered: no engine gets it."""
        record, out = self._records.get(ticket), list[Effect]()
        if record is None or not record.happens(Event.LEFT):
            return out
        if record.run is None:
            self._entering.withdraw(record, now, out)
        elif record.state is State.SETTLED:
            self._running.finish(record, record.run, now, out)
        else:
            self._running.undo(record, record.run, now, out)
        self._waiting.wake(now, out)
        return out

    def finish(self, ticket: str, now: float) -> list[Effect]:
        """The stream of a request is closed: its endpoint is free of it."""
        record, out = self._records.get(ticket), list[Effect]()
        if record is None or not record.happens(Event.FINISHED):
            return out
        if record.run is None:
            self._entering.withdraw(record, now, out)
        else:
            self._running.finish(record, record.run, now, out)
        self._waiting.wake(now, out)
        return out

    def settle(self, outcome: Outcome, now: float) -> list[Effect]:
        """An outcome became known here, whichever process decided the request; Settled if it is in the table."""
        out = list[Effect]()
        if self._machine is not None:
            out.append(Tell(Learned(outcome)))
        self._running.settle(outcome, now, out)
        return out

    def take_report(self, event: EngineSaid, now: float) -> list[Effect]:
        """An engine told this process how it is."""
        out: list[Effect] = [] if self._machine is None else [Tell(event)]
        take_report(self.pools, event, now)
        self._waiting.wake(now, out)
        return out

    def hear(self, batch: EventBatch, now: float) -> list[Effect]:
        """Repeat what another process did."""
        out, origin = list[Effect](), batch.origin
        self.mirror.heard_of(origin, now)
        for event in batch.events:
            match event:
                case RequestStarted():
                    gate = self.admission.gates.get(event.server)
                    if self._running.repeat(event, origin, self.pools.get(event.server), gate, now):
                        self.mirror.started(origin, event.ticket)
                case Ended():
                    self._running.finish_elsewhere(
                        [event.ticket] if self.mirror.ended(origin, event.ticket) else [], now, out
                    )
                case Learned():
                    self._running.settle(event.outcome, now, out)
                case EngineSaid():
                    take_report(self.pools, event, now)
                case Alive():
                    self._running.finish_elsewhere(self.mirror.lost(origin, event.running), now, out)
                case AdapterChanged():
                    take_change(self.pools, event, now)
                case Spent() | AskLevels() | Levels():
                    self.levels.hear(event, origin, now, out)
        self._waiting.wake(now, out)
        return out

    def beat(self, now: float) -> list[Effect]:
        """A heartbeat: tell the others which requests run here, and end those of processes that have gone silent."""
        out: list[Effect] = [Tell(Alive(self._running.here()))]
        self.levels.ask(out)
        self._running.finish_elsewhere(self.mirror.silent(now), now, out)
        self._waiting.wake(now, out)
        return out

    def explain(
        self, arrival: Arrival, now: float, *, tokens: Sequence[int] | None = None, attachment: Attachment = BUNDLE
    ) -> Explanation:
        """What would be decided, with every reason, and nothing changed; raises a Refusal."""
        return explain_arrival(Asked(arrival, attachment, tokens), self._awaiting, now=now, rng=self._rng)

    def state_of(self, ticket: str) -> State:
        """Where the request of this ticket stands."""
        record = self._records.get(ticket)
        return State.ABSENT if record is None else record.state

    def count(self, *states: State) -> int:
        """How many requests are in these states."""
        return sum(1 for one in self._records.values() if one.state in states)

    def at_zero(self) -> dict[str, ZeroDemand]:
        """By server: who waits because it has no engine."""
        return self._awaiting.at_zero()

    def loads(self) -> dict[str, EndpointLoad]:
        """What each engine does for this process, by address."""
        return loads_of(self._records.values(), self.pools.values())

    def loads_in_parts(self) -> Iterator[dict[str, EndpointLoad]]:
        """The same for ``add_part``, a pool at a time."""
        return loads_in_parts(self._records.values(), self.pools.values())

    def demand(self, now: float, *, began_at_s: float = 0.0) -> Demand:
        """What clients ask for and what the engines do, for autoscalers. ``began_at_s``: when the process began."""
        return self.meter.page(self.pools, now, began_at_s=began_at_s)
