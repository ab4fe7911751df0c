# SPDX-License-Identifier: Apache-2.0
"""Spans of sampled requests to an OpenTelemetry collector, by OTLP over HTTP or gRPC.

Nothing waits for the collector. Traces wait in a queue of ``MOST_TRACES``; what does not fit is dropped and counted. A
batch that the collector does not take within ``_TIMEOUT_S`` is dropped, too, and the next one is tried after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from extproc.api.addresses import join_host_port, parse_envoy_upstream
from extproc.core.trace import TraceStep
from extproc.task_supervisor import Backoff
from extproc.wire_names import TRACES_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import grpc.aio
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

    from extproc.api.tracing import Tracing
    from extproc.core.trace import Attributes, AttributeValue, Trace

log = logging.getLogger(__name__)

MOST_TRACES: Final = 4096
_BATCH: Final = 512
_EACH_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
# Traces that are encoded before the event loop goes on: some 0.1 ms each.
_AT_ONCE: Final = 4
_SCOPE: Final = "attache.extproc"
_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
# A float of today has no smaller parts.
_MICROSECONDS: Final = 1_000_000
_NS: Final = 1000
# A collector's answer has a few bytes.
_MOST_ANSWER_BYTES: Final = 64 * 1024


class ExportRejected(Exception):
    """The collector did not take a batch."""


class OtlpClient(Protocol):
    """A connection to one collector."""

    async def send(self, body: bytes) -> None:
        """Send an ExportTraceServiceRequest; raises ExportRejected, OSError or TimeoutError."""
        ...

    async def close(self) -> None:
        """Close it."""
        ...


class TraceExporter:
    """A TraceSink. Made inside the event loop."""

    def __init__(
        self,
        tracing: Callable[[], Tracing | None],
        count: Callable[[str, int], None],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        process: str,
        files: Path,
    ) -> None:
        """``tracing``: the collector in use, None: no trace is wanted. ``count``: gets what became of traces, and of
        how many. ``clock``: that of traces. ``process``: the name of this one. ``files``: what names of files are
        relative to.
        """
        self._tracing = tracing
        self._clock = clock
        self._wall_clock = wall_clock
        self._process = process
        self._files = files
        self._queue: deque[Trace] = deque()
        self._is_due = asyncio.Event()
        self._client: tuple[Tracing, OtlpClient] | None = None
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        # with which the last batch was sent: while it is under way, another may be configured
        self._tried: Tracing | None = None
        # whether spans can be encoded; None: nobody has asked
        self._is_able: bool | None = None
        self._count = count

    @property
    def is_enabled(self) -> bool:
        """Whether anybody wants traces."""
        return bool(self._is_able) and self._tracing() is not None

    def add(self, trace: Trace) -> None:
        """One whose request is decided. Dropped if the queue is full."""
        if len(self._queue) >= MOST_TRACES:
            self._count("dropped", 1)
            return
        self._queue.append(trace)
        if len(self._queue) >= _BATCH:
            self._is_due.set()

    async def run(self) -> None:
        """Send batches until cancelled."""
        while True:
            if self._is_able is None and self._tracing() is not None:
                self._is_able = _can_encode()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), _EACH_S)
            self._is_due.clear()
            await self._send_batch()
            if self._backoff.pause_s:
                await self._pause()
            elif len(self._queue) >= _BATCH:
                self._is_due.set()

    async def _pause(self) -> None:
        """After a failure; another collector is tried at once."""
        left_s = self._backoff.pause_s
        while left_s > 0 and self._tracing() == self._tried:
            await asyncio.sleep(min(left_s, _EACH_S))
            left_s -= _EACH_S
        if self._tracing() != self._tried:
            self._backoff.reset()

    async def close(self) -> None:
        """Send what is there, if the collector takes it at once."""
        if self._is_able and not self._backoff.pause_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EACH_S):
                    await self._send_batch()
        await self._close_client()

    async def _send_batch(self) -> None:
        tracing = self._tracing()
        if tracing is None:
            self._queue.clear()
            await self._close_client()
            return
        if not self._queue:
            return
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        self._tried = tracing
        try:
            body = await self._encode(batch, tracing)
            client = await self._client_of(tracing)
            async with asyncio.timeout(_TIMEOUT_S):
                await client.send(body)
        except (ExportRejected, OSError, TimeoutError) as error:
            self._count("failed", len(batch))
            self._failed(tracing, error)
        else:
            self._count("sent", len(batch))
            if self._backoff.pause_s:
                log.info("the collector at %s takes spans again", tracing.endpoint)
            self._backoff.reset()

    def _failed(self, tracing: Tracing, error: Exception) -> None:
        if not self._backoff.pause_s:
            why = str(error) or f"no answer within {_TIMEOUT_S:g} s"
            log.warning(
                "the collector at %s does not take spans: %s; they are dropped until it does. "
                "See that 'endpoint' and 'protocol' are right, and that it runs",
                tracing.endpoint,
                why,
            )
        self._backoff.record_failure()

    async def _encode(self, batch: Iterable[Trace], tracing: Tracing) -> bytes:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415 - an extra
            ExportTraceServiceRequest,
        )

        request = ExportTraceServiceRequest()
        of_resource = request.resource_spans.add()
        about = {"service.name": f"{tracing.service_name}-extproc", **tracing.resource}
        _write(of_resource.resource.attributes, {**about, "service.instance.id": self._process})
        scope = of_resource.scope_spans.add()
        scope.scope.name = _SCOPE
        offset_s = self._wall_clock() - self._clock()
        for number, trace in enumerate(batch, start=1):
            write_spans(scope, trace, offset_s)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        body: bytes = request.SerializeToString()
        return body

    async def _client_of(self, tracing: Tracing) -> OtlpClient:
        if self._client is None or self._client[0] != tracing:
            await self._close_client()
            made = (
                OtlpGrpcClient(tracing, self._files)
                if tracing.protocol == "grpc"
                else OtlpHttpClient(tracing, self._files)
            )
            self._client = tracing, made
        return self._client[1]

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client[1].close()


def _can_encode() -> bool:
    try:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2  # noqa: F401, PLC0415 - an extra
    except ImportError:
        log.warning("extproc's spans are not sent: run pip install 'attache[tracing]'")
        return False
    return True


def write_spans(scope: ScopeSpans, trace: Trace, offset_s: float) -> None:
    """A span for the decision, and one for each of its steps. ``offset_s``: from the traces' clock to Unix time."""
    trace_id, parent = bytes.fromhex(trace.parent.trace_id), bytes.fromhex(trace.parent.span_id)
    about = {"attache.ticket": trace.ticket} if trace.ticket else {}
    if trace.error:
        about["error.type"] = trace.error
    whole = TraceStep("attache.decide", trace.started_s, trace.ended_s, about)
    own = _write_span(scope, whole, trace_id, parent, offset_s, error=trace.error)
    for step in trace.steps:
        _write_span(scope, step, trace_id, own, offset_s)


