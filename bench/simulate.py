"""The same decisions and the same engine model in virtual time: a comparison of policies in seconds instead of minutes.

No Envoy, no HTTP: a request reaches its engine at the moment of its pick, which is that of its arrival unless it is held, and
the access log entry comes ``LOG_DELAY_S`` after its end. What engines say of themselves is read every ``SCRAPE_S``, and is as old as that. What is decided is decided
by extproc's own pipeline.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.engine.hardware import API_S, Hardware
from bench.engine.scheduler import Limits, Request, Scheduler, Step
from bench.engine.text import Message, answer_words, count_tokens, render_chat
from bench.load.client import Result
from bench.workload.sessions import Session
from extproc.endpoints.live import EngineState, report
from extproc.errors import Refusal
from extproc.learning import Outcome
from extproc.passage import Decision, Head, Held, Terms
from extproc.pipeline import Pipeline
from extproc.request.model import Api
from extproc.scheduling.pickers import make_picker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.workload.sessions import Workload
    from extproc.config.types import Snapshot
    from extproc.scheduling.pickers import MakePicker

LOG_DELAY_S: Final = 0.2
SCRAPE_S: Final = 0.2


class _Asked(msgspec.Struct):
    """A request from its arrival on. ``done``: told of its end, with the answer's text."""

    session: Session
    prompt: bytes
    output_tokens: int
    due_s: float
    done: Callable[[float, str], None]


class _Flight(msgspec.Struct):
    """A request from its pick to its last token."""

    asked: _Asked
    ticket: str
    address: str
    first_token_s: float = 0.0


class Watch(Protocol):
    """Somebody who wants to see all that happens, as it happens; ``label`` is the session's."""

    def held(self, label: str, ticket: str, now: float) -> None:
        """A request has to wait."""
        ...

    def sent(self, label: str, decision: Decision, input_tokens: int, now: float) -> None:
        """One goes to an engine."""
        ...

    def token(self, label: str, now: float) -> None:
        """One has a token of output."""
        ...

    def ended(self, label: str, tokens: int, now: float) -> None:
        """One has all of them; ``tokens``: of its prompt and its answer."""
        ...


