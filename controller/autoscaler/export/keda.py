# SPDX-License-Identifier: Apache-2.0
"""KEDA's external scaler service, with push: the desired replicas of a binding's target, as a metric.

A ScaledObject names the binding, and the target if it has several. The metric is the number of replicas that we decided
on and its target value is 1, so that the HPA, which divides the one by the other (``metricType: AverageValue``, the
default), comes to the same number. Without a decision calls fail, and KEDA keeps the current replicas or applies its
``fallback``; zero is never reported instead.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import msgspec

from controller.autoscaler.export.desired_replicas import DecisionMissing, DesiredReplicas
from controller.autoscaler.export.keda_access import MOST_STREAMS, ReadPermissions, StreamLimiter, TooManyStreams
from controller.autoscaler.export.keda_messages import (
    SERVICE,
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    MetricSpec,
    MetricValue,
    ScaledObjectRef,
)
from extproc.file_reloading import Reloadable

log = logging.getLogger(__name__)
METRIC: Final = "attache-desired-replicas"
# Streams get a message at least this often, so that broken connections are noticed sooner.
_REPEAT_S: Final = 30.0
# Concurrent calls other than streams.
_MOST_CALLS: Final = 1024
# Names of Kubernetes' objects are no longer.
_LONGEST_NAME: Final = 253
_OPTIONS: Final = (
    # a second process on the same port would share its connections without a word
    ("grpc.so_reuseport", 0),
    # ScaledObjects hold a stream each, over one connection; OpenStreams limits them
    ("grpc.max_concurrent_streams", 100_000),
    # a reference to a ScaledObject is short
    ("grpc.max_receive_message_length", 64 * 1024),
    # a client that is gone without a word keeps its streams no longer than this
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),
)
_Context = grpc.aio.ServicerContext[Any, Any]


class TlsFiles(msgspec.Struct, frozen=True):
    """``certificate`` and ``key``: of the server. ``clients``: authorities of callers' certificates; None: callers need
    none.
    """

    certificate: Path
    key: Path
    clients: Path | None = None

    def read_files(self) -> tuple[bytes, bytes, bytes | None]:
        """Raises OSError."""
        clients = None if self.clients is None else self.clients.read_bytes()
        return self.certificate.read_bytes(), self.key.read_bytes(), clients


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """New connections use the current content of the files; while certificate and key do not match, the last valid
    content.

    Raises OSError or ValueError if the first ones cannot be used.
    """
    loaded = Reloadable(files.read_files, _configuration)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for every new connection, in a thread of its own; None: unchanged."""
        outcome = loaded.poll()
        if outcome == "refused":
            log.error("the certificate is refused, the last good one stays: %s", loaded.problem)
        return loaded.value if outcome == "new" else None

    return grpc.dynamic_ssl_server_credentials(
        loaded.value,
        newer,  # type: ignore[arg-type]  # types-grpcio leaves out that None is for "no change"
        require_client_authentication=files.clients is not None,
    )


def _configuration(contents: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    """Raises ValueError, as gRPC itself breaks connections without an error where files are unusable."""
    # the library takes a while to import: only with TLS
    from controller.api.certificate_checks import check_authorities, check_key_pair  # noqa: PLC0415

    certificate, key, clients = contents
    check_key_pair(certificate, key)
    if clients is not None:
        check_authorities(clients, None)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], clients)


class DecisionSource(Protocol):
    """Reads decisions. ``binding``: its key, ``namespace/name``. ``target``: its name; empty: the only one."""

    def last_decision(self, binding: str, target: str) -> DesiredReplicas:
        """The last decision; raises Unknown."""
        ...

    async def wait_for_change(self, last: DesiredReplicas | None, binding: str, target: str) -> DesiredReplicas | None:
        """Wait until the desired replicas differ from ``last``, and return them; None: there is no decision."""
        ...


