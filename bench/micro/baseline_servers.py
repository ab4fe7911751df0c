# SPDX-License-Identifier: Apache-2.0
"""The baselines: an ext_proc server that reads nothing and lets requests pass, and one that answers without deciding.

What the first costs is what gRPC costs in Python. Its answers are constant bytes. They name the ModelServer: without a
name, Envoy would parse the body to find out where to send the request, and the baseline would cost Envoy more than
extproc does.

With ``--engines`` it reads and answers as much as extproc does. An answer has four endpoints, as header and as
metadata, a ticket, the length, and the whole body with the engines' name of the model in place of the client's. What
extproc costs beyond this is what deciding costs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from typing import TYPE_CHECKING, Any, Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from bench.stack.loopback_stack import ALIAS, MODEL
from extproc.streams.health import EXTERNAL_PROCESSOR, READINESS
from extproc.streams.message_order import BodyMode
from extproc.streams.messages import (
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamAccessLogsMessage,
)
from extproc.streams.server import ACCESS_LOG
from extproc.wire_names import DESTINATION, LB_NAMESPACE, NAMESPACE, SERVER_CLUSTER, SERVER_HEADER, TICKET

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Process = Callable[[object, grpc.aio.ServicerContext[ProcessingRequest, bytes]], Awaitable[None]]

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 1_000_000),
    # whole prompts at once instead of 64 KiB a round trip
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),
)
SERVER: Final = SERVER_CLUSTER + "default/llama"
PASS_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
_PASS_ANSWER_HEADERS: Final = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
_OVERWRITE: Final = 2  # HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_CHOICES: Final = 4
_ASKED, _RENAMED = f'"model": "{ALIAS}"'.encode(), f'"model": "{MODEL}"'.encode()


def _naming_the_server(part: str) -> bytes:
    answer = ProcessingResponse()
    common = getattr(answer, part).response
    common.clear_route_cache = True
    header = common.header_mutation.set_headers.add().header
    header.key, header.raw_value = SERVER_HEADER, SERVER.encode()
    return answer.SerializeToString()


_PASS_BODY: Final = _naming_the_server("request_body")
# Where no body comes.
_PASS_ALL: Final = _naming_the_server("request_headers")


async def _process(_: object, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
    first = await context.read()
    if not _is_end(first) and first.protocol_config.request_body_mode == BodyMode.FULL_DUPLEX_STREAMED:
        await _process_pieces(first, context)
        return
    if not _is_end(first) and first.protocol_config.request_body_mode == BodyMode.NONE:
        await context.write(_PASS_ALL)
        await context.read()
        return
    await context.write(PASS_HEADERS)
    await context.read()
    await context.write(_PASS_BODY)
    await context.read()


async def _process_pieces(
    message: ProcessingRequest, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]
) -> None:
    """Send every piece back as it came, at once."""
    while not _is_end(message):
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


def _is_end(message: object) -> bool:
    # of a type of its own, which grpc's annotations leave out
    return message is grpc.aio.EOF


async def _discard(_: object, context: grpc.aio.ServicerContext[Any, bytes]) -> bytes:
    while not _is_end(await context.read()):
        pass
    return b""


async def serve_extproc_baseline(listen: str, process: Process, *, reads_logs: bool = False) -> None:
    """Answer streams with ``process`` until cancelled.

    ``reads_logs``: parse access log entries before they are dropped.
    """
    server = grpc.aio.server(options=_OPTIONS)
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


class RoundRobinResponder:
    """Answers with the engines in turn."""

    def __init__(self, engines: list[str]) -> None:
        lists = [",".join((engines * 2)[start : start + _CHOICES]) for start in range(len(engines))]
        self._destinations = itertools.cycle(lists)
        self._tickets = itertools.count()

    async def process(self, _: object, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
        """Headers, the body, the end of the stream."""
        await context.read()
        await context.write(PASS_HEADERS)
        message = await context.read()
        await context.write(self._answer(message.request_body.body))
        await context.read()

    def _answer(self, body: bytes) -> bytes:
        answer = ProcessingResponse()
        common = answer.request_body.response
        common.clear_route_cache = True
        renamed = body.replace(_ASKED, _RENAMED, 1)
        common.body_mutation.body = renamed
        destination = next(self._destinations)
        headers = {SERVER_HEADER: SERVER, DESTINATION: destination, "content-length": str(len(renamed))}
        for name, value in headers.items():
            option = common.header_mutation.set_headers.add(append_action=_OVERWRITE)
            option.header.key, option.header.raw_value = name, value.encode()
        metadata = answer.dynamic_metadata.fields
        metadata[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
        metadata[NAMESPACE].struct_value.fields[TICKET].string_value = f"ticket-{next(self._tickets):x}"
        return answer.SerializeToString()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.micro.baseline_servers", description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--engines", help="their addresses, separated by commas: answer with these in turn")
    options = parser.parse_args()
    if options.engines is None:
        sys.exit(uvloop.run(serve_extproc_baseline(options.listen, _process)))
    answering = RoundRobinResponder(options.engines.split(","))
    sys.exit(uvloop.run(serve_extproc_baseline(options.listen, answering.process, reads_logs=True)))
