# SPDX-License-Identifier: Apache-2.0
"""Clusters: of extproc, of the engines of each ModelServer, and of Backends, over which Envoy balances by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    CircuitBreakersThresholdsRetryBudget,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
    TcpKeepalive,
)
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints
from envoy_data_plane.envoy.extensions.filters.http.credential_injector.v3 import CredentialInjector
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.http.injected_credentials.generic.v3 import Generic
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsAutoHttpConfig as AutoHttp
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig as ExplicitHttp
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent

from controller.bundle.envoy.bootstrap import ENDPOINTS_FOLDER, file_config_source
from controller.bundle.envoy.envoy_json import (
    PackedMessage,
    duration,
    envoy_address,
    http_filter,
    to_plain,
    to_resource,
    typed_extension,
)
from controller.bundle.envoy.fallback import (
    FallbackRuleLimits,
    cluster_metadata,
    high_priority_thresholds,
    model_name_filter,
)
from controller.bundle.envoy.path_prefix import path_prefix_filter
from controller.bundle.envoy.provider_filters import provider_filter, request_signing_filter, trailer_removal_filter
from controller.bundle.envoy.response_filters import reserved_header_filter
from controller.bundle.envoy.secrets import EngineKey, engine_tls_socket, secret_reference, upstream_credentials
from extproc.api.addresses import parse_address, parse_envoy_upstream, worker_addresses
from extproc.api.engine_connection import EngineConnection
from extproc.wire_names import (
    BACKEND_CLUSTER,
    DESTINATION,
    EXTPROC_CLUSTER,
    GRPC_PROTOCOLS,
    LB_NAMESPACE,
    MOST_STREAMS,
    RESERVED_FROM_ENGINES,
    RESERVED_IN_ANSWERS,
    SERVED_HOST,
    SERVED_NAMESPACE,
    SERVER_CLUSTER,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from betterproto2 import Message
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.http_route import Backend
    from extproc.api.model_server import ModelServer
    from extproc.api.model_server import OutlierDetection as OutlierPolicy

USAGE_CLUSTER: Final = "attache-usage"
UPSTREAM_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# Streams live as long as answers do: Envoy's defaults of 1,024 would cut requests off long before engines are full.
# What limits load is the engines' own queue and, before it, extproc.
_UNLIMITED: Final = 1_000_000
# Of extproc. Together less than the default of ``messageTimeout``, and more than it takes to read the largest bodies.
_PING_S: Final = 1.0
_PING_ANSWER_S: Final = 3.0
# vLLM's server closes idle connections after 5 s; a request sent at that moment would meet a reset.
IDLE_S: Final = 4.0
# Providers' servers keep them for a minute and more, and a new one costs a handshake over a long way.
_PROVIDER_IDLE_S: Final = 30.0
_PROVIDER_PING_S: Final = 30.0
_PROVIDER_PING_ANSWER_S: Final = 10.0
# File systems take names of 255 bytes; drafts of a file have a longer name.
_LONGEST_FILE_NAME: Final = 200
_BACKEND_CONNECT_S: Final = 5.0


def server_cluster_name(server: str) -> str:
    """The cluster of the ModelServer ``namespace/name``, as extproc names it."""
    return SERVER_CLUSTER + server


def endpoints_file(server: ModelServer) -> str:
    """Where the endpoints of a ModelServer are: Envoy takes one cluster from an EDS file.

    Another connection is another file. Clusters and endpoints do not change at one moment, and a cluster without TLS,
    or with another key, must never get the endpoints that are reached with it.
    """
    file = f"{ENDPOINTS_FOLDER}/{file_name(server.metadata.key)}"
    connection, provider = server.spec.connection, server.spec.provider
    if connection == EngineConnection() and provider is None:
        return file
    reached = connection if provider is None else (connection, provider)
    return f"{file.removesuffix('.json')}~{xxhash.xxh3_64_hexdigest(msgspec.json.encode(reached))}.json"


def file_name(key: str) -> str:
    """A file for the object ``namespace/name``."""
    namespace, _, name = key.partition("/")
    if len(name) > _LONGEST_FILE_NAME:
        name = f"{name[:_LONGEST_FILE_NAME]}-{xxhash.xxh3_64_hexdigest(name.encode())}"
    return f"{namespace}/{name}.json"


def server_cluster(
    server: ModelServer, directory: str, chained: FallbackRuleLimits | None = None, named: Sequence[str] = ()
) -> dict[str, object]:
    """Balanced by extproc's list of endpoints, on retries its next entry; without a list, by least requests.

    ``chained``: it is in a rule with fallbacks. ``named``: see ``configured_response_headers``.
    """
    policy = server.spec.traffic_policy
    idle_s = IDLE_S if server.spec.provider is None else _PROVIDER_IDLE_S
    name = server_cluster_name(server.metadata.key)
    return to_resource(
        Cluster(
            name=name,
            type=ClusterDiscoveryType.EDS,
            eds_cluster_config=ClusterEdsClusterConfig(
                eds_config=file_config_source(directory, endpoints_file(server)), service_name=name
            ),
            connect_timeout=duration(policy.connect_timeout),
            load_balancing_policy=_override_host(),
            # Ejected engines get requests only when all are ejected.
            common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=1.0)),
            outlier_detection=_outlier_detection(policy.outlier_detection),
            circuit_breakers=unlimited_circuit_breakers(chained=chained),
            metadata=None if chained is None else cluster_metadata(server),
            upstream_connection_options=keepalive(),
            transport_socket=engine_tls_socket(server.spec, directory),
            typed_extension_protocol_options={
                UPSTREAM_OPTIONS: PackedMessage(
                    UpstreamOptions(
                        common_http_protocol_options=HttpProtocolOptions(idle_timeout=duration(idle_s)),
                        http_filters=_upstream_filters(server, directory, chained, named),
                        **_http_of(server),
                    )
                )
            },
        )
    )


def _http_of(server: ModelServer) -> Mapping[str, Any]:
    """What its engines understand: those of gRPC HTTP/2 alone, with or without TLS. Over TLS a provider chooses."""
    http1 = Http1ProtocolOptions()
    if server.spec.protocol in GRPC_PROTOCOLS:
        return {"explicit_http_config": ExplicitHttp(http2_protocol_options=Http2ProtocolOptions())}
    if server.spec.provider is not None and server.spec.uses_tls:
        # all requests may share one connection: one to a machine that has vanished must not take them for long
        pings = KeepaliveSettings(interval=duration(_PROVIDER_PING_S), timeout=duration(_PROVIDER_PING_ANSWER_S))
        http2 = Http2ProtocolOptions(connection_keepalive=pings)
        return {"auto_config": AutoHttp(http_protocol_options=http1, http2_protocol_options=http2)}
    return {"explicit_http_config": ExplicitHttp(http_protocol_options=http1)}


def server_endpoints(server: ModelServer) -> dict[str, object]:
    """The engines of a ModelServer, as a resource of xDS.

    The classes of Envoy's schema need some 60 µs for an endpoint, and there may be thousands: they make the frame
    alone.
    """
    resource = to_resource(load_assignment(server_cluster_name(server.metadata.key), []))
    if server.spec.endpoints:
        connection = server.spec.connection
        endpoints = [
            endpoint_json(one.address, connection.server_name_of(one.server_name)) for one in server.spec.endpoints
        ]
        resource["endpoints"] = [{"lb_endpoints": endpoints}]
    return resource


def with_endpoints(cluster: Mapping[str, object], endpoints: Mapping[str, object]) -> dict[str, object]:
    """``cluster`` with its endpoints in it, in place of the file that has them."""
    assigned = {name: value for name, value in endpoints.items() if name != "@type"}
    others = {name: value for name, value in cluster.items() if name != "eds_cluster_config"}
    return {**others, "type": "STATIC", "load_assignment": assigned}


def extproc_cluster(gateway: GatewayConfigSpec) -> dict[str, object]:
    """extproc over HTTP/2, with a health check every second, so that a hung process is skipped soon.

    A process that does not answer a ping loses its connection, so that its streams are opened again at another one.
    Envoy resolves a host name itself, and follows what it resolves to.
    """
    is_name = not gateway.extproc.startswith("unix:") and not parse_envoy_upstream(gateway.extproc).is_ip
    return to_resource(
        Cluster(
            name=EXTPROC_CLUSTER,
            type=ClusterDiscoveryType.STRICT_DNS if is_name else ClusterDiscoveryType.STATIC,
            dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED if is_name else ClusterDnsLookupFamily.AUTO,
            load_assignment=load_assignment(
                EXTPROC_CLUSTER, worker_addresses(gateway.extproc, gateway.extproc_workers)
            ),
            connect_timeout=duration(1),
            # All requests of a process that dies are sent again at once.
            circuit_breakers=unlimited_circuit_breakers(limits_retries=False),
            # Never send to an unready extproc: the failure mode decides what happens then.
            common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0)),
            health_checks=[
                HealthCheck(
                    grpc_health_check=HealthCheckGrpcHealthCheck(service_name="readiness"),
                    interval=duration(1),
                    no_traffic_interval=duration(1),
                    timeout=duration(2),
                    unhealthy_threshold=2,
                    healthy_threshold=1,
                )
            ],
            typed_extension_protocol_options={
                UPSTREAM_OPTIONS: PackedMessage(
                    UpstreamOptions(
                        explicit_http_config=ExplicitHttp(
                            http2_protocol_options=Http2ProtocolOptions(
                                max_concurrent_streams=MOST_STREAMS,
                                # Beyond these Envoy closes the connection, and with it all requests, as one to a
                                # server that does not read. Pings tell whether extproc does.
                                max_outbound_frames=_UNLIMITED,
                                max_outbound_control_frames=_UNLIMITED,
                                connection_keepalive=KeepaliveSettings(
                                    interval=duration(_PING_S), timeout=duration(_PING_ANSWER_S)
                                ),
                            )
                        )
                    )
                )
            },
        )
    )


def usage_reports_cluster(api: str) -> dict[str, object]:
    """The process that serves reports, ``attache usage serve``."""
    is_name = not parse_envoy_upstream(api).is_ip
    return to_resource(
        Cluster(
            name=USAGE_CLUSTER,
            type=ClusterDiscoveryType.STRICT_DNS if is_name else ClusterDiscoveryType.STATIC,
            dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED if is_name else ClusterDnsLookupFamily.AUTO,
            load_assignment=load_assignment(USAGE_CLUSTER, [api]),
            connect_timeout=duration(1),
        )
    )


def socket_cluster(name: str, directory: str, socket: str, options: UpstreamOptions | None = None) -> dict[str, object]:
    """What listens on ``socket`` in the bundle's directory."""
    return to_resource(
        Cluster(
            name=name,
            type=ClusterDiscoveryType.STATIC,
            load_assignment=load_assignment(name, [f"unix:{directory}/{socket}"]),
            connect_timeout=duration(1),
            circuit_breakers=unlimited_circuit_breakers(),
            typed_extension_protocol_options={} if options is None else {UPSTREAM_OPTIONS: PackedMessage(options)},
        )
    )


