# SPDX-License-Identifier: Apache-2.0
"""A workload against extproc's own core and simulated engines, in virtual time.

No Envoy, no HTTP: a request is picked for when it arrives or is released, and reaches its engine after the time that
vLLM's API server takes. What the picker knows is as late as in reality (``Delays``).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from bench.engine.hardware import API_S
from bench.engine.request import Request, Token
from bench.engine.text import Message, answer_text, count_tokens, render_chat, tokens_of
from bench.virtual.adapter_loads import VirtualLoads
from bench.virtual.delays import Delays
from bench.virtual.engines import VirtualEngine
from bench.virtual.event_queue import EventQueue
from bench.virtual.flights import Asked, Flight, outcome_of, refused, served
from bench.virtual.kv_events import kv_event_feed
from bench.virtual.observers import REQUEST_KEY, RequestObserver, TokenObserver
from extproc.admission.limits import LocalLimits
from extproc.core.core import Core
from extproc.core.effects import (
    AskLimits,
    AskTokens,
    Decision,
    Held,
    LoadAdapter,
    Refused,
    SettleGrant,
    WakeAt,
)
from extproc.core.record import Head
from extproc.errors import Refusal
from extproc.llmd.pickers import make_picker
from extproc.protocol import Api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bench.reporting.results import RequestResult
    from bench.virtual.engines import EngineKind
    from bench.workload.sessions import Session, Workload
    from extproc.admission.limits import Grant
    from extproc.api.snapshot import Snapshot
    from extproc.core.effects import Effect, RequestEffect
    from extproc.core.record import LoadResult
    from extproc.llmd.pickers import MakePicker


class Simulation:
    """Engines by address under one core. ``run`` plays a workload and returns its results, in engine time."""

    def __init__(
        self,
        snapshot: Snapshot,
        engines: Mapping[str, EngineKind],
        *,
        seed: int = 0,
        make_picker: MakePicker = make_picker,
        delays: Delays = Delays(),  # noqa: B008 - frozen
        token_observer: TokenObserver | None = None,
        request_observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.core = Core(snapshot, rng=random.Random(seed), ticket_prefix="s", make_picker=make_picker)
        self._rng = random.Random(seed)
        (server,) = snapshot.servers
        self._server = server.metadata.key
        self._model = server.spec.model
        self._asked_model = snapshot.routes[0].spec.model_name or self._model
        self._has_events = server.spec.kv_events is not None
        self._events = EventQueue()
        self.engines = {address: self._engine(address, kind, token_observer) for address, kind in engines.items()}
        self._longest = min(one.limits.num_gpu_blocks * one.limits.block_size for one in engines.values())
        self._block_size = next(iter(engines.values())).limits.block_size
        self._delays, self._token_observer, self._request_observers = delays, token_observer, request_observers
        for observer in request_observers:
            observer.begins({address: engine.scheduler for address, engine in self.engines.items()})
        # of limits that engines share
        self._store = LocalLimits()
        self._held: dict[str, Asked] = {}
        self._looks_again_s = math.inf
        self._flights: dict[int, Flight] = {}
        self._in_flight: Counter[str] = Counter()
        self._keys = itertools.count()
        self._results: list[RequestResult] = []

        def taken(result: LoadResult, now: float) -> None:
            self._perform(self.core.take_load(result, now), now)

        self.adapters = VirtualLoads(self.engines, self._events, delays.load_s, taken)

    def _engine(self, address: str, kind: EngineKind, token_observer: TokenObserver | None) -> VirtualEngine:
        on_blocks = None
        if self._has_events:
            size = kind.limits.block_size
            on_blocks = kv_event_feed(
                self.core, server=self._server, address=address, block_size=size, later=self._later
            )
        return VirtualEngine(kind, self._events, self._take_tokens, leaps=token_observer is None, on_blocks=on_blocks)

    def _later(self, now: float, act: Callable[[float], None]) -> None:
        self._events.at(now + self._delays.events_s, act)

    def run(self, workload: Workload) -> Sequence[RequestResult]:
        """Play ``workload`` to its end."""
        for number, session in enumerate(workload.sessions):
            self._begin(number, session)
        self._events.at(0.0, self._scrape)
        self._events.run()
        return self._results

    def at(self, at_s: float, act: Callable[[float], None]) -> None:
        """Plan ``act`` for the instant ``at_s``. What plans itself again must end, or the run never does."""
        self._events.at(at_s, act)

    def add_engine(self, address: str, kind: EngineKind) -> None:
        """An engine is there from now on. It gets requests once a snapshot has it (``apply``)."""
        self.engines[address] = self._engine(address, kind, self._token_observer)

    def remove_engine(self, address: str) -> None:
        """An engine goes. It must have nothing to do, and no snapshot may have it."""
        del self.engines[address]

    def in_flight(self, address: str) -> int:
        """Requests that were sent to an engine and have not ended."""
        return self._in_flight[address]

    def apply(self, snapshot: Snapshot, now: float) -> None:
        """The core gets another configuration, as when its files change."""
        self._perform(self.core.apply(snapshot, now), now)

    def _scrape(self, now: float) -> None:
        effects: list[Effect] = []
        for address, engine in self.engines.items():
            # all of them wake the core at the same time, and once is enough
            effects = self.core.take_report(engine.said(self._server, address), now)
        self._perform(effects, now)
        if self._events:  # nothing else to come: the end
            self._events.at(now + self._delays.scrape_s, self._scrape)

    def _begin(self, number: int, session: Session) -> None:
        messages: list[dict[str, str]] = []

        def turn(index: int, now: float) -> None:
            one = session.turns[index]
            if not index or one.is_whole:
                messages[:] = session.opening()
            messages.append({"role": "user", "content": one.text})
            answer = answer_text(self._rng, one.output_tokens)

            def done(ended: float) -> None:
                if index + 1 < len(session.turns):
                    messages.append({"role": "assistant", "content": answer.decode()})
                    following = session.turns[index + 1]
                    self._events.at(ended + following.think_s, lambda later: turn(index + 1, later))

            self._ask(session, (number, index), messages, answer, now, done)

        self._events.at(session.begins_at_s, lambda now: turn(0, now))

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
        asked = Asked(session, position, request, now, done)
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
            observer.arrives(request, position, now)
        head = Head("POST", "/v1/chat/completions", headers, has_body=True, is_trusted=True)
        try:
            arrival = self.core.intake.receive(Api.CHAT, head, body)
        except Refusal as refusal:
            self._refuse(asked, refusal.outcome)
            return
        own: RequestEffect | None
        own, effects = self.core.arrive(arrival, now)
        while isinstance(own, AskTokens | AskLimits):
            self._perform(effects, now)
            asked_for = tokens_of(prompt) if isinstance(own, AskTokens) else self._granted(own, now)
            own, effects = self.core.resume(own.ticket, asked_for, now)
        match own:
            case Decision():
                self._send(asked, own, now)
            case Refused():
                self._refuse(asked, own.refusal.outcome)
            case _ if isinstance(own, Held):
                self._held[own.ticket] = asked
                if self._token_observer is not None:
                    self._token_observer.held(session.label, own.ticket, now)
        self._perform(effects, now)

    def _granted(self, ask: AskLimits, now: float) -> Grant | Refusal:
        """By the store that all engines would share."""
        try:
            return msgspec.structs.replace(self._store.reserve(ask.charges, now), is_global=True)
        except Refusal as refusal:
            return refusal

    def _refuse(self, asked: Asked, error: str) -> None:
        self._results.append(refused(asked, error))

    def _perform(self, effects: list[Effect], now: float) -> None:
        """What the core asks for; requests that were held have their answers here."""
        for effect in effects:
            match effect:
                case Decision():
                    self._send(self._held.pop(effect.ticket), effect, now)
                case Refused():
                    self._refuse(self._held.pop(effect.ticket), effect.refusal.outcome)
                case SettleGrant():
                    self._store.settle(effect.grant, effect.used, now)
                case LoadAdapter():
                    self.adapters.begin(effect, now)
                case WakeAt():
                    self._wake_at(effect.at_s, now)

    def _wake_at(self, at_s: float, now: float) -> None:
        if at_s <= now:
            self._perform(self.core.tick(now), now)
        elif at_s < self._looks_again_s:
            self._looks_again_s = at_s
            self._events.at(at_s, self._look_again)

    def _look_again(self, now: float) -> None:
        # an earlier look may have taken the position of this one
        if now == self._looks_again_s:
            self._looks_again_s = math.inf
            self._perform(self.core.tick(now), now)

    def _send(self, asked: Asked, decision: Decision, now: float) -> None:
        address, request = decision.assignment.endpoint.address, asked.request
        if decision.assignment.adapter is not None and request.adapter not in self.engines[address].adapters:
            self._refuse(asked, "the engine does not have the adapter")
            self._perform(self.core.finish(decision.ticket, now), now)
            return
        self._flights[request.key] = Flight(asked, decision.ticket, address)
        self._in_flight[address] += 1
        if self._token_observer is not None:
            self._token_observer.sent(asked.session.label, decision, request.prompt_tokens, now)
        for observer in self._request_observers:
            observer.sent(request, address, now)
        engine = self.engines[address]
        self._events.at(now + API_S, lambda later: engine.add(request, later))

    def _take_tokens(self, tokens: Iterable[Token], now: float) -> None:
        for token in tokens:
            flight = self._flights[token.request.key]
            if not flight.first_token_at_s:
                flight.first_token_at_s = now
                for observer in self._request_observers:
                    observer.first_token(token.request, now)
            if self._token_observer is not None:
                self._token_observer.token(flight.asked.session.label, now)
            if token.is_last:
                self._finish(token.request, self._flights.pop(token.request.key), now)

    def _finish(self, request: Request, flight: Flight, now: float) -> None:
        asked = flight.asked
        self._in_flight[flight.address] -= 1
        if self._token_observer is not None:
            self._token_observer.ended(asked.session.label, request.tokens, now)
        for observer in self._request_observers:
            observer.ended(request, now)
        effects = self.core.finish(flight.ticket, now)
        outcome = outcome_of(flight, request, now)
        self._events.at(now + self._delays.log_s, lambda later: self._perform(self.core.settle(outcome, later), later))
        self._results.append(served(flight, request, now))
        self._perform(effects, now)
        asked.done(now)
