# SPDX-License-Identifier: Apache-2.0
"""A collector that keeps what it gets: OTLP by gRPC and by HTTP, on ports of its own."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Span(msgspec.Struct, frozen=True):
    """A span with the attributes of its resource. Ids are hexadecimal; instants are nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """What has come. ``requests``: as they were."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.requests: list[bytes] = []
        self.grpc = self.http = ""

    def take(self, body: bytes) -> None:
        """A request of an exporter."""
        self.requests.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                for one in scope.spans:
                    self.spans.append(
                        Span(
                            name=one.name,
                            trace=one.trace_id.hex(),
                            id=one.span_id.hex(),
                            parent=one.parent_span_id.hex(),
                            kind=one.kind,
                            start_ns=one.start_time_unix_nano,
                            end_ns=one.end_time_unix_nano,
                            is_error=one.status.code == 2,
                            attributes=_attributes(one.attributes),
                            resource=resource,
                        )
                    )

    def trace(self, trace: str) -> dict[str, list[Span]]:
        """The spans of one trace, by name."""
        found: dict[str, list[Span]] = {}
        for one in self.spans:
            if one.trace == trace:
                found.setdefault(one.name, []).append(one)
        return found

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until what has come suffices."""

        async def suffices() -> bool:
            return bool(holds())

        await eventually(suffices)


def _attributes(pairs: Any) -> dict[str, Any]:  # noqa: ANN401 - a container of protobuf's
    return {one.key: _value(one.value) for one in pairs}


def _value(value: AnyValue) -> Any:  # noqa: ANN401 - as the exporter wrote it
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """One that listens on loopback until the end."""
    found = Collector()

    async def export(body: bytes, _: object) -> bytes:
        found.take(body)
        return ExportTraceServiceResponse().SerializeToString()

    async def post(request: web.Request) -> web.Response:
        found.take(await request.read())
        return web.Response(body=ExportTraceServiceResponse().SerializeToString())

    server = grpc.aio.server()
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    found.grpc = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.add_routes([web.post("/v1/traces", post)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.http = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()
        await server.stop(None)
