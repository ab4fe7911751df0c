# SPDX-License-Identifier: Apache-2.0
"""A workload against extproc's own core and simulated engines, in virtual time.

No Envoy, no HTTP: a request is picked for when it arrives or is released, and reaches its engine after the time that
vLLM's API server takes. The picker gets reports, KV events and adapters' loads as late as in reality
(``SimulatedDelays``).

A request whose prefill is remote goes to the prefill engine first, and to the decode engine when that has answered; if
KV caches are pushed in pieces, to both at once. Where extproc makes the leg, its core decides when that is; where a
sidecar would, the simulation does. The core gets the end of a leg that it asks for beside its request.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from bench.engine.fake_tokenizer import Message, answer_text, count_tokens, render_chat, tokens_of
from bench.engine.hardware import API_S
from bench.engine.kv_cache import BlocksRemoved
from bench.engine.kv_transfer import NETWORKS, TransferNetwork
from bench.engine.request import Request, Token
from bench.reporting.request_results import RequestResult
from bench.virtual.engines import VirtualEngine
from bench.virtual.event_queue import EventQueue
from bench.virtual.kv_transfers import KvTransfers
from bench.virtual.observers import REQUEST_KEY, RequestObserver, TokenObserver
from bench.workload.sessions import Session
from extproc.admission.local_limits import LocalLimits
from extproc.core.core import Core
from extproc.core.effects import (
    AskGuard,
    AskLimits,
    AskPromptTokens,
    Decision,
    LoadAdapter,
    Prefill,
    RequestHeld,
    RequestRefused,
    SettleGrant,
    WakeAt,
)
from extproc.core.guard_decisions import ALLOWED
from extproc.core.request_record import AdapterLoadResult, Outcome, PrefillResult, RequestHead
from extproc.prefix import kv_event_decoder
from extproc.prefix.kv_index import EventSource
from extproc.refusals import Refusal
from extproc.scheduling.picker_cache import make_picker_without_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.engine.kv_cache import CacheChange
    from bench.virtual.engines import EngineProfile
    from bench.workload.sessions import Workload
    from extproc.admission.rate_limits import Grant
    from extproc.api.config_snapshot import Snapshot
    from extproc.core.admission_pipeline import Answer
    from extproc.core.effects import Effect, RequestEffect
    from extproc.scheduling.picker_cache import MakePicker


# From a prefill engine's answer to the request to the decode engine: the way through extproc and Envoy.
LEG_S: Final = 0.002


class SimulatedDelays(msgspec.Struct, frozen=True):
    """``scrape_s``: between two readings of an engine's metrics. ``log_s``: from the end of a request to its access
    log entry.

    ``events_s``: from a change in an engine's cache to the KV event. ``load_s``: what an engine takes to load an
    adapter.
    """

    scrape_s: float = 0.2
    log_s: float = 0.2
    events_s: float = 0.05
    load_s: float = 0.5


class DisaggregationSettings(msgspec.Struct, frozen=True):
    """``network``: between engines, over which KV caches are pulled, or pushed in pieces (``pushes``).
    ``on_transfer``: called with the addresses of a pair, the prompt's tokens that the decode engine lacked, and the
    seconds from the end of a prefill to the first token.
    """

    network: TransferNetwork = NETWORKS["nvlink"]
    pushes: bool = False
    on_transfer: Callable[[str, str, int, float], None] | None = None


class SimulatedRequest(msgspec.Struct):
    """A request from its arrival on. ``position``: of session and turn. ``done``: called with the end's instant."""

    session: Session
    position: tuple[int, int]
    request: Request
    due_at_s: float
    done: Callable[[float], None]


class InFlightRequest(msgspec.Struct):
    """A request from its pick to its last token."""

    asked: SimulatedRequest
    ticket: str
    address: str
    first_token_at_s: float = 0.0
    leg: PrefillLeg | None = None


class PrefillLeg(msgspec.Struct):
    """The prefill of a flight at another engine, whose address it has. ``ended_at_s``: when its answer came."""

    address: str
    request: Request
    ended_at_s: float = 0.0


def is_refused(asked: SimulatedRequest, error: str) -> RequestResult:
    """No engine served it."""
    due_at_s = asked.due_at_s
    return RequestResult(
        due_at_s, due_at_s, due_at_s, 0, 0, 0, error=error, label=asked.session.label, position=asked.position
    )


def cached_tokens(flight: InFlightRequest, request: Request) -> int:
    """Of the prompt, at the engine that computed it: what a decode engine reports in its ``usage``."""
    return (request if flight.leg is None else flight.leg.request).cached_tokens or 0


