# SPDX-License-Identifier: Apache-2.0
"""The server as gRPC's own client sees it, and as clients see it that keep to nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from prometheus_client import CollectorRegistry

from extproc.listen_sockets import ListenFailed, listen
from extproc.metrics.request_metrics import TlsMetrics
from extproc.rpc import server as rpc_server
from extproc.rpc.http2 import PREFACE, WINDOW, FrameType, encode_frame
from extproc.rpc.server import MOST_MESSAGE_BYTES, RpcCall, RpcFailed, RpcServer, Status
from extproc.streams.tls import ReloadingCertificate
from tests.extproc.runtime.test_app import free_port
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

ECHO = "/test.Test/Echo"
NOW = dt.datetime.now(dt.UTC)


async def echo(call: RpcCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


class Served(NamedTuple):
    server: RpcServer
    channel: grpc.aio.Channel
    port: int


@asynccontextmanager
async def served(
    handler: Callable[[RpcCall], Awaitable[None]] = echo,
) -> AsyncIterator[Served]:
    server, port = RpcServer({ECHO: handler}), free_port()
    address = f"127.0.0.1:{port}"
    await server.start(listen(address))
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield Served(server, channel, port)
    finally:
        await server.close()


async def failure_of(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize("size", [0, 1, 4, 5, 16_379, 16_384, 16_385, 70_000, WINDOW, 2 * WINDOW + 3])
async def test_messages_of_any_size_come_back_as_they_were(size: int) -> None:
    message = (bytes(range(251)) * (size // 251 + 1))[:size]
    async with served() as (_, channel, _):
        call = channel.stream_stream(ECHO)()
        for _ in range(3):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_messages_that_come_together_are_read_one_by_one() -> None:
    sent = [b"m" * (number % 700) for number in range(5000)]
    async with served() as (_, channel, _):
        call = channel.stream_stream(ECHO)(iter(sent))
        assert [one async for one in call] == sent


def digits(message: bytes) -> bytes | None:
    """A relay: numbers come back, ``boom`` is an error of ours, and other texts are the handler's."""
    if message == b"boom":
        raise ZeroDivisionError
    return message if message.isdigit() else None


async def test_what_a_relay_answers_passes_the_handler_and_stays_in_order() -> None:
    read: list[bytes] = []

    async def handler(call: RpcCall) -> None:
        while (message := await call.read(digits)) is not None:
            read.append(message)
            await asyncio.sleep(0)
            await call.write(message)

    sent = [b"%d" % number if number % 5 else b"text" * (number % 700) for number in range(3000)]
    async with served(handler) as (_, channel, _):
        call = channel.stream_stream(ECHO)()
        # one by one, the handler waits for each
        for message in (b"1", b"a", b"2"):
            await call.write(message)
            assert await call.read() == message
        assert read == [b"a"]

        async def send() -> None:
            for message in sent:
                await call.write(message)
            await call.done_writing()

        sending = asyncio.create_task(send())
        assert [await call.read() for _ in sent] == sent, "whoever answers, and whatever waits for the client's windows"
        await sending
        assert await call.code() is grpc.StatusCode.OK


async def test_a_relay_that_fails_costs_its_message_a_turn_and_no_call_its_connection() -> None:
    async def handler(call: RpcCall) -> None:
        while (message := await call.read(digits)) is not None:
            await call.write(b"read " + message)

    async with served(handler) as (_, channel, _):
        one, other = channel.stream_stream(ECHO)(), channel.stream_stream(ECHO)()
        for message, answer in ((b"1", b"1"), (b"boom", b"read boom"), (b"2", b"2")):
            for call in (one, other):
                await call.write(message)
                assert await call.read() == answer


async def test_a_relay_is_not_asked_while_the_client_takes_nothing() -> None:
    read: list[bytes] = []

    async def handler(call: RpcCall) -> None:
        # each answer is larger than what the client takes unread
        while (message := await call.read(lambda message: message * 1000)) is not None:
            read.append(message)
            await call.write(message)

    async with served(handler) as (server, channel, _):
        call = channel.stream_stream(ECHO)()
        for _ in range(5):
            await call.write(b"x" * 10_000)
        # and the handler waits until the client takes more
        await eventually(lambda: len(read) == 1)
        (connection,) = server.connections
        call.cancel()
        await eventually(lambda: not connection.cancel_calls())


