# SPDX-License-Identifier: Apache-2.0
"""Calls of gRPC as no library sends them, and an engine that answers as no library does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

from tests.model_calls import V2, framed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Headers = list[tuple[str, str]]
_HEAD: Final = [(":status", "200"), ("content-type", "application/grpc")]
_FORGED: Final = [("x-attache-cost-micros", "1"), ("x-ratelimit-remaining-tokens", "1"), ("x-envoy-anything", "1")]
_FINE: Final = framed(V2["ModelInferResponse"](model_name="fine").SerializeToString())
HUGE_BYTES: Final = 40 * 2**20


class Answer:
    """Of a raw call. ``reset``: the code with which the stream was cut, None if it ended."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.reset: int | None = None

    @property
    def outcome(self) -> str:
        """Status of HTTP, and that of gRPC, such as ``200/13``."""
        return f"{self.headers.get(':status')}/{self.headers.get('grpc-status', '-')}"


class RawClient:
    """One connection of HTTP/2 without TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        config = h2.config.H2Configuration(
            client_side=True, header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        # answers of any size
        self.connection.increment_flow_control_window(2**30)
        self.answers: dict[int, Answer] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, url: str) -> Self:
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.writer.close()

    def begin(self, path: str, more: Headers, *, method: str = "POST", ends: bool = False) -> int:
        """The number of a new stream."""
        stream = self.connection.get_next_available_stream_id()
        self.answers[stream], self._ended[stream] = Answer(), asyncio.Event()
        head = [(":method", method), (":scheme", "http"), (":authority", "gateway"), (":path", path)]
        self.connection.send_headers(stream, [*head, *more], end_stream=ends)
        self.connection.increment_flow_control_window(2**30, stream)
        return stream

    def flush(self) -> None:
        self.writer.write(self.connection.data_to_send())

    async def send(self, stream: int, data: bytes) -> None:
        """All of it, as fast as the window allows; no further once the answer has come."""
        while data and not self._ended[stream].is_set():
            size = min(self.connection.local_flow_control_window(stream), 16_384, len(data))
            if size:
                self.connection.send_data(stream, data[:size])
                data = data[size:]
                self.flush()
            await asyncio.sleep(0)

    async def answer(self, stream: int) -> Answer:
        self.flush()
        async with asyncio.timeout(60):
            await self._ended[stream].wait()
        return self.answers[stream]

    async def call(self, path: str, body: bytes, more: Headers, trailers: Headers | None = None) -> Answer:
        """The answer to a whole call."""
        stream = self.begin(path, more)
        await self.send(stream, body)
        if not self._ended[stream].is_set():
            if trailers is None:
                self.connection.end_stream(stream)
            else:
                self.connection.send_headers(stream, trailers, end_stream=True)
        return await self.answer(stream)

    async def _read(self) -> None:
        while data := await self._reader.read(2**20):
            for event in self.connection.receive_data(data):
                self._receive(event)
            self.flush()
        for one in self._ended.values():
            one.set()

    def _receive(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                self.answers[event.stream_id].headers.update(dict(event.headers or []))  # type: ignore[arg-type]
            case h2.events.DataReceived():
                self.answers[event.stream_id].body += event.data or b""
            case h2.events.StreamReset():
                self.answers[event.stream_id].reset = event.error_code
                self._ended[event.stream_id].set()
            case h2.events.StreamEnded():
                self._ended[event.stream_id].set()
            case _:
                pass


class RawEngine:
    """Answers by the name of the model, which is one of ``ANSWERS`` or ``REACTIONS``. ``calls``: names that came;
    ``cut``: those whose streams the gateway has reset.
    """

    def __init__(self) -> None:
        self.address = ""
        self.calls: list[str] = []
        self.cut: list[str] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8", validate_outbound_headers=False)
        connection = h2.connection.H2Connection(config)
        connection.initiate_connection()
        names, bodies, left = dict[int, str](), dict[int, bytes](), dict[int, bytes]()
        while data := await reader.read(2**20):
            for event in connection.receive_data(data):
                match event:
                    case h2.events.DataReceived():
                        bodies[event.stream_id] = bodies.get(event.stream_id, b"") + (event.data or b"")
                        connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case h2.events.StreamReset():
                        self.cut.append(names.pop(event.stream_id, ""))
                        left.pop(event.stream_id, None)
                    case h2.events.StreamEnded():
                        name = V2["ModelInferRequest"].FromString(bodies.pop(event.stream_id)[5:]).model_name
                        names[event.stream_id] = name
                        self.calls.append(name)
                        if name == "huge":
                            connection.send_headers(event.stream_id, _HEAD)
                            left[event.stream_id] = framed(bytes(HUGE_BYTES))
                        else:
                            self._react(name, connection, event.stream_id, writer)
                    case _:
                        pass
            _send_what_fits(connection, left)
            if writer.is_closing():
                return
            writer.write(connection.data_to_send())
        writer.close()

    def _react(
        self, name: str, connection: h2.connection.H2Connection, stream: int, writer: asyncio.StreamWriter
    ) -> None:
        if name in ANSWERS:
            for number, (part, is_last) in enumerate(ANSWERS[name]):
                if isinstance(part, bytes):
                    connection.send_data(stream, part, end_stream=is_last)
                else:
                    head = part if number or (":status" in dict(part)) else [*_HEAD, *part]
                    connection.send_headers(stream, head, end_stream=is_last)
        elif name in REACTIONS:
            REACTIONS[name](connection, stream, writer)


def _send_what_fits(connection: h2.connection.H2Connection, left: dict[int, bytes]) -> None:
    for stream, data in list(left.items()):
        sent = 0
        while size := min(connection.local_flow_control_window(stream), 16_384, len(data) - sent):
            connection.send_data(stream, data[sent : sent + size])
            sent += size
        left[stream] = data[sent:]
        if not left[stream]:
            del left[stream]
            connection.send_headers(stream, [("grpc-status", "0")], end_stream=True)


def _with_status(*statuses: str, message: str = "") -> Sequence[tuple[Headers | bytes, bool]]:
    trailers = [*(("grpc-status", one) for one in statuses), *([("grpc-message", message)] if message else [])]
    return [([], False), (_FINE, False), (trailers, True)]


# Parts of an answer, and whether each is the last.
ANSWERS: Final[dict[str, Sequence[tuple[Headers | bytes, bool]]]] = {
    "fine": _with_status("0"),
    "no-trailers": [([], False), (_FINE, True)],
    "no-body": [([], True)],
    "status-99": _with_status("99"),
    "status-abc": _with_status("abc"),
    "status-negative": _with_status("-1"),
    "status-empty": _with_status(""),
    "status-long": _with_status("9" * 5000),
    "status-repeated": _with_status("0", "13"),
    "status-in-headers-alone": [([("grpc-status", "13")], True)],
    "message-long": _with_status("13", message="%41" * 5000),
    "message-odd": _with_status("13", message="100% %zz %0a"),
    "two-messages": [([], False), (_FINE * 2, False), ([("grpc-status", "0")], True)],
    "half-a-message": [([], False), (_FINE[:7], False), ([("grpc-status", "0")], True)],
    "html": [([(":status", "200"), ("content-type", "text/html")], False), (b"<html>", True)],
    "http-503": [([(":status", "503"), ("content-type", "text/plain")], False), (b"busy", True)],
    "http-404": [([(":status", "404")], True)],
    "http-302": [([(":status", "302"), ("location", "http://127.0.0.1:9/")], True)],
    "forged": [(_FORGED, False), (_FINE, False), ([("grpc-status", "0"), *_FORGED], True)],
    "forged-in-headers-alone": [([("grpc-status", "13"), *_FORGED], True)],
}


def _reset(code: h2.errors.ErrorCodes) -> Callable[[h2.connection.H2Connection, int, asyncio.StreamWriter], None]:
    def react(connection: h2.connection.H2Connection, stream: int, _writer: asyncio.StreamWriter) -> None:
        connection.reset_stream(stream, code)

    return react


def _reset_after_head(connection: h2.connection.H2Connection, stream: int, _writer: asyncio.StreamWriter) -> None:
    connection.send_headers(stream, _HEAD)
    connection.send_data(stream, _FINE[:7])
    connection.reset_stream(stream, h2.errors.ErrorCodes.INTERNAL_ERROR)


def _go_away(connection: h2.connection.H2Connection, _stream: int, writer: asyncio.StreamWriter) -> None:
    connection.close_connection(last_stream_id=0)
    writer.write(connection.data_to_send())
    writer.close()


def _http1(_connection: h2.connection.H2Connection, _stream: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK")
    writer.close()


def _nothing(_connection: h2.connection.H2Connection, _stream: int, _writer: asyncio.StreamWriter) -> None:
    """Never answers."""


REACTIONS: Final = {
    "reset": _reset(h2.errors.ErrorCodes.INTERNAL_ERROR),
    "reset-refused": _reset(h2.errors.ErrorCodes.REFUSED_STREAM),
    "reset-no-error": _reset(h2.errors.ErrorCodes.NO_ERROR),
    "reset-after-head": _reset_after_head,
    "go-away": _go_away,
    "http1": _http1,
    "nothing": _nothing,
}
