# SPDX-License-Identifier: Apache-2.0
"""KV events over real ZeroMQ sockets: from a publisher that restarts, loses messages and replays."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
import zmq.asyncio

from bench.engine.fake_tokenizer import tokens_of
from bench.engine.kv_cache import CacheJournal
from bench.engine.kv_event_publisher import Form, KvEventPublisher, KvEventsConfig
from bench.stack.processes import free_ports
from extproc.api.config_loader import load_snapshot
from extproc.api.dns_resolver import with_resolved_addresses
from extproc.core.core import Core
from extproc.feeds.kv_events import KvEventFeed, publishers_of
from extproc.metrics.request_metrics import Metrics
from extproc.prefix.kv_index import KvStream
from extproc.scheduling.cache_estimator import Prompt
from extproc.task_supervisor import Supervisor
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from extproc.api.config_snapshot import Snapshot
    from extproc.scheduling.pool import Pool

SIZE = 4


class Engine:
    """A publisher that can be killed and started again on the same ports."""

    def __init__(self, *, replays: bool = True, form: Form = "maps") -> None:
        self.port, replay = free_ports(2)
        self.replay = replay if replays else None
        self._form: Form = form
        self._journal = CacheJournal()
        self._publisher: KvEventPublisher | None = None
        self._answering: asyncio.Task[None] | None = None

    def start(self) -> None:
        settings = KvEventsConfig(self.port, self.replay, "kv@e", self._form)
        self._publisher = KvEventPublisher(settings, host="127.0.0.1", block_size=SIZE, base_model="m")
        self._answering = asyncio.create_task(self._publisher.answer_replays())

    async def stop(self) -> None:
        """If it runs."""
        if self._publisher is None or self._answering is None:
            return
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._publisher.close()
        self._publisher = None

    def drop(self, count: int) -> None:
        assert self._publisher is not None
        self._publisher.drop_next(count)

    def garble_the_past(self) -> None:
        """Its first message is unreadable."""
        assert self._publisher is not None
        self._publisher.store_for_replay_only(b"\xc1")

    def replays_odd_frames(self, frames: list[bytes], times: int = 1) -> None:
        """Whoever asks for the past gets these frames, then the end."""
        assert self._publisher is not None
        assert self._answering is not None
        self._answering.cancel()
        replay = self._publisher._replay

        async def answer() -> None:
            while True:
                client, *_ = await replay.recv_multipart()
                for _ in range(times):
                    await replay.send_multipart([client, *frames])
                await replay.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])

        self._answering = asyncio.create_task(answer())

    async def send_frames(self, frames: list[bytes]) -> None:
        assert self._publisher is not None
        await self._publisher._events.send_multipart(frames)

    async def publish(self, payload: bytes) -> None:
        """Any events, which are also replayed."""
        assert self._publisher is not None
        number = self._publisher._next
        self._publisher.store_for_replay_only(payload)
        await self.send_frames([b"kv@e", number.to_bytes(8, "big"), payload])

    async def store(self, text: bytes, *, after: int | None = None) -> None:
        """One block of text; its hash is its first byte."""
        assert self._publisher is not None
        self._journal.on_stored([text[0]], after, [text], "m")
        await self._publisher.publish(self._journal.pop_changes())

    async def remove(self, value: int) -> None:
        assert self._publisher is not None
        self._journal.on_removed(value)
        await self._publisher.publish(self._journal.pop_changes())


def block(letter: str) -> bytes:
    return letter.encode() * (4 * SIZE)


def held(pool: Pool, text: bytes) -> float:
    """Tokens that the engine holds of ``text``."""
    kv = pool.caches.kv_index
    assert kv is not None
    found = kv.match(kv.block_keys(tokens_of(text), adapter=None, salt=None), 1e9)
    return max((one.weighted for one in found), default=0.0)


def is_whole(pool: Pool) -> bool:
    return pool.caches.whole_feeds == 1


@asynccontextmanager
async def subscribed(*engines: Engine) -> AsyncIterator[tuple[Pool, Metrics]]:
    endpoints = []
    for number, engine in enumerate(engines, 1):
        replay = "" if engine.replay is None else f', kvReplay: "127.0.0.1:{engine.replay}"'
        endpoints.append(f'{{address: "127.0.0.1:{number}", kvEvents: "127.0.0.1:{engine.port}"{replay}}}')
    config = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: s}}
spec:
  model: m
  kvEvents: {{topic: "kv@"}}
  endpoints: [{", ".join(endpoints)}]
"""
    async with following(config, *engines) as (core, metrics):
        yield core.pools["default/s"], metrics


