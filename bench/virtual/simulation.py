"""A workload against extproc's own pipeline and simulated engines, in virtual time.

No Envoy, no HTTP: a request reaches its engine a moment after its pick, which is that of its arrival unless it is held. What the
picker knows is as late as it is in reality: ``Delays``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from bench.engine.hardware import API_S
from bench.engine.request import Request, Token
from bench.engine.text import Message, answer_text, count_tokens, render_chat, tokens_of
from bench.load.client import Result
from bench.virtual.blocks import follow_blocks
from bench.virtual.engines import Machine
from bench.virtual.events import Events
from bench.virtual.observer import REQUEST_KEY, Delays, Onlooker, Watch
from bench.workload.sessions import Session
from extproc.core.feedback import Outcome
from extproc.core.pipeline import Pipeline
from extproc.core.types import Decision, Head, Held, Terms
from extproc.errors import Refusal
from extproc.replication.messages import engine_said
from extproc.request.model import Api
from extproc.scheduling.pickers import make_picker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.virtual.engines import Kind
    from bench.workload.sessions import Workload
    from extproc.config.types import Snapshot
    from extproc.scheduling.pickers import MakePicker


class _Asked(msgspec.Struct):
    """A request from its arrival on. ``place``: of its session and of its turn. ``done``: told of its end."""

    session: Session
    place: tuple[int, int]
    request: Request
    due_s: float
    done: Callable[[float], None]


class _Flight(msgspec.Struct):
    """A request from its pick to its last token."""

    asked: _Asked
    ticket: str
    address: str
    first_token_s: float = 0.0


class Simulation:
    """Engines by address under one pipeline. ``run`` plays a workload and returns its results, in engine time."""

    def __init__(
        self,
        snapshot: Snapshot,
        engines: Mapping[str, Kind],
        *,
        seed: int = 0,
        make_picker: MakePicker = make_picker,
        delays: Delays = Delays(),  # noqa: B008 - frozen
        watch: Watch | None = None,
        onlookers: Sequence[Onlooker] = (),
    ) -> None:
        self.pipeline = Pipeline(snapshot, rng=random.Random(seed), ticket_prefix="s", make_picker=make_picker)
        self._rng = random.Random(seed)
        (server,) = snapshot.servers
        self._server = server.metadata.key
        self._model = server.spec.model
        self._asked_model = snapshot.routes[0].spec.model_name or self._model
        self._has_events = server.spec.kv_events is not None
        self._events = Events()
        self.machines = {address: self._machine(address, kind, watch) for address, kind in engines.items()}
        self._longest = min(one.limits.num_gpu_blocks * one.limits.block_size for one in engines.values())
        self._block_size = next(iter(engines.values())).limits.block_size
        self._delays, self._watch, self._onlookers = delays, watch, onlookers
        for onlooker in onlookers:
            onlooker.begins({address: machine.scheduler for address, machine in self.machines.items()})
        self._held: dict[str, _Asked] = {}
        self._looks_again_s = math.inf
        self._flights: dict[int, _Flight] = {}
        self._keys = itertools.count()
        self._results: list[Result] = []

    def _machine(self, address: str, kind: Kind, watch: Watch | None) -> Machine:
        on_blocks = None
        if self._has_events:
            on_blocks = follow_blocks(self.pipeline, self._server, address, kind.limits.block_size, self._later)
        return Machine(kind, self._events, self._take_tokens, leaps=watch is None, on_blocks=on_blocks)

    def _later(self, now: float, act: Callable[[float], None]) -> None:
        self._events.at(now + self._delays.events_s, act)

    def run(self, workload: Workload) -> Sequence[Result]:
        """Play ``workload`` to its end."""
        for number, session in enumerate(workload.sessions):
            self._begin(number, session)
        self._events.at(0.0, self._scrape)
        self._events.run()
        return self._results

    def _scrape(self, now: float) -> None:
        for address, machine in self.machines.items():
            engine_said(self.pipeline, machine.said(self._server, address), now)
        self._release(now)
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

        self._events.at(session.begins_s, lambda now: turn(0, now))

    def _ask(
        self,
        session: Session,
        place: tuple[int, int],
        messages: list[dict[str, str]],
        answer: bytes,
        now: float,
        done: Callable[[float], None],
    ) -> None:
        prompt = render_chat([Message(one["role"], one["content"]) for one in messages])
        model = session.adapter or self._model
        request = Request(
            next(self._keys), prompt, answer, model=model, block_size=self._block_size, keeps_text=self._has_events
        )
        asked = _Asked(session, place, request, now, done)
        if count_tokens(prompt) + request.output_tokens > self._longest:
            # an engine would answer 400; one that took it would wait for blocks for ever
            self._refuse(asked, "longer than the KV cache")
            return
        body = msgspec.json.encode(
            {"model": session.adapter or self._asked_model, "messages": messages, "stream": True}
        )
        headers = session.headers
        if self._onlookers:
            headers = {**headers, REQUEST_KEY: str(request.key)}
        for onlooker in self._onlookers:
            onlooker.arrives(request, place, now)
        head = Head("POST", "/v1/chat/completions", headers, has_body=True, is_trusted=True)
        terms = Terms(tokens=tokens_of(prompt)) if self._has_events else Terms()
        try:
            arrival = self.pipeline.intake.receive(Api.CHAT, head, body)
            found = self.pipeline.enter(arrival, now, terms)
        except Refusal as refusal:
            self._refuse(asked, refusal.outcome)
            return
        if isinstance(found, Held):
            self._held[found.ticket] = asked
            if self._watch is not None:
                self._watch.held(session.label, found.ticket, now)
            self._release(now)
        else:
            self._send(asked, found, now)

    def _refuse(self, asked: _Asked, error: str) -> None:
        due_s = asked.due_s
        self._results.append(
            Result(due_s, due_s, due_s, 0, 0, 0, error=error, label=asked.session.label, place=asked.place)
        )

    def _release(self, now: float) -> None:
        """Let go who may; and look again when something may have changed by itself."""
        if not self.pipeline.admission.has_waiting:
            return
        for one in self.pipeline.release(now):
            asked = self._held.pop(one.held.ticket)
            if isinstance(one.result, Decision):
                self._send(asked, one.result, now)
            else:
                self._refuse(asked, one.result.outcome)
        again_s = self.pipeline.admission.look_again_s(now)
        if again_s is not None and again_s < self._looks_again_s:
            self._looks_again_s = again_s
            self._events.at(again_s, self._look_again)

    def _look_again(self, now: float) -> None:
        # an earlier look may have taken the place of this one
        if now == self._looks_again_s:
            self._looks_again_s = math.inf
            self._release(now)

    def _send(self, asked: _Asked, decision: Decision, now: float) -> None:
        address = decision.assignment.place.address
        request = asked.request
        self._flights[request.key] = _Flight(asked, decision.ticket, address)
        if self._watch is not None:
            self._watch.sent(asked.session.label, decision, request.prompt_tokens, now)
        for onlooker in self._onlookers:
            onlooker.sent(request, address, now)
        machine = self.machines[address]
        self._events.at(now + API_S, lambda later: machine.add(request, later))

    def _take_tokens(self, tokens: Iterable[Token], now: float) -> None:
        for token in tokens:
            flight = self._flights[token.request.key]
            if not flight.first_token_s:
                flight.first_token_s = now
                for onlooker in self._onlookers:
                    onlooker.first_token(token.request, now)
            if self._watch is not None:
                self._watch.token(flight.asked.session.label, now)
            if token.is_last:
                self._finish(token.request, self._flights.pop(token.request.key), now)

    def _finish(self, request: Request, flight: _Flight, now: float) -> None:
        asked = flight.asked
        if self._watch is not None:
            self._watch.ended(asked.session.label, request.tokens, now)
        for onlooker in self._onlookers:
            onlooker.ended(request, now)
        self.pipeline.finish(flight.ticket, now)
        outcome = Outcome(
            ticket=flight.ticket,
            status=200,
            served=flight.address,
            duration_s=now - asked.due_s,
            ttfb_s=flight.first_token_s - asked.due_s,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.produced,
            cached_tokens=request.cached_tokens or None,
        )
        self._events.at(now + self._delays.log_s, lambda later: self._settle(outcome, later))
        self._results.append(
            Result(
                due_s=asked.due_s,
                first_token_s=flight.first_token_s,
                last_token_s=now,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens or 0,
                output_tokens=request.produced,
                label=asked.session.label,
                engine=flight.address,
                place=asked.place,
            )
        )
        self._release(now)
        asked.done(now)

    def _settle(self, outcome: Outcome, now: float) -> None:
        self.pipeline.settle(outcome, now)
