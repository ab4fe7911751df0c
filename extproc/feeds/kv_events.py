# SPDX-License-Identifier: Apache-2.0
"""Subscribes to KV events over ZeroMQ, with a socket for each endpoint and rank.

The transport is vLLM's (``vllm/distributed/kv_events.py``): a PUB socket with the frames topic, 8-byte sequence
number, and batch; and, if configured, a ROUTER socket that replays messages from a sequence number on, ending with
number -1. SGLang uses the same.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from extproc.config.validation import parse_address, parse_endpoint
from extproc.prefix.kv_events import UnreadableEvents
from extproc.prefix.kv_index import Source
from extproc.prefix.kv_stream import KvStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config.model_server import StaticEndpoint
    from extproc.core.core import Core
    from extproc.metrics.registry import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

# How often to look for changes of the configuration.
_FOLLOW_S: Final = 0.2
_REPLAY_TIMEOUT_S: Final = 5.0
# After a failed replay, none is requested for this long.
_REPLAY_PAUSE_S: Final = 30.0
# The sequence number that ends a replay.
_END: Final = -1
_HIGH_WATER: Final = 100_000


class Publisher(msgspec.Struct, frozen=True):
    """Where one data-parallel rank of an engine publishes: ``events`` and ``replay`` are ZeroMQ addresses."""

    server: str
    address: str
    rank: int
    events: str
    replay: str | None
    topic: str


class KvEventFeed:
    """Runs a subscription for each configured publisher."""

    def __init__(self, core: Core, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics

    async def run(self) -> None:
        """Follow the configured publishers until cancelled."""
        tasks: dict[Publisher, asyncio.Task[None]] = {}
        seen: object = None
        context = zmq.asyncio.Context()
        # a subscription takes two sockets; ZeroMQ allows 1,023 by itself, and descriptors end before these do
        context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
        ranks: dict[tuple[str, str], dict[int, bool | None]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    if seen is not self._core.snapshot:
                        seen = self._core.snapshot
                        wanted = {one: pool for pool in self._core.pools.values() for one in publishers_of(pool)}
                        for gone in tasks.keys() - wanted.keys():
                            tasks.pop(gone).cancel()
                        for new in wanted.keys() - tasks.keys():
                            subscription = _Subscription(new, wanted[new], self._metrics, context, ranks)
                            tasks[new] = group.create_task(subscription.run())
                    await asyncio.sleep(_FOLLOW_S)
        finally:
            context.destroy(linger=0)


def publishers_of(pool: Pool) -> Iterator[Publisher]:
    """The publishers of KV events of ``pool`` whose host names, if they have any, are resolved."""
    events = pool.spec.kv_events
    if events is None:
        return
    for endpoint in pool.spec.endpoints:
        if _is_unresolved(endpoint.kv_events):
            continue
        has_replay = not _is_unresolved(endpoint.kv_replay) and (endpoint.kv_replay or events.replay_port) is not None
        for rank in range(events.data_parallel_size):
            yield Publisher(
                pool.name,
                endpoint.address,
                rank,
                _at(endpoint, endpoint.kv_events, events.port, rank),
                _at(endpoint, endpoint.kv_replay, events.replay_port or 0, rank) if has_replay else None,
                events.topic,
            )


def _is_unresolved(place: str | None) -> bool:
    return place is not None and not parse_endpoint(place).is_ip


def _at(endpoint: StaticEndpoint, own: str | None, port: int, rank: int) -> str:
    host, port = parse_address(own) if own is not None else (parse_address(endpoint.address)[0], port)
    return f"tcp://[{host}]:{port + rank}" if ":" in host else f"tcp://{host}:{port + rank}"


class _Subscription:
    """Follows one publisher: connects, reads, and requests replays of missed messages."""

    def __init__(
        self,
        publisher: Publisher,
        pool: Pool,
        metrics: Metrics,
        context: zmq.asyncio.Context,
        ranks: dict[tuple[str, str], dict[int, bool | None]],
    ) -> None:
        """``ranks``: by (server, address) the state of each rank's feed, shared by all subscriptions."""
        self._publisher = publisher
        self._ranks = ranks
        self._pool = pool
        self._metrics = metrics
        self._context = context
        self._stream: KvStream | None = None
        self._row = -1
        self._next_replay_at_s = 0.0

    async def run(self) -> None:
        """Follow the publisher until cancelled."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.SUBSCRIBE, self._publisher.topic.encode())
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._publisher.events)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(monitor, socket))
                while True:
                    await self._take(await socket.recv_multipart(), socket)
        finally:
            socket.disable_monitor()
            socket.close(linger=0)
            self._set_state(is_whole=None)

    async def _watch(self, monitor: zmq.asyncio.Socket, socket: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                log.info("KV events of %s: disconnected", self._publisher.address)
                if self._stream is not None:
                    self._stream.disconnected()
                self._set_state(is_whole=None)
            elif self._publisher.replay is not None:
                # includes the events of an engine that publishes nothing now
                await self._replay(0, socket)
            else:
                self._set_state(is_whole=False)

    def _current(self) -> KvStream | None:
        """The stream into the endpoint's row, a new one if the row has changed; None if it was removed."""
        row, index = self._pool.table.row_of(self._publisher.address), self._pool.caches.kv_index
        if row is None or index is None:
            return None
        if self._stream is None or row != self._row:
            self._row = row
            self._stream = KvStream(index, Source(row, self._publisher.rank))
        return self._stream

    async def _take(self, frames: list[bytes], socket: zmq.asyncio.Socket) -> None:
        stream = self._current()
        if stream is None or len(frames) < 2:
            return
        number, payload = int.from_bytes(frames[-2], "big", signed=True), frames[-1]
        try:
            start = stream.receive(number, payload)
            if start is not None and not await self._replay(start, socket):
                stream.missed(number, payload)
        except UnreadableEvents as error:
            self._reset(stream, error)
        self._metrics.kv_events(self._publisher.server, "received")
        self._set_state(is_whole=stream.is_whole)

    async def _replay(self, start: int, socket: zmq.asyncio.Socket) -> bool:
        """Request and apply all messages from ``start`` on; False if that fails."""
        stream, loop = self._current(), asyncio.get_running_loop()
        if self._publisher.replay is None or stream is None or loop.time() < self._next_replay_at_s:
            return False
        try:
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                messages = await self._ask(self._publisher.replay, start)
        except TimeoutError:
            self._next_replay_at_s = loop.time() + _REPLAY_PAUSE_S
            self._metrics.kv_events(self._publisher.server, "replay_failed")
            log.warning(
                "KV events of %s: no answer from the replay socket %s", self._publisher.address, self._publisher.replay
            )
            return False
        try:
            stream.replayed(start, messages)
        except UnreadableEvents as error:
            self._reset(stream, error)
            return False
        self._metrics.kv_events(self._publisher.server, "replayed")
        self._set_state(is_whole=stream.is_whole)
        await self._drop_old(stream, socket)
        return True

    def _reset(self, stream: KvStream, error: UnreadableEvents) -> None:
        """Reset the stream after unreadable events; it continues with the next message."""
        self._metrics.kv_events(self._publisher.server, "unreadable")
        log.warning("KV events of %s: %s", self._publisher.address, error)
        stream.disconnected()

    async def _ask(self, replay: str, start: int) -> list[tuple[int, bytes]]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            messages: list[tuple[int, bytes]] = []
            while True:
                frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number == _END or not frames[-1]:
                    return messages
                messages.append((number, frames[-1]))
        finally:
            socket.close(linger=0)

    async def _drop_old(self, stream: KvStream, socket: zmq.asyncio.Socket) -> None:
        """Skip queued messages that the replay has already brought."""
        while await socket.poll(0):
            frames = await socket.recv_multipart()
            if not stream.is_old(int.from_bytes(frames[-2], "big", signed=True)):
                await self._take(frames, socket)
                return

    def _set_state(self, *, is_whole: bool | None) -> None:
        """Report the state of the feed to the pool; that of an endpoint is the worst of its ranks."""
        row = self._pool.table.row_of(self._publisher.address)
        if row is not None:
            ranks = self._ranks.setdefault((self._publisher.server, self._publisher.address), {})
            ranks[self._publisher.rank] = is_whole
            states = set(ranks.values())
            self._pool.caches.set_feed_state(row, is_whole=None if None in states else states == {True})
