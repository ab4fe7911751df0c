# SPDX-License-Identifier: Apache-2.0
"""gRPC's health service (``grpc.health.v1.Health``), for gateways and for the probes of a kubelet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from extproc.rpc.server import RpcFailed, RpcServer, Status

if TYPE_CHECKING:
    import socket

    from extproc.metrics.request_metrics import Metrics
    from extproc.rpc.server import RpcCall

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
# The service name in the probes of the Inference Extension's own charts.
INFERENCE_EXTENSION: Final = "inference-extension"
# In the user agent of Envoy's health checks.
_ENVOY: Final = "Envoy"


class HealthService:
    """Answers health checks, and records when Envoy sends one; other programs' probes are no evidence of Envoy."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._statuses: dict[str, int] = {"": HealthCheckResponse.SERVING}
        # set when a status changes, and then replaced
        self._changed = asyncio.Event()
        self.handlers = {"/grpc.health.v1.Health/Check": self._check, "/grpc.health.v1.Health/Watch": self._watch}

    def set_live(self) -> None:
        """The process runs; it may not be ready."""
        self._set(HealthCheckResponse.SERVING, LIVENESS)
        self.set_ready(is_ready=False)

    def set_ready(self, *, is_ready: bool) -> None:
        """Whether requests may come."""
        status = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
        self._set(status, "", READINESS, EXTERNAL_PROCESSOR, INFERENCE_EXTENSION)

    def _set(self, status: int, *services: str) -> None:
        self._statuses.update(dict.fromkeys(services, status))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, call: RpcCall) -> None:
        service = await _service(call)
        if any(name == "user-agent" and _ENVOY in value for name, value in call.metadata):
            self._metrics.on_health_check()
        if service not in self._statuses:
            raise RpcFailed(Status.NOT_FOUND, f"there is no service '{service[:100]}'")
        await call.write(HealthCheckResponse(status=self._statuses[service]).SerializeToString())

    async def _watch(self, call: RpcCall) -> None:
        """Send the status now and whenever it changes."""
        service, last = await _service(call), -1
        while True:
            changed, status = self._changed, self._statuses.get(service, HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                await call.write(HealthCheckResponse(status=status).SerializeToString())
                last = status
            await changed.wait()


async def _service(call: RpcCall) -> str:
    message = await call.read()
    return "" if message is None else HealthCheckRequest.FromString(message).service


class HealthPort:
    """``health`` on a port of its own, without TLS."""

    def __init__(self, health: HealthService) -> None:
        self._server = RpcServer(health.handlers)

    async def start(self, listening: socket.socket) -> None:
        """Take the connections of a socket."""
        await self._server.start(listening)

    async def stop(self) -> None:
        """Close the server at once."""
        await self._server.close()