def _write_span(
    scope: ScopeSpans, step: TraceStep, trace_id: bytes, parent: bytes, offset_s: float, error: str = ""
) -> bytes:
    span = scope.spans.add()
    span.trace_id, span.span_id, span.parent_span_id = trace_id, random.randbytes(8), parent
    span.name = step.name
    span.kind = span.SPAN_KIND_INTERNAL
    span.start_time_unix_nano = round((step.start_s + offset_s) * _MICROSECONDS) * _NS
    span.end_time_unix_nano = round((step.end_s + offset_s) * _MICROSECONDS) * _NS
    _write(span.attributes, step.attributes)
    if error:
        span.status.code = span.status.STATUS_CODE_ERROR
    own: bytes = span.span_id
    return own


def _write(pairs: RepeatedKeyValues, attributes: Attributes) -> None:
    for name, value in attributes.items():
        pair = pairs.add()
        pair.key = name
        _write_value(pair, value)


def _write_value(pair: KeyValue, value: AttributeValue) -> None:
    match value:
        case str():
            pair.value.string_value = value
        case int():
            pair.value.int_value = value
        case float():
            pair.value.double_value = value
        case _:
            for one in value:
                pair.value.array_value.values.add().string_value = one


class RepeatedKeyValues(Protocol):
    """A repeated field of KeyValues."""

    def add(self) -> KeyValue:
        """One more."""
        ...


class OtlpHttpClient:
    """OTLP over HTTP."""

    def __init__(self, tracing: Tracing, files: Path) -> None:
        import aiohttp  # noqa: PLC0415 - takes as long to load as all else

        tls = tracing.tls
        context = ssl.create_default_context(cafile=files / tls.ca_file) if tls is not None else False
        target = parse_envoy_upstream(tracing.endpoint)
        scheme = "http" if tls is None else "https"
        self._url = f"{scheme}://{join_host_port(target.host, target.port)}{TRACES_PATH}"
        self._server_name = None if tls is None else tls.server_name
        self._failures: tuple[type[Exception], ...] = (aiohttp.ClientError,)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, ssl=context),
            headers={"content-type": "application/x-protobuf"},
            trust_env=False,
        )

    async def send(self, body: bytes) -> None:
        """Send an ExportTraceServiceRequest."""
        try:
            async with self._http.post(
                self._url, data=body, allow_redirects=False, server_hostname=self._server_name
            ) as answer:
                if answer.status >= 300:
                    raise ExportRejected(f"it answers {answer.status}")
        except self._failures as error:
            raise ExportRejected(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the connection."""
        await self._http.close()


class OtlpGrpcClient:
    """OTLP over gRPC."""

    def __init__(self, tracing: Tracing, files: Path) -> None:
        import grpc.aio  # noqa: PLC0415 - a thread of its own, and 20 MB

        tls, target = tracing.tls, parse_envoy_upstream(tracing.endpoint)
        address = join_host_port(target.host, target.port)
        options: list[tuple[str, object]] = [
            ("grpc.max_receive_message_length", _MOST_ANSWER_BYTES),
            ("grpc.enable_http_proxy", 0),
        ]
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            if tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            credentials = grpc.ssl_channel_credentials((files / tls.ca_file).read_bytes())
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        # bytes are sent and received as they are
        self._export: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_EXPORT)
        self._failure: type[grpc.aio.AioRpcError] = grpc.aio.AioRpcError

    async def send(self, body: bytes) -> None:
        """Send an ExportTraceServiceRequest."""
        try:
            await self._export(body, timeout=_TIMEOUT_S)
        except self._failure as error:
            raise ExportRejected(f"{error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