def _override_host() -> LoadBalancingPolicy:
    def key(namespace: str, name: str) -> MetadataKey:
        return MetadataKey(key=namespace, path=[MetadataKeyPathSegment(key=name)])

    return balancing_policy(
        "envoy.load_balancing_policies.override_host",
        OverrideHost(
            # Metadata only: a header could be a client's.
            override_host_sources=[OverrideHostOverrideHostSource(metadata=key(LB_NAMESPACE, DESTINATION))],
            selected_host_key=key(SERVED_NAMESPACE, SERVED_HOST),
            fallback_policy=balancing_policy("envoy.load_balancing_policies.least_request", LeastRequest()),
        ),
    )


def balancing_policy(name: str, message: Message) -> LoadBalancingPolicy:
    """The policy of that name, alone."""
    return LoadBalancingPolicy(
        policies=[LoadBalancingPolicyPolicy(typed_extension_config=typed_extension(name, message))]
    )


def _outlier_detection(policy: OutlierPolicy) -> OutlierDetection:
    """Failures to connect and 502, 503, 504 count. A plain 500 does not: one bad prompt must not take engines out."""
    return OutlierDetection(
        interval=duration(1),
        base_ejection_time=duration(policy.ejection_time),
        max_ejection_time=duration(10 * policy.ejection_time),
        max_ejection_percent=100,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=policy.consecutive_failures,
        enforcing_consecutive_local_origin_failure=100,
        consecutive_gateway_failure=policy.consecutive_failures,
        enforcing_consecutive_gateway_failure=100,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
        enforcing_failure_percentage=0,
        enforcing_failure_percentage_local_origin=0,
    )


