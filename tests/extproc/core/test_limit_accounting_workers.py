# SPDX-License-Identifier: Apache-2.0
"""Workers whose messages take time are asked at once: a local budget is granted once, whatever happens to them."""

from __future__ import annotations

import os
import random
from collections import deque
from typing import TYPE_CHECKING

import pytest

from extproc.core.effects import Broadcast, Decision
from extproc.core.peer_events import HEARTBEAT_S, EventBatch, decode_events, encode_events
from extproc.feeds.shared_limit_grants import MmapGrantLedger
from tests.examples import examples
from tests.extproc.core.test_limit_accounting_budgets import Process

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from extproc.core.effects import Effect, RequestEffect

MOST, TOKENS = 1000, 50


class Machine:
    """Its workers' messages arrive when ``deliver`` says so; those of one sender in their order."""

    def __init__(self, directory: Path, count: int) -> None:
        self.now = 0.0
        self.directory = directory
        self.workers: list[Worker] = []
        for number in range(count):
            self.starts(f"w{number}")

    def starts(self, name: str) -> Worker:
        worker = Worker(self, name)
        self.workers.append(worker)
        worker.perform(worker.core.heartbeat(self.now), self.now)
        return worker

    def deliver(self) -> None:
        """All that is on its way."""
        for one in self.workers:
            for sender in one.coming:
                while one.receives(sender):
                    pass


class Worker(Process):
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        # by sender
        self.coming: dict[str, deque[bytes]] = {}
        self.recent = MmapGrantLedger(machine.directory, name, lambda: machine.now)
        budget = f"{{name: b, window: Month, max: {{outputTokens: {MOST}}}}}"
        super().__init__(budget, name=name, wire=[], recent=self.recent)

    def perform(self, effects: Iterable[Effect], now: float) -> list[Effect]:  # noqa: ARG002 - as it is on its way
        done = list(effects)
        events = [one.event for one in done if isinstance(one, Broadcast)]
        if events:
            payload = encode_events(EventBatch(self.name, events))
            for other in self.machine.workers:
                if other is not self:
                    other.coming.setdefault(self.name, deque()).append(payload)
        return done

    def receives(self, sender: str) -> bool:
        """The oldest message of ``sender``; whether there was one."""
        coming = self.coming[sender]
        if not coming:
            return False
        self.perform(self.core.apply_peer_batch(decode_events(coming.popleft()), self.machine.now), self.machine.now)
        return True


@pytest.mark.parametrize("count", [1, 2, 4])
def test_two_hundred_at_once_are_granted_what_a_budget_has(tmp_path: Path, count: int) -> None:
    machine = Machine(tmp_path, count)
    found = [machine.workers[number % count].ask(0.0, tokens=TOKENS) for number in range(200)]
    assert sum(isinstance(one, Decision) for one in found) == MOST // TOKENS
    machine.deliver()
    assert {one.left(0.0) for one in machine.workers} == {0.0}


def test_what_was_not_used_can_be_granted_by_every_worker(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    one, other = machine.workers
    running = [one.ask(0.0, tokens=TOKENS) for _ in range(MOST // TOKENS)]
    assert not isinstance(other.ask(0.0, tokens=TOKENS), Decision)
    one.ends(running[0], 1.0, output=0)
    # it was not told yet
    assert not isinstance(other.ask(1.0, tokens=TOKENS), Decision)
    machine.deliver()
    assert isinstance(other.ask(1.0, tokens=TOKENS), Decision)
    assert not isinstance(one.ask(1.0, tokens=TOKENS), Decision)


class History:
    """Requests use at most what they reserve. Messages take up to seconds; workers start, and are killed; there may be
    one alone.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.machine = Machine(directory, self.chosen.choice([1, 3]))
        self.running: list[tuple[Worker, RequestEffect, int]] = []
        self.used = 0.0

    @property
    def reserved(self) -> int:
        return sum(tokens for *_, tokens in self.running)

    def asks(self, worker: Worker) -> None:
        tokens = self.chosen.randrange(1, 200)
        found = worker.ask(self.machine.now, tokens=tokens)
        if isinstance(found, Decision):
            self.running.append((worker, found, tokens))

    def ends(self, worker: Worker) -> None:
        ours = [one for one in self.running if one[0] is worker]
        if ours:
            ends = self.chosen.choice(ours)
            self.running.remove(ends)
            output = self.chosen.randrange(ends[2] + 1)
            self.used += output
            worker.ends(ends[1], self.machine.now, output=output)

    def is_killed(self, worker: Worker, successor: str) -> None:
        """Some of its messages were not sent. What its requests had reserved is not used."""
        machine = self.machine
        machine.workers.remove(worker)
        worker.recent._memory.close()
        os.close(worker.recent._file)
        for other in machine.workers:
            late = other.coming.get(worker.name, deque())
            while late and self.chosen.randrange(2):
                late.pop()
        machine.deliver()
        if not machine.workers or self.chosen.randrange(2):
            self.starts(successor)

    def starts(self, name: str) -> None:
        self.machine.starts(name)
        self.machine.deliver()

    def steps(self, number: int) -> None:
        self.machine.now += self.chosen.choice([0.0, 0.0, 0.001, 0.05])
        worker = self.chosen.choice(self.machine.workers)
        match self.chosen.randrange(64):
            case 0:
                self.is_killed(worker, f"w{number}")
            case 1 if len(self.machine.workers) < 3:
                self.starts(f"w{number}")
            case step if step < 20:
                for sender in worker.coming:
                    worker.receives(sender)
            case step if step < 36:
                self.ends(worker)
            case _:
                self.asks(worker)


@pytest.mark.parametrize("seed", range(examples(100)))
def test_what_is_used_and_reserved_is_at_most_the_budget(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    for number in range(3, 250):
        history.steps(number)
        assert history.used + history.reserved <= MOST
    # and all of it can be used
    for worker in history.machine.workers:
        while any(one[0] is worker for one in history.running):
            history.ends(worker)
    # what killed ones had reserved comes back
    for _ in range(10):
        history.machine.now += HEARTBEAT_S
        for worker in history.machine.workers:
            worker.perform(worker.core.heartbeat(history.machine.now), history.machine.now)
        history.machine.deliver()
    assert min(one.left(history.machine.now) for one in history.machine.workers) >= MOST - history.used - 1e-6