def is_served(flight: InFlightRequest, request: Request, now: float) -> RequestResult:
    """It has its last token."""
    asked = flight.asked
    return RequestResult(
        due_at_s=asked.due_at_s,
        first_token_at_s=flight.first_token_at_s,
        last_token_at_s=now,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=cached_tokens(flight, request),
        output_tokens=request.produced,
        label=asked.session.label,
        engine=flight.address,
        position=asked.position,
        prefilled_by="" if flight.leg is None else flight.leg.address,
    )


def outcome_of(flight: InFlightRequest, request: Request, now: float) -> Outcome:
    """The outcome in its access log entry."""
    asked = flight.asked
    return Outcome(
        ticket=flight.ticket,
        status=200,
        served=flight.address,
        duration_s=now - asked.due_at_s,
        ttfb_s=flight.first_token_at_s - asked.due_at_s,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.produced,
        cached_tokens=cached_tokens(flight, request) or None,
    )


class VirtualAdapterLoader:
    """Performs LoadAdapter effects. ``loads``: counts by outcome; ``unloads``: their number."""

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        events: EventQueue,
        load_s: float,
        deliver: Callable[[AdapterLoadResult, float], None],
    ) -> None:
        """``load_s``: what a load takes. ``deliver``: gets every result, and its instant."""
        self.loads: Counter[str] = Counter()
        self.unloads = 0
        self._engines = engines
        self._events = events
        self._load_s = load_s
        self._deliver = deliver

    def begin(self, ask: LoadAdapter, now: float) -> None:
        """The engine begins to load."""
        adapters = self._engines[ask.address].adapters
        unloaded = ask.unload
        self.unloads += len(adapters.intersection(unloaded))
        adapters.difference_update(unloaded)

        def ended(later: float) -> None:
            self.loads["was there" if ask.adapter in adapters else "loaded"] += 1
            adapters.add(ask.adapter)
            result = AdapterLoadResult(ask.server, ask.address, ask.adapter, unloaded=unloaded, duration_s=later - now)
            self._deliver(result, later)

        self._events.schedule_at(now + self._load_s, ended)


def kv_event_feed(
    core: Core,
    *,
    server: str,
    address: str,
    block_size: int,
    later: Callable[[float, Callable[[float], None]], None],
) -> Callable[[list[CacheChange], float], None]:
    """What to call with changes in the cache of the engine at ``address``, and with the instant.

    ``later(now, act)`` calls ``act`` when events of the instant ``now`` have reached extproc.
    """
    pool = core.pools[server]
    row = pool.table.row_of(address)
    kv = pool.caches.kv_index
    assert row is not None
    assert kv is not None
    pool.caches.set_feed_state(row, is_whole=True)
    source = EventSource(row)

    def changed(changes: list[CacheChange], now: float) -> None:
        later(now, lambda _: kv.apply(source, [_event(one, block_size) for one in changes]))

    return changed


def _event(change: CacheChange, block_size: int) -> kv_event_decoder.Event:
    if isinstance(change, BlocksRemoved):
        return kv_event_decoder.BlocksRemoved(tuple(change.hashes), "GPU")
    return kv_event_decoder.BlocksStored(tuple(change.hashes), change.parent, tuple(tokens_of(change.text)), block_size)


