# SPDX-License-Identifier: Apache-2.0
"""The gRPC shell: external processing, access logs and health on one grpc.aio server.

For probes of a kubelet, health is served on a port of its own, too.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from extproc.core.effects import Held
from extproc.failures import FailureLog
from extproc.protocol import BUNDLE_MARK
from extproc.streams.access_log import receive_entries
from extproc.streams.headers import read_origin
from extproc.streams.messages import ProcessingRequest, StreamAccessLogsMessage
from extproc.streams.order import ANSWER_KINDS, IllegalMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from extproc.core.effects import Decision, Pending, Refused
    from extproc.core.pipeline import Answer
    from extproc.metrics.registry import Metrics
    from extproc.streams.context import StreamContext
    from extproc.streams.exchange import Exchange
    from extproc.streams.headers import Origin

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
# What probes of the Inference Extension's own charts ask for.
INFERENCE_EXTENSION: Final = "inference-extension"
# In the user agent of Envoy's health checks.
_ENVOY: Final = "Envoy"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_aio.HealthServicer):
    """Answers for health, and notes when Envoy asks; probes of others say nothing of Envoy."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    async def be_alive(self) -> None:
        """The process runs; it may not be ready."""
        await self.set(LIVENESS, _SERVING)
        await self.be_ready(is_ready=False)

    async def be_ready(self, *, is_ready: bool) -> None:
        """Whether requests may come."""
        for service in ("", READINESS, EXTERNAL_PROCESSOR, INFERENCE_EXTENSION):
            await self.set(service, _SERVING if is_ready else _NOT_SERVING)

    async def Check(  # noqa: N802 - gRPC's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        """The health of one service."""
        if any(name == "user-agent" and _ENVOY in str(value) for name, value in context.invocation_metadata() or ()):
            self._metrics.health_checked()
        return await super().Check(request, context)


class HealthPort:
    """``health`` on a port of its own, without TLS."""

    def __init__(self, health: Health) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_HealthServicer_to_server(health, self._server)

    async def start(self, address: str) -> None:
        """Listen on ``ip:port``; raises ListenFailed."""
        listen(self._server, address)
        await self._server.start()

    async def stop(self) -> None:
        """At once."""
        await self._server.stop(None)


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> None:
    """Listen on ``ip:port`` or ``unix:path``; raises ListenFailed."""
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise ListenFailed(address)


class ListenFailed(Exception):
    """The address is taken or not ours."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}; is it in use, or not an address of this machine?")


log = logging.getLogger(__name__)
ACCESS_LOG: Final = "envoy.service.accesslog.v3.AccessLogService"
OPTIONS: Final = (
    # the largest prompt is Envoy's to limit
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # a second process on the same port would share its connections without a word
    ("grpc.so_reuseport", 0),
    # a request holds its stream for as long as its answer takes
    ("grpc.max_concurrent_streams", 1_000_000),
    # whole prompts at once instead of 64 KiB a round trip
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),
)


async def _nothing() -> None:
    """Comes before no message."""


class _Messages:
    """What a gateway sends on one stream."""

    def __init__(self, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
        self.context = context
        self._ahead: asyncio.Task[ProcessingRequest] | None = None

    async def next(self) -> ProcessingRequest:
        """The next message, or the end."""
        if self._ahead is None:
            # grpc.aio's read and write cost half of its async iterators
            return await self.context.read()
        ahead, self._ahead = self._ahead, None
        return await ahead

    def ahead(self) -> asyncio.Task[ProcessingRequest]:
        """What ``next`` will return."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self.context.read())
        return self._ahead

    def stop(self) -> None:
        """Read no more."""
        if self._ahead is not None:
            self._ahead.cancel()


class GrpcServer:
    """Owns the listening socket and answers with what ``new_exchange`` decides."""

    def __init__(
        self,
        context: StreamContext,
        *,
        new_exchange: Callable[[Callable[[], bool], Callable[[], Origin]], Exchange],
        answer_to: Callable[
            [Pending, Callable[[], Awaitable[None]]], Coroutine[None, None, Answer | Decision | Refused]
        ],
        before_each: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """``new_exchange``: takes two functions, whether headers are trusted, and where the stream comes from.
        ``answer_to``: awaits a Pending.

        It first awaits its second argument if the request is held: the gateway must know. ``before_each``: awaited
        before a message is read.
        """
        self._streams = context
        self._answer_to = answer_to
        self._before_each = before_each
        self._metrics = context.metrics
        self._new_exchange = new_exchange
        self._failures = FailureLog(log)
        self._open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._server = grpc.aio.server(options=OPTIONS)
        self.health = Health(context.metrics)
        add_HealthServicer_to_server(self.health, self._server)
        self._server.add_generic_rpc_handlers((self._external_processor(), self._access_log()))

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> None:
        """Listen on ``ip:port`` or ``unix:path``, alive and not yet ready; raises ListenFailed.

        ``credentials``: for TLS; None: plain text.
        """
        listen(self._server, address, credentials)
        await self._server.start()
        await self.health.be_alive()

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Report not ready, take no new streams, and wait up to ``drain_s``, or until ``hurry``, for running requests.

        Access log streams are not waited for: Envoy keeps them open for ever.
        """
        await self.health.be_ready(is_ready=False)
        draining = asyncio.create_task(self._server.stop(drain_s))
        ends = [asyncio.create_task(event.wait()) for event in (self._is_idle, hurry)]
        await asyncio.wait({draining, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        # None, not 0: two calls that both wait for a grace have been seen to crash the process in grpc
        await self._server.stop(None)
        await draining

    def _external_processor(self) -> grpc.GenericRpcHandler:
        handler: grpc.RpcMethodHandler[ProcessingRequest, bytes] = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=ProcessingRequest.FromString, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": handler})

    def _access_log(self) -> grpc.GenericRpcHandler:
        handler: grpc.RpcMethodHandler[StreamAccessLogsMessage, bytes] = grpc.stream_unary_rpc_method_handler(
            self._stream_access_logs, request_deserializer=StreamAccessLogsMessage.FromString, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(ACCESS_LOG, {"StreamAccessLogs": handler})

    async def _process(self, _: object, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
        exchange = self._new_exchange(
            lambda: self._streams.options.trusts_headers or _is_bundle(context),
            lambda: read_origin(context.invocation_metadata() or ()),
        )
        self._open += 1
        self._is_idle.clear()
        # Not at the end of this function: gRPC sends the status after it, and when all have ended the server stops. Nor
        # by the context's own callbacks: they and the call refer to each other, so that gRPC's memory of a call with a
        # large body would wait for the collector.
        cast("asyncio.Task[None]", asyncio.current_task()).add_done_callback(self._one_less)
        messages = _Messages(context)
        try:
            while not is_end(message := await messages.next()):
                answers = await self._answers(exchange, message, messages)
                for answer in answers:
                    await context.write(answer)
                # bodies are not kept while the answer takes its time
                answer = b""
                del message, answers
        except IllegalMessage as error:
            self._failures.note("a gateway sends what it may not", error, is_ours=False)
            if exchange.has_answer:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            await context.write(exchange.refuse())
        finally:
            messages.stop()
            exchange.close()

    async def _answers(self, exchange: Exchange, message: ProcessingRequest, messages: _Messages) -> list[bytes]:
        """Whatever fails here, requests are refused rather than left to the gateway's failure mode: no request gets
        round its decision by making us fail. Answers pass.
        """
        try:
            await self._before_each()
            answers = exchange.receive(message)
            while (pending := exchange.pending) is not None:
                answers = await self._resumed(exchange, pending, messages)
        except IllegalMessage:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, logged once and answered
            self._failures.note("a request could not be decided and is refused, or an answer passes unread", error)
            return exchange.fail(message)
        return answers

    async def _resumed(self, exchange: Exchange, pending: Pending, messages: _Messages) -> list[bytes]:
        """Answers once ``pending`` is here; none if the gateway has answered a held request by itself, as at a time
        limit of its own.
        """
        waiting = self._answer_to(pending, partial(_ask_to_wait, exchange, messages.context))
        if not isinstance(pending, Held):
            return exchange.resume(await waiting)
        ended, ahead = asyncio.create_task(waiting), messages.ahead()
        try:
            await asyncio.wait({ended, ahead}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and _is_answer(ahead.result()):
                exchange.answered_elsewhere()
                return []
            return exchange.resume(await ended)
        finally:
            ended.cancel()
            await asyncio.wait({ended})

    def _one_less(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._is_idle.set()

    async def _stream_access_logs(
        self, _: object, context: grpc.aio.ServicerContext[StreamAccessLogsMessage, bytes]
    ) -> bytes:
        while not is_end(message := await context.read()):
            # one odd entry must not cut off the log stream and with it all learning
            receive_entries(message, self._streams, self._streams.clock(), self._failures)
        return b""


async def _ask_to_wait(exchange: Exchange, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
    longer = exchange.longer_wait()
    if longer is not None:
        await context.write(longer)


def _is_bundle(context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> bool:
    """Whether our own bundle asks: the gateway writes gRPC's metadata, and no client can."""
    return any(name == BUNDLE_MARK for name, _ in context.invocation_metadata() or ())


def _is_answer(message: ProcessingRequest) -> bool:
    return not is_end(message) and message.WhichOneof("request") in ANSWER_KINDS


def is_end(message: object) -> bool:
    """Whether the peer has closed its side of the stream."""
    # of a type of its own, which grpc's annotations leave out
    return message is grpc.aio.EOF
