# SPDX-License-Identifier: Apache-2.0
"""The first baseline: an ext_proc server that reads nothing and lets requests pass.

What it costs is what gRPC costs in Python. Its answers are constant bytes. They name the ModelServer: without a name,
Envoy would parse the body to find out where to send the request, and the baseline would cost Envoy more than extproc
does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from extproc.protocol import SERVER_CLUSTER, SERVER_HEADER
from extproc.streams.messages import (
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamAccessLogsMessage,
)
from extproc.streams.order import BodyMode
from extproc.streams.server import ACCESS_LOG, EXTERNAL_PROCESSOR, OPTIONS, READINESS, is_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Process = Callable[[object, grpc.aio.ServicerContext[ProcessingRequest, bytes]], Awaitable[None]]

SERVER: Final = SERVER_CLUSTER + "default/llama"
PASS_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
_PASS_ANSWER_HEADERS: Final = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()


def _naming_the_server() -> bytes:
    answer = ProcessingResponse()
    common = answer.request_body.response
    common.clear_route_cache = True
    header = common.header_mutation.set_headers.add().header
    header.key, header.raw_value = SERVER_HEADER, SERVER.encode()
    return answer.SerializeToString()


_PASS_BODY: Final = _naming_the_server()


async def _process(_: object, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
    first = await context.read()
    if not is_end(first) and first.protocol_config.request_body_mode == BodyMode.FULL_DUPLEX_STREAMED:
        await _process_pieces(first, context)
        return
    await context.write(PASS_HEADERS)
    await context.read()
    await context.write(_PASS_BODY)
    await context.read()


async def _process_pieces(
    message: ProcessingRequest, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]
) -> None:
    """Send every piece back as it came, at once."""
    while not is_end(message):
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            await context.write(PASS_HEADERS)
        elif kind == "response_headers":
            await context.write(_PASS_ANSWER_HEADERS)
        else:
            body = message.request_body if kind == "request_body" else message.response_body
            answer = ProcessingResponse()
            side = answer.request_body if kind == "request_body" else answer.response_body
            streamed = side.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = body.body, body.end_of_stream
            await context.write(answer.SerializeToString())
        message = await context.read()


async def _discard(_: object, context: grpc.aio.ServicerContext[Any, bytes]) -> bytes:
    while not is_end(await context.read()):
        pass
    return b""


async def serve(listen: str, process: Process, *, reads_logs: bool = False) -> None:
    """Answer streams with ``process`` until cancelled.

    ``reads_logs``: parse access log entries before they are dropped.
    """
    server = grpc.aio.server(options=OPTIONS)
    health = health_aio.HealthServicer()
    add_HealthServicer_to_server(health, server)
    processes: grpc.RpcMethodHandler[ProcessingRequest, bytes] = grpc.stream_stream_rpc_method_handler(
        process, request_deserializer=ProcessingRequest.FromString, response_serializer=None
    )
    logs: grpc.RpcMethodHandler[Any, bytes] = grpc.stream_unary_rpc_method_handler(
        _discard,
        request_deserializer=StreamAccessLogsMessage.FromString if reads_logs else None,
        response_serializer=None,
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": processes}),
            grpc.method_handlers_generic_handler(ACCESS_LOG, {"StreamAccessLogs": logs}),
        )
    )
    server.add_insecure_port(listen)
    await server.start()
    await health.set(READINESS, health_pb2.HealthCheckResponse.SERVING)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.micro.noop", description=__doc__)
    parser.add_argument("--listen", required=True)
    sys.exit(uvloop.run(serve(parser.parse_args().listen, _process)))
