# SPDX-License-Identifier: Apache-2.0
"""Generated traffic: shapes with their parameters, by name as in ``shared-prefix:groups=256,prefix=4096``.

Lengths are tokens, rates are requests or sessions per second. Equal shapes and seeds give equal workloads. Arrivals are
a Poisson process unless the shape has another one. "Varies by half": evenly between half and one and a half of the
mean.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.workload.sessions import Session, SessionTurn, TextPiece, Workload, single_piece
from bench.workload.traces import Excerpt, TraceInvalid, read_trace
from extproc.wire_names import TENANT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Conversations(msgspec.Struct, frozen=True):
    """Many users chat with a few assistants: shared system prompts, several turns, pauses to think.

    User turns, answers and think times vary by half. The shape is that of inference-perf's ``shared_prefix``
    generator, with which llm-d's published comparisons were made.
    """

    sessions: int = 240
    sessions_per_s: float = 4.5
    system_prompts: int = 24
    system_tokens: int = 4000
    turns: int = 4
    user_tokens: int = 300
    output_tokens: int = 80
    think_s: float = 4.0

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """Each session draws its system prompt by chance."""
        rng = random.Random(seed)
        systems = [single_piece(f"{seed}/system/{number}", self.system_tokens) for number in range(self.system_prompts)]
        begins_at_s = 0.0
        for number in range(self.sessions):
            begins_at_s += rng.expovariate(self.sessions_per_s)
            turns = tuple(
                SessionTurn(
                    pieces=single_piece(f"{seed}/{number}/{turn}", jitter_length(rng, self.user_tokens)),
                    output_tokens=jitter_length(rng, self.output_tokens),
                    think_s=rng.uniform(0.5, 1.5) * self.think_s if turn else 0.0,
                )
                for turn in range(self.turns)
            )
            yield Session(begins_at_s, turns, rng.choice(systems))


class SharedPrefix(msgspec.Struct, frozen=True):
    """Groups of prompts with a long common prefix: inference-perf's ``shared_prefix``, used by llm-d and Kthena.

    ``concurrency``: clients that each send the next request when they have an answer; 0: ``rate`` requests per second.
    """

    groups: int = 150
    prompts: int = 5
    prefix: int = 6000
    question: int = 1200
    output: int = 1000
    rate: float = 10.0
    concurrency: int = 0

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """The prompts of all groups in random order."""
        rng = random.Random(seed)
        order = [(group, number) for group in range(self.groups) for number in range(self.prompts)]
        rng.shuffle(order)
        turns = [self._turn(seed, group, number) for group, number in order]
        if self.concurrency:
            for client in range(min(self.concurrency, len(turns))):
                yield Session(0.0, tuple(turns[client :: self.concurrency]))
            return
        for begins_at_s, turn in zip(poisson_arrivals(rng, self.rate), turns, strict=False):
            yield Session(begins_at_s, (turn,))

    def _turn(self, seed: int, group: int, number: int) -> SessionTurn:
        pieces = (TextPiece(f"{seed}/group/{group}", self.prefix), TextPiece(f"{seed}/{group}/{number}", self.question))
        return SessionTurn(pieces, self.output, is_whole=True)


class Agents(msgspec.Struct, frozen=True):
    """Agents in tool loops: a long prompt of instructions that all share, then tool results and short answers in turn.

    ``tool_s``: the mean time that a tool takes.
    """

    sessions: int = 120
    rate: float = 0.6
    instructions: int = 8000
    task: int = 1500
    steps: int = 12
    result: int = 1200
    output: int = 150
    tool_s: float = 2.0

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """Numbers of steps vary by half, tool results by a lognormal distribution."""
        rng = random.Random(seed)
        system = (TextPiece(f"{seed}/tools", self.instructions),)
        for number, begins_at_s in zip(range(self.sessions), poisson_arrivals(rng, self.rate), strict=False):
            steps = jitter_length(rng, self.steps)
            yield Session(
                begins_at_s, tuple(self._turn(rng, f"{seed}/{number}/{step}", step) for step in range(steps)), system
            )

    def _turn(self, rng: random.Random, key: str, step: int) -> SessionTurn:
        if not step:
            return SessionTurn((TextPiece(key, jitter_length(rng, self.task)),), jitter_length(rng, self.output))
        tokens = max(1, round(self.result * rng.lognormvariate(-0.5, 1.0)))
        return SessionTurn(
            (TextPiece(key, tokens),), jitter_length(rng, self.output), think_s=rng.expovariate(1 / self.tool_s)
        )


class Retrieval(msgspec.Struct, frozen=True):
    """Answers from documents: instructions, ``retrieved`` of ``documents`` by popularity (Zipf), and a question."""

    requests: int = 1500
    rate: float = 4.0
    documents: int = 400
    document: int = 2500
    retrieved: int = 4
    instructions: int = 500
    question: int = 60
    output: int = 250

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """The most popular document comes first, so that prompts with the same one share a prefix."""
        rng = random.Random(seed)
        weights = [1 / (place + 1) for place in range(self.documents)]
        for number, begins_at_s in zip(range(self.requests), poisson_arrivals(rng, self.rate), strict=False):
            found = sorted(set(rng.choices(range(self.documents), weights, k=self.retrieved)))
            pieces = (
                TextPiece(f"{seed}/instructions", self.instructions),
                *(TextPiece(f"{seed}/document/{one}", self.document) for one in found),
                TextPiece(f"{seed}/question/{number}", self.question),
            )
            yield Session(begins_at_s, (SessionTurn(pieces, jitter_length(rng, self.output)),))


class Bursts(msgspec.Struct, frozen=True):
    """Bursts: ``burst_rate`` for ``burst_s`` seconds, then ``rate`` for ``quiet_s`` seconds. Prompts share nothing."""

    requests: int = 2000
    rate: float = 2.0
    burst_rate: float = 20.0
    burst_s: float = 10.0
    quiet_s: float = 50.0
    prompt: int = 3000
    output: int = 200

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """A Poisson process with two rates, by thinning."""
        rng = random.Random(seed)
        fastest = max(self.rate, self.burst_rate)
        number = 0
        for begins_at_s in poisson_arrivals(rng, fastest):
            is_burst = begins_at_s % (self.burst_s + self.quiet_s) < self.burst_s
            if rng.random() * fastest > (self.burst_rate if is_burst else self.rate):
                continue
            yield Session(
                begins_at_s,
                (
                    SessionTurn(
                        (TextPiece(f"{seed}/{number}", jitter_length(rng, self.prompt)),),
                        jitter_length(rng, self.output),
                    ),
                ),
            )
            number += 1
            if number == self.requests:
                return


class HeavyTail(msgspec.Struct, frozen=True):
    """Lognormal prompt lengths with the given median and sigma, at most ``longest``. Prompts share nothing."""

    requests: int = 2000
    rate: float = 4.0
    median: int = 1500
    sigma: float = 1.5
    longest: int = 100_000
    output: int = 250

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """Answers vary by half."""
        rng = random.Random(seed)
        for number, begins_at_s in zip(range(self.requests), poisson_arrivals(rng, self.rate), strict=False):
            tokens = min(self.longest, max(1, round(self.median * rng.lognormvariate(0.0, self.sigma))))
            yield Session(
                begins_at_s, (SessionTurn((TextPiece(f"{seed}/{number}", tokens),), jitter_length(rng, self.output)),)
            )


class Tenants(msgspec.Struct, frozen=True):
    """Tenants with unequal shares of the requests (Zipf), each with a system prompt of its own.

    The tenant is in the header and in the label.
    """

    requests: int = 2000
    rate: float = 8.0
    tenants: int = 10
    system: int = 2000
    prompt: int = 1000
    output: int = 200

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """The first tenant sends most."""
        rng = random.Random(seed)
        weights = [1 / (place + 1) for place in range(self.tenants)]
        for number, begins_at_s in zip(range(self.requests), poisson_arrivals(rng, self.rate), strict=False):
            tenant = f"tenant-{rng.choices(range(self.tenants), weights)[0]}"
            turn = SessionTurn(
                (TextPiece(f"{seed}/{number}", jitter_length(rng, self.prompt)),), jitter_length(rng, self.output)
            )
            system = (TextPiece(f"{seed}/{tenant}", self.system),)
            yield Session(begins_at_s, (turn,), system, headers={TENANT: tenant}, label=tenant)


class LoraMix(msgspec.Struct, frozen=True):
    """Requests for LoRA adapters by popularity (Zipf). Adapters share no cache."""

    requests: int = 2000
    rate: float = 8.0
    adapters: int = 12
    system: int = 1500
    prompt: int = 800
    output: int = 200

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """The label is the adapter."""
        rng = random.Random(seed)
        weights = [1 / (place + 1) for place in range(self.adapters)]
        for number, begins_at_s in zip(range(self.requests), poisson_arrivals(rng, self.rate), strict=False):
            adapter = f"adapter-{rng.choices(range(self.adapters), weights)[0]}"
            turn = SessionTurn(
                (TextPiece(f"{seed}/{number}", jitter_length(rng, self.prompt)),), jitter_length(rng, self.output)
            )
            yield Session(
                begins_at_s, (turn,), (TextPiece(f"{seed}/system", self.system),), label=adapter, adapter=adapter
            )


def poisson_arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    """Instants of a Poisson process, without end. ``rate``: per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def jitter_length(rng: random.Random, mean: int) -> int:
    """A random integer between half and one and a half of ``mean``, at least 1."""

    return max(1, round(rng.uniform(0.5, 1.5) * mean))