async def test_metadata_is_read() -> None:
    read: list[tuple[str, str]] = []

    async def handler(call: RpcCall) -> None:
        read.extend(call.metadata)
        await call.write(b"")

    async with served(handler) as (_, channel, _):
        await channel.unary_unary(ECHO)(b"", metadata=(("x-one", "1"), ("x-two", "2" * 3000)))
    assert {(":path", ECHO), ("x-one", "1"), ("x-two", "2" * 3000)} <= set(read)


async def test_what_ends_a_call_ends_no_other() -> None:
    async def handler(call: RpcCall) -> None:
        match await call.read():
            case b"refused":
                raise RpcFailed(Status.FAILED_PRECONDITION, "100% wrong: größer")
            case b"broken":
                raise ZeroDivisionError
            case b"odd":
                HealthCheckRequest.FromString(b"\xff")
        await call.write(b"fine")

    async with served(handler) as (_, channel, _):
        for asked, code, details in (
            (b"refused", grpc.StatusCode.FAILED_PRECONDITION, "100% wrong: größer"),
            (b"broken", grpc.StatusCode.UNKNOWN, "ZeroDivisionError"),
            (b"odd", grpc.StatusCode.INTERNAL, "a message of another type"),
        ):
            call = channel.stream_stream(ECHO)()
            await call.write(asked)
            found, said = await failure_of(call)
            assert found is code
            assert said.startswith(details)
        assert await channel.unary_unary(ECHO)(b"") == b"fine"


async def test_calls_that_are_not_served_are_told_so() -> None:
    async with served() as (_, channel, _):
        code, _ = await failure_of(channel.stream_stream("/test.Test/Other")())
        assert code is grpc.StatusCode.UNIMPLEMENTED
        compressed = channel.stream_stream(ECHO)(compression=grpc.Compression.Gzip)
        await compressed.write(b"a" * 1000)
        assert await failure_of(compressed) == (grpc.StatusCode.UNIMPLEMENTED, "messages must not be compressed")


async def test_a_client_that_reads_nothing_is_sent_only_what_it_has_asked_for() -> None:
    written, is_waiting = 0, asyncio.Event()

    async def handler(call: RpcCall) -> None:
        nonlocal written
        await call.read()
        asyncio.get_running_loop().call_later(1.0, is_waiting.set)
        while True:
            await call.write(b"x" * 100_000)
            written += 100_000

    async with served(handler) as (server, channel, _):
        call = channel.stream_stream(ECHO)()
        await call.write(b"")
        await is_waiting.wait()
        assert 0 < written < 100_000_000
        call.cancel()
        (connection,) = server.connections
        await eventually(lambda: not connection.cancel_calls())


async def test_a_cancelled_call_cancels_its_handler() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(call: RpcCall) -> None:
        begun.set()
        try:
            await call.read()
        finally:
            ended.set()

    async with served(handler) as (_, channel, _):
        call = channel.stream_stream(ECHO)()
        await begun.wait()
        call.cancel()
        async with asyncio.timeout(60):
            await ended.wait()


async def test_calls_that_are_reset_as_they_begin_leave_nothing_behind() -> None:
    head = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in ((b":method", b"POST"), (b":path", ECHO.encode()), (b"content-type", b"application/grpc"))
    )
    async with served() as (server, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + encode_frame(FrameType.SETTINGS, 0, 0, b""))
        for stream in range(1, 2001, 2):
            writer.write(
                encode_frame(FrameType.HEADERS, 0x4, stream, head)
                + encode_frame(FrameType.RST_STREAM, 0, stream, b"\0\0\0\x08")
            )
        writer.write(encode_frame(FrameType.PING, 0, 0, b"all read"))
        await asyncio.wait_for(reader.readuntil(b"all read"), 60)
        (connection,) = server.connections
        await eventually(lambda: not connection.cancel_calls())
        writer.close()


