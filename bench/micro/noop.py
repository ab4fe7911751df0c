"""The baseline: an ext_proc server that lets every request pass and reads nothing. What is left is gRPC in Python."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from extproc.streams.messages import HeadersResponse, ProcessingRequest, ProcessingResponse
from extproc.streams.responses import FULL_DUPLEX
from extproc.streams.server import ACCESS_LOG, EXTERNAL_PROCESSOR, OPTIONS, READINESS, is_end

_PASS_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
_BODY: Final = ProcessingResponse()
_BODY.request_body.SetInParent()
_PASS_BODY: Final = _BODY.SerializeToString()


_PASS_ANSWER_HEADERS: Final = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()


async def _process(_: object, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
    first = await context.read()
    if not is_end(first) and first.protocol_config.request_body_mode == FULL_DUPLEX:
        await _process_pieces(first, context)
        return
    await context.write(_PASS_HEADERS)
    await context.read()
    await context.write(_PASS_BODY)
    await context.read()


async def _process_pieces(
    message: ProcessingRequest, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]
) -> None:
    """Every piece goes back as it came, at once."""
    while not is_end(message):
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            await context.write(_PASS_HEADERS)
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


async def _discard(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    while not is_end(await context.read()):
        pass
    return b""


async def serve(listen: str) -> None:
    """Until cancelled."""
    server = grpc.aio.server(options=OPTIONS)
    health = health_aio.HealthServicer()
    add_HealthServicer_to_server(health, server)
    process: grpc.RpcMethodHandler[ProcessingRequest, bytes] = grpc.stream_stream_rpc_method_handler(
        _process, request_deserializer=ProcessingRequest.FromString, response_serializer=None
    )
    logs: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(
        _discard, request_deserializer=None, response_serializer=None
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": process}),
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
    sys.exit(uvloop.run(serve(parser.parse_args().listen)))