@asynccontextmanager
async def following(config: str, *engines: Engine) -> AsyncIterator[tuple[Core, Metrics]]:
    """``engines`` end, too, however the test ends: a context that is garbage may wait for its sockets without end."""
    core = Core(load_snapshot({"a.yaml": config.encode()}), rng=random.Random(0), ticket_prefix="t")
    metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)
    task = asyncio.create_task(KvEventFeed(core, metrics, Supervisor(metrics.count_feed_failure)).run())
    try:
        yield core, metrics
    finally:
        task.cancel()
        await asyncio.wait([task])
        for engine in engines:
            await engine.stop()


async def subscription_arrives(engine: Engine, metrics: Metrics) -> None:
    """A PUB socket drops what it sends before; without replays that is lost. Messages without a number make the
    feed begin anew.
    """

    def unreadable() -> float:
        labels = {"server": "default/s", "result": "unreadable"}
        return metrics.registry.get_sample_value("attache_kv_events_total", labels) or 0

    before = unreadable()

    async def arrives() -> bool:
        await engine.send_frames([b"kv@e", b""])
        return unreadable() > before

    await eventually(arrives)


@pytest.mark.parametrize("form", ["maps", "arrays"])
async def test_stored_and_removed_blocks_are_followed(form: Form) -> None:
    engine = Engine(form=form)
    engine.start()
    async with subscribed(engine) as (pool, _):
        await eventually(lambda: is_whole(pool))
        await engine.store(block("a"))
        await engine.store(block("b"), after=ord("a"))
        await eventually(lambda: held(pool, block("a") + block("b")) == 8)
        await engine.remove(ord("b"))
        await eventually(lambda: held(pool, block("a") + block("b")) == 4)


async def test_events_before_the_subscription_are_replayed() -> None:
    engine = Engine()
    engine.start()
    await engine.store(block("a"))
    async with subscribed(engine) as (pool, _):
        await eventually(lambda: held(pool, block("a")) == 4)
        assert is_whole(pool)


async def test_lost_messages_are_replayed() -> None:
    engine = Engine()
    engine.start()
    async with subscribed(engine) as (pool, metrics):
        await eventually(lambda: is_whole(pool))
        await engine.store(block("a"))
        engine.drop(2)
        await engine.store(block("b"), after=ord("a"))
        await engine.store(block("c"), after=ord("b"))
        await engine.store(block("d"), after=ord("c"))
        await eventually(lambda: held(pool, block("a") + block("b") + block("c") + block("d")) == 16)
        assert is_whole(pool)
        assert (
            metrics.registry.get_sample_value("attache_kv_events_total", {"server": "default/s", "result": "replayed"})
            or 0
        ) >= 2


@pytest.mark.parametrize("replays", [True, False])
async def test_a_restarted_engine_has_an_empty_cache(*, replays: bool) -> None:
    engine = Engine(replays=replays)
    engine.start()
    async with subscribed(engine) as (pool, metrics):
        await eventually(lambda: bool(pool.caches.partial_feeds | pool.caches.whole_feeds))
        await subscription_arrives(engine, metrics)
        await engine.store(block("a"))
        await eventually(lambda: held(pool, block("a")) == 4)
        await engine.stop()
        await eventually(lambda: held(pool, block("a")) == 0 and not is_whole(pool))
        engine.start()
        await eventually(lambda: bool(pool.caches.partial_feeds | pool.caches.whole_feeds))
        await subscription_arrives(engine, metrics)
        await engine.store(block("b"))
        await eventually(lambda: held(pool, block("b")) == 4)
        assert held(pool, block("a")) == 0
        assert is_whole(pool)


