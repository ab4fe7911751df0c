# SPDX-License-Identifier: Apache-2.0
"""Subscribes to KV events over ZeroMQ, with a socket for each endpoint and rank.

The transport is vLLM's (``vllm/distributed/kv_events.py``): a PUB socket with the frames topic, 8-byte sequence
number, and batch; and, if configured, a ROUTER socket that replays messages from a sequence number on, ending with
number -1. SGLang uses the same.

Publishers are not trusted. Each has a task that fails for itself: its blocks are dropped, and it is subscribed to
again. Their messages are bounded, and however many there are, requests are served in between.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from extproc.api.addresses import parse_address, parse_endpoint
from extproc.prefix.kv_event_decoder import UnreadableEvents
from extproc.prefix.kv_index import EventSource, KvStream

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from extproc.api.model_server import StaticEndpoint
    from extproc.core.core import Core
    from extproc.metrics.request_metrics import Metrics
    from extproc.scheduling.pool import Pool
    from extproc.task_supervisor import Supervisor

log = logging.getLogger(__name__)

# Between two checks for changes of the configuration.
_FOLLOW_S: Final = 0.2
_REPLAY_TIMEOUT_S: Final = 5.0
# After a failed replay, none is requested for this long.
_REPLAY_PAUSE_S: Final = 30.0
# The sequence number that ends a replay.
_END: Final = (-1).to_bytes(8, "big", signed=True)
# A step of an engine has some 100 KB at most. Of each socket so many messages wait here, and more at the publisher.
_MOST_BYTES: Final = 4 << 20
_HIGH_WATER: Final = 8
# Of one replay; vLLM keeps 10,000 messages.
_MOST_REPLAYED: Final = 100_000
_MOST_REPLAYED_BYTES: Final = 64 << 20
# Between two warnings of one publisher.
_QUIET_S: Final = 60.0
# Messages are taken for so long without a pause.
_LONGEST_TURN_S: Final = 0.002
# Between two slices of blocks that are dropped.
_SWEEP_S: Final = 0.005

# By server and address the state of each rank's feed.
_Ranks = dict[tuple[str, str], dict[int, bool | None]]


class KvPublisherAddresses(msgspec.Struct, frozen=True):
    """Where one data-parallel rank of an engine publishes: ``events`` and ``replay`` are ZeroMQ addresses."""

    server: str
    address: str
    rank: int
    events: str
    replay: str | None
    topic: str


class KvEventFeed:
    """Runs a subscription for each configured publisher."""

    def __init__(self, core: Core, metrics: Metrics, supervisor: Supervisor) -> None:
        self._core = core
        self._metrics = metrics
        self._supervisor = supervisor

    async def run(self) -> None:
        """Follow the configured publishers until cancelled."""
        tasks: dict[KvPublisherAddresses, asyncio.Task[None]] = {}
        followed: dict[KvPublisherAddresses, _Subscription] = {}
        seen: object = None
        context = zmq.asyncio.Context()
        # a subscription takes two sockets; ZeroMQ allows 1,023 by itself, and descriptors end before these do
        context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
        ranks: _Ranks = {}
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    if seen is not self._core.snapshot:
                        seen = self._core.snapshot
                        wanted = {one: pool for pool in self._core.pools.values() for one in publishers_of(pool)}
                        await _end([tasks.pop(gone) for gone in tasks.keys() - wanted.keys()])
                        followed = {one: subscription for one, subscription in followed.items() if one in wanted}
                        for subscription in followed.values():
                            subscription.check_bounds()
                        for new in wanted.keys() - tasks.keys():
                            followed[new] = _Subscription(new, wanted[new], self._metrics, context, ranks)
                            tasks[new] = group.create_task(self._follow(followed[new]))
                    await self._sweep()
                    await asyncio.sleep(_FOLLOW_S)
        finally:
            context.destroy(linger=0)

    async def _follow(self, one: _Subscription) -> None:
        try:
            await self._supervisor.run("kv_events", one.run, of=one.publisher.events)
        finally:
            one.leave()

    async def _sweep(self) -> None:
        """Drop the blocks of caches that were cleared."""
        for pool in list(self._core.pools.values()):
            while pool.caches.kv_index is not None and pool.caches.kv_index.drop_cleared_blocks():  # noqa: ASYNC110 - a turn each
                await asyncio.sleep(_SWEEP_S)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def publishers_of(pool: Pool) -> Iterator[KvPublisherAddresses]:
    """The publishers of KV events of ``pool`` whose host names, if they have any, are resolved."""
    events = pool.spec.kv_events
    if events is None:
        return
    for endpoint in pool.spec.endpoints:
        if _is_unresolved(endpoint.kv_events):
            continue
        has_replay = not _is_unresolved(endpoint.kv_replay) and (endpoint.kv_replay or events.replay_port) is not None
        for rank in range(events.data_parallel_size):
            yield KvPublisherAddresses(
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
        publisher: KvPublisherAddresses,
        pool: Pool,
        metrics: Metrics,
        context: zmq.asyncio.Context,
        ranks: _Ranks,
    ) -> None:
        """``ranks``: shared by all subscriptions."""
        self.publisher = publisher
        self._states = ranks.setdefault((publisher.server, publisher.address), {})
        self._states[publisher.rank] = None
        self._pool = pool
        self._metrics = metrics
        self._context = context
        self._stream: KvStream | None = None
        self._row = -1
        self._next_replay_at_s = self._next_warning_at_s = self._next_pause_at_s = 0.0
        # messages are applied in slices, one message after the other
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Follow the publisher until cancelled."""
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.SUBSCRIBE, self.publisher.topic.encode())
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self.publisher.events)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(monitor, socket))
                while True:
                    frames = await socket.recv_multipart()
                    async with self._turn:
                        await self._take_all(frames, socket)
                    await self._pause()
        finally:
            socket.disable_monitor()
            # left to the garbage collector, it could be open while the context waits for the end of all sockets
            monitor.close(linger=0)
            socket.close(linger=0)
            self._lose()

    def leave(self) -> None:
        """Remove the rank, which is no longer configured: the endpoint's feed is that of the other ranks."""
        self._states.pop(self.publisher.rank, None)
        self._show()

    def check_bounds(self) -> None:
        """Report it if the engine has more than is followed."""
        stream = self._current()
        if stream is not None and stream.is_truncated:
            self._metrics.count_kv_events(self.publisher.server, "truncated")
            self._warn("more blocks, media or block sizes than are followed; the approximate index decides, too")
            self._set_state(is_whole=False)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        # ZeroMQ disconnects a sender of a longer message
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        return socket

    async def _watch(self, monitor: zmq.asyncio.Socket, socket: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            async with self._turn:
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    log.info("KV events of %s: disconnected", self.publisher.address)
                    self._lose()
                elif self.publisher.replay is None:
                    self._set_state(is_whole=False)
                elif await self._replay(0):
                    # included the events of an engine that publishes nothing now
                    await self._take_all(await self._first_new(socket), socket)

    def _current(self) -> KvStream | None:
        """The stream into the endpoint's row, a new one if the row has changed; None if it was removed."""
        row, index = self._pool.table.row_of(self.publisher.address), self._pool.caches.kv_index
        if row is None or index is None:
            return None
        if self._stream is None or row != self._row:
            self._row = row
            self._stream = KvStream(index, EventSource(row, self.publisher.rank))
        return self._stream

    async def _take_all(self, frames: Sequence[bytes] | None, socket: zmq.asyncio.Socket) -> None:
        """Take a message, and one that was received meanwhile."""
        while frames is not None:
            frames = await self._first_new(socket) if await self._take(frames) else None

    async def _take(self, frames: Sequence[bytes]) -> bool:
        """Take a message; whether it came with a replay."""
        stream, is_replayed = self._current(), False
        if stream is None:
            return False
        try:
            number = _number(frames)
            start = stream.gap_before(number)
            if start is None:
                await self._apply(stream, stream.apply(number, frames[-1]))
            else:
                is_replayed = await self._replay(start)
                if not is_replayed:
                    await self._apply(stream, stream.restart_from(number, frames[-1]))
        except UnreadableEvents as error:
            self._reset(stream, error)
        self.check_bounds()
        self._metrics.count_kv_events(self.publisher.server, "received")
        self._report()
        return is_replayed

    async def _apply(self, stream: KvStream, slices: Iterator[None]) -> None:
        """Apply messages, with requests in between. Raises UnreadableEvents."""
        for _ in slices:
            await self._pause()
            if self._current() is not stream:
                # the endpoint has gone meanwhile, and its row may be another's
                return

    async def _pause(self) -> None:
        """Give requests a turn of the event loop, if they had none for a while: a message that is already there is
        received without one.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_pause_at_s:
            await asyncio.sleep(0)
            self._next_pause_at_s = loop.time() + _LONGEST_TURN_S

    async def _replay(self, start: int) -> bool:
        """Request and apply all messages from ``start`` on; False if that fails."""
        stream, loop = self._current(), asyncio.get_running_loop()
        if self.publisher.replay is None or stream is None or loop.time() < self._next_replay_at_s:
            return False
        self._next_replay_at_s = loop.time() + _REPLAY_PAUSE_S
        try:
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                messages = await self._ask(self.publisher.replay, start)
            await self._apply(stream, stream.apply_replay(start, messages))
        except TimeoutError:
            self._metrics.count_kv_events(self.publisher.server, "replay_failed")
            self._warn(f"no answer from the replay socket {self.publisher.replay}")
            return False
        except UnreadableEvents as error:
            self._reset(stream, error)
            return False
        self._next_replay_at_s = 0.0
        self._metrics.count_kv_events(self.publisher.server, "replayed")
        self._report()
        return True

    def _reset(self, stream: KvStream, error: UnreadableEvents) -> None:
        """Reset the stream after unreadable events; it continues with the next message."""
        self._metrics.count_kv_events(self.publisher.server, "unreadable")
        self._warn(str(error))
        stream.on_disconnect()

    def _warn(self, message: str) -> None:
        """Now and then; metrics count the others."""
        now = asyncio.get_running_loop().time()
        if now >= self._next_warning_at_s:
            self._next_warning_at_s = now + _QUIET_S
            log.warning("KV events of %s: %s", self.publisher.address, message)

    async def _ask(self, replay: str, start: int) -> list[tuple[int, bytes]]:
        """The messages of a replay. Raises UnreadableEvents."""
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            messages: list[tuple[int, bytes]] = []
            size = 0
            while True:
                frames = await socket.recv_multipart()
                if len(frames) > 1 and (frames[-2] == _END or not frames[-1]):
                    return messages
                messages.append((_number(frames), frames[-1]))
                size += len(frames[-1])
                if len(messages) > _MOST_REPLAYED or size > _MOST_REPLAYED_BYTES:
                    raise UnreadableEvents("the replay does not end")
                await self._pause()
        finally:
            socket.close(linger=0)

    async def _first_new(self, socket: zmq.asyncio.Socket) -> Sequence[bytes] | None:
        """The first message that waits, but for those that a replay has brought; None if there is none."""
        while await socket.poll(0):
            frames: Sequence[bytes] = await socket.recv_multipart()
            if self._stream is None or not _is_old(self._stream, frames):
                return frames
            await self._pause()
        return None

    def _lose(self) -> None:
        """The publisher is away: drop its blocks."""
        if self._stream is not None:
            self._stream.on_disconnect()
        self._set_state(is_whole=None)

    def _report(self) -> None:
        stream = self._current()
        self._set_state(is_whole=None if stream is None else stream.is_whole)

    def _set_state(self, *, is_whole: bool | None) -> None:
        self._states[self.publisher.rank] = is_whole
        self._show()

    def _show(self) -> None:
        """Show the pool the state of the endpoint's feed: the worst of its ranks."""
        row = self._pool.table.row_of(self.publisher.address)
        if row is not None:
            states = set(self._states.values()) or {None}
            self._pool.caches.set_feed_state(row, is_whole=None if None in states else states == {True})


def _number(frames: Sequence[bytes]) -> int:
    """The sequence number of a message. Raises UnreadableEvents."""
    if len(frames) < 2 or len(frames[-2]) != len(_END) or frames[-2][0] > 127:
        raise UnreadableEvents("a message has no sequence number of 8 bytes before its events")
    return int.from_bytes(frames[-2], "big")


def _is_old(stream: KvStream, frames: Sequence[bytes]) -> bool:
    try:
        return stream.was_applied(_number(frames))
    except UnreadableEvents:
        # the consumer of the message raises the same error
        return False
