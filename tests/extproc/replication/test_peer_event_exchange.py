# SPDX-License-Identifier: Apache-2.0
"""What comes over the buses: batches that come twice, and batches that cannot be repeated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from extproc.admission.token_buckets import Limit
from extproc.core.peer_events import EventBatch, LimitSpent, PeerEvent, ProcessAlive, encode_events
from extproc.metrics.request_metrics import Metrics
from extproc.replication.buses import RedisBus, RedisUnusable, UnixSocketBus, redis_client
from extproc.replication.peer_event_exchange import PeerEventExchange
from tests.lying_redis import LIES, lying_redis
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPENT = LimitSpent("here", "default/chat/0/requests/acme", Limit(1.0, 10.0), 1.0)


class MemoryBus:
    """Gives what one process sends to all others on it, in the same moment."""

    def __init__(self, wire: list[MemoryBus]) -> None:
        self._wire = wire
        self._receive: Callable[[bytes], None] | None = None
        wire.append(self)

    async def run(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        await asyncio.Event().wait()

    async def send(self, payload: bytes) -> None:
        for one in self._wire:
            if one._receive is not None:
                one._receive(payload)


def metrics() -> Metrics:
    return Metrics(list, lambda: 0.0, lambda: 0.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a list gives no event
        await asyncio.sleep(0)


def test_what_comes_over_two_buses_is_repeated_once() -> None:
    heard: list[PeerEvent] = []

    async def talk() -> None:
        wires: list[list[MemoryBus]] = [[], []]
        one, other = (PeerEventExchange([MemoryBus(wire) for wire in wires], metrics(), origin=name) for name in "ab")
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(one.run(on_batch=lambda _: None, heartbeat=lambda: None)),
                tasks.create_task(other.run(on_batch=lambda batch: heard.extend(batch.events), heartbeat=lambda: None)),
            ]
            for number in range(1, 4):
                one.publish(SPENT)
                await until(lambda number=number: len(heard) >= number)  # type: ignore[misc]
            one.publish(ProcessAlive([]))
            await until(lambda: ProcessAlive([]) in heard)
            for task in running:
                task.cancel()

    asyncio.run(talk())
    assert heard == [SPENT, SPENT, SPENT, ProcessAlive([])]


def test_a_batch_that_cannot_be_repeated_does_not_end_the_process(caplog: pytest.LogCaptureFixture) -> None:
    found = metrics()
    peers = PeerEventExchange([], found, origin="a")

    def on_batch(batch: EventBatch) -> None:
        raise OverflowError(batch.origin)

    peers._receive(on_batch, encode_events(EventBatch("b", [ProcessAlive([])], 1)))
    assert "could not be repeated" in caplog.text
    assert found.registry.get_sample_value("attache_shared_messages_total", {"result": "failed"}) == 1


def test_batches_without_a_number_are_all_repeated() -> None:
    heard: list[EventBatch] = []
    peers = PeerEventExchange([], metrics(), origin="a")
    for _ in range(2):
        peers._receive(heard.append, encode_events(EventBatch("b", [SPENT])))
    assert len(heard) == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91\xa1\xff",
        b"\x93\xa1\xff\x90\x01",
        b"\x91" * 200_000,
        b"[]",
        b"\xff" * 9,
        b"\x92\xa1a\x91\x91\xa5\x1b[2J\n",
    ],
)
def test_a_message_that_is_no_batch_is_counted_and_told_once(payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    found = metrics()
    peers = PeerEventExchange([], found, origin="a")
    for _ in range(3):
        peers._receive(lambda _: None, payload)
    assert found.registry.get_sample_value("attache_shared_messages_total", {"result": "unreadable"}) == 3
    (line,) = caplog.messages
    assert "cannot be read" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    "answer", [b"$x\r\n", b"*2\r\n$1\r\na\r\n", b"\xff\xfe\r\n", b"+OK\r\n" * 9, b"_\r\n", b"HTTP/1.1 400\r\n"]
)
async def test_what_is_not_redis_protocol_ends_no_bus(answer: bytes) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            await reader.read(1)
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        bus = RedisBus(f"redis://127.0.0.1:{port}", "attache")
        running = asyncio.create_task(bus.run(lambda _: None))
        await eventually(lambda: connections >= 2 or running.done())
        assert not running.done()
        with pytest.raises(OSError, match=r"[A-Za-z]"):
            await bus.send(b"x")
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_batch_without_end_is_not_read_and_its_connection_ends(protocol: int, lie: tuple[bytes, bytes]) -> None:
    async with lying_redis(b"SUBSCRIBE", lie) as redis:
        bus = RedisBus(f"redis://127.0.0.1:{redis.port}?protocol={protocol}", "attache")
        running = asyncio.create_task(bus.run(lambda _: None))
        # to send, it has another one
        await eventually(lambda: redis.connections >= 2)
        # with what buffers of the system hold
        assert redis.sent < 24 << 20
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("protocol", [2, 3])
async def test_elements_of_an_answer_count_more_than_their_bytes(protocol: int) -> None:
    async with lying_redis(b"LRANGE", (b"*200000\r\n" + 200_000 * b":1\r\n", b"")) as redis:
        client, failure = redis_client(f"redis://127.0.0.1:{redis.port}?protocol={protocol}", timeout_s=30.0)
        with pytest.raises(failure, match="an answer has more than 8454144 bytes"):
            await client.lrange("a", 0, -1)
        await client.aclose()


async def test_a_batch_that_others_would_not_read_is_not_sent() -> None:
    with pytest.raises(OSError, match="a batch has 8388609 bytes"):
        await RedisBus("redis://127.0.0.1:1", "attache").send(b"x" * ((8 << 20) + 1))


@pytest.mark.parametrize(
    "url", ["redis://:s3cret/x@h:1", "redis://h:x", "http://s3cret@h:1", "redis://h:99999", "redis://h:1?db=s3cret"]
)
def test_what_is_no_url_of_a_redis_is_told_without_its_password(url: str) -> None:
    with pytest.raises(RedisUnusable, match="write redis://") as refused:
        RedisBus(url, "attache")
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_the_socket_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    # no process has this number
    (tmp_path / "99999999-killed.events").touch()
    assert not UnixSocketBus(tmp_path, "one").peer_files()
    assert not list(tmp_path.iterdir())


async def test_a_bus_has_those_that_come_and_forgets_those_that_have_gone(tmp_path: Path) -> None:
    first, late = UnixSocketBus(tmp_path, "first"), UnixSocketBus(tmp_path, "late")
    heard: dict[str, list[bytes]] = {"first": [], "late": []}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(first.run(heard["first"].append))
        await eventually(lambda: bool(late.peer_files()))
        joining = tasks.create_task(late.run(heard["late"].append))
        while not all(heard.values()):
            for bus in (first, late):
                await bus.send(b"hello")
            await asyncio.sleep(0.02)
        joining.cancel()
        await eventually(lambda: not first.peer_files())
        running.cancel()


async def test_a_bus_between_workers_can_be_run_again(tmp_path: Path) -> None:
    one, other = (UnixSocketBus(tmp_path, name) for name in "ab")
    heard: list[bytes] = []
    for _ in range(2):
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(bus.run(heard.append)) for bus in (one, other)]
            while not heard:
                await one.send(b"hello")
                await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
        heard.clear()
