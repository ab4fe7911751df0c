# SPDX-License-Identifier: Apache-2.0
"""A process that starts finds local limits as the others of its machine have left them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, Effect, RequestRefused
from extproc.core.peer_events import AskLimitLevels, EventBatch, LimitLevels, decode_events, encode_events
from extproc.core.request_record import RequestHead
from tests.extproc.conftest import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterable

HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
LIMITED = CONFIG.replace(b"  loraAdapters: [sql]", b"  loraAdapters: [sql]\n  rateLimits: [{unit: hour, requests: 10}]")
BODY = b'{"model": "chat", "messages": []}'


class Process:
    """A core whose words all the others on the wire hear at once, if they are there."""

    def __init__(self, name: str, wire: list[Process], *, machine: str | None = "here") -> None:
        self.name = name
        self.wire = wire
        self.core = Core(load_snapshot({"a.yaml": LIMITED}), rng=random.Random(0), ticket_prefix=name, machine=machine)
        wire.append(self)

    def perform(self, effects: Iterable[Effect], now: float) -> None:
        events = [one.event for one in effects if isinstance(one, Broadcast)]
        if events:
            batch = decode_events(encode_events(EventBatch(self.name, events)))
            for other in [one for one in self.wire if one is not self]:
                other.perform(other.core.apply_peer_batch(batch, now), now)

    def beat(self, now: float) -> None:
        self.perform(self.core.heartbeat(now), now)

    def ask(self, now: float) -> bool:
        """Whether a request is granted."""
        own, effects = self.core.arrive(self.core.builder.build_by_model(HEAD, BODY), now)
        self.perform(effects, now)
        assert isinstance(own, Decision | RequestRefused)
        return isinstance(own, Decision)

    def granted(self, now: float) -> int:
        """How many requests are granted until one is refused."""
        count = 0
        while self.ask(now):
            count += 1
        return count


def test_a_worker_that_is_started_again_does_not_find_full_buckets() -> None:
    wire: list[Process] = []
    one, other = Process("a", wire), Process("b", wire)
    assert [process.ask(0.0) for process in (one, other) for _ in range(4)] == [True] * 8
    wire.remove(other)
    again = Process("c", wire)
    assert not again.core.levels.is_told
    again.beat(0.5)
    assert again.core.levels.is_told
    assert again.granted(0.5) == 2
    # and what it has granted itself meanwhile is gone for the others
    assert not one.ask(0.5)


def test_a_hundred_restarts_grant_nothing_more() -> None:
    wire: list[Process] = []
    stays = Process("stays", wire)
    stays.beat(0.0)
    granted = 0
    for number in range(100):
        process = Process(f"p{number}", wire)
        process.beat(number * 0.5)
        granted += process.granted(number * 0.5)
        wire.remove(process)
    # ten at once and ten an hour
    assert granted == 10


def test_the_lower_of_two_levels_holds() -> None:
    wire: list[Process] = []
    one = Process("a", wire)
    assert [one.ask(0.0) for _ in range(3)] == [True] * 3
    again = Process("b", [])
    assert [again.ask(0.1) for _ in range(6)] == [True] * 6
    # its own grants were not heard of
    again.wire = wire
    wire.append(again)
    again.beat(0.2)
    assert again.granted(0.2) == 4


def test_inflow_counts_as_ever() -> None:
    wire: list[Process] = []
    one = Process("a", wire)
    assert one.granted(0.0) == 10
    again = Process("b", wire)
    again.beat(1800.0)
    assert again.granted(1800.0) == 5


@pytest.mark.parametrize("machine", ["there", None])
def test_other_machines_have_limits_of_their_own(machine: str | None) -> None:
    wire: list[Process] = []
    one = Process("a", wire)
    assert one.granted(0.0) == 10
    elsewhere = Process("b", wire, machine=machine)
    elsewhere.beat(0.1)
    assert not elsewhere.core.levels.is_told
    assert elsewhere.granted(0.1) == 10


def test_only_who_has_asked_takes_levels() -> None:
    wire: list[Process] = []
    one, other = Process("a", wire), Process("b", [])
    assert one.granted(0.0) == 10
    (told,) = [
        one.event
        for one in one.core.apply_peer_batch(EventBatch("c", [AskLimitLevels("here")]), 0.0)
        if isinstance(one, Broadcast)
    ]
    assert isinstance(told, LimitLevels)
    other.core.apply_peer_batch(EventBatch("a", [told]), 0.0)
    assert other.granted(0.0) == 10


def test_a_process_that_is_alone_stops_asking() -> None:
    alone = Process("a", [])
    asked = [
        any(
            isinstance(one, Broadcast) and isinstance(one.event, AskLimitLevels)
            for one in alone.core.heartbeat(float(second))
        )
        for second in range(60)
    ]
    assert asked[0]
    assert not any(asked[30:])


def test_what_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.admission.local_limits.MOST_LEVELS", 5)
    trusted = LIMITED
    core = Core(load_snapshot({"a.yaml": trusted}), rng=random.Random(0), ticket_prefix="a", machine="here")
    for number in range(20):
        head = RequestHead("POST", HEAD.path, {"x-attache-tenant": f"t{number}"}, has_body=True, is_trusted=True)
        core.arrive(core.builder.build_by_model(head, BODY), 0.0)
    levels = core.admission.limits.levels(0.0)
    # those that were used last
    assert [one.key.rpartition("/")[2] for one in levels] == [f"t{number}" for number in range(19, 14, -1)]
    assert core.admission.limits.levels(3600.0) == []
