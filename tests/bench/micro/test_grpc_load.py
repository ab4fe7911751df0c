# SPDX-License-Identifier: Apache-2.0
"""Prepared calls are calls of gRPC, and the load counts good answers alone."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from bench.micro.compared_servers import BenchmarkCase
from bench.micro.grpc_load import grpc_call_frames, set_stream_id
from bench.micro.http_load import RequestLoad, grpc_tensor_requests
from bench.micro.instant_engine import INFER_CALL, serve_grpc
from bench.stack.processes import free_ports
from extproc.rpc.http2 import PREFACE, DataReceived, FrameType, Http2Connection, StreamEnded, StreamOpened, encode_frame
from extproc.rpc.server import RpcCall, RpcFailed, RpcServer, Status
from tests.model_calls import V2
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.mark.parametrize("size", [0, 10, 40_000])
def test_frames_are_a_call_with_one_message(size: int) -> None:
    message = bytes(size)
    server = Http2Connection()
    greeting = PREFACE + encode_frame(FrameType.SETTINGS, 0, 0, b"")
    frames = grpc_call_frames("/a.B/C", message, "x-one: 1\r\n")
    opened, *parts, ended = server.receive(greeting + set_stream_id(frames, 5))
    assert isinstance(opened, StreamOpened)
    assert opened.stream == 5
    assert {(":path", "/a.B/C"), ("content-type", "application/grpc"), ("x-one", "1")} <= set(opened.headers)
    assert b"".join(one.data for one in parts if isinstance(one, DataReceived)) == b"\0" + size.to_bytes(4) + message
    assert ended == StreamEnded(5)


def test_a_tensor_is_a_message_of_the_protocol() -> None:
    first, second = grpc_tensor_requests(300, count=2, model="iris")
    found = V2["ModelInferRequest"].FromString(second.body)
    assert found.model_name == "iris"
    assert (found.inputs[0].datatype, list(found.inputs[0].shape)) == ("UINT8", [300])
    assert list(found.raw_input_contents) == [b"\1" * 300]
    assert first.body != second.body
    assert BenchmarkCase(2_000, 8, by_call=True).requests(1)[0].path == INFER_CALL


async def load(handler: Callable[[RpcCall], Awaitable[None]], *, by_gateway: bool = False) -> int:
    """How many calls were answered well; raises RuntimeError if one was not."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = RpcServer({INFER_CALL: handler})
    await server.start(listening)
    requests = [one.wire_bytes() for one in grpc_tensor_requests(100_000, count=3)]
    made = RequestLoad(requests, connections=2, calls=True, by_gateway=by_gateway)
    try:
        await made.run("127.0.0.1", listening.getsockname()[1], seconds=0.05)
    finally:
        await server.close()
    return len(made.taken_s)


async def test_a_load_goes_on_after_good_answers() -> None:
    async def answer(call: RpcCall) -> None:
        assert await call.read()
        await call.write(b"x" * 100_000)

    assert await load(answer) > 2


async def test_an_answer_that_is_not_good_ends_it_with_its_head() -> None:
    async def refuse(_: RpcCall) -> None:
        raise RpcFailed(Status.UNAVAILABLE, "away")

    with pytest.raises(RuntimeError, match="grpc-status"):
        await load(refuse)
    assert await load(refuse, by_gateway=True) > 2


async def test_the_engine_answers_calls() -> None:
    (port,) = free_ports(1)
    serving = asyncio.create_task(serve_grpc([port]))
    requests = [one.wire_bytes() for one in grpc_tensor_requests(10, count=1)]

    async def answers() -> bool:
        try:
            await RequestLoad(requests, connections=1, calls=True).run("127.0.0.1", port, seconds=0.0)
        except OSError:
            return False
        return True

    await eventually(answers)
    serving.cancel()
    await asyncio.wait([serving])
