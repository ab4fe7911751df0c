"""Generated traffic of several kinds, each a few numbers with defaults; lengths in tokens, times in seconds.

Equal shapes and seeds give equal workloads. Requests arrive as a Poisson process unless it is said otherwise.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from bench.workload.sessions import Session, Turn
from bench.workload.text import Piece
from extproc.protocol import TENANT

if TYPE_CHECKING:
    from collections.abc import Iterator


class SharedPrefix(msgspec.Struct, frozen=True):
    """Groups of prompts with a long common beginning: inference-perf's ``shared_prefix``, with which llm-d and Kthena compare.

    With ``concurrency``, so many clients that each send the next when they have an answer; else ``rate`` a second.
    """

    groups: int = 150
    prompts: int = 5
    prefix: int = 6000
    question: int = 1200
    output: int = 1000
    rate: float = 10.0
    concurrency: int = 0

    def play(self, seed: int) -> Iterator[Session]:
        """The groups' prompts in any order."""
        rng = random.Random(seed)
        order = [(group, number) for group in range(self.groups) for number in range(self.prompts)]
        rng.shuffle(order)
        turns = [self._turn(seed, group, number) for group, number in order]
        if self.concurrency:
            for client in range(min(self.concurrency, len(turns))):
                yield Session(0.0, tuple(turns[client :: self.concurrency]))
            return
        for begins_s, turn in zip(arrivals(rng, self.rate), turns, strict=False):
            yield Session(begins_s, (turn,))

    def _turn(self, seed: int, group: int, number: int) -> Turn:
        pieces = (Piece(f"{seed}/group/{group}", self.prefix), Piece(f"{seed}/{group}/{number}", self.question))
        return Turn(pieces, self.output, is_whole=True)


class Agents(msgspec.Struct, frozen=True):
    """Tool loops: one long prompt of instructions and tools for all, then step after step a tool's result and a short answer."""

    sessions: int = 120
    rate: float = 0.6
    instructions: int = 8000
    task: int = 1500
    steps: int = 12
    result: int = 1200
    output: int = 150
    tool_s: float = 2.0

    def play(self, seed: int) -> Iterator[Session]:
        """Steps vary by half their mean, results by a long tail."""
        rng = random.Random(seed)
        system = (Piece(f"{seed}/tools", self.instructions),)
        for number, begins_s in zip(range(self.sessions), arrivals(rng, self.rate), strict=False):
            steps = around(rng, self.steps)
            yield Session(
                begins_s, tuple(self._turn(rng, f"{seed}/{number}/{step}", step) for step in range(steps)), system
            )

    def _turn(self, rng: random.Random, key: str, step: int) -> Turn:
        if not step:
            return Turn((Piece(key, around(rng, self.task)),), around(rng, self.output))
        tokens = max(1, round(self.result * rng.lognormvariate(-0.5, 1.0)))
        return Turn((Piece(key, tokens),), around(rng, self.output), think_s=rng.expovariate(1 / self.tool_s))


class Retrieval(msgspec.Struct, frozen=True):
    """Answers from documents: instructions, some of many documents by falling popularity (Zipf), and a question."""

    requests: int = 1500
    rate: float = 4.0
    documents: int = 400
    document: int = 2500
    retrieved: int = 4
    instructions: int = 500
    question: int = 60
    output: int = 250

    def play(self, seed: int) -> Iterator[Session]:
        """The most popular document first: whose prompts begin alike share a prefix."""
        rng = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(self.documents)]
        for number, begins_s in zip(range(self.requests), arrivals(rng, self.rate), strict=False):
            found = sorted(set(rng.choices(range(self.documents), weights, k=self.retrieved)))
            pieces = (
                Piece(f"{seed}/instructions", self.instructions),
                *(Piece(f"{seed}/document/{one}", self.document) for one in found),
                Piece(f"{seed}/question/{number}", self.question),
            )
            yield Session(begins_s, (Turn(pieces, around(rng, self.output)),))


class Bursts(msgspec.Struct, frozen=True):
    """Quiet and loud in turn: ``burst_rate`` for ``burst_s``, then ``rate`` for ``quiet_s``. Prompts have nothing in common."""

    requests: int = 2000
    rate: float = 2.0
    burst_rate: float = 20.0
    burst_s: float = 10.0
    quiet_s: float = 50.0
    prompt: int = 3000
    output: int = 200

    def play(self, seed: int) -> Iterator[Session]:
        """A Poisson process with two rates, by thinning."""
        rng = random.Random(seed)
        fastest = max(self.rate, self.burst_rate)
        number = 0
        for begins_s in arrivals(rng, fastest):
            is_loud = begins_s % (self.burst_s + self.quiet_s) < self.burst_s
            if rng.random() * fastest > (self.burst_rate if is_loud else self.rate):
                continue
            yield Session(
                begins_s, (Turn((Piece(f"{seed}/{number}", around(rng, self.prompt)),), around(rng, self.output)),)
            )
            number += 1
            if number == self.requests:
                return


class HeavyTail(msgspec.Struct, frozen=True):
    """Prompts by a lognormal distribution with the given median and sigma, at most ``longest``; nothing in common."""

    requests: int = 2000
    rate: float = 4.0
    median: int = 1500
    sigma: float = 1.5
    longest: int = 100_000
    output: int = 250

    def play(self, seed: int) -> Iterator[Session]:
        """Answers vary by half their mean."""
        rng = random.Random(seed)
        for number, begins_s in zip(range(self.requests), arrivals(rng, self.rate), strict=False):
            tokens = min(self.longest, max(1, round(self.median * rng.lognormvariate(0.0, self.sigma))))
            yield Session(begins_s, (Turn((Piece(f"{seed}/{number}", tokens),), around(rng, self.output)),))


class Tenants(msgspec.Struct, frozen=True):
    """Tenants that ask for more or less (Zipf), each with an assistant of its own; the tenant stands in the header and the label."""

    requests: int = 2000
    rate: float = 8.0
    tenants: int = 10
    system: int = 2000
    prompt: int = 1000
    output: int = 200

    def play(self, seed: int) -> Iterator[Session]:
        """The first tenant asks most."""
        rng = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(self.tenants)]
        for number, begins_s in zip(range(self.requests), arrivals(rng, self.rate), strict=False):
            tenant = f"tenant-{rng.choices(range(self.tenants), weights)[0]}"
            turn = Turn((Piece(f"{seed}/{number}", around(rng, self.prompt)),), around(rng, self.output))
            system = (Piece(f"{seed}/{tenant}", self.system),)
            yield Session(begins_s, (turn,), system, headers={TENANT: tenant}, label=tenant)


class LoraMix(msgspec.Struct, frozen=True):
    """Requests for LoRA adapters by falling popularity (Zipf); adapters share no cache."""

    requests: int = 2000
    rate: float = 8.0
    adapters: int = 12
    system: int = 1500
    prompt: int = 800
    output: int = 200

    def play(self, seed: int) -> Iterator[Session]:
        """The label is the adapter."""
        rng = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(self.adapters)]
        for number, begins_s in zip(range(self.requests), arrivals(rng, self.rate), strict=False):
            adapter = f"adapter-{rng.choices(range(self.adapters), weights)[0]}"
            turn = Turn((Piece(f"{seed}/{number}", around(rng, self.prompt)),), around(rng, self.output))
            yield Session(begins_s, (turn,), (Piece(f"{seed}/system", self.system),), label=adapter, adapter=adapter)


def arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    """A Poisson process without end."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def around(rng: random.Random, mean: int) -> int:
    """Within half of the mean, at least one."""
    return max(1, round(rng.uniform(0.5, 1.5) * mean))