class KedaScaler:
    """Answers KEDA from ``source``, on one grpc.aio server, which serves once.

    Only the replica that decides serves: behind a Service the others refuse connections, and KEDA's client retries
    until it reaches that one.
    """

    def __init__(
        self,
        source: DecisionSource,
        *,
        readers: ReadPermissions = ReadPermissions(),  # noqa: B008 - frozen
        most_streams: int = MOST_STREAMS,
        repeat_s: float = _REPEAT_S,
    ) -> None:
        self._source = source
        self._readers = readers
        self._streams = StreamLimiter(most_streams)
        self._repeat_s = repeat_s
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=most_streams + _MOST_CALLS)
        self._server.add_generic_rpc_handlers((self._service(),))

    async def run(self, address: str, credentials: grpc.ServerCredentials | None = None) -> None:
        """Serve until cancelled. Raises OSError."""
        await self.start(address, credentials)
        try:
            await self._server.wait_for_termination()
        finally:
            await self.stop(None)

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on ``ip:port``; returns the port. ``credentials``: for TLS. Raises OSError."""
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        await self._server.start()
        return port

    async def stop(self, grace_s: float | None = 1.0) -> None:
        """Take no more calls, and end streams after ``grace_s``."""
        await self._server.stop(grace_s)

    def _service(self) -> grpc.GenericRpcHandler:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "IsActive": unary(self._is_active, ScaledObjectRef.FromString, IsActiveResponse.SerializeToString),
            "StreamIsActive": stream(
                self._stream_is_active, ScaledObjectRef.FromString, IsActiveResponse.SerializeToString
            ),
            "GetMetricSpec": unary(
                self._metric_spec, ScaledObjectRef.FromString, GetMetricSpecResponse.SerializeToString
            ),
            "GetMetrics": unary(self._metrics, GetMetricsRequest.FromString, GetMetricsResponse.SerializeToString),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _is_active(self, ref: ScaledObjectRef, context: _Context) -> IsActiveResponse:
        return IsActiveResponse(result=(await self._wanted(ref, context)).is_active)

    async def _stream_is_active(self, ref: ScaledObjectRef, context: _Context) -> None:
        binding, target = await self._named(ref, context)
        try:
            with self._streams.count_stream(_caller(context), ref.namespace):
                await self._push(binding, target, context)
        except TooManyStreams as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def _push(self, binding: str, target: str, context: _Context) -> None:
        """Send at once when the decision changes, and periodically; nothing while there is no decision."""
        last: DesiredReplicas | None = None
        reported: bool | None = None
        while True:
            try:
                async with asyncio.timeout(self._repeat_s):
                    last = await self._source.wait_for_change(last, binding, target)
            except TimeoutError:
                reported = None
            if last is not None and last.is_active != reported:
                reported = last.is_active
                await context.write(IsActiveResponse(result=reported))

    async def _metric_spec(self, ref: ScaledObjectRef, context: _Context) -> GetMetricSpecResponse:
        """The same for every caller; a mistake in the ScaledObject is refused here."""
        await self._named(ref, context)
        return GetMetricSpecResponse(metricSpecs=[MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)])

    async def _metrics(self, request: GetMetricsRequest, context: _Context) -> GetMetricsResponse:
        wanted = await self._wanted(request.scaledObjectRef, context)
        name = request.metricName or METRIC
        value = MetricValue(metricName=name, metricValue=wanted.desired, metricValueFloat=float(wanted.desired))
        return GetMetricsResponse(metricValues=[value])

    async def _wanted(self, ref: ScaledObjectRef, context: _Context) -> DesiredReplicas:
        binding, target = await self._named(ref, context)
        try:
            return self._source.last_decision(binding, target)
        except DecisionMissing as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _named(self, ref: ScaledObjectRef, context: _Context) -> tuple[str, str]:
        """The binding's key and the target, from the trigger's metadata; ends the call if they are missing, or not
        readable by this caller.

        The binding is in the ScaledObject's namespace, which the caller names: KEDA does; see ``ReadPermissions`` for
        others.
        """
        binding, target = ref.scalerMetadata.get("binding", ""), ref.scalerMetadata.get("target", "")
        if not binding or "/" in binding:
            text = (
                "write the name of an AutoscalingPolicyBinding of the same namespace as 'binding' into the trigger's"
                " metadata"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        if max(map(len, (ref.namespace, binding, target))) > _LONGEST_NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "names have at most 253 characters")
        refusal = self._readers.refusal(_names(context), ref.namespace)
        if refusal:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
        return f"{ref.namespace}/{binding}", target


def _names(context: _Context) -> list[str]:
    """In the client's certificate: the common name and the alternative ones; none without a certificate."""
    known = context.auth_context()
    found = [*known.get("x509_common_name", ()), *known.get("x509_subject_alternative_name", ())]
    return [one.decode(errors="replace") for one in found]


def _caller(context: _Context) -> str:
    """Its certificate's first name, or else its address without the port."""
    return next(iter(_names(context)), "") or context.peer().rpartition(":")[0]
