# SPDX-License-Identifier: Apache-2.0
"""The server's side of one HTTP/2 connection (RFC 9113) as an object without I/O: bytes in, events and bytes out.

No more than gRPC needs: requests with a body and trailers behind the answer, no pushes, no priorities. What clients can
grow is bounded: streams by ``MOST_STREAMS``, header blocks by ``_MOST_HEADER_BYTES``, bodies by windows that the caller
opens as it reads. What is unsent waits for the client's windows; see ``unsent``.
"""

from __future__ import annotations

import enum
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.rpc.header_blocks import BadHeaderBlock, HeaderBlockDecoder, Headers
from extproc.wire_names import MOST_STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Of a stream: how much of a request may come before the caller has read any of it. Whole prompts at once.
WINDOW: Final = 4 * 1024 * 1024
# Of a connection: how much may be on its way here. Envoy closes a connection on which 10,000 frames wait to be sent
# (``max_outbound_frames``), and makes none of more than 16 KiB: this window takes 2,048 of those.
CONNECTION_WINDOW: Final = 32 * 1024 * 1024
_LARGEST_WINDOW: Final = 2**31 - 1
_FIRST_WINDOW: Final = 65_535
_LARGEST_FRAME: Final = 16_384
_MOST_HEADER_BYTES: Final = 64 * 1024
_LAST_STREAM: Final = 2**31 - 1
# length, in 16 and 8 bits, type, flags, stream
_HEAD: Final = Struct(">HBBBL")
_HEAD_SIZE: Final = 9
_SETTING: Final = Struct(">HL")
_NUMBER: Final = Struct(">L")
_GOAWAY: Final = Struct(">LL")
_ACK: Final = 0x1
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_PRIORITY: Final = 0x20
_HEADER_TABLE_SIZE: Final = 0x1
_MAX_CONCURRENT_STREAMS: Final = 0x3
_INITIAL_WINDOW_SIZE: Final = 0x4
_MAX_FRAME_SIZE: Final = 0x5
_MAX_HEADER_LIST_SIZE: Final = 0x6