async def test_a_message_is_read_ahead_while_another_waits_to_be_written() -> None:
    read: list[bytes | None] = []

    async def handler(call: RpcCall) -> None:
        ahead = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        await call.write(b"w" * (WINDOW // 4))
        read.append(await ahead)

    options = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    async with (
        served(handler) as (_, _, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        call = channel.stream_stream(ECHO)()
        assert len(await call.read()) == WINDOW // 4
        await call.write(b"ahead")
        assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.OK
    assert read == [b"ahead"]


async def test_what_runs_goes_on_while_the_server_takes_no_more() -> None:
    async with served() as (server, channel, _):
        call = channel.stream_stream(ECHO)()
        await call.write(b"before")
        assert await call.read() == b"before"
        server.stop_listening()
        await call.write(b"after")
        assert await call.read() == b"after"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(ECHO)(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_what_is_not_grpc_is_let_go() -> None:
    async with served() as (_, _, port):
        for sent, expected in (
            (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"not the preface"),
            # POST and nothing else: 415
            (
                PREFACE + encode_frame(FrameType.SETTINGS, 0, 0, b"") + encode_frame(FrameType.HEADERS, 5, 1, b"\x83"),
                b"415",
            ),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(60):
                received = b""
                while expected not in received:
                    received += await reader.read(1000) or pytest.fail("closed without a word")
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"", PREFACE[:-1]])
@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_connection_that_does_not_begin_in_time_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, *, has_tls: bool
) -> None:
    monkeypatch.setattr(rpc_server, "_GREETING_S", 0.3)
    server, port = RpcServer({ECHO: echo}), free_port()
    tls = ReloadingCertificate(None, TlsMetrics(CollectorRegistry()), lambda: NOW).context if has_tls else None
    await server.start(listen(f"127.0.0.1:{port}"), tls)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 60)
    await eventually(lambda: not server.connections)
    writer.close()
    await server.close()


async def test_a_connection_that_has_begun_may_stay_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "_GREETING_S", 0.3)
    async with served() as (server, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + encode_frame(FrameType.SETTINGS, 0, 0, b""))
        other, other_writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            await asyncio.wait_for(other.read(), 60)
        other_writer.close()
        writer.write(encode_frame(FrameType.PING, 0, 0, b"still on"))
        await asyncio.wait_for(reader.readuntil(b"still on"), 60)
        assert len(server.connections) == 1
        writer.close()


async def test_an_address_that_is_taken_or_not_ours_is_named(tmp_path: Path) -> None:
    async with served() as (_, _, port):
        for address in (
            f"127.0.0.1:{port}",
            f"0.0.0.0:{port}",
            "192.0.2.1:9002",
            f"unix:{tmp_path}/none/a",
        ):
            with pytest.raises(ListenFailed, match=f"cannot listen on {address}: .*; stop what listens there"):
                listen(address)


async def test_every_address_of_the_machine_is_one_of_ipv6_too() -> None:
    server, port = RpcServer({ECHO: echo}), free_port()
    targets = [f"ipv4:127.0.0.1:{port}", *([f"ipv6:[::1]:{port}"] if socket.has_dualstack_ipv6() else [])]
    await server.start(listen(f"0.0.0.0:{port}"))
    try:
        for target in targets:
            async with grpc.aio.insecure_channel(target) as channel:
                assert await channel.unary_unary(ECHO)(b"a") == b"a"
    finally:
        await server.close()


@pytest.mark.parametrize("steps", range(6))
async def test_a_connection_that_is_accepted_as_the_server_closes_is_closed(steps: int) -> None:
    server, port = RpcServer({}), free_port()
    await server.start(listen(f"127.0.0.1:{port}"))
    # in the queue before the loop looks: each step of it is one of accepting
    with socket.create_connection(("127.0.0.1", port)) as client:
        for _ in range(steps):
            await asyncio.sleep(0)
        await server.close()
        reader, writer = await asyncio.open_connection(sock=client)
        # an end, or a reset of what was never accepted
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert not server.connections
    # asyncio's own warning of what nobody closed
    gc.collect()


async def test_a_message_beyond_the_largest_is_refused_before_it_has_come() -> None:
    async with served() as one:
        call = one.channel.stream_stream(ECHO)()
        await call.write(bytes(MOST_MESSAGE_BYTES + 1))
        code, why = await failure_of(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert why == f"a message of {MOST_MESSAGE_BYTES + 1} bytes; at most {MOST_MESSAGE_BYTES}"
        # others go on
        other = one.channel.stream_stream(ECHO)()
        await other.write(b"hello")
        assert await other.read() == b"hello"