async def test_without_a_replay_a_gap_is_not_trusted() -> None:
    engine = Engine(replays=False)
    engine.start()
    async with subscribed(engine) as (pool, metrics):
        await eventually(lambda: pool.caches.partial_feeds == 1)
        await subscription_arrives(engine, metrics)
        await engine.store(block("a"))
        await eventually(lambda: is_whole(pool))
        engine.drop(1)
        await engine.remove(ord("a"))
        await engine.store(block("z"))
        await eventually(lambda: held(pool, block("z")) == 4)
        assert held(pool, block("a")) == 0, "it may have been removed: it was"
        assert pool.caches.partial_feeds == 1


async def test_no_socket_is_left_when_a_subscription_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, left = list[zmq.asyncio.Socket](), list[zmq.asyncio.Socket]()
    socket, destroy = zmq.asyncio.Context.socket, zmq.asyncio.Context.destroy

    def noted(self: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        opened.append(socket(self, kind))
        return opened[-1]

    def destroyed(self: zmq.asyncio.Context, linger: int) -> None:
        left.extend(one for one in opened if one.context is self and not one.closed)
        destroy(self, linger)

    engine = Engine()
    engine.start()
    monkeypatch.setattr(zmq.asyncio.Context, "socket", noted)
    monkeypatch.setattr(zmq.asyncio.Context, "destroy", destroyed)
    async with subscribed(engine) as (pool, _):
        await eventually(lambda: is_whole(pool))
        # of the events, of its monitor, and of the replay
        assert len(opened) == 3
    assert left == []


async def test_without_a_publisher_the_approximate_index_decides() -> None:
    engine = Engine()
    prompt = Prompt(b"a" * 4000, "m")
    async with subscribed(engine) as (pool, _):
        expected = pool.caches.estimate_prompt(prompt, pool.table, 0.0)
        assert expected.demand.cached_tokens[0] == 0
        pool.caches.record_sent(0, expected, 0.0)
        await asyncio.sleep(0.3)
        assert pool.caches.whole_feeds == pool.caches.partial_feeds == 0
        expected = pool.caches.estimate_prompt(prompt, pool.table, 1.0)
        assert expected.demand.cached_tokens[0] > 900
        # it was subscribed all the time
        engine.start()
        await eventually(lambda: is_whole(pool))


async def test_an_unreadable_replay_does_not_end_the_subscription() -> None:
    engine = Engine()
    engine.start()
    engine.garble_the_past()
    async with subscribed(engine) as (pool, metrics):

        def unreadable() -> float:
            labels = {"server": "default/s", "result": "unreadable"}
            return metrics.registry.get_sample_value("attache_kv_events_total", labels) or 0

        await eventually(lambda: unreadable() >= 1)
        await engine.store(block("a"))
        await eventually(lambda: held(pool, block("a")) == 4)
        assert not is_whole(pool)


def test_events_at_a_name_wait_until_it_is_resolved() -> None:
    config = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: s}
spec:
  model: m
  kvEvents: {replayPort: 9}
  endpoints:
  - {address: "10.0.0.1:1", kvEvents: "events.example:5557"}
  - {address: "10.0.0.2:1", kvEvents: "10.0.0.2:5557", kvReplay: "events.example:5558"}
