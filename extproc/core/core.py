# SPDX-License-Identifier: Apache-2.0
"""All requests of a process: they arrive, may wait, run and end, and estimates are learned from their outcomes.

There is one record for each request, in one table. Each verb takes the time in seconds, changes the table and what
depends on it, and returns the effects that its caller is to perform. There is no clock, no event loop and no network
here: the same core runs under Envoy, in tests and in virtual time. ``states.py`` has the table of legal events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.admission.guard_services_by_route import guards_by_route
from extproc.admission.identity import CacheIsolation, IdentityResolver
from extproc.admission.model_access import Authorizer
from extproc.admission.rate_limits import Grant
from extproc.admission.slo_classes import ObjectiveTable
from extproc.api.config_snapshot import kv_event_source_count, scrape_interval_factor
from extproc.core.admission_pipeline import AdmissionPipeline
from extproc.core.breakers import breakers_for_peers, merge_breakers, reset_breakers
from extproc.core.demand import DemandMeter
from extproc.core.dispatch import Dispatcher
from extproc.core.effects import AskGuard, BreakerChanged, Broadcast, CacheStoreAttempted, Effect
from extproc.core.fallback import FallbackPlanner
from extproc.core.fallback_budget import FallbackBudgets
from extproc.core.flow_control import AdmissionController
from extproc.core.guard_decisions import GuardStopped
from extproc.core.limit_accounting import NO_OTHERS, LimitAccounting, LimitLevelExchange
from extproc.core.mirror import PercentMirrorSampler
from extproc.core.orphaned_request_charges import OrphanedRequests, process_of_ticket
from extproc.core.outcome_feedback import apply_adapter_change, apply_engine_report
from extproc.core.peer_events import (
    MOST_SHARED_BYTES,
    AdapterChanged,
    AnswerArrived,
    AnswerStored,
    AskLimitLevels,
    AskRequestsStarted,
    BudgetsRecovered,
    EngineReported,
    LimitLevels,
    LimitSpent,
    OutcomeKnown,
    PeerRequests,
    ProcessAlive,
    RequestEnded,
    RequestPrefilled,
    RequestStarted,
)
from extproc.core.prefill_completion import PrefillCompletion
from extproc.core.request_builder import RequestBuilder
from extproc.core.request_record import BUNDLE, AdapterLoadResult, PrefillResult, RequestRecord
from extproc.core.request_states import RequestEvent, RequestState
from extproc.core.response_cache import CacheKey
from extproc.core.running_requests import RunningRequests, endpoint_loads, endpoint_loads_by_pool
from extproc.core.spare_capacity import load_fraction
from extproc.endpoints.breaker import ProbeTurns
from extproc.prefix.approximate_index import max_blocks_per_endpoint
from extproc.prefix.kv_event_decoder import max_blocks_per_source
from extproc.routing.routing_table import RoutingTable
from extproc.scheduling.picker_cache import make_picker_without_files, pickers_for
from extproc.scheduling.pool import Pool

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from extproc.admission.budget_recovery import RemainingBudgets
    from extproc.admission.slo_classes import ObjectiveClass
    from extproc.admission.token_buckets import BucketLevel
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.payload_log import PayloadLog
    from extproc.api.status_page_contents import EndpointLoad, ProcessDemand
    from extproc.core.admission_pipeline import Answer
    from extproc.core.effects import RequestEffect
    from extproc.core.explanation import Explanation
    from extproc.core.guard_decisions import GuardFailed, GuardReply
    from extproc.core.limit_accounting import MachineGrantLedger
    from extproc.core.orphaned_request_charges import OrphanedOutcome
    from extproc.core.peer_events import EventBatch
    from extproc.core.request_record import Arrival, GatewayProperties, Outcome, RequestHead, WorkResult
    from extproc.core.response_cache import AnswerStore, Kind
    from extproc.core.trace import Trace
    from extproc.scheduling.picker_cache import CachedPicker, MakePicker


class Core:
    """All requests of one process, and the pools that they go to."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        rng: random.Random,
        ticket_prefix: str,
        make_picker: MakePicker = make_picker_without_files,
        machine: str | None = None,
        recent: MachineGrantLedger = NO_OTHERS,
        has_readers: Callable[[], bool] = lambda: True,
    ) -> None:
        """``ticket_prefix``: unique to this process, and its name among others. ``make_picker``: by default one that
        refuses ModelServers with an EndpointPickerConfig. ``machine``: its processes share local limits; None: no
        peers. ``recent``: what they have granted. ``has_readers``: whether any process would be told.
        """
        self.pools: dict[str, Pool] = {}
        self.admission = AdmissionController(rng=rng)
        self.peer_view = PeerRequests()
        self._turns = ProbeTurns(ticket_prefix, lambda: self.peer_view.peer_names)
        self.snapshot = snapshot
        # of the configuration in use
        self.builder: RequestBuilder
        # whether anything depends on the caller
        self.asks_who = False
        # whether anything depends on the metadata that our bundle gives a stream
        self.asks_origin = self._has_copies = False
        # whether the configuration has a usage log
        self.logs_usage = False
        # by the key of their ModelRoute; none without a sink
        self.payload_logs: Mapping[str, PayloadLog] = {}
        self._make_picker = make_picker
        self._pickers: dict[str, CachedPicker] = {}
        self._routing: RoutingTable | None = None
        self._rng = rng
        self._ticket_prefix = ticket_prefix
        self._tickets = 0
        self._machine = machine
        limits, peers = self.admission.limits, lambda: self.peer_view.peer_count
        self._accounts = LimitAccounting(limits, machine=machine, peers=peers, recent=recent, has_readers=has_readers)
        self.levels = LimitLevelExchange(limits, machine=machine, origin=ticket_prefix, recent=recent)
        self._records: dict[str, RequestRecord] = {}
        self.meter = DemandMeter(ticket_prefix)
        budgets = FallbackBudgets()
        fallbacks = FallbackPlanner(budgets, rng=rng)
        self._mirrors = PercentMirrorSampler(rng=rng)
        self._dispatcher = Dispatcher(
            self._records, self._accounts, self.meter, fallbacks, self._mirrors, rng=rng, has_peers=machine is not None
        )
        self._pipeline = AdmissionPipeline(
            self._records,
            self.admission,
            self._accounts,
            self._dispatcher,
            fallbacks,
            rng=rng,
            has_peers=machine is not None,
        )
        self._caches = self._pipeline.caches
        self._running = RunningRequests(self._records, self._accounts, budgets, has_peers=machine is not None)
        self._orphans = OrphanedRequests(self.admission, self._accounts)
        self._legs = PrefillCompletion(
            self._records,
            self._dispatcher,
            self._running,
            self._pipeline.prepare_fallback_move,
            has_peers=machine is not None,
        )
        self.apply(snapshot, 0.0)

    def apply(self, snapshot: Snapshot, now: float) -> list[Effect]:
        """Switch to another configuration; the state of servers that stay is kept.

        Raises ConfigInvalid, with nothing changed, if a picker's file is wrong.
        """
        pickers = pickers_for(snapshot, self._pickers, self._make_picker)
        routing = RoutingTable(snapshot, self._routing)
        identities, authorizer = IdentityResolver(snapshot), Authorizer(snapshot)
        isolation = CacheIsolation(snapshot)
        pools: dict[str, Pool] = {}
        stretch = scrape_interval_factor(snapshot.servers)
        most_blocks = max_blocks_per_endpoint(sum(len(server.spec.endpoints) for server in snapshot.servers))
        most_of_source = max_blocks_per_source(kv_event_source_count(snapshot.servers))
        for server in snapshot.servers:
            name = server.metadata.key
            picker, known = pickers[name].picker, self.pools.get(name)
            # the loader gives what has not changed again, as the same object
            if known is not None and (known.spec is not server.spec or known.picker is not picker):
                known.update(server.spec, picker)
            pools[name] = known or Pool(name, server.spec, picker, self._turns)
            pools[name].set_requested_models(
                routing.adapters_of(name), is_asked_by_model=name in routing.asked_by_model
            )
            pools[name].set_report_interval(stretch)
            pools[name].caches.limit_blocks(most_blocks, of_source=most_of_source)
        self.pools, self.snapshot, self._pickers = pools, snapshot, pickers
        self._routing = routing
        self.admission.apply(snapshot, pools)
        gateway, guards = snapshot.gateway, guards_by_route(snapshot)
        self._caches.apply(snapshot)
        self.asks_who = bool(
            self._caches.has_per_caller_answers
            or gateway.authentication is not None
            or gateway.clients == "Trusted"
            or self.admission.gates
            or snapshot.picker_files
            or self.admission.has_limits
            or isolation.asks_who
            or authorizer.restricts
            or gateway.usage_log is not None
            or gateway.payload_log is not None
            or gateway.load_shown_to
            or guards
        )
        self.payload_logs = {
            one.metadata.key: one.spec.payload_log
            for one in snapshot.routes
            if one.spec.payload_log is not None and gateway.payload_log is not None
        }
        self.logs_usage = self._dispatcher.logs_usage = gateway.usage_log is not None
        self._dispatcher.objectives = ObjectiveTable(snapshot)
        self.claims = authorizer.claims
        # Envoy may still send copies when no rule has a mirror any more
        self._has_copies |= any(rule.mirror is not None for route in snapshot.routes for rule in route.spec.rules)
        self.asks_origin = bool(snapshot.gateway_api_routes or gateway.listeners or gateway.steps) or self._has_copies
        self.builder = RequestBuilder(
            routing,
            identities,
            isolation,
            authorizer,
            pools,
            self._rng,
            has_limits=self.admission.has_limits or bool(guards),
        )
        self._mirrors.apply_config(self.builder)
        out = list[Effect]()
        self._pipeline.apply_config(self.builder, guards, now, out)
        return out

    def arrive(
        self,
        arrival: Arrival,
        now: float,
        attachment: GatewayProperties = BUNDLE,
        *,
        wants_reasons: bool = False,
        trace: Trace | None = None,
    ) -> tuple[RequestEffect, list[Effect]]:
        """A request has arrived. ``wants_reasons``: explain its Decision. ``trace``: gets its steps.

        Returns the effect that is about the request itself, and all others.
        """
        self._tickets += 1
        wall_s = now + self._accounts.wall_offset_s
        record = RequestRecord(
            f"{self._ticket_prefix}-{self._tickets:x}", arrival=arrival, arrived_at_s=now, wall_s=wall_s
        )
        record.attachment, record.wants_reasons, record.trace = attachment, wants_reasons, trace
        record.begin_transition(RequestEvent.ARRIVED)
        out = list[Effect]()
        self._pipeline.choose_server(record, now, out)
        self.meter.count_arrival(record, record.arrival_before_dispatch)
        return self._pipeline.start_request(record, now, out), out

    def load_fraction_for_caller(self, head: RequestHead, model: str, now: float) -> float | None:
        """How full it is, from 0 to 1, where requests of the caller for ``model`` go; None: it may not know."""
        shown_to = self.snapshot.gateway.load_shown_to
        if not shown_to or self.builder.tenant_of(head) not in shown_to:
            return None
        targets = self.builder.unconditional_chat_targets(head, model)
        return None if targets is None else load_fraction(targets, self.pools, self.admission.gates, now)

    def resume(self, ticket: str, answer: Answer, now: float) -> tuple[RequestEffect | None, list[Effect]]:
        """The answer to an AskLimits, AskGuard or AskTokens has come. Returns as ``arrive`` does; None if the client
        has disconnected.
        """
        record, out = self._records.get(ticket), list[Effect]()
        if record is None:
            if isinstance(answer, Grant):
                self._accounts.settle_grants((answer,), None, now, out)
            return None, out
        record.begin_transition(RequestEvent.ANSWERED)
        return self._pipeline.resume(record, answer, now, out), out

    def align_with_wall_clock(self, wall_s: float, now: float) -> None:
        """Align prices and budget windows with the wall clock, which may jump. ``wall_s``: seconds since 1970."""
        self._accounts.wall_offset_s = wall_s - now
        self.admission.forget_ended_windows(wall_s)
        self._accounts.forget_ended(wall_s)

    def cap_budgets(self, spent: RemainingBudgets, now: float) -> list[BucketLevel]:
        """Budgets have no more left than usage rows leave. Returns the levels of Global ones, which are in the shared
        store.
        """
        local, shared = spent.levels()
        self.admission.limits.cap_levels(local, now)
        return shared

    def tick(self, now: float) -> list[Effect]:
        """Dispatch held requests that can go, and refuse those that have waited too long."""
        out = list[Effect]()
        self._pipeline.tick(now, out)
        return out

    def on_work_result(self, result: WorkResult, now: float) -> list[Effect]:
        """Work for requests that wait has ended, well or not."""
        out = list[Effect]()
        match result:
            case AdapterLoadResult():
                self._pipeline.adapters.on_adapter_load(result, self.pools.get(result.server), now, out)
            case PrefillResult():
                self._legs.on_prefill_result(result, self.pools, now, out)
                self._pipeline.wake_if_any_held(now, out)
        return out

    def on_disconnect(self, ticket: str, now: float) -> list[Effect]:
        """The client of a request went away before it was answered: no engine gets it."""
        record, out = self._records.get(ticket), list[Effect]()
        if record is None or not record.begin_transition(RequestEvent.LEFT):
            return out
        if record.run is None:
            self._pipeline.on_disconnect(record, now, out)
        elif record.state is RequestState.PREFILLING:
            self._legs.on_client_left(record, record.run, now, out)
        elif record.state is RequestState.SETTLED:
            self._running.on_stream_closed(record, record.run, now, out)
        else:
            self._running.undo_dispatch(record, record.run, now, out)
        self._legs.on_request_ended(ticket, out)
        self._pipeline.wake_if_any_held(now, out)
        return out

    def on_stream_closed(self, ticket: str, now: float) -> list[Effect]:
        """The stream of a request is closed: its endpoint is free of it."""
        record, out = self._records.get(ticket), list[Effect]()
        if record is None or not record.begin_transition(RequestEvent.FINISHED):
            return out
        if record.run is None:
            self._pipeline.on_disconnect(record, now, out)
        elif record.state is RequestState.PREFILLING:
            self._legs.on_client_left(record, record.run, now, out)
        else:
            self._running.on_stream_closed(record, record.run, now, out)
        self._legs.on_request_ended(ticket, out)
        self._pipeline.wake_if_any_held(now, out)
        return out

    def on_outcome(self, outcome: Outcome, now: float) -> list[Effect]:
        """The outcome of a request is known, whichever process decided it. Returns Settled if it is in the table."""
        out = list[Effect]()
        if self._machine is not None:
            out.append(Broadcast(OutcomeKnown(outcome)))
        self._running.settle(outcome, now, out)
        self._share_breakers(now, out)
        return out

    def on_cacheable_answer(self, ticket: str, kind: Kind, body: bytes, now: float) -> list[Effect]:
        """The answer to a request that the response cache had not found has come to its end. Envoy sends it to one of
        several processes, whichever decided the request.
        """
        out = list[Effect]()
        if process_of_ticket(ticket) == self.process_name or self._machine is None:
            self._keep_answer(ticket, kind, body, now, out)
        elif len(body) <= MOST_SHARED_BYTES:
            out.append(Broadcast(AnswerArrived(ticket, kind, body)))
        return out

    def _keep_answer(self, ticket: str, kind: Kind, body: bytes, now: float, out: list[Effect]) -> None:
        awaited = self._caches.pop_awaited_answer(ticket)
        if awaited is None:
            out.append(CacheStoreAttempted("", "unknown"))
            return
        pool = self.pools.get(awaited.server)
        if pool is None or pool.revisions != awaited.revisions:
            # an engine of another revision may have given it
            out.append(CacheStoreAttempted(awaited.route, "outdated"))
            return
        is_kept = self._caches.store_own_answer(awaited, kind, body, now)
        out.append(CacheStoreAttempted(awaited.route, "stored" if is_kept else "not_whole"))
        if is_kept and self._machine is not None and len(body) <= MOST_SHARED_BYTES:
            key = awaited.key
            out.append(Broadcast(AnswerStored(key.scope, key.text, kind, body, awaited.ttl_s)))

    @property
    def stored_answers(self) -> AnswerStore:
        """Those that the response cache keeps."""
        return self._caches.store

    def reset_breakers(self, server: str, address: str, now: float) -> list[Effect]:
        """Close the breaker of an endpoint; with an empty ``address`` those of the ModelServer and of all endpoints."""
        out = list[Effect]()
        pool = self.pools.get(server)
        if pool is not None:
            reset_breakers(pool, address, now, out)
        self._share_breakers(now, out)
        self._pipeline.wake_if_any_held(now, out)
        return out

    def _share_breakers(self, now: float, out: list[Effect]) -> None:
        """The other processes repeat what happens here, but may have missed a part of it."""
        if self._machine is not None and any(isinstance(one, BreakerChanged) for one in out):
            out.append(self._alive(now))

    def _alive(self, now: float) -> Broadcast:
        return Broadcast(ProcessAlive(self._running.local_tickets(), breakers_for_peers(self.pools.values(), now)))

    def has_no_record(self, ticket: str) -> bool:
        """Whether no request of this process has the ticket."""
        record = self._records.get(ticket)
        return (record is None or not record.is_decided_here) and process_of_ticket(ticket) != self.process_name

    def on_orphaned_outcome(self, orphan: OrphanedOutcome, now: float) -> list[Effect]:
        """The outcome of a request came that another process has decided: that one settles it, or it is gone."""
        out = list[Effect]()
        self._orphans.on_outcome(
            orphan, now, out, may_be_settled=self.peer_view.is_alive(process_of_ticket(orphan.ticket))
        )
        return out

    def on_usage_rows_read(self, read_s: float) -> list[Effect]:
        """Budgets are lowered to what usage rows leave, which were read until ``read_s``, seconds since 1970."""
        self._orphans.rows_read_s = read_s
        return [] if self._machine is None else [Broadcast(BudgetsRecovered(read_s))]

    def on_engine_report(self, event: EngineReported, now: float) -> list[Effect]:
        """An engine has reported its metrics or its models to this process."""
        out: list[Effect] = [] if self._machine is None else [Broadcast(event)]
        apply_engine_report(self.pools, event, now, out)
        self._pipeline.wake_if_any_held(now, out)
        return out

    def apply_peer_batch(self, batch: EventBatch, now: float) -> list[Effect]:
        """Apply the events of another process."""
        out, origin = list[Effect](), batch.origin
        self.peer_view.record_event(origin, now)
        self._orphans.on_process_alive(origin)
        for event in batch.events:
            match event:
                case RequestStarted() | RequestPrefilled() | RequestEnded():
                    self._repeat(event, origin, now, out)
                case OutcomeKnown():
                    self._running.settle(event.outcome, now, out)
                case EngineReported():
                    # whoever has read the engine logs what is new
                    apply_engine_report(self.pools, event, now, [])
                case ProcessAlive() | AskRequestsStarted():
                    self._compare(event, origin, now, out)
                case AnswerArrived() | AnswerStored() | BudgetsRecovered():
                    self._share(event, now, out)
                case AdapterChanged():
                    apply_adapter_change(self.pools, event, now)
                case LimitSpent() | AskLimitLevels() | LimitLevels():
                    self.levels.on_event(event, origin, now, out)
                    if isinstance(event, AskLimitLevels) and breakers_for_peers(self.pools.values(), now):
                        # it begins to serve when it has the levels
                        out.append(self._alive(now))
        self._pipeline.wake_if_any_held(now, out)
        return out

    def _share(self, event: AnswerArrived | AnswerStored | BudgetsRecovered, now: float, out: list[Effect]) -> None:
        match event:
            case AnswerArrived() if process_of_ticket(event.ticket) == self.process_name:
                self._keep_answer(event.ticket, event.kind, event.body, now, out)
            case AnswerStored():
                key = CacheKey(event.scope, event.key)
                self._caches.store_answer(key, event.kind, event.body, now=now, ttl_s=event.ttl_s)
            case BudgetsRecovered():
                self._orphans.rows_read_s = max(self._orphans.rows_read_s, event.read_s)

    def _repeat(
        self, event: RequestStarted | RequestPrefilled | RequestEnded, origin: str, now: float, out: list[Effect]
    ) -> None:
        """Count a request of the process ``origin`` as it does."""
        match event:
            case RequestStarted():
                gate = self.admission.gates.get(event.server)
                is_counted = self._running.track_peer_request(event, origin, self.pools.get(event.server), gate, now)
                self.peer_view.add_request(origin, event.ticket, is_counted=is_counted)
            case RequestPrefilled():
                self._running.on_peer_prefill_ended(event, now, out)
            case RequestEnded() if self.peer_view.remove_request(origin, event.ticket):
                self._running.finish_remote([event.ticket], now, out, is_moved=event.is_moved)

    def _compare(self, event: ProcessAlive | AskRequestsStarted, origin: str, now: float, out: list[Effect]) -> None:
        """Make up for ends, starts and changes of breakers that were lost."""
        match event:
            case ProcessAlive():
                self._running.finish_remote(self.peer_view.remove_lost_requests(origin, event.running), now, out)
                merge_breakers(self.pools, event.breakers, now, out)
                if unknown := self.peer_view.unknown_requests(origin, event.running):
                    out.append(Broadcast(AskRequestsStarted(origin, unknown)))
            case AskRequestsStarted() if event.process == self.process_name:
                out += map(Broadcast, self._running.started_events(event.tickets))

    def heartbeat(self, now: float) -> list[Effect]:
        """Send the list of requests that run here, and end the requests of processes that are silent."""
        out: list[Effect] = [self._alive(now)]
        self.levels.request_levels(out)
        for origin, tickets in self.peer_view.remove_silent(now).items():
            self._running.finish_remote(tickets, now, out)
            self.admission.limits.on_process_gone(origin, now)
            self._orphans.on_process_lost(origin, now, out)
        self._pipeline.wake_if_any_held(now, out)
        return out

    def explain(
        self,
        arrival: Arrival,
        now: float,
        *,
        tokens: Sequence[int] | None = None,
        attachment: GatewayProperties = BUNDLE,
        guarded: str = "",
    ) -> Explanation:
        """The decision that a request would get, with every reason; nothing changes. Raises a Refusal.

        ``guarded``: what its guard said, if it was asked.
        """
        return self._pipeline.explain(arrival, attachment, tokens, now=now, rng=self._rng, guarded=guarded)

    def guard_ask_for(self, arrival: Arrival) -> AskGuard | None:
        """To explain a request: its guard, which can then be asked."""
        guard = self._pipeline.guard_of(arrival)
        return None if guard is None or guard.service is None else AskGuard(self._ticket_prefix, arrival, guard)

    def preview_guard_reply(self, ask: AskGuard, answer: GuardReply | GuardFailed) -> tuple[Arrival, str]:
        """The request as it goes on, and what its guard said; nothing changes. Raises a Refusal."""
        try:
            found = self._pipeline.apply_guard_reply(ask.guard, ask.arrival, answer, [])
        except GuardStopped as stopped:
            raise stopped.refusal from None
        return found.arrival, found.text

    def state_of(self, ticket: str) -> RequestState:
        """The state of the request with this ticket."""
        record = self._records.get(ticket)
        return RequestState.ABSENT if record is None else record.state

    def count_requests(self, *states: RequestState) -> int:
        """How many requests are in these states."""
        return sum(1 for one in self._records.values() if one.state in states)

    @property
    def process_name(self) -> str:
        """Of this process; another one after each start."""
        return self._ticket_prefix

    def records(self) -> list[RequestRecord]:
        """The records of all requests, those of other processes included."""
        return list(self._records.values())

    def objective_classes(self) -> list[ObjectiveClass]:
        """Those of the configuration in use."""
        return self._dispatcher.objectives.all_classes()

    def configured_names(self) -> dict[str, set[str]]:
        """Of what the configuration in use has, by what it is."""
        snapshot = self.snapshot
        guards = {one.name for one in snapshot.gateway.guards}
        guards |= {one.spec.guard.name for one in snapshot.routes if one.spec.guard is not None}
        bands = {band.spec.name for gate in self.admission.gates.values() for band in gate.queue.bands}
        classes = bands | {one.name for one in self.objective_classes()}
        return {
            "budget": self.admission.budget_names(),
            "guard": guards,
            "band": bands,
            "class": classes,
            # of response caches
            "route": {*self._caches.routes_with_cache},
        }

    def engine_loads(self) -> dict[str, EndpointLoad]:
        """The load that this process puts on each engine, by address."""
        return endpoint_loads(self._records.values(), self.pools.values())

    def engine_loads_by_pool(self) -> Iterator[dict[str, EndpointLoad]]:
        """The same for ``merge_loads``, a pool at a time."""
        return endpoint_loads_by_pool(self._records.values(), self.pools.values())

    def demand(self, now: float, *, began_at_s: float = 0.0) -> ProcessDemand:
        """Demand and load of each ModelServer, for autoscalers. ``began_at_s``: when the process began."""
        return self.meter.process_demand(self.pools, now, began_at_s=began_at_s)