def unlimited_circuit_breakers(
    *, limits_retries: bool = True, chained: FallbackRuleLimits | None = None
) -> CircuitBreakers:
    """Envoy's circuit breakers hold back retries in a storm, what other ModelServers send on, and nothing else."""
    # An engine that dies with many requests waiting sends them all to its neighbours at once: let them go, and hold
    # only a storm back in which half of everything is a retry.
    budget = CircuitBreakersThresholdsRetryBudget(budget_percent=Percent(value=50.0), min_retry_concurrency=100)
    own = CircuitBreakersThresholds(
        max_connections=_UNLIMITED,
        max_pending_requests=_UNLIMITED,
        max_requests=_UNLIMITED,
        max_retries=None if limits_retries else _UNLIMITED,
        retry_budget=budget if limits_retries else None,
    )
    return CircuitBreakers(thresholds=[own, *([] if chained is None else [high_priority_thresholds(chained, own)])])


def keepalive() -> UpstreamConnectionOptions:
    """Of connections to servers."""
    return UpstreamConnectionOptions(tcp_keepalive=keepalive_probes())


def keepalive_probes() -> TcpKeepalive:
    """A probe after 30 s of silence and three more every 10 s: a vanished machine is noticed within a minute."""
    return TcpKeepalive(keepalive_time=30, keepalive_interval=10, keepalive_probes=3)


