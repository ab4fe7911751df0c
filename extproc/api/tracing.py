# SPDX-License-Identifier: Apache-2.0
"""Tracing: which requests Envoy and extproc write spans of, and the OpenTelemetry collector that gets them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import unquote

import msgspec

from extproc.api import spec as patterns
from extproc.api.addresses import check_endpoint, parse_endpoint
from extproc.api.spec import NonEmpty, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.config_errors import Finding, Path

AttributeName = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=patterns.NO_CONTROL)]
AttributeValue = Annotated[str, msgspec.Meta(max_length=512, pattern=patterns.NO_CONTROL)]

# OpenTelemetry's variables for the authorities of the collector's certificate.
_CERTIFICATES: Final = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
# OpenTelemetry's names of what is configured by fields of their own.
_SERVICE_NAME: Final = "service.name"


class CollectorTls(Spec, frozen=True):
    """TLS towards the collector. ``ca_file``: the authorities that sign its certificate, in PEM. ``server_name``: the
    name that the certificate has, sent as SNI; without it, the endpoint's host.
    """

    ca_file: NonEmpty = "/etc/ssl/certs/ca-certificates.crt"
    server_name: NonEmpty | None = None


class Tracing(Spec, frozen=True):
    """Spans of a share of all requests, sent by OTLP. ``endpoint``: the collector's address, ``ip:port`` or
    ``name:port``. ``protocol``: what it takes there; collectors listen on port 4317 for gRPC and on 4318 for HTTP.
    ``service_name``: of the gateway. ``resource``: further attributes of it. ``tls``: without it, plain text.
    """

    endpoint: NonEmpty
    protocol: Literal["grpc", "http"] = "grpc"
    # Of all requests, those that no caller has decided about: of trusted clients, the sampled flag of their traceparent
    # counts.
    sampling_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    service_name: NonEmpty = "attache"
    resource: Annotated[dict[AttributeName, AttributeValue], msgspec.Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    tls: CollectorTls | None = None

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """All files that it names."""
        return () if self.tls is None else (self.tls.ca_file,)


def parse_otlp(url: str, variables: Mapping[str, str] = MappingProxyType({})) -> Tracing:
    """``http://HOST:PORT`` or ``grpc://HOST:PORT``, with TLS ``https://`` or ``grpcs://``; raises ValueError.

    ``variables``: OpenTelemetry's of the environment; those that name the service, its attributes and the authorities
    are used.
    """
    scheme, separator, endpoint = url.partition("://")
    if not separator or scheme not in {"http", "https", "grpc", "grpcs"}:
        raise ValueError(f"'{url}' is no collector; write http://HOST:4318, grpc://HOST:4317, or https:// or grpcs://")
    parse_endpoint(endpoint := endpoint.removesuffix("/"))
    ca_file = next(filter(None, map(variables.get, _CERTIFICATES)), None)
    tls = None
    if scheme in {"https", "grpcs"}:
        tls = CollectorTls() if ca_file is None else CollectorTls(ca_file=ca_file)
    return Tracing(
        endpoint=endpoint,
        protocol="grpc" if scheme.startswith("grpc") else "http",
        resource=_resource(variables),
        tls=tls,
    )


def _resource(variables: Mapping[str, str]) -> dict[str, str]:
    """Pairs that are none are left out, as OpenTelemetry's libraries do."""
    pairs = [pair.partition("=") for pair in variables.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")]
    found = {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip() and value}
    name = variables.get("OTEL_SERVICE_NAME")
    return {**found, _SERVICE_NAME: name} if name else found


def check_tracing(tracing: Tracing) -> Iterator[Finding]:
    """The endpoint parses, and no attribute has two values."""
    path: Path = ("spec", "tracing")
    if "://" in tracing.endpoint:
        yield (*path, "endpoint"), f"'{tracing.endpoint}' is a URL; write host:port, and tls for TLS"
    else:
        yield from check_endpoint(tracing.endpoint, (*path, "endpoint"))
    if _SERVICE_NAME in tracing.resource:
        yield (*path, "resource", _SERVICE_NAME), "has a field of its own; write serviceName"
