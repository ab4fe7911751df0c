# SPDX-License-Identifier: Apache-2.0
"""Processes that share over a bus: Redis between machines, sockets between workers."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, Effect
from extproc.core.request_record import RequestHead
from extproc.metrics.request_metrics import Metrics
from extproc.replication.buses import RedisBus, UnixSocketBus
from extproc.replication.peer_event_exchange import Bus, PeerEventExchange
from tests.extproc.conftest import CONFIG
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.redis_server import Redis

HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)


class Process:
    """A core that tells others and hears them."""

    def __init__(self, name: str, bus: Bus) -> None:
        self.core = Core(load_snapshot({"a.yaml": CONFIG}), rng=random.Random(0), ticket_prefix=name, machine=name)
        clock = asyncio.get_running_loop().time
        metrics = Metrics(self.core.pools.values, lambda: 0.0, clock)
        self.clock = clock
        self.peers = PeerEventExchange([bus], metrics, origin=name)
        self.task = asyncio.create_task(
            self.peers.run(
                on_batch=lambda batch: self.perform(self.core.apply_peer_batch(batch, clock())),
                heartbeat=lambda: self.perform(self.core.heartbeat(clock())),
            )
        )

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                self.peers.publish(effect.event)

    @property
    def in_flight(self) -> int:
        return int(self.core.pools["default/llama"].table.in_flight.sum())

    def send(self, text: str) -> Decision:
        body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": text}]}).encode()
        decision, effects = self.core.arrive(self.core.builder.build_by_model(HEAD, body), self.clock())
        assert isinstance(decision, Decision)
        self.perform(effects)
        return decision

    def end(self, decision: Decision) -> None:
        self.perform(self.core.on_stream_closed(decision.ticket, self.clock()))


@asynccontextmanager
async def processes(*buses: Bus) -> AsyncIterator[list[Process]]:
    made = [Process(f"p{number}", bus) for number, bus in enumerate(buses)]
    try:
        yield made
    finally:
        for process in made:
            process.task.cancel()
        await asyncio.wait([process.task for process in made])


async def connected(made: list[Process]) -> None:
    """Until all hear all: what is said before a subscription stands is lost."""

    for process in made:

        async def all_hear(speaker: Process = process) -> bool:
            decision = speaker.send("probe")
            try:
                await eventually(lambda: all(process.in_flight == 1 for process in made), timeout_s=1.0)
            except TimeoutError:
                return False
            finally:
                speaker.end(decision)
            return True

        await eventually(all_hear)
        await eventually(lambda: all(process.in_flight == 0 for process in made))


async def test_two_machines_share_over_redis(redis: Redis) -> None:
    async with processes(*(RedisBus(redis.url, "test") for _ in range(2))) as (one, other):
        await connected([one, other])
        decision = one.send("hello")
        await eventually(lambda: other.in_flight == 1)
        one.end(decision)
        await eventually(lambda: other.in_flight == 0)


async def test_channels_are_kept_apart(redis: Redis) -> None:
    buses = [RedisBus(redis.url, channel) for channel in ("one", "one", "two", "two")]
    async with processes(*buses) as (one, sibling, other, its_sibling):
        await connected([one, sibling])
        await connected([other, its_sibling])
        one.send("hello")
        await eventually(lambda: sibling.in_flight == 1)
        # what is said on the second channel later comes later too: nothing of the first is still under way
        its_sibling.send("hello")
        await eventually(lambda: other.in_flight == 1)
        assert [process.in_flight for process in (one, sibling, other, its_sibling)] == [1, 1, 1, 1]


async def test_redis_goes_and_comes_back(redis: Redis) -> None:
    async with processes(*(RedisBus(redis.url, "test") for _ in range(2))) as (one, other):
        await connected([one, other])
        redis.stop()
        decisions = [one.send(f"hello {number}") for number in range(5)]
        assert one.in_flight == 5, "requests go on"
        await asyncio.sleep(0.5)
        for decision in decisions[:3]:
            one.end(decision)
        redis.start()
        await connected_after_a_pause([one, other])
        for decision in decisions[3:]:
            one.end(decision)
        await eventually(lambda: other.in_flight == one.in_flight == 0)


async def connected_after_a_pause(made: list[Process]) -> None:
    """The other hears again; requests that it never heard of stay unknown to it."""

    async def hears() -> bool:
        before = made[1].in_flight
        decision = made[0].send("probe")
        await asyncio.sleep(0.1)
        heard = made[1].in_flight > before
        made[0].end(decision)
        return heard

    await eventually(hears)


async def test_a_process_ends_at_once_whatever_redis_does_then(redis: Redis) -> None:
    """The client library swallows a cancellation that comes while it connects again."""
    for tenths_ms in range(0, 400, 50):
        bus = RedisBus(redis.url, "attache")
        listening = asyncio.create_task(bus.run(lambda _: None))
        await asyncio.sleep(0.1)
        redis.stop()
        redis.start()
        await asyncio.sleep(tenths_ms / 10_000)
        listening.cancel()
        _, late = await asyncio.wait((listening,), timeout=60)
        assert not late


async def test_a_redis_that_is_not_there_harms_nobody() -> None:
    async with processes(RedisBus("redis://127.0.0.1:1", "test")) as (alone,):
        decision = alone.send("hello")
        await asyncio.sleep(0.3)
        alone.end(decision)
        assert alone.in_flight == 0
        assert not alone.task.done()


async def test_workers_share_over_sockets(tmp_path: Path) -> None:
    async with processes(*(UnixSocketBus(tmp_path, name) for name in "abc")) as made:
        await connected(made)
        decisions = [process.send("hello") for process in made]
        await eventually(lambda: all(process.in_flight == 3 for process in made))
        for process, decision in zip(made, decisions, strict=True):
            process.end(decision)
        await eventually(lambda: all(process.in_flight == 0 for process in made))


async def test_a_worker_that_dies_leaves_no_requests_behind(tmp_path: Path) -> None:
    async with processes(*(UnixSocketBus(tmp_path, name) for name in "ab")) as made:
        await connected(made)
        made[0].send("hello")
        await eventually(lambda: made[1].in_flight == 1)
        made[0].task.cancel()
        await eventually(lambda: made[1].in_flight == 0)
