# SPDX-License-Identifier: Apache-2.0
"""gRPC over HTTP/2 on the event loop: each call has a task of its own, which reads and writes whole messages.

In place of grpc.aio, where each message costs a wake-up of a second thread each way (docs/decisions/0024). Messages are
not compressed, and deadlines are the client's to keep: it resets the call.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import quote

from google.protobuf.message import DecodeError
from hpack.hpack import encode_integer

from extproc.listen_sockets import BACKLOG
from extproc.rpc.http2 import (
    WINDOW,
    DataReceived,
    Http2Connection,
    Http2ProtocolError,
    StreamDrained,
    StreamEnded,
    StreamOpened,
    StreamReset,
)
from extproc.task_supervisor import FailureLog

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    from extproc.rpc.header_blocks import Headers

    Handler = Callable[["RpcCall"], Awaitable[None]]
    # From a message to the answer; None: the handler is to have it.
    Relay = Callable[[bytes], bytes | None]

log = logging.getLogger(__name__)
# Whether the message is compressed, and its length.
_PREFIX: Final = Struct(">BL")
# From accepting a connection to the preface of HTTP/2, and likewise the handshake of TLS before it.
_GREETING_S: Final = 10.0
# Printable ASCII but for the percent sign.
_UNQUOTED: Final = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_LONGEST_REASON: Final = 1000
# A gateway that we do not configure may send whole bodies of any size that its own limits allow.
MOST_MESSAGE_BYTES: Final = 64 * 1024 * 1024


class Status(enum.IntEnum):
    """How a call ends."""

    OK = 0
    UNKNOWN = 2
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13


class RpcFailed(Exception):
    """Raised by a handler to end its call with ``status``."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


def _field(name: str, value: str) -> bytes:
    """A header that leaves the decoder's table as it is."""
    texts = (text.encode() for text in (name, value))
    return b"\x00" + b"".join(bytes(encode_integer(len(text), 7)) + text for text in texts)


_HEAD: Final = _field(":status", "200") + _field("content-type", "application/grpc")
_NO_GRPC: Final = _field(":status", "415")
_OK: Final = _field("grpc-status", "0")


def _trailers(status: Status, why: str) -> bytes:
    if status is Status.OK:
        return _OK
    return _field("grpc-status", str(int(status))) + _field(
        "grpc-message", quote(why[:_LONGEST_REASON], safe=_UNQUOTED)
    )