class WorkloadShape(Protocol):
    """A kind of traffic: a struct of parameters."""

    def generate_sessions(self, seed: int) -> Iterator[Session]:
        """Sessions in the order of their beginning. Equal seeds give equal sessions."""
        ...


GENERATORS: Final[Mapping[str, type[WorkloadShape]]] = MappingProxyType(
    {
        "chat": Conversations,
        "shared-prefix": SharedPrefix,
        "agents": Agents,
        "retrieval": Retrieval,
        "bursts": Bursts,
        "heavy-tail": HeavyTail,
        "tenants": Tenants,
        "lora": LoraMix,
    }
)


def conversation_workload(shape: Conversations, seed: int = 0) -> Workload:
    """The workload of ``shape``, under a name with its parameters."""
    name = f"{shape.sessions} generated conversations of {shape.turns} turns over {shape.system_prompts} system prompts"
    return Workload(name, tuple(shape.generate_sessions(seed)))


def generate_workload(described: str, seed: int, excerpt: Excerpt) -> Workload:
    """The sessions of a generator. Raises TraceInvalid.

    ``described``: its name and parameters, as in ``chat:sessions=30,turns=2``. ``excerpt``: which sessions; without a
    limit all that the generator makes.
    """

    name, _, numbers = described.partition(":")
    pairs = [one.partition("=") for one in numbers.split(",") if one]
    try:
        shape = msgspec.convert({key: value for key, _, value in pairs}, GENERATORS[name], strict=False)
    except msgspec.ValidationError as error:
        msg = f"{described}: {error}; {name} takes {', '.join(_fields(name))}"
        raise TraceInvalid(msg) from None
    unknown = [key for key, _, _ in pairs if key not in _fields(name)]
    if unknown:
        msg = f"{described}: {name} has no {', '.join(unknown)}; it takes {', '.join(_fields(name))}"
        raise TraceInvalid(msg)
    stop = excerpt.skip + excerpt.limit if excerpt.limit else None
    sessions = tuple(islice(shape.generate_sessions(seed), excerpt.skip, stop))
    if not sessions:
        msg = f"{described}: makes no sessions after the first {excerpt.skip}; skip fewer"
        raise TraceInvalid(msg)
    return Workload(f"{described}, seed {seed}, {len(sessions)} sessions", sessions)


def _fields(name: str) -> list[str]:
    return list(GENERATORS[name].__annotations__)


def load_workload(source: str, excerpt: Excerpt, *, trace_format: str | None = None, seed: int = 0) -> Workload:
    """``source``: the path of a trace, or a generator as in ``chat:sessions=30``. Raises TraceInvalid.

    ``trace_format``: of a trace; None: by its file name. ``seed``: of a generator.
    """
    if source.partition(":")[0] in GENERATORS:
        return generate_workload(source, seed, excerpt)
    return read_trace(Path(source), excerpt, trace_format)