"""
    snapshot = load_snapshot({"a.yaml": config.encode()})

    def known(snapshot: Snapshot) -> list[tuple[str, str | None]]:
        core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
        return [(one.events, one.replay) for one in publishers_of(core.pools["default/s"])]

    assert known(snapshot) == [("tcp://10.0.0.2:5557", None)]
    assert known(with_resolved_addresses(snapshot, {"events.example": ("10.0.0.5",)})) == [
        ("tcp://10.0.0.5:5557", "tcp://10.0.0.1:9"),
        ("tcp://10.0.0.2:5557", "tcp://10.0.0.5:5558"),
    ]


async def test_a_publisher_that_makes_its_subscription_fail_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apply, is_broken = KvStream.apply, True

    def broken(stream: KvStream, number: int, payload: bytes) -> Iterator[None]:
        if is_broken and b"poison" in payload:
            raise ZeroDivisionError("a mistake of ours")
        return apply(stream, number, payload)

    monkeypatch.setattr(KvStream, "apply", broken)
    good, bad = Engine(), Engine()
    good.start()
    bad.start()
    async with subscribed(good, bad) as (pool, metrics):

        def restarts() -> float:
            return metrics.registry.get_sample_value("attache_feed_restarts_total", {"feed": "kv_events"}) or 0

        await eventually(lambda: pool.caches.whole_feeds == 0b11)
        await good.store(block("a"))
        await bad.store(block("b"))
        await eventually(lambda: held(pool, block("a")) == held(pool, block("b")) == 4)

        async def has_failed_twice() -> bool:
            # what is published before it is subscribed to again is lost
            await bad.publish(b"poison")
            return restarts() >= 2

        await eventually(has_failed_twice)
        assert held(pool, block("b")) == 0
        assert pool.caches.whole_feeds == 0b01, "the state of the good one's feed"
        await good.store(block("c"))
        await eventually(lambda: held(pool, block("c")) == 4)
        assert held(pool, block("a")) == 4
        is_broken = False

        async def is_back() -> bool:
            await bad.store(block("d"))
            return held(pool, block("d")) == 4

        await eventually(is_back, pause_s=0.1)
        # it has missed events, which it knows once the replay is read
        await eventually(lambda: pool.caches.partial_feeds == 0b10)
    assert caplog.text.count("Traceback") == 1


NUMBER = (1).to_bytes(8, "big")
GOOD = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [7] * SIZE, SIZE]]])


@pytest.mark.parametrize(
    "frames",
    [
        [b"one"],
        [b"", b"short", GOOD],
        [b"", b"long" * 1_000, GOOD],
        [b"", (-2).to_bytes(8, "big", signed=True), GOOD],
        [b"", NUMBER, b"\x91" * 200_000],
    ],
)
async def test_messages_and_replays_of_odd_frames_are_unreadable_and_the_feed_goes_on(frames: list[bytes]) -> None:
    engine = Engine()
    engine.start()
    engine.replays_odd_frames(frames)
    async with subscribed(engine) as (pool, metrics):

        def unreadable() -> float:
            labels = {"server": "default/s", "result": "unreadable"}
            return metrics.registry.get_sample_value("attache_kv_events_total", labels) or 0

        await eventually(lambda: unreadable() >= 1)
        await engine.send_frames([b"kv@e", *frames])
        if len(frames) > 1:
            # a message of a topic alone has no events
            await eventually(lambda: unreadable() >= 2)
        await engine.store(block("a"))
        await eventually(lambda: held(pool, block("a")) == 4)
        assert not metrics.registry.get_sample_value("attache_feed_restarts_total", {"feed": "kv_events"})


async def test_a_replay_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.feeds.kv_events._MOST_REPLAYED", 100)
    engine = Engine()
    engine.start()
    engine.replays_odd_frames([b"", NUMBER, GOOD], times=1_000)
    async with subscribed(engine) as (pool, metrics):
        labels = {"server": "default/s", "result": "unreadable"}
        await eventually(lambda: bool(metrics.registry.get_sample_value("attache_kv_events_total", labels)))
        await engine.store(block("a"))
        await eventually(lambda: held(pool, block("a")) == 4)


async def test_a_rank_that_is_not_configured_any_more_leaves_the_feed_to_the_others() -> None:
    engine = Engine()
    engine.start()
    config = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: s}
spec:
  model: m
  kvEvents: {topic: "kv@", dataParallelSize: %d}
  endpoints: [{address: "127.0.0.1:1", kvEvents: "127.0.0.1:%d", kvReplay: "127.0.0.1:%d"}]
"""
    texts = [config % (ranks, engine.port, engine.replay) for ranks in (2, 1)]
    async with following(texts[0], engine) as (core, _):
        pool = core.pools["default/s"]
        await engine.store(block("a"))
        await eventually(lambda: held(pool, block("a")) == 4)
        assert not is_whole(pool), "nobody publishes as the other rank"
        core.apply(load_snapshot({"a.yaml": texts[1].encode()}), 0.0)
        await eventually(lambda: is_whole(pool))
        assert held(pool, block("a")) == 4


