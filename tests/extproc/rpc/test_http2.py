# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 in memory, with the library h2 as the client, and broken bytes by hand."""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.rpc import http2
from extproc.rpc.http2 import (
    CONNECTION_WINDOW,
    PREFACE,
    WINDOW,
    DataReceived,
    ErrorCode,
    Event,
    FrameType,
    Http2Connection,
    Http2ProtocolError,
    StreamDrained,
    StreamEnded,
    StreamOpened,
    StreamReset,
    encode_frame,
)
from extproc.wire_names import MOST_STREAMS

ASKED = [(":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "x"), ("te", "trailers")]
HEAD = b"\x88"  # :status 200
TRAILERS = b"\x00\x0bgrpc-status\x010"


class Client:
    """h2's client and our server, which read what the other one sends."""

    def __init__(self, **settings: int) -> None:
        self.server = Http2Connection()
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.settings(**settings)
        self.events: list[Event] = []
        self.answers: list[h2.events.Event] = []
        self.exchange()

    def settings(self, **settings: int) -> None:
        if settings:
            codes = h2.settings.SettingCodes
            self.h2.update_settings({codes[name.upper()]: value for name, value in settings.items()})

    def exchange(self) -> None:
        """Until neither has anything to send."""
        while sent := self.h2.data_to_send():
            self.events += self.server.receive(sent)
            self.answers += self.h2.receive_data(self.server.take_output())

    def flush(self) -> None:
        """What the server was told to send."""
        self.answers += self.h2.receive_data(self.server.take_output())
        self.exchange()

    def ask(self, body: bytes = b"", *, is_whole: bool = True, **more: str) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [*ASKED, *more.items()])
        self.exchange()
        if body or is_whole:
            self.h2.send_data(stream, body, end_stream=is_whole)
        self.exchange()
        return stream

    def body_of(self, stream: int) -> bytes:
        return b"".join(
            one.data for one in self.answers if isinstance(one, h2.events.DataReceived) and one.stream_id == stream
        )

    def is_ended(self, stream: int) -> bool:
        return any(isinstance(one, h2.events.StreamEnded) and one.stream_id == stream for one in self.answers)


def test_a_request_is_opened_received_and_ended_and_its_answer_arrives() -> None:
    client = Client()
    stream = client.ask(b"hello")
    assert client.events == [StreamOpened(stream, ASKED), DataReceived(stream, b"hello"), StreamEnded(stream)]
    client.server.send_headers(stream, HEAD)
    client.server.send_data(stream, b"world")
    client.server.end_stream(stream, TRAILERS)
    client.flush()
    assert client.body_of(stream) == b"world"
    assert client.is_ended(stream)
    (trailers,) = (one for one in client.answers if isinstance(one, h2.events.TrailersReceived))
    assert trailers.headers == [("grpc-status", "0")]


@given(st.lists(st.integers(1, 40), max_size=30))
def test_bytes_may_be_cut_anywhere(sizes: list[int]) -> None:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [*ASKED, ("x-long", "y" * 100)])
    client.send_data(1, b"z" * 200, end_stream=True)
    sent, server, events, at = client.data_to_send(), Http2Connection(), [], 0
    for size in [*sizes, len(sent)]:
        events += server.receive(sent[at : at + size])
        at += size
    assert [type(one) for one in events] == [StreamOpened, DataReceived, StreamEnded]


def test_headers_of_the_next_requests_are_right_whatever_the_table_did() -> None:
    client = Client()
    given = [{}, {}, {"x-one": "1"}, {"x-one": "1"}, {}, {"x-two": "2"}, {"x-one": "1"}, {}]
    for more in given:
        client.ask(**more)
    opened = [one.headers for one in client.events if isinstance(one, StreamOpened)]
    assert opened == [[*ASKED, *more.items()] for more in given]


