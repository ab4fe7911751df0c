# SPDX-License-Identifier: Apache-2.0
"""Tracing in Envoy: its OpenTelemetry tracer, the attributes of its spans, and the collector's cluster.

Envoy writes a span for each request and one for each try at an engine. What extproc knows of a request comes as dynamic
metadata (``TRACE_NAMESPACE``), for sampled requests alone. No attribute has text of a prompt, of an answer or of a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
)
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpService,
    HttpUri,
    TransportSocket,
)
from envoy_data_plane.envoy.config.trace.v3 import OpenTelemetryConfig, TracingHttp
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManagerTracing,
    RequestIdExtension,
)
from envoy_data_plane.envoy.extensions.request_id.uuid.v3 import UuidRequestIdConfig
from envoy_data_plane.envoy.extensions.tracers.opentelemetry.resource_detectors.v3 import (
    StaticConfigResourceDetectorConfig,
)
from envoy_data_plane.envoy.extensions.tracers.opentelemetry.samplers.v3 import (
    ParentBasedSamplerConfig,
    TraceIdRatioBasedSamplerConfig,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig as ExplicitHttp
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType, Percent

from controller.bundle.envoy.authentication import upstream_tls
from controller.bundle.envoy.clusters import UPSTREAM_OPTIONS, load_assignment
from controller.bundle.envoy.envoy_json import PackedMessage, duration, to_plain, to_resource, typed_extension
from extproc.api.addresses import join_host_port, parse_envoy_upstream
from extproc.wire_names import (
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    CREATED_TOKENS,
    NAMESPACE,
    PROMPT_TOKENS,
    TICKET,
    TRACE_NAMESPACE,
    TRACES_PATH,
    USAGE_NAMESPACE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig

    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.tracing import CollectorTls, Tracing

COLLECTOR_CLUSTER: Final = "attache-collector"
# Headers by which a client continues a trace, or asks for one. Envoy's tracer writes the first two anew.
TRACE_HEADERS: Final = ("traceparent", "tracestate", "baggage", "b3", "x-client-trace-id")
TRACE_PREFIXES: Final = ("x-b3-", "x-datadog-", "x-cloud-trace-", "uber-trace-")
# Envoy sends spans every 5 s, and as soon as it has five: so many requests wait for a slow collector at most.
_MOST_REQUESTS: Final = 64
_MOST_SPANS: Final = 1024
_EXPORT_S: Final = 2.0
_CONNECT_S: Final = 1.0
_PARTS_OF_PERCENT: Final = 10_000
# As the conventions name them; of a request that extproc has not decided, its method.
_NAME: Final = (
    f"%CEL('{TRACE_NAMESPACE}' in metadata.filter_metadata"
    f" ? metadata.filter_metadata['{TRACE_NAMESPACE}']['name'] : request.method)%"
)


def _metadata(namespace: str, key: str) -> str:
    return f"%DYNAMIC_METADATA({namespace}:{key})%"


def _of_trace(key: str) -> str:
    return _metadata(TRACE_NAMESPACE, key)


# Attributes of OpenTelemetry's conventions for generative AI, and ours. An attribute without a value is left out.
_TEXTS: Final[Mapping[str, str]] = {
    "gen_ai.operation.name": _of_trace("operation"),
    "gen_ai.provider.name": _of_trace("provider"),
    "gen_ai.request.model": _of_trace("model"),
    "gen_ai.response.model": _of_trace("served_model"),
    "server.address": "%UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    # without the query, where clients may write keys
    "http.url": "%REQ(:SCHEME)%://%REQ(:AUTHORITY)%%PATH(NQ:ORIG_OR_PATH)%",
    "error.type": "%CEL(response.code >= 400 ? response.code : '')%",
    "attache.ticket": _metadata(NAMESPACE, TICKET),
    "attache.route": _of_trace("route"),
    "attache.server": _of_trace("server"),
    "attache.tenant": _of_trace("tenant"),
}
_NUMBERS: Final[Mapping[str, str]] = {
    "server.port": "%UPSTREAM_REMOTE_PORT%",
    "gen_ai.usage.input_tokens": _metadata(USAGE_NAMESPACE, PROMPT_TOKENS),
    "gen_ai.usage.output_tokens": _metadata(USAGE_NAMESPACE, COMPLETION_TOKENS),
    "gen_ai.usage.cache_read.input_tokens": _metadata(USAGE_NAMESPACE, CACHED_TOKENS),
    "gen_ai.usage.cache_write.input_tokens": _metadata(USAGE_NAMESPACE, CREATED_TOKENS),
    "attache.queue_ms": _of_trace("queue_ms"),
}


def with_tracing(manager: Mapping[str, object], gateway: GatewayConfigSpec) -> dict[str, object]:
    """``manager``: a connection manager as a resource, without tracing."""
    tracing = gateway.tracing
    if tracing is None:
        return dict(manager)
    written = to_plain(
        HttpConnectionManagerTracing(
            provider=TracingHttp(
                name="envoy.tracers.opentelemetry", typed_config=PackedMessage(_tracer(tracing, gateway.clients))
            ),
            # the sampler decides
            random_sampling=Percent(value=100.0),
            client_sampling=Percent(value=0.0),
            spawn_upstream_span=True,
            operation=_NAME,
            upstream_operation="try",
            custom_tags=[CustomTag(tag=name, value=value) for name, value in [*_TEXTS.items(), *_NUMBERS.items()]],
        )
    )
    for one in cast("list[dict[str, object]]", written["custom_tags"]):
        if one["tag"] in _NUMBERS:
            # of Envoy's schema, and not yet of its classes
            one["value_type"] = "INT"
    # An id of a request that its client has chosen would decide whether it is sampled.
    ids = RequestIdExtension(
        typed_config=PackedMessage(
            UuidRequestIdConfig(pack_trace_reason=False, use_request_id_for_trace_sampling=False)
        )
    )
    return {**manager, "tracing": written, "request_id_extension": to_plain(ids)}


def _tracer(tracing: Tracing, clients: str) -> OpenTelemetryConfig:
    config = OpenTelemetryConfig(
        service_name=tracing.service_name,
        max_cache_size=_MOST_SPANS,
        resource_detectors=_resource(tracing),
        sampler=_sampler(tracing.sampling_percent, continues_traces=clients == "Trusted"),
    )
    if tracing.protocol == "grpc":
        config.grpc_service = GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR_CLUSTER), timeout=duration(_EXPORT_S)
        )
    else:
        target = parse_envoy_upstream(tracing.endpoint)
        scheme = "http" if tracing.tls is None else "https"
        uri = f"{scheme}://{join_host_port(target.host, target.port)}{TRACES_PATH}"
        config.http_service = HttpService(
            http_uri=HttpUri(uri=uri, cluster=COLLECTOR_CLUSTER, timeout=duration(_EXPORT_S))
        )
    return config


def _resource(tracing: Tracing) -> list[TypedExtensionConfig]:
    if not tracing.resource:
        return []
    detector = StaticConfigResourceDetectorConfig(attributes=dict(tracing.resource))
    return [typed_extension("envoy.tracers.opentelemetry.resource_detectors.static_config", detector)]


def _sampler(percent: float, *, continues_traces: bool) -> TypedExtensionConfig:
    """``continues_traces``: the caller's decision counts where there is one."""
    share = FractionalPercent(
        numerator=round(percent * _PARTS_OF_PERCENT), denominator=FractionalPercentDenominatorType.MILLION
    )
    by_id = typed_extension(
        "envoy.tracers.opentelemetry.samplers.trace_id_ratio_based",
        TraceIdRatioBasedSamplerConfig(sampling_percentage=share),
    )
    if not continues_traces:
        return by_id
    return typed_extension(
        "envoy.tracers.opentelemetry.samplers.parent_based", ParentBasedSamplerConfig(wrapped_sampler=by_id)
    )