async def test_what_waits_of_a_flood_waits_at_the_publisher() -> None:
    config = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: s}
spec: {model: m, kvEvents: {}, endpoints: [{address: "127.0.0.1:1", kvEvents: "127.0.0.1:%d"}]}
"""
    context = zmq.Context()
    with context, context.socket(zmq.XPUB) as publisher:
        publisher.set(zmq.LINGER, 0)
        publisher.set(zmq.SNDHWM, 1)
        publisher.set(zmq.XPUB_NODROP, 1)
        async with following(config % publisher.bind_to_random_port("tcp://127.0.0.1")):
            await eventually(lambda: bool(publisher.poll(0)))
            sent = failures = 0
            # no turn of the event loop meanwhile
            while failures < 20 and sent < 200:
                try:
                    publisher.send_multipart([b"kv@e", bytes(8), bytes(1 << 20)], zmq.NOBLOCK)
                    sent, failures = sent + 1, 0
                except zmq.Again:
                    failures += 1
                    time.sleep(0.02)  # noqa: ASYNC251 - see above
    assert sent <= 40, "MiB, of which some are in buffers of the system"


async def test_an_engine_that_has_more_than_its_new_share_is_not_whole_even_if_it_says_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.prefix.kv_event_decoder.MOST_BLOCKS_IN_ALL", 4)
    engine = Engine()
    engine.start()
    config = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: s}
spec:
  model: m
  kvEvents: {topic: "kv@"}
  endpoints: [{address: "127.0.0.1:1", kvEvents: "127.0.0.1:%d", kvReplay: "127.0.0.1:%d"}%s]
"""
    alone, beside = (config % (engine.port, engine.replay, more) for more in ("", ', {address: "127.0.0.2:1"}'))
    async with following(alone, engine) as (core, metrics):
        pool = core.pools["default/s"]
        for letter in "abcd":
            await engine.store(block(letter))
        await eventually(lambda: is_whole(pool) and held(pool, block("d")) == 4)
        core.apply(load_snapshot({"a.yaml": beside.encode()}), 0.0)
        await eventually(lambda: pool.caches.partial_feeds == 1)
        assert held(pool, block("d")) == 0
        labels = {"server": "default/s", "result": "truncated"}
        assert metrics.registry.get_sample_value("attache_kv_events_total", labels) == 1


async def test_an_engine_with_more_than_is_followed_is_told_and_not_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("extproc.prefix.kv_event_decoder.MOST_BLOCKS", 2)
    engine = Engine()
    engine.start()
    async with subscribed(engine) as (pool, metrics):
        await eventually(lambda: is_whole(pool))
        for letter in "abcd":
            await engine.store(block(letter))
        await eventually(lambda: pool.caches.partial_feeds == 1)
        labels = {"server": "default/s", "result": "truncated"}
        await eventually(lambda: metrics.registry.get_sample_value("attache_kv_events_total", labels) == 2)
    assert caplog.text.count("than are followed") == 1