def test_streams_beyond_the_bound_are_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    assert client.h2.remote_settings.max_concurrent_streams == MOST_STREAMS
    monkeypatch.setattr(http2, "MOST_STREAMS", 2)
    first, second = client.ask(b"a", is_whole=False), client.ask(**{"x-one": "1"})
    refused = client.h2.get_next_available_stream_id()
    client.h2.send_headers(refused, [*ASKED, ("x-two", "2")])
    client.h2.send_data(refused, b"c", end_stream=True)
    client.exchange()
    assert [(one.stream_id, one.error_code) for one in client.answers if isinstance(one, h2.events.StreamReset)] == [
        (refused, ErrorCode.REFUSED_STREAM)
    ]
    client.h2.send_data(first, b"more", end_stream=True)
    client.exchange()
    client.server.send_headers(second, HEAD)
    client.server.end_stream(second, TRAILERS)
    client.flush()
    third = client.ask(**{"x-two": "2"})
    assert client.events == [
        StreamOpened(first, ASKED),
        DataReceived(first, b"a"),
        StreamOpened(second, [*ASKED, ("x-one", "1")]),
        StreamEnded(second),
        DataReceived(first, b"more"),
        StreamEnded(first),
        StreamOpened(third, [*ASKED, ("x-two", "2")]),
        StreamEnded(third),
    ]


def test_headers_in_many_frames_are_one_block() -> None:
    client = Client()
    stream = client.ask(**{"x-long": "".join(chr(33 + number % 90) for number in range(40_000))})
    (opened,) = (one for one in client.events if isinstance(one, StreamOpened))
    assert opened.stream == stream
    assert len(opened.headers[-1][1]) == 40_000


def test_what_the_client_has_no_window_for_waits_and_then_follows() -> None:
    client = Client(initial_window_size=10)
    one, two = client.ask(b"a"), client.ask(b"b")
    for stream in (one, two):
        client.server.send_headers(stream, HEAD)
        client.server.send_data(stream, b"x" * 25)
        client.server.end_stream(stream, TRAILERS)
    client.flush()
    assert (client.body_of(one), client.server.unsent_count(one)) == (b"x" * 10, 1)
    assert not client.is_ended(one)
    client.h2.increment_flow_control_window(15, stream_id=one)
    client.exchange()
    assert client.body_of(one) == b"x" * 25
    assert client.is_ended(one)
    assert StreamDrained(one) in client.events
    assert not client.is_ended(two)
    # of all streams at once
    client.settings(initial_window_size=100)
    client.exchange()
    assert client.is_ended(two)


def test_a_large_answer_goes_in_frames_that_the_client_takes() -> None:
    client, body = Client(), bytes(range(256)) * 4000
    stream = client.ask(b"a")
    client.server.send_headers(stream, HEAD)
    client.server.send_data(stream, body)
    client.server.end_stream(stream, TRAILERS)
    client.flush()
    while not client.is_ended(stream):
        client.h2.increment_flow_control_window(100_000)
        client.h2.increment_flow_control_window(100_000, stream_id=stream)
        client.exchange()
    assert client.body_of(stream) == body


def test_a_body_that_nobody_reads_stops_at_the_window() -> None:
    client = Client()
    stream = client.ask(b"a", is_whole=False)
    assert client.h2.local_flow_control_window(stream) == WINDOW - 1
    client.server.grant_window(stream, 1)
    client.flush()
    assert client.h2.local_flow_control_window(stream) == WINDOW