class FrameType(enum.IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class ErrorCode(enum.IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


_DATA: Final = int(FrameType.DATA)


class Http2ProtocolError(Exception):
    """The client has broken the protocol, so that the connection ends; ``code`` is what it is told."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class StreamOpened(msgspec.Struct, frozen=True, gc=False):
    """A request has begun."""

    stream: int
    headers: Headers


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """A part of its body, not empty."""

    stream: int
    data: bytes


class StreamEnded(msgspec.Struct, frozen=True, gc=False):
    """The client has sent all of it."""

    stream: int


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """The client takes the request back; nothing more comes of it, and nothing goes."""

    stream: int


class StreamDrained(msgspec.Struct, frozen=True, gc=False):
    """All that waited for the client's windows is sent."""

    stream: int


Event = StreamOpened | DataReceived | StreamEnded | StreamReset | StreamDrained


class _Stream:
    """One that the server has not ended. Windows count bytes: what may come, and what may go."""

    __slots__ = ("incoming", "is_read", "outgoing", "trailers", "unsent")

    def __init__(self, outgoing: int) -> None:
        self.incoming = WINDOW
        self.outgoing = outgoing
        # the client has sent all
        self.is_read = False
        self.unsent: deque[bytes] = deque()
        self.trailers: bytes | None = None


def encode_frame(kind: FrameType, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _window_update(stream: int, size: int) -> bytes:
    return encode_frame(FrameType.WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


_GREETING: Final = encode_frame(
    FrameType.SETTINGS,
    0,
    0,
    _SETTING.pack(_HEADER_TABLE_SIZE, 0)
    + _SETTING.pack(_MAX_CONCURRENT_STREAMS, MOST_STREAMS)
    + _SETTING.pack(_INITIAL_WINDOW_SIZE, WINDOW)
    + _SETTING.pack(_MAX_HEADER_LIST_SIZE, _MOST_HEADER_BYTES),
) + _window_update(0, CONNECTION_WINDOW - _FIRST_WINDOW)


class Http2Connection:
    """Takes what the client sends, and holds what is to be sent until ``take_output``. ``is_greeted``: the client's
    preface has come.
    """

    def __init__(self) -> None:
        self.is_greeted = False
        self._output = [_GREETING]
        self._input = b""
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._blocks = HeaderBlockDecoder(_MOST_HEADER_BYTES)
        # a block in several frames: its stream, whether the request ends with it, what has come
        self._block: tuple[int, bool, bytearray] | None = None
        self._incoming = CONNECTION_WINDOW
        self._outgoing = _FIRST_WINDOW
        self._first_outgoing = _FIRST_WINDOW
        self._largest_frame = _LARGEST_FRAME
        # streams with unsent data, in the order in which they began to wait
        self._waiting: dict[int, _Stream] = {}
        self._events: list[Event] = []
        self._receive: dict[int, Callable[[int, int, bytes], None]] = {
            FrameType.DATA: self._receive_data,
            FrameType.HEADERS: self._receive_headers,
            FrameType.PRIORITY: self._receive_priority,
            FrameType.RST_STREAM: self._receive_reset,
            FrameType.SETTINGS: self._receive_settings,
            FrameType.PUSH_PROMISE: self._receive_push,
            FrameType.PING: self._receive_ping,
            FrameType.WINDOW_UPDATE: self._receive_window_update,
            FrameType.CONTINUATION: self._receive_continuation,
        }

    def receive(self, data: bytes) -> list[Event]:
        """What the next bytes of the client say; raises Http2ProtocolError, with a GOAWAY to be sent."""
        try:
            self._receive_frames(self._input + data if self._input else data)
        except Http2ProtocolError as error:
            self.go_away(error.code, str(error))
            raise
        events, self._events = self._events, []
        return events

    def take_output(self) -> bytes:
        """What is to be sent now."""
        output, self._output = b"".join(self._output), []
        return output

    def unsent_count(self, stream: int) -> int:
        """How many parts of an answer wait for the client's windows."""
        found = self._streams.get(stream)
        return 0 if found is None else len(found.unsent)

    def grant_window(self, stream: int, size: int) -> None:
        """The caller has read ``size`` bytes of the body: as many more may come."""
        found = self._streams.get(stream)
        if found is not None and not found.is_read:
            found.incoming += size
            self._output.append(_window_update(stream, size))

    def send_headers(self, stream: int, block: bytes) -> None:
        """Begin an answer. ``block``: encoded without the dynamic table."""
        self._output.append(encode_frame(FrameType.HEADERS, _END_HEADERS, stream, block))

    def send_data(self, stream: int, data: bytes) -> bool:
        """Send a part of the answer, or what of it the client's windows allow now: the rest follows by itself, and
        then comes Drained. Whether there is no rest.
        """
        found = self._streams.get(stream)
        if found is None:
            return True
        size = len(data)
        if not found.unsent and size <= self._outgoing and size <= found.outgoing and size <= self._largest_frame:
            self._outgoing -= size
            found.outgoing -= size
            self._output.append(_HEAD.pack(size >> 8, size & 0xFF, _DATA, 0, stream) + data)
            return True
        found.unsent.extend(data[start : start + _LARGEST_FRAME] for start in range(0, size, _LARGEST_FRAME))
        self._send_unsent(stream, found)
        return not found.unsent

    def end_stream(self, stream: int, trailers: bytes) -> None:
        """Send the trailers when all else is sent, and forget the stream."""
        found = self._streams.get(stream)
        if found is not None:
            found.trailers = trailers
            if not found.unsent:
                self._finish(stream, found)

    def reset_stream(self, stream: int, code: ErrorCode) -> None:
        """End a stream at once, with what is unsent dropped."""
        if self._forget(stream) is not None:
            self._output.append(encode_frame(FrameType.RST_STREAM, 0, stream, _NUMBER.pack(code)))

    def go_away(self, code: ErrorCode = ErrorCode.NO_ERROR, why: str = "") -> None:
        """Tell the client to open no more streams here. Without an error, those that it has opened by then go on."""
        last = _LAST_STREAM if code is ErrorCode.NO_ERROR else self._last_stream
        self._output.append(encode_frame(FrameType.GOAWAY, 0, 0, _GOAWAY.pack(last, code) + why.encode()))

    def _receive_frames(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self.is_greeted:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
            if size < len(PREFACE):
                self._input = data
                return
            at, self.is_greeted = len(PREFACE), True
        while size - at >= _HEAD_SIZE:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > _LARGEST_FRAME:
                raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + _HEAD_SIZE + length
            if end > size:
                break
            if self._block is not None and kind != FrameType.CONTINUATION:
                raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "a frame inside of a header block")
            take = self._receive.get(kind)
            # of unknown types, as a GOAWAY, nothing follows
            if take is not None:
                take(flags, stream & _LAST_STREAM, data[at + _HEAD_SIZE : end])
            at = end
        self._input = data[at:]

    def _receive_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._incoming -= size
        if self._incoming < CONNECTION_WINDOW // 2:
            # what may wait here is bounded by the windows of streams
            self._output.append(_window_update(0, CONNECTION_WINDOW - self._incoming))
            self._incoming = CONNECTION_WINDOW
        found = self._streams.get(stream)
        if found is None:
            self._expect_known(stream)
            return
        found.incoming -= size
        if found.incoming < 0:
            raise Http2ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "more than the stream's window")
        if found.is_read:
            raise Http2ProtocolError(ErrorCode.STREAM_CLOSED, "data behind the end of a request")
        data = payload if not flags & _PADDED else _without_padding(payload)
        if len(data) != size:
            # nobody reads what only fills up
            self.grant_window(stream, size - len(data))
        if data:
            self._events.append(DataReceived(stream, data))
        if flags & _END_STREAM:
            found.is_read = True
            self._events.append(StreamEnded(stream))

    def _receive_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if not stream % 2:
            raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "a stream that no client may open")
        if flags & _PADDED:
            payload = _without_padding(payload)
        if flags & _PRIORITY:
            if len(payload) < 5:
                raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "headers without their priority")
            payload = payload[5:]
        is_end = bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            self._receive_block(stream, payload, is_end=is_end)
        else:
            self._block = stream, is_end, bytearray(payload)

    def _receive_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream:
            raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
        _, is_end, block = self._block
        block += payload
        if len(block) > _MOST_HEADER_BYTES or not payload:
            raise Http2ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "headers in too many bytes or frames")
        if flags & _END_HEADERS:
            self._block = None
            self._receive_block(stream, bytes(block), is_end=is_end)

    def _receive_block(self, stream: int, block: bytes, *, is_end: bool) -> None:
        # also where nobody reads them: the decoder learns from each block
        try:
            headers = self._blocks.decode(block)
        except BadHeaderBlock as error:
            raise Http2ProtocolError(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        found = self._streams.get(stream)
        if stream > self._last_stream:
            self._last_stream = stream
            if len(self._streams) >= MOST_STREAMS:
                self._output.append(
                    encode_frame(FrameType.RST_STREAM, 0, stream, _NUMBER.pack(ErrorCode.REFUSED_STREAM))
                )
                return
            found = self._streams[stream] = _Stream(self._first_outgoing)
            self._events.append(StreamOpened(stream, headers))
        elif found is not None and not is_end:
            raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the request")
        if found is not None and is_end:
            if found.is_read:
                raise Http2ProtocolError(ErrorCode.STREAM_CLOSED, "headers behind the end of a request")
            found.is_read = True
            self._events.append(StreamEnded(stream))

    def _receive_priority(self, _: int, stream: int, payload: bytes) -> None:
        if not stream or len(payload) != 5:
            raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "no priority")

    def _receive_push(self, _: int, __: int, ___: bytes) -> None:
        raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "clients push nothing")

    def _receive_reset(self, _: int, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "no code of a reset")
        self._expect_known(stream)
        if self._forget(stream) is not None:
            self._events.append(StreamReset(stream))

    def _receive_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "no ping")
        if not flags & _ACK:
            self._output.append(encode_frame(FrameType.PING, _ACK, 0, payload))

    def _receive_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % _SETTING.size or (flags & _ACK and payload):
            raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "no settings")
        if flags & _ACK:
            return
        window = self._first_outgoing
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW_SIZE:
                if value > _LARGEST_WINDOW:
                    raise Http2ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                window = value
            elif name == _MAX_FRAME_SIZE:
                if not _LARGEST_FRAME <= value < 2**24:
                    raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, f"a largest frame of {value} bytes")
                self._largest_frame = value
        # once for the frame, which may hold thousands: each changes every stream
        self._set_first_window(window)
        self._output.append(encode_frame(FrameType.SETTINGS, _ACK, 0, b""))
        self._send_waiting()

    def _set_first_window(self, size: int) -> None:
        if size == self._first_outgoing:
            return
        more, self._first_outgoing = size - self._first_outgoing, size
        for stream in self._streams.values():
            stream.outgoing += more
            if stream.outgoing > _LARGEST_WINDOW:
                raise Http2ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond the largest")

    def _receive_window_update(self, _: int, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "no window update")
        more = _NUMBER.unpack(payload)[0] & _LARGEST_WINDOW
        if not more:
            raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "a window that opens by nothing")
        if not stream:
            self._outgoing += more
            if self._outgoing > _LARGEST_WINDOW:
                raise Http2ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond the largest")
            self._send_waiting()
            return
        found = self._streams.get(stream)
        if found is None:
            self._expect_known(stream)
            return
        found.outgoing += more
        if found.outgoing > _LARGEST_WINDOW:
            raise Http2ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond the largest")
        self._send_unsent(stream, found)

    def _expect_known(self, stream: int) -> None:
        """A stream that has ended here may get frames that were on their way."""
        if not stream or stream > self._last_stream:
            raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, f"a frame for stream {stream}, which was never opened")

    def _send_waiting(self) -> None:
        for stream, found in list(self._waiting.items()):
            self._send_unsent(stream, found)

    def _send_unsent(self, stream: int, found: _Stream) -> None:
        """Send as much as the windows allow."""
        unsent = found.unsent
        while unsent:
            most = min(found.outgoing, self._outgoing, self._largest_frame)
            if most <= 0:
                self._waiting[stream] = found
                return
            data = unsent.popleft()
            if len(data) > most:
                unsent.appendleft(data[most:])
                data = data[:most]
            self._outgoing -= len(data)
            found.outgoing -= len(data)
            self._output.append(encode_frame(FrameType.DATA, 0, stream, data))
        if self._waiting.pop(stream, None) is not None:
            self._events.append(StreamDrained(stream))
        if found.trailers is not None:
            self._finish(stream, found)

    def _finish(self, stream: int, found: _Stream) -> None:
        self._output.append(encode_frame(FrameType.HEADERS, _END_HEADERS | _END_STREAM, stream, found.trailers or b""))
        if found.is_read:
            self._forget(stream)
        else:
            # the answer is whole before the request is: the client need not send the rest
            self.reset_stream(stream, ErrorCode.NO_ERROR)

    def _forget(self, stream: int) -> _Stream | None:
        self._waiting.pop(stream, None)
        return self._streams.pop(stream, None)


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise Http2ProtocolError(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