class _Reader:
    """The messages in a body that comes in parts."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes``: of a message; a longer one is refused before its bytes are kept."""
        self._most_bytes = most_bytes
        self._parts: list[bytes] = []
        self._missing = _PREFIX.size

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with this part; raises RpcFailed."""
        if len(data) < self._missing:
            self._parts.append(data)
            self._missing -= len(data)
            return []
        if self._parts:
            data = b"".join((*self._parts, data))
            self._parts.clear()
        messages, at, size, self._missing = [], 0, len(data), _PREFIX.size
        while size - at >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(data, at)
            if is_compressed:
                raise RpcFailed(Status.UNIMPLEMENTED, "messages must not be compressed")
            if length > self._most_bytes:
                why = f"a message of {length} bytes; at most {self._most_bytes}"
                raise RpcFailed(Status.RESOURCE_EXHAUSTED, why)
            end = at + _PREFIX.size + length
            if end > size:
                self._missing += length
                break
            messages.append(data[at + _PREFIX.size : end])
            at = end
        if at < size:
            self._parts.append(data[at:])
            self._missing -= size - at
        return messages


class RpcCall:
    """One call, as its handler sees it. ``metadata``: the headers of its request."""

    def __init__(self, connection: _Connection, stream: int, metadata: Headers, most_message_bytes: int) -> None:
        self.metadata = metadata
        self._connection = connection
        self._stream = stream
        self._reader = _Reader(most_message_bytes)
        self._arrived: deque[bytes] = deque()
        # the client has sent all
        self._is_read = False
        self._problem: RpcFailed | None = None
        self._relay: Relay | None = None
        self._is_begun = False
        # the bytes of ``_arrived``, and those for which the client's window is still to be opened again
        self._unread = self._owed = 0
        # a message may be read ahead while another is written
        self._waiters: set[asyncio.Future[None]] = set()

    async def read(self, relay: Relay | None = None) -> bytes | None:
        """The next message; None: the client has sent its last. Raises RpcFailed.

        ``relay``: answers the messages that come while this waits, as they come, without the task's being woken. The
        first that it does not answer is returned.
        """
        while not self._arrived:
            if self._problem is not None:
                raise self._problem
            if self._is_read:
                return None
            self._relay = relay
            await self._wait()
        self._relay = None
        message = self._arrived.popleft()
        self._unread -= len(message)
        self._open_window()
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; waits while the client takes none."""
        is_sent = self._send(message)
        self._connection.flush()
        while not is_sent:
            await self._wait()
            is_sent = not self._connection.http2.unsent_count(self._stream)
        if self._connection.is_full is not None:
            await self._connection.is_full.wait()

    def finish(self, status: Status, why: str) -> None:
        """The last of the answer."""
        self._begin()
        self._connection.http2.end_stream(self._stream, _trailers(status, why))
        self._connection.flush()

    def on_data(self, data: bytes) -> None:
        """A part of the request's body has come."""
        if self._problem is not None:
            return
        self._owed += len(data)
        try:
            messages = self._reader.feed(data)
        except RpcFailed as error:
            self._problem, messages = error, []
        for message in messages:
            if self._relay is None or not self._is_relayed(message, self._relay):
                # those behind it are for the handler, too
                self._relay = None
                self._unread += len(message)
                self._arrived.append(message)
        self._open_window()
        if self._arrived or self._problem is not None:
            self.wake()

    def _is_relayed(self, message: bytes, relay: Relay) -> bool:
        # the handler can wait until the client takes more
        if self._connection.is_full is not None or self._connection.http2.unsent_count(self._stream):
            return False
        try:
            answer = relay(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the connection's other calls
            self._connection.note_failure(error)
            return False
        if answer is None:
            return False
        self._send(answer)
        return True

    def _send(self, message: bytes) -> bool:
        self._begin()
        return self._connection.http2.send_data(self._stream, _PREFIX.pack(0, len(message)) + message)

    def on_end_stream(self) -> None:
        """The request is whole."""
        self._is_read = True
        self.wake()

    def wake(self) -> None:
        """Let what waits look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        await waiter

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._connection.http2.send_headers(self._stream, _HEAD)

    def _open_window(self) -> None:
        """Open the client's window again by halves, while the handler keeps up with what comes."""
        if self._owed >= WINDOW // 2 and self._unread < WINDOW // 2:
            self._connection.http2.grant_window(self._stream, self._owed)
            self._owed = 0
            self._connection.flush()


class _Connection(asyncio.Protocol):
    """One client: between its transport, its ``http2``, and the tasks of its calls."""

    def __init__(self, server: RpcServer) -> None:
        self.http2 = Http2Connection()
        # what is sent waits for the client to take it
        self.is_full: asyncio.Event | None = None
        self._server = server
        self._transport: asyncio.Transport
        self._late: asyncio.TimerHandle
        self._calls: dict[int, tuple[RpcCall, asyncio.Task[None]]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(WINDOW)
        self._server.connections.add(self)
        self._late = asyncio.get_running_loop().call_later(_GREETING_S, self._expect_greeting)
        if self._server.is_stopping:
            self.http2.go_away()
        self.flush()
        # it was accepted before the server closed, and made after
        if self._server.is_closed:
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            events = self.http2.receive(data)
        except Http2ProtocolError as error:
            self._server.failures.record("a gateway's connection breaks HTTP/2", error, is_ours=False)
            self.flush()
            self._transport.close()
            return
        for event in events:
            if isinstance(event, StreamOpened):
                self._open(event.stream, event.headers)
            elif event.stream in self._calls:
                call, task = self._calls[event.stream]
                match event:
                    case DataReceived():
                        call.on_data(event.data)
                    case StreamEnded():
                        call.on_end_stream()
                    case StreamDrained():
                        call.wake()
                    case StreamReset():
                        task.cancel()
        self.flush()

    def _open(self, stream: int, headers: Headers) -> None:
        named = dict(headers)
        if not named.get("content-type", "").startswith("application/grpc"):
            self.http2.end_stream(stream, _NO_GRPC)
            return
        handler = self._server.handlers.get(named.get(":path", ""))
        if handler is None:
            self.http2.end_stream(stream, _HEAD + _trailers(Status.UNIMPLEMENTED, "there is no such method"))
            return
        call = RpcCall(self, stream, headers, self._server.most_message_bytes())
        task = asyncio.get_running_loop().create_task(self._run(handler, call))
        self._calls[stream] = call, task
        # not in the task: one that is cancelled before its first step runs none of its code
        task.add_done_callback(lambda _: self._calls.pop(stream))

    async def _run(self, handler: Handler, call: RpcCall) -> None:
        status, why = Status.OK, ""
        try:
            await handler(call)
        except RpcFailed as error:
            status, why = error.status, str(error)
        except DecodeError as error:
            status, why = Status.INTERNAL, f"a message of another type: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends one call
            self.note_failure(error)
            status, why = Status.UNKNOWN, type(error).__name__
        call.finish(status, why)

    def note_failure(self, error: Exception) -> None:
        """Of a call."""
        self._server.failures.record("a call has failed", error)

    def flush(self) -> None:
        """Hand over what is to be sent."""
        if output := self.http2.take_output():
            self._transport.write(output)

    def pause_writing(self) -> None:
        """Nor read from a client that does not read."""
        self.is_full = asyncio.Event()
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It has taken what was sent."""
        if self.is_full is not None:
            self.is_full.set()
            self.is_full = None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _expect_greeting(self) -> None:
        if not self.http2.is_greeted:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._late.cancel()
        self._server.connections.discard(self)
        self.cancel_calls()

    def cancel_calls(self) -> list[asyncio.Task[None]]:
        """Cancel what runs; returns it."""
        tasks = [task for _, task in self._calls.values()]
        for task in tasks:
            task.cancel()
        return tasks

    def go_away(self) -> None:
        """The client is to call elsewhere; what runs goes on."""
        self.http2.go_away()
        self.flush()

    def close(self) -> None:
        """Close when all is sent."""
        self._transport.close()


class RpcServer:
    """Listens, and runs the handler of each call. ``handlers``: by path, ``/package.Service/Method``.
    ``most_message_bytes``: of a message of a call that begins.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], most_message_bytes: Callable[[], int] = lambda: MOST_MESSAGE_BYTES
    ) -> None:
        self.handlers = dict(handlers)
        self.most_message_bytes = most_message_bytes
        self.connections: set[_Connection] = set()
        self.failures = FailureLog(log)
        self.is_stopping = False
        self.is_closed = False
        self._listening: asyncio.Server | None = None

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Take the connections of a socket, which is closed with the server."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            self._connected,
            sock=listening,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _GREETING_S,
            backlog=BACKLOG,
        )

    def _connected(self) -> _Connection:
        return _Connection(self)

    def stop_listening(self) -> None:
        """Take no new connections, and ask clients for no new calls; those that run go on."""
        self.is_stopping = True
        if self._listening is not None:
            self._listening.close()
        for connection in self.connections:
            connection.go_away()

    async def close(self) -> None:
        """Cancel all calls and close all connections."""
        self.stop_listening()
        self.is_closed = True
        connections = list(self.connections)
        running = [task for connection in connections for task in connection.cancel_calls()]
        if running:
            await asyncio.wait(running)
        for connection in connections:
            connection.close()
