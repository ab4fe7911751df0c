# SPDX-License-Identifier: Apache-2.0
"""gRPC's health service: on the port of the streams and, for probes of a kubelet, on one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

if TYPE_CHECKING:
    from extproc.metrics.registry import Metrics

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
