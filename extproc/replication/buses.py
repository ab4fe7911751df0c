# SPDX-License-Identifier: Apache-2.0
"""Buses between extproc processes: socket files between workers of a machine, a Redis channel between machines.

While Redis does not answer, every process decides by the events of its own machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_HIGH_WATER: Final = 10_000
# Between two looks for processes that have come or gone.
_FOLLOW_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_TIMEOUT_S: Final = 1.0
# Between two checks whether this has been cancelled.
_LISTEN_S: Final = 0.5
# Of a batch. The heartbeat makes up for a longer one, which is not sent.
_MOST_BATCH_BYTES: Final = 8 << 20
# Of one answer of Redis: a batch, and what is around it.
_MOST_ANSWER_BYTES: Final = _MOST_BATCH_BYTES + (64 << 10)
# What an element of an answer counts beside its bytes: the memory of a small object.
_ELEMENT_BYTES: Final = 64


class UnixSocketBus:
    """Between the processes of one supervisor, each with a socket file in ``directory``. Beside those that serve there
    may be predecessors, which end with their requests.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """``name``: of this process among the others."""
        self._directory = directory
        self._file = directory / f"{os.getpid()}-{name}.events"
        # of the others that it is connected to
        self._known: set[Path] = set()
        # while it runs
        self._own: zmq.asyncio.Socket | None = None

    @property
    def has_readers(self) -> bool:
        """Whether there are others to send to."""
        return bool(self._known)

    def peer_files(self) -> set[Path]:
        """The files of the other processes. A process that was killed has left its file, which is removed."""
        found = {file for file in self._directory.glob("*.events") if file != self._file}
        gone = {file for file in found if not Path("/proc", file.name.partition("-")[0]).exists()}
        for file in gone:
            file.unlink(missing_ok=True)
        return found - gone

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Exchange batches until cancelled."""
        context = zmq.asyncio.Context()
        try:
            self._own = context.socket(zmq.PUB)
            self._own.setsockopt(zmq.SNDHWM, _HIGH_WATER)
            self._own.bind(f"ipc://{self._file}")
            others = context.socket(zmq.SUB)
            others.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            others.setsockopt(zmq.SUBSCRIBE, b"")
            others.setsockopt(zmq.RECONNECT_IVL, 100)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(others))
                while True:
                    receive(await others.recv())
        finally:
            context.destroy(linger=0)
            self._own = None
            self._file.unlink(missing_ok=True)

    async def _follow(self, subscriber: zmq.asyncio.Socket) -> None:
        """Connect to those that come, and disconnect from those that have gone, until cancelled."""
        self._known = set()
        while True:
            found = self.peer_files()
            for file in found - self._known:
                subscriber.connect(f"ipc://{file}")
            for file in self._known - found:
                subscriber.disconnect(f"ipc://{file}")
            self._known = found
            await asyncio.sleep(_FOLLOW_S)

    async def send(self, payload: bytes) -> None:
        """Never waits: a worker that does not read loses messages."""
        if self._own is not None:
            await self._own.send(payload, zmq.NOBLOCK)


class RedisUnusable(Exception):
    """There can be no client; the message says what to do. It holds nothing of the URL, which may have a password."""


def redis_client(
    url: str, *, timeout_s: float | None, connections: int = 4, most_answer_bytes: int = _MOST_ANSWER_BYTES
) -> tuple[Any, type[Exception]]:
    """A client with that many connections at most, and the type of its errors; raises RedisUnusable.

    A connection on which a longer answer comes, or is announced, is closed.
    """
    try:
        # an extra: only deployments on several machines need it
        from redis.asyncio import BlockingConnectionPool, Redis  # noqa: PLC0415
        from redis.asyncio.connection import parse_url  # noqa: PLC0415
        from redis.exceptions import RedisError  # noqa: PLC0415
    except ImportError:
        raise RedisUnusable("install the extra: pip install 'attache[redis]'") from None
    try:
        # the URL may have options of its own; the default of the protocol depends on the library's version
        options: dict[str, Any] = {"protocol": 2, **parse_url(url)}
        pool = BlockingConnectionPool(
            **{
                "max_connections": connections,
                "timeout": timeout_s or _TIMEOUT_S,
                "socket_timeout": timeout_s,
                "socket_connect_timeout": timeout_s or _TIMEOUT_S,
                "socket_keepalive": True,
                **options,
                "parser_class": _bounded_parser(options["protocol"], most_answer_bytes),
            }
        )
    except ValueError:
        advice = "with signs of the password that are no letters or digits as %40, %2F and so on"
        raise RedisUnusable(f"this is no URL of a Redis; write redis://:PASSWORD@HOST:PORT, {advice}") from None
    return Redis.from_pool(pool), RedisError


def _bounded_parser(protocol: int, most_bytes: int) -> type[Any]:
    """The library's parser, which by itself reads whatever length an answer announces.

    Its methods for a line and for so many bytes are internal to the library: a test has a server that lies.
    """
    from redis._parsers import _AsyncRESP2Parser, _AsyncRESP3Parser  # noqa: PLC0415 - an extra
    from redis.exceptions import ConnectionError as RedisConnectionError  # noqa: PLC0415

    class BoundedParser(_AsyncRESP3Parser if protocol == 3 else _AsyncRESP2Parser):  # type: ignore[misc]
        _left = most_bytes

        async def read_response(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - the library's
            self._left = most_bytes
            return await super().read_response(*args, **options)

        async def _readline(self) -> bytes:
            self._take(_ELEMENT_BYTES)
            line: bytes = await super()._readline()
            self._take(len(line))
            return line

        async def _read(self, length: int) -> bytes:
            self._take(length)
            read: bytes = await super()._read(length)
            return read

        def _take(self, size: int) -> None:
            self._left -= size
            if size < 0 or self._left < 0:
                raise RedisConnectionError(f"an answer has more than {most_bytes} bytes; see what runs there")

    return BoundedParser


class RedisBus:
    """``url``: redis://host:port/db; ``channel``: shared by those that serve the same engines."""

    def __init__(self, url: str, channel: str) -> None:
        self._channel = channel
        self._redis, _ = redis_client(url, timeout_s=_TIMEOUT_S)
        # a subscriber waits while there is no message
        self._listening, _ = redis_client(url, timeout_s=None)

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Exchange batches until cancelled."""
        pause_s = 0.1
        task = asyncio.current_task()
        try:
            # the client library swallows a cancellation that comes while it connects, also when it connects again by
            # itself
            while not _is_cancelled(task):
                try:
                    async with self._listening.pubsub(ignore_subscribe_messages=True) as subscription:
                        await subscription.subscribe(self._channel)
                        log.info("sharing over Redis channel %s", self._channel)
                        pause_s = 0.1
                        while not _is_cancelled(task):
                            message = await subscription.get_message(timeout=_LISTEN_S)
                            if message is not None:
                                receive(message["data"])
                except Exception as error:  # noqa: BLE001 - the client library raises all sorts at what is not Redis' protocol
                    log.warning("Redis is away, this process decides by what it sees itself: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            await self._redis.aclose()
            await self._listening.aclose()

    async def send(self, payload: bytes) -> None:
        """Raises OSError while Redis is away, and for a batch that the others would not read."""
        if len(payload) > _MOST_BATCH_BYTES:
            raise OSError(f"a batch has {len(payload)} bytes, and at most {_MOST_BATCH_BYTES} are read")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._redis.publish(self._channel, payload)
        except Exception as error:  # noqa: BLE001 - as above
            raise OSError(str(error)) from None
        finally:
            # swallowed here, it would leave the caller running for ever
            if _is_cancelled(asyncio.current_task()):
                raise asyncio.CancelledError


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and bool(task.cancelling())