def endpoint_json(text: str, server_name: str | None = None) -> dict[str, object]:
    """The result of ``to_plain`` for an LbEndpoint at ``ip:port``; a test compares the two.

    ``server_name``: the SNI, and the name that the certificate must have.
    """
    ip, port = parse_address(text)
    named = {} if server_name is None else {"hostname": server_name}
    return {"endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}, **named}}


def _upstream_filters(
    server: ModelServer, directory: str, chained: FallbackRuleLimits | None, named: Sequence[str]
) -> list[HttpFilter]:
    """The ModelServer's model, if a request may come from another one. The engines' key takes the place of what the
    client sent. A provider gets its own requests, engines with a prefix their own paths. The last one is the first that
    has the answer.
    """
    found: list[HttpFilter] = []
    if chained is not None:
        found.append(model_name_filter(server, most_read=chained.most_read))
    credentials, provider = upstream_credentials(server.spec), server.spec.provider
    if isinstance(credentials, EngineKey):
        credential = Generic(credential=secret_reference(credentials, directory), header="authorization")
        injector = CredentialInjector(
            overwrite=True, credential=typed_extension("envoy.http.injected_credentials.generic", credential)
        )
        found.append(http_filter("envoy.filters.http.credential_injector", injector))
    if provider is not None:
        found += [provider_filter(server, provider), trailer_removal_filter()]
        if provider.signs_requests:
            found.append(request_signing_filter(provider, credentials, directory))
    elif server.spec.path_prefix:
        found.append(path_prefix_filter(server.spec.path_prefix))
    is_http2 = server.spec.protocol in GRPC_PROTOCOLS
    found.append(reserved_header_filter(RESERVED_FROM_ENGINES, named, has_trailers=is_http2))
    return [*found, http_filter("envoy.filters.http.upstream_codec", UpstreamCodec())]


def load_assignment(cluster: str, addresses: list[str]) -> ClusterLoadAssignment:
    """The endpoints of a cluster, all of one locality and weight."""
    return ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[
            LocalityLbEndpoints(
                lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=envoy_address(one))) for one in addresses]
            )
        ],
    )


