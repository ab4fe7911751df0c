# SPDX-License-Identifier: Apache-2.0
"""Calls of gRPC for ``RequestLoad``: prepared frames of HTTP/2 on connections that stay, one call at a time on each.

A request is HEADERS and DATA of stream 0; a connection writes the stream's number into them. Flow control is left to
its size: a gateway opens its windows again while it answers, and no request may be larger than its first one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, cast

from hpack.hpack import encode_integer

from extproc.rpc.header_blocks import HeaderBlockDecoder
from extproc.rpc.http2 import PREFACE, FrameType, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HEAD_SIZE: Final = 9
_LARGEST_FRAME: Final = 16_384
_LARGEST_WINDOW: Final = 2**31 - 1
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_ACK: Final = 0x1
# no dynamic table, no push, any window
_SETTINGS: Final = b"".join(
    number.to_bytes(2) + value.to_bytes(4) for number, value in ((1, 0), (2, 0), (4, _LARGEST_WINDOW))
)
_GREETING: Final = (
    PREFACE
    + encode_frame(FrameType.SETTINGS, 0, 0, _SETTINGS)
    + encode_frame(FrameType.WINDOW_UPDATE, 0, 0, (_LARGEST_WINDOW - 65_535).to_bytes(4))
)
# Opened again when half of it is used.
_REFILL: Final = 2**30
_MOST_HEADERS: Final = 64 * 1024


def grpc_call_frames(path: str, message: bytes, extra_headers: str = "") -> bytes:
    """The frames of a call with one message. ``extra_headers``: lines as HTTP/1.1 has them."""
    lines = [line.split(": ") for line in extra_headers.splitlines()]
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "gateway"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *((name, value) for name, value in lines),
    ]
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    body = b"\0" + len(message).to_bytes(4) + message
    parts = [body[at : at + _LARGEST_FRAME] for at in range(0, len(body), _LARGEST_FRAME)]
    data = [encode_frame(FrameType.DATA, _END_STREAM if part is parts[-1] else 0, 0, part) for part in parts]
    return encode_frame(FrameType.HEADERS, _END_HEADERS, 0, block) + b"".join(data)


def set_stream_id(frames: bytes, stream: int) -> bytes:
    """``frames`` as those of ``stream``."""
    made, at, number = bytearray(frames), 0, stream.to_bytes(4)
    while at < len(made):
        made[at + 5 : at + _HEAD_SIZE] = number
        at += _HEAD_SIZE + int.from_bytes(made[at : at + 3])
    return bytes(made)


def _text(text: str) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text.encode()


class GrpcCallLoad(Protocol):
    """What a connection needs of its load, which is ``bench.micro.http_load.RequestLoad``."""

    @property
    def requests(self) -> Sequence[bytes]:
        """The prepared calls."""

    @property
    def by_gateway(self) -> bool:
        """Whether the gateway answers by itself."""

    @property
    def clock(self) -> Callable[[], float]:
        """In seconds."""

    def on_response(self, taken_s: float, *, refused: bytes) -> bool:
        """Count an answer; whether the connection may send the next call."""

    def on_connection_closed(self) -> None:
        """Count a connection as closed."""


class GrpcConnection(asyncio.Protocol):
    """One connection of a load. A call is good if its status is 200 and it has no ``grpc-status`` but OK; what Envoy
    answers by itself has one that it cannot know, which is good for a load that asks for that.
    """

    def __init__(self, load: GrpcCallLoad, first: int) -> None:
        self._load = load
        self._next = first
        self._stream = -1
        self._received = b""
        self._blocks = HeaderBlockDecoder(_MOST_HEADERS)
        self._headers: list[tuple[str, str]] = []
        self._unopened = 0
        self._sent_at_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the server; its settings let the first call go."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(_GREETING)

    def data_received(self, data: bytes) -> None:
        """Take the frames that are whole."""
        self._received += data
        while len(self._received) >= _HEAD_SIZE:
            end = _HEAD_SIZE + int.from_bytes(self._received[:3])
            if len(self._received) < end:
                return
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:_HEAD_SIZE])
            payload, self._received = self._received[_HEAD_SIZE:end], self._received[end:]
            # a server resets what it has answered before it came to its end
            if stream in (0, self._stream) or kind != FrameType.RST_STREAM:
                self._take(kind, flags, payload)

    def connection_lost(self, _: Exception | None) -> None:
        """Tell the load."""
        self._load.on_connection_closed()

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        assert self._transport is not None
        match kind:
            case FrameType.SETTINGS if not flags & _ACK:
                self._transport.write(encode_frame(FrameType.SETTINGS, _ACK, 0, b""))
                self._send()
                return
            case FrameType.PING if not flags & _ACK:
                self._transport.write(encode_frame(FrameType.PING, _ACK, 0, payload))
                return
            case FrameType.HEADERS:
                self._headers += self._blocks.decode(payload)
            case FrameType.DATA:
                self._open_window(len(payload))
            case FrameType.RST_STREAM | FrameType.GOAWAY:
                self._headers.append(("reset", payload.hex()))
                flags = _END_STREAM
            case _:
                return
        if flags & _END_STREAM:
            self._end()

    def _open_window(self, size: int) -> None:
        self._unopened += size
        if self._unopened >= _REFILL and self._transport is not None:
            self._transport.write(encode_frame(FrameType.WINDOW_UPDATE, 0, 0, self._unopened.to_bytes(4)))
            self._unopened = 0

    def _end(self) -> None:
        assert self._transport is not None
        found, self._headers = dict(self._headers), []
        is_good = found.get(":status") == "200" and "reset" not in found
        is_good &= self._load.by_gateway or found.get("grpc-status") == "0"
        why = str(found).encode()
        if self._load.on_response(self._load.clock() - self._sent_at_s, refused=b"" if is_good else why):
            self._send()
        else:
            self._transport.close()

    def _send(self) -> None:
        assert self._transport is not None
        self._stream += 2
        frames = set_stream_id(self._load.requests[self._next % len(self._load.requests)], self._stream)
        self._sent_at_s = self._load.clock()
        self._transport.write(frames)
        self._next += 1