def test_the_window_of_a_connection_opens_again_though_nobody_reads_its_bodies() -> None:
    client = Client()
    for _ in range(CONNECTION_WINDOW // WINDOW):
        stream = client.ask(is_whole=False)
        for _ in range(WINDOW // 16_384):
            client.h2.send_data(stream, b"a" * 16_384)
        client.exchange()
        client.flush()
    stream = client.ask(b"more", is_whole=False)
    assert client.events[-1] == DataReceived(stream, b"more")


def test_an_answer_that_ends_before_its_request_ends_the_stream() -> None:
    client = Client()
    stream = client.ask(b"a", is_whole=False)
    client.server.end_stream(stream, HEAD + TRAILERS)
    client.flush()
    (reset,) = (one for one in client.answers if isinstance(one, h2.events.StreamReset))
    assert reset.error_code == ErrorCode.NO_ERROR
    # what was on its way
    assert client.server.receive(encode_frame(FrameType.DATA, 1, stream, b"late")) == []


def test_a_reset_ends_a_stream_and_what_waits_for_it() -> None:
    client = Client(initial_window_size=1)
    stream = client.ask(b"a")
    client.server.send_headers(stream, HEAD)
    client.server.send_data(stream, b"xx")
    client.flush()
    client.h2.reset_stream(stream)
    client.exchange()
    assert client.events[-1] == StreamReset(stream)
    client.server.send_data(stream, b"nobody reads this")
    client.server.end_stream(stream, TRAILERS)
    assert client.server.take_output() == b""


def test_pings_are_answered() -> None:
    client = Client()
    client.h2.ping(b"12345678")
    client.exchange()
    assert any(isinstance(one, h2.events.PingAckReceived) for one in client.answers)


def test_a_client_that_is_asked_to_go_away_may_end_what_it_has_begun() -> None:
    client = Client()
    client.server.go_away()
    assert client.server.take_output() == encode_frame(FrameType.GOAWAY, 0, 0, struct.pack(">LL", 2**31 - 1, 0))


def test_padding_and_priorities_are_left_out() -> None:
    server = greeted()
    block = b"\x83\x86\x84"  # POST, http, /
    padded = bytes([3]) + struct.pack(">LB", 0, 15) + block + b"\0\0\0"
    events = server.receive(encode_frame(FrameType.HEADERS, 0x4 | 0x8 | 0x20, 1, padded))
    assert events == [StreamOpened(1, [(":method", "POST"), (":scheme", "http"), (":path", "/")])]
    assert server.receive(encode_frame(FrameType.DATA, 0x8, 1, bytes([2]) + b"ab\0\0")) == [DataReceived(1, b"ab")]
    # nobody reads it, so the window opens again by itself
    assert server.take_output() == encode_frame(FrameType.WINDOW_UPDATE, 0, 1, struct.pack(">L", 3))


def greeted() -> Http2Connection:
    server = Http2Connection()
    server.receive(PREFACE + encode_frame(FrameType.SETTINGS, 0, 0, b""))
    server.take_output()
    return server


OPEN = encode_frame(FrameType.HEADERS, 0x4, 1, b"\x83")
BROKEN = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "a frame that is too large": (struct.pack(">HBBBL", 0xFFFF, 0, 0, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    "data of no stream": (encode_frame(FrameType.DATA, 0, 0, b"a"), ErrorCode.PROTOCOL_ERROR),
    "data of a stream that was never opened": (encode_frame(FrameType.DATA, 0, 5, b"a"), ErrorCode.PROTOCOL_ERROR),
    "data behind the end": (OPEN + 2 * encode_frame(FrameType.DATA, 1, 1, b"a"), ErrorCode.STREAM_CLOSED),
    "headers behind the end": (
        OPEN + encode_frame(FrameType.DATA, 1, 1, b"") + encode_frame(FrameType.HEADERS, 5, 1, b""),
        ErrorCode.STREAM_CLOSED,
    ),
    "headers that end nothing": (OPEN + OPEN, ErrorCode.PROTOCOL_ERROR),
    "an even stream": (encode_frame(FrameType.HEADERS, 4, 2, b"\x83"), ErrorCode.PROTOCOL_ERROR),
    "headers of no stream": (encode_frame(FrameType.HEADERS, 4, 0, b"\x83"), ErrorCode.PROTOCOL_ERROR),
    "more padding than frame": (OPEN + encode_frame(FrameType.DATA, 8, 1, b"\x09a"), ErrorCode.PROTOCOL_ERROR),
    "padding without its length": (OPEN + encode_frame(FrameType.DATA, 8, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "headers without their priority": (encode_frame(FrameType.HEADERS, 0x24, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "a frame inside of headers": (
        encode_frame(FrameType.HEADERS, 0, 1, b"\x83") + encode_frame(FrameType.PING, 0, 0, b"12345678"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": (encode_frame(FrameType.CONTINUATION, 4, 1, b"\x83"), ErrorCode.PROTOCOL_ERROR),
    "a continuation of another": (
        encode_frame(FrameType.HEADERS, 0, 1, b"") + encode_frame(FrameType.CONTINUATION, 4, 3, b"\x83"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "continuations without end": (
        encode_frame(FrameType.HEADERS, 0, 1, b"") + 5 * encode_frame(FrameType.CONTINUATION, 0, 1, b"\0" * 16_384),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "empty continuations": (
        encode_frame(FrameType.HEADERS, 0, 1, b"") + encode_frame(FrameType.CONTINUATION, 0, 1, b""),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "headers that grow": (
        OPEN
        + encode_frame(FrameType.HEADERS, 4, 3, b"\x40\x01a\x7f\x81\x1e" + b"b" * 4000)
        + encode_frame(FrameType.HEADERS, 4, 5, b"\xbe" * 100),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "an entry that no table has": (encode_frame(FrameType.HEADERS, 4, 1, b"\xff\xff\x01"), ErrorCode.COMPRESSION_ERROR),
    "a cut entry": (encode_frame(FrameType.HEADERS, 4, 1, b"\x40\x7f"), ErrorCode.COMPRESSION_ERROR),
    "a table that is too large": (
        encode_frame(FrameType.HEADERS, 4, 1, b"\x3f\xff\xff\x7f"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a priority of no stream": (encode_frame(FrameType.PRIORITY, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
    "a short reset": (OPEN + encode_frame(FrameType.RST_STREAM, 0, 1, b"1"), ErrorCode.FRAME_SIZE_ERROR),
    "a reset of nothing": (encode_frame(FrameType.RST_STREAM, 0, 1, b"1234"), ErrorCode.PROTOCOL_ERROR),
    "a push": (encode_frame(FrameType.PUSH_PROMISE, 4, 1, b"\0\0\0\2\x83"), ErrorCode.PROTOCOL_ERROR),
    "a short ping": (encode_frame(FrameType.PING, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
    "settings of a stream": (encode_frame(FrameType.SETTINGS, 0, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
    "a piece of a setting": (encode_frame(FrameType.SETTINGS, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
    "a window of settings beyond the largest": (
        encode_frame(FrameType.SETTINGS, 0, 0, struct.pack(">HL", 4, 2**31)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "frames that are too small": (
        encode_frame(FrameType.SETTINGS, 0, 0, struct.pack(">HL", 5, 1)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a short window update": (encode_frame(FrameType.WINDOW_UPDATE, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
    "a window that opens by nothing": (
        encode_frame(FrameType.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a connection's window beyond the largest": (
        encode_frame(FrameType.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a stream's window beyond the largest": (
        OPEN + encode_frame(FrameType.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a window of a stream that was never opened": (
        encode_frame(FrameType.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "more than the stream's window": (
        OPEN + 257 * encode_frame(FrameType.DATA, 0, 1, b"a" * 16_384),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_client_that_breaks_the_protocol_is_told_how_and_let_go(name: str) -> None:
    sent, code = BROKEN[name]
    server = Http2Connection() if name == "another protocol" else greeted()
    with pytest.raises(Http2ProtocolError) as caught:
        server.receive(sent)
    assert caught.value.code is code
    last = server.take_output()
    at = last.rindex(struct.pack(">BBL", FrameType.GOAWAY, 0, 0))
    assert struct.unpack_from(">L", last, at + 10)[0] == code


@given(st.binary(max_size=400), st.integers(0, 10))
def test_no_bytes_do_more_than_break_their_connection(junk: bytes, kind: int) -> None:
    server = greeted()
    server.receive(OPEN)
    for sent in (
        encode_frame(FrameType.DATA, 0, 1, junk)[:3] + bytes([kind]) + encode_frame(FrameType.DATA, 0, 1, junk)[4:],
        junk,
    ):
        try:
            server.receive(sent)
        except Http2ProtocolError:
            return