class Simulation:
    """Engines under one pipeline. ``run`` plays a workload and returns its results, in engine time."""

    def __init__(
        self,
        snapshot: Snapshot,
        hardware: Hardware,
        limits: Limits,
        *,
        seed: int = 0,
        make_picker: MakePicker = make_picker,
        watch: Watch | None = None,
    ) -> None:
        self._pipeline = Pipeline(snapshot, rng=random.Random(seed), ticket_prefix="s", make_picker=make_picker)
        self._rng = random.Random(seed)
        self._limits = limits
        (server,) = snapshot.servers
        self._model = server.spec.model
        self._asked_model = snapshot.routes[0].spec.model_name or self._model
        self.engines = {one.address: Scheduler(hardware, limits) for one in server.spec.endpoints}
        self.served = dict.fromkeys(self.engines, 0)
        self._watch = watch
        self._held: dict[str, _Asked] = {}
        self._looks_again_s = math.inf
        self._busy: set[str] = set()
        self._flights: dict[int, _Flight] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._results: list[Result] = []

    def run(self, workload: Workload) -> Sequence[Result]:
        """Play ``workload`` to its end."""
        for session in workload.sessions:
            self._begin(session)
        self._at(0.0, self._scrape)
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        return self._results

    def _scrape(self, now: float) -> None:
        (pool,) = self._pipeline.pools.values()
        for address, engine in self.engines.items():
            row = pool.table.row_of(address)
            if row is not None:
                usage = 1 - engine.pool.free / engine.pool.total
                report(pool.table, row, EngineState(len(engine.waiting), len(engine.running), usage), now)
                pool.table.kv_tokens[row] = self._limits.num_gpu_blocks * self._limits.block_size
        self._release(now)
        if self._events:  # nothing else to come: the end
            self._at(now + SCRAPE_S, self._scrape)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _begin(self, session: Session) -> None:
        messages = [Message("system", session.system)] if session.system else []

        def turn(number: int, now: float) -> None:
            one = session.turns[number]
            messages.append(Message("user", one.text))

            def done(ended: float, text: str) -> None:
                messages.append(Message("assistant", text))
                if number + 1 < len(session.turns):
                    self._at(ended + session.turns[number + 1].think_s, lambda later: turn(number + 1, later))

            self._ask(session, messages, one.output_tokens, now, done)

        self._at(session.begins_s, lambda now: turn(0, now))

    def _ask(
        self,
        session: Session,
        messages: list[Message],
        output_tokens: int,
        now: float,
        done: Callable[[float, str], None],
    ) -> None:
        prompt = render_chat(messages)
        asked = _Asked(session, prompt, output_tokens, now, done)
        if count_tokens(prompt) + output_tokens > self._limits.num_gpu_blocks * self._limits.block_size:
            # an engine would answer 400; one that took it would wait for blocks for ever
            self._refuse(asked, "longer than the KV cache")
            return
        said = [{"role": message.role, "content": message.content} for message in messages]
        body = msgspec.json.encode({"model": self._asked_model, "messages": said, "stream": True})
        head = Head("POST", "/v1/chat/completions", session.headers, has_body=True, is_trusted=True)
        try:
            arrival = self._pipeline.reception.receive(Api.CHAT, head, body)
            found = self._pipeline.enter(arrival, now, Terms())
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
        self._results.append(Result(due_s, due_s, due_s, 0, 0, 0, error=error, label=asked.session.label))

    def _release(self, now: float) -> None:
        """Let go who may; and look again when something may have changed by itself."""
        if not self._pipeline.entrance.has_waiting:
            return
        for one in self._pipeline.release(now):
            asked = self._held.pop(one.held.ticket)
            if isinstance(one.result, Decision):
                self._send(asked, one.result, now)
            else:
                self._refuse(asked, one.result.outcome)
        again_s = self._pipeline.entrance.look_again_s(now)
        if again_s is not None and again_s < self._looks_again_s:
            self._looks_again_s = again_s
            self._at(again_s, self._look_again)

    def _look_again(self, now: float) -> None:
        # an earlier look may have taken the place of this one
        if now == self._looks_again_s:
            self._looks_again_s = math.inf
            self._release(now)

    def _send(self, asked: _Asked, decision: Decision, now: float) -> None:
        address = decision.assignment.place.address
        words = answer_words(self._rng, asked.output_tokens)
        block_size = self._limits.block_size
        request = Request(next(self._order), asked.prompt, words, model=self._model, block_size=block_size)
        self._flights[request.key] = _Flight(asked, decision.ticket, address)
        if self._watch is not None:
            self._watch.sent(asked.session.label, decision, request.prompt_tokens, now)

        def enter(later: float) -> None:
            self.engines[address].add(request)
            self._step(address, later)

        self._at(now + API_S, enter)

    def _step(self, address: str, now: float) -> None:
        if address in self._busy:
            return
        step = self.engines[address].begin_step()
        if step is not None:
            self._busy.add(address)
            self._at(now + step.seconds, lambda later: self._end_step(address, step, later))

    def _end_step(self, address: str, step: Step, now: float) -> None:
        for token in self.engines[address].end_step(step):
            flight = self._flights[token.request.key]
            flight.first_token_s = flight.first_token_s or now
            if self._watch is not None:
                self._watch.token(flight.asked.session.label, now)
            if token.is_last:
                self._finish(token.request, self._flights.pop(token.request.key), now)
        self._busy.discard(address)
        self._step(address, now)

    def _finish(self, request: Request, flight: _Flight, now: float) -> None:
        if self._watch is not None:
            self._watch.ended(flight.asked.session.label, request.tokens, now)
        self._pipeline.finish(flight.ticket, now)
        self.served[flight.address] += 1
        outcome = Outcome(
            ticket=flight.ticket,
            status=200,
            served=flight.address,
            duration_s=now - flight.asked.due_s,
            ttfb_s=flight.first_token_s - flight.asked.due_s,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.produced,
            cached_tokens=request.cached_tokens or None,
        )
        self._at(now + LOG_DELAY_S, lambda later: self._settle(outcome, later))
        self._results.append(
            Result(
                due_s=flight.asked.due_s,
                first_token_s=flight.first_token_s,
                last_token_s=now,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens or 0,
                output_tokens=request.produced,
                label=flight.asked.session.label,
            )
        )
        self._release(now)
        flight.asked.done(now, "".join(request.words))

    def _settle(self, outcome: Outcome, now: float) -> None:
        self._pipeline.settle(outcome, now)