def collector_clusters(tracing: Tracing | None) -> list[dict[str, object]]:
    """The cluster of the collector, as a resource of xDS; none without tracing."""
    if tracing is None:
        return []
    target = parse_envoy_upstream(tracing.endpoint)
    if tracing.protocol == "grpc":
        protocol = ExplicitHttp(http2_protocol_options=Http2ProtocolOptions())
    else:
        protocol = ExplicitHttp(http_protocol_options=Http1ProtocolOptions())
    options = PackedMessage(UpstreamOptions(explicit_http_config=protocol))
    bounds = CircuitBreakersThresholds(
        max_connections=4, max_pending_requests=_MOST_REQUESTS, max_requests=_MOST_REQUESTS
    )
    cluster = Cluster(
        name=COLLECTOR_CLUSTER,
        type=ClusterDiscoveryType.STATIC if target.is_ip else ClusterDiscoveryType.STRICT_DNS,
        dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED if not target.is_ip else ClusterDnsLookupFamily.AUTO,
        connect_timeout=duration(_CONNECT_S),
        load_assignment=load_assignment(COLLECTOR_CLUSTER, [join_host_port(target.host, target.port)]),
        circuit_breakers=CircuitBreakers(thresholds=[bounds]),
        transport_socket=None if tracing.tls is None else _socket(target.host, tracing.tls),
        typed_extension_protocol_options={UPSTREAM_OPTIONS: options},
    )
    return [to_resource(cluster)]


def _socket(host: str, tls: CollectorTls) -> TransportSocket:
    context = upstream_tls(tls.server_name or host, tls.ca_file)
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedMessage(context))