class Simulation:
    """Engines by address under one core. ``run`` plays a workload and returns its results, in engine time."""

    def __init__(
        self,
        snapshot: Snapshot,
        engines: Mapping[str, EngineProfile],
        *,
        seed: int = 0,
        make_picker: MakePicker = make_picker_without_files,
        delays: SimulatedDelays = SimulatedDelays(),  # noqa: B008 - frozen
        token_observer: TokenObserver | None = None,
        request_observers: Sequence[RequestObserver] = (),
        pairing: DisaggregationSettings = DisaggregationSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.core = Core(snapshot, rng=random.Random(seed), ticket_prefix="s", make_picker=make_picker)
        self._rng = random.Random(seed)
        server = snapshot.servers[0]
        # the ModelServer of each engine; one that is added later is of the first
        self._server = server.metadata.key
        self._server_of = {
            endpoint.address: one.metadata.key for one in snapshot.servers for endpoint in one.spec.endpoints
        }
        self._model = server.spec.model
        self._asked_model = snapshot.routes[0].spec.model_name or self._model
        self._has_events = server.spec.kv_events is not None
        self._events = EventQueue()
        kv_bytes = next(iter(engines.values())).kv_bytes
        self.transfers = KvTransfers(self._events, pairing.network, kv_bytes=kv_bytes, pushes=pairing.pushes)
        self._legs: dict[int, InFlightRequest] = {}
        # of those that extproc has requested, the request to the prefill engine, by ticket and by key
        self._asked_legs: dict[str, PrefillLeg] = {}
        self._asked_tickets: dict[int, str] = {}
        # of requests whose decode engines have them at the same time
        self._beside: set[str] = set()
        self._on_transfer = pairing.on_transfer
        self.engines = {address: self._engine(address, kind, token_observer) for address, kind in engines.items()}
        self._longest = min(one.limits.num_gpu_blocks * one.limits.block_size for one in engines.values())
        self._block_size = next(iter(engines.values())).limits.block_size
        self._delays, self._token_observer, self._request_observers = delays, token_observer, request_observers
        for observer in request_observers:
            observer.on_begin({address: engine.scheduler for address, engine in self.engines.items()})
        # of limits that engines share
        self._store = LocalLimits()
        self._held: dict[str, SimulatedRequest] = {}
        self._next_tick_s = math.inf
        self._flights: dict[int, InFlightRequest] = {}
        self._in_flight: Counter[str] = Counter()
        self._keys = itertools.count()
        self._results: list[RequestResult] = []

        def taken(result: AdapterLoadResult, now: float) -> None:
            self._perform(self.core.on_work_result(result, now), now)

        self.adapters = VirtualAdapterLoader(self.engines, self._events, delays.load_s, taken)

    def _engine(self, address: str, kind: EngineProfile, token_observer: TokenObserver | None) -> VirtualEngine:
        on_blocks = None
        if self._has_events:
            size = kind.limits.block_size
            server = self._server_of.get(address, self._server)
            on_blocks = kv_event_feed(self.core, server=server, address=address, block_size=size, later=self._later)
        return VirtualEngine(
            kind,
            self._events,
            self._take_tokens,
            leaps=token_observer is None,
            on_blocks=on_blocks,
            transfers=self.transfers,
        )

    def _later(self, now: float, act: Callable[[float], None]) -> None:
        self._events.schedule_at(now + self._delays.events_s, act)

    def run(self, workload: Workload) -> Sequence[RequestResult]:
        """Play ``workload`` to its end."""
        for number, session in enumerate(workload.sessions):
            self._begin(number, session)
        self._events.schedule_at(0.0, self._scrape)
        self._events.run()
        return self._results

    def schedule_at(self, at_s: float, act: Callable[[float], None]) -> None:
        """Plan ``act`` for the instant ``at_s``. What plans itself again must end, or the run never does."""
        self._events.schedule_at(at_s, act)

    def add_engine(self, address: str, kind: EngineProfile) -> None:
        """An engine is there from now on. It gets requests once a snapshot has it (``apply_snapshot``)."""
        self.engines[address] = self._engine(address, kind, self._token_observer)

    def remove_engine(self, address: str) -> None:
        """An engine goes. It must have nothing to do, and no snapshot may have it."""
        del self.engines[address]

    def in_flight(self, address: str) -> int:
        """Requests that were sent to an engine and have not ended."""
        return self._in_flight[address]

    def apply_snapshot(self, snapshot: Snapshot, now: float) -> None:
        """The core gets another configuration, as when its files change."""
        self._perform(self.core.apply(snapshot, now), now)

    def _scrape(self, now: float) -> None:
        effects: list[Effect] = []
        for address, engine in self.engines.items():
            # all of them wake the core at the same time, and once is enough
            server = self._server_of.get(address, self._server)
            effects = self.core.on_engine_report(engine.engine_report(server, address), now)
        self._perform(effects, now)
        if self._events:  # nothing else to come: the end
            self._events.schedule_at(now + self._delays.scrape_s, self._scrape)

    def _begin(self, number: int, session: Session) -> None:
        messages: list[dict[str, str]] = []

        def turn(index: int, now: float) -> None:
            one = session.turns[index]
            if not index or one.is_whole:
                messages[:] = session.opening_messages()
            messages.append({"role": "user", "content": one.text})
            answer = answer_text(self._rng, one.output_tokens)

            def done(ended: float) -> None:
                if index + 1 < len(session.turns):
                    messages.append({"role": "assistant", "content": answer.decode()})
                    following = session.turns[index + 1]
                    self._events.schedule_at(ended + following.think_s, lambda later: turn(index + 1, later))

            self._ask(session, (number, index), messages, answer, now, done)

        self._events.schedule_at(session.begins_at_s, lambda now: turn(0, now))

    def _ask(
        self,
        session: Session,
        position: tuple[int, int],
        messages: list[dict[str, str]],
        answer: bytes,
        now: float,
        done: Callable[[float], None],
    ) -> None:
        prompt = render_chat([Message(one["role"], one["content"]) for one in messages])
        named = {"model": session.adapter or self._model, "adapter": session.adapter}
        request = Request(
            next(self._keys), prompt, answer, block_size=self._block_size, keeps_text=self._has_events, **named
        )
        asked = SimulatedRequest(session, position, request, now, done)
        if count_tokens(prompt) + request.output_tokens > self._longest:
            # an engine would answer 400; one that took it would wait for blocks for ever
            self._refuse(asked, "longer than the KV cache")
            return
        body = msgspec.json.encode(
            {"model": session.adapter or self._asked_model, "messages": messages, "stream": True}
        )
        headers = session.headers
        if self._request_observers:
            headers = {**headers, REQUEST_KEY: str(request.key)}
        for observer in self._request_observers:
            observer.on_arrival(request, position, now)
        head = RequestHead("POST", "/v1/chat/completions", headers, has_body=True, is_trusted=True)
        try:
            arrival = self.core.builder.build_by_model(head, body)
        except Refusal as refusal:
            self._refuse(asked, refusal.outcome)
            return
        own: RequestEffect | None
        own, effects = self.core.arrive(arrival, now)
        while isinstance(own, AskPromptTokens | AskLimits | AskGuard):
            self._perform(effects, now)
            own, effects = self.core.resume(own.ticket, self._answer_to(own, prompt, now), now)
        match own:
            case Decision():
                self._send(asked, own, now)
            case RequestRefused():
                self._refuse(asked, own.refusal.outcome)
            case _ if isinstance(own, RequestHeld):
                self._held[own.ticket] = asked
                if self._token_observer is not None:
                    self._token_observer.on_held(session.label, own.ticket, now)
        self._perform(effects, now)

    def _answer_to(self, ask: AskLimits | AskGuard | AskPromptTokens, prompt: bytes, now: float) -> Answer:
        match ask:
            case AskPromptTokens():
                return tokens_of(prompt)
            case AskGuard():
                return ALLOWED
            case AskLimits():
                return self._granted(ask, now)

    def _granted(self, ask: AskLimits, now: float) -> Grant | Refusal:
        """By the store that all engines would share."""
        try:
            return msgspec.structs.replace(self._store.reserve(ask.charges, now), is_global=True)
        except Refusal as refusal:
            return refusal

    def _refuse(self, asked: SimulatedRequest, error: str) -> None:
        self._results.append(is_refused(asked, error))

    def _perform(self, effects: list[Effect], now: float) -> None:
        """Perform the core's effects; they include the answers to requests that were held."""
        for effect in effects:
            match effect:
                case Decision():
                    self._send(self._held.pop(effect.ticket), effect, now)
                case RequestRefused():
                    self._refuse(self._held.pop(effect.ticket), effect.refusal.outcome)
                case SettleGrant():
                    self._store.settle(effect.grant, effect.used, now)
                case LoadAdapter():
                    self.adapters.begin(effect, now)
                case Prefill() if effect.is_beside:
                    # the engines get it with the decision
                    self._beside.add(effect.ticket)
                case Prefill():
                    self._ask_leg(effect, now)
                case WakeAt():
                    self._wake_at(effect.at_s, now)

    def _wake_at(self, at_s: float, now: float) -> None:
        if at_s <= now:
            self._perform(self.core.tick(now), now)
        elif at_s < self._next_tick_s:
            self._next_tick_s = at_s
            self._events.schedule_at(at_s, self._tick)

    def _tick(self, now: float) -> None:
        # an earlier tick may have taken the position of this one
        if now == self._next_tick_s:
            self._next_tick_s = math.inf
            self._perform(self.core.tick(now), now)

    def _send(self, asked: SimulatedRequest, decision: Decision, now: float) -> None:
        address, request = decision.assignment.endpoint.address, asked.request
        if decision.assignment.adapter is not None and request.adapter not in self.engines[address].adapters:
            self._refuse(asked, "the engine does not have the adapter")
            self._perform(self.core.on_stream_closed(decision.ticket, now), now)
            return
        self._flights[request.key] = InFlightRequest(asked, decision.ticket, address)
        self._in_flight[address] += 1
        if self._token_observer is not None:
            self._token_observer.on_sent(asked.session.label, decision, request.prompt_tokens, now)
        for observer in self._request_observers:
            observer.on_sent(request, address, now)
        prefill, flight = decision.assignment.prefill, self._flights[request.key]
        flight.leg = self._asked_legs.pop(decision.ticket, None)
        if flight.leg is not None:
            # from here on as of a leg that a sidecar has made; the decode engine may be another one than was picked
            self.transfers.retarget(request, self.engines[address])
            self._add(address, request, now + LEG_S)
            return
        if prefill is not None:
            self._begin_leg(flight, request, prefill.address, now)
        if prefill is None or self.transfers.pushes:
            self._add(address, request, now)

    def _add(self, address: str, request: Request, now: float) -> None:
        engine = self.engines[address]
        self._events.schedule_at(now + API_S, lambda later: engine.add(request, later))

    def _begin_leg(self, flight: InFlightRequest, request: Request, address: str, now: float) -> None:
        leg = request.prefill_leg(next(self._keys))
        flight.leg = PrefillLeg(address, leg)
        self._legs[leg.key] = flight
        self.transfers.register(leg, self.engines[address], request, self.engines[flight.address])
        self._add(address, leg, now)

    def _ask_leg(self, ask: Prefill, now: float) -> None:
        """extproc requests a prefill. The decode engine that it has picked reserves blocks when it gets the request."""
        request = self._held[ask.ticket].request
        run = next(one.run for one in self.core.records() if one.ticket == ask.ticket)
        assert run is not None
        leg = request.prefill_leg(next(self._keys))
        self._asked_legs[ask.ticket] = PrefillLeg(ask.address, leg)
        self._asked_tickets[leg.key] = ask.ticket
        target = self.engines[run.assignment.endpoint.address]
        self.transfers.register(leg, self.engines[ask.address], request, target)
        self._add(ask.address, leg, now)

    def _end_asked_leg(self, ticket: str, leg: PrefillLeg, now: float) -> None:
        leg.ended_at_s = now
        self._answer_leg(ticket, leg, now)

    def _answer_leg(self, ticket: str, leg: PrefillLeg, now: float) -> None:
        cached = {"cached_tokens": leg.request.cached_tokens or 0}
        usage = {"prompt_tokens": leg.request.prompt_tokens, "prompt_tokens_details": cached}
        answer = {"kv_transfer_params": {"remote_request_id": ticket}, "usage": usage}
        result = PrefillResult(ticket, status=200, body=msgspec.json.encode(answer), answered_at_s=now)
        self._perform(self.core.on_work_result(result, now), now)

    def _end_leg(self, flight: InFlightRequest, now: float) -> None:
        assert flight.leg is not None
        flight.leg.ended_at_s = now
        if flight.ticket in self._beside:
            self._beside.remove(flight.ticket)
            self._answer_leg(flight.ticket, flight.leg, now)
        if not self.transfers.pushes:
            self._add(flight.address, flight.asked.request, now + LEG_S)

    def _take_tokens(self, tokens: Iterable[Token], now: float) -> None:
        for token in tokens:
            ticket = self._asked_tickets.pop(token.request.key, None)
            if ticket is not None:
                self._end_asked_leg(ticket, self._asked_legs[ticket], now)
                continue
            if token.request.key in self._legs:
                self._end_leg(self._legs.pop(token.request.key), now)
                continue
            flight = self._flights[token.request.key]
            if not flight.first_token_at_s:
                flight.first_token_at_s = now
                self._learn_transfer(flight, now)
                for observer in self._request_observers:
                    observer.on_first_token(token.request, now)
            if self._token_observer is not None:
                self._token_observer.on_token(flight.asked.session.label, now)
            if token.is_last:
                self._finish(token.request, self._flights.pop(token.request.key), now)

    def _learn_transfer(self, flight: InFlightRequest, now: float) -> None:
        leg = flight.leg
        if leg is not None and self._on_transfer is not None:
            tokens = flight.asked.request.transferred
            self._on_transfer(leg.address, flight.address, tokens, now - leg.ended_at_s)

    def _finish(self, request: Request, flight: InFlightRequest, now: float) -> None:
        asked = flight.asked
        self._in_flight[flight.address] -= 1
        if self._token_observer is not None:
            self._token_observer.on_ended(asked.session.label, request.tokens, now)
        for observer in self._request_observers:
            observer.on_ended(request, now)
        effects = self.core.on_stream_closed(flight.ticket, now)
        outcome = outcome_of(flight, request, now)
        self._events.schedule_at(
            now + self._delays.log_s, lambda later: self._perform(self.core.on_outcome(outcome, later), later)
        )
        self._results.append(is_served(flight, request, now))
        self._perform(effects, now)
        asked.done(now)