def backend_cluster_name(backend: str) -> str:
    """The cluster of the Backend ``namespace/name``."""
    return f"{BACKEND_CLUSTER}{backend}"


def backend_endpoints_file(backend: str) -> str:
    """Where the endpoints of the Backend ``namespace/name`` are. No namespace begins with ``_``."""
    return f"{ENDPOINTS_FOLDER}/_backends/{file_name(backend)}"


def backend_cluster(backend: Backend, directory: str, named: Sequence[str] = ()) -> dict[str, object]:
    """Balanced by least requests; its only health check is a failing connection. ``named``: see
    ``configured_response_headers``.
    """
    name = backend_cluster_name(backend.metadata.key)
    return to_resource(
        Cluster(
            name=name,
            type=ClusterDiscoveryType.EDS,
            eds_cluster_config=ClusterEdsClusterConfig(
                eds_config=file_config_source(directory, backend_endpoints_file(backend.metadata.key)),
                service_name=name,
            ),
            connect_timeout=duration(_BACKEND_CONNECT_S),
            load_balancing_policy=balancing_policy("envoy.load_balancing_policies.least_request", LeastRequest()),
            circuit_breakers=unlimited_circuit_breakers(),
            upstream_connection_options=keepalive(),
            typed_extension_protocol_options={UPSTREAM_OPTIONS: PackedMessage(_backend_protocol(backend, named))},
        )
    )


def backend_cluster_resource(backend: Backend, like: Mapping[str, object], directory: str) -> dict[str, object]:
    """The cluster of ``backend`` as a resource of xDS. ``like``: the one of another Backend of the same protocol.

    The classes of Envoy's schema need some 0.5 ms for a cluster, and clusters of Backends differ in their names alone.
    """
    name, file = backend_cluster_name(backend.metadata.key), backend_endpoints_file(backend.metadata.key)
    source = to_plain(file_config_source(directory, file))
    return {**like, "name": name, "eds_cluster_config": {"eds_config": source, "service_name": name}}


def backend_endpoints(backend: Backend) -> dict[str, object]:
    """The servers of a Backend, as a resource of xDS."""
    resource = to_resource(load_assignment(backend_cluster_name(backend.metadata.key), []))
    if backend.spec.endpoints:
        resource["endpoints"] = [{"lb_endpoints": [endpoint_json(one) for one in backend.spec.endpoints]}]
    return resource


def _backend_protocol(backend: Backend, named: Sequence[str]) -> UpstreamOptions:
    is_http2 = backend.spec.protocol == "H2C"
    filters = [
        reserved_header_filter(RESERVED_IN_ANSWERS, named, has_trailers=is_http2),
        http_filter("envoy.filters.http.upstream_codec", UpstreamCodec()),
    ]
    if is_http2:
        http2 = ExplicitHttp(http2_protocol_options=Http2ProtocolOptions())
        return UpstreamOptions(explicit_http_config=http2, http_filters=filters)
    return UpstreamOptions(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=duration(IDLE_S)),
        explicit_http_config=ExplicitHttp(http_protocol_options=Http1ProtocolOptions()),
        http_filters=filters,
    )
