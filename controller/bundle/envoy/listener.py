# SPDX-License-Identifier: Apache-2.0
"""Listeners: connection managers, TLS by server name, headers stripped from requests, access log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    HttpProtocolOptionsHeadersWithUnderscoresAction,
    KeepaliveSettings,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import (
    Filter,
    FilterChain,
    FilterChainMatch,
    Listener,
    ListenerFilter,
)
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.envoy.extensions.filters.listener.tls_inspector.v3 import TlsInspector
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
    Rds,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag

from controller.bundle.envoy.bootstrap import file_source
from controller.bundle.envoy.clusters import keepalive_probes
from controller.bundle.envoy.envoy_json import address, seconds, to_plain, to_resource, typed
from controller.bundle.envoy.filters import NO_NEEDS, Needs, extproc_service, http_filters
from controller.bundle.envoy.listener_groups import DEFAULT_ROUTES, listener_groups
from controller.bundle.envoy.local_replies import local_replies
from controller.bundle.envoy.plain import Packed
from controller.bundle.envoy.tls import listener_socket
from extproc.protocol import (
    ACCESS_LOG_NAME,
    CLIENT,
    DESTINATION,
    OBJECTIVE_PREFIXES,
    POLICY_HEADER,
    RESERVED_PREFIXES,
    SERVER_HEADER,
    SIDECAR_HEADERS,
    SUBSET,
    TTFT_TAG,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.bundle.envoy.listener_groups import ListenerGroup
    from extproc.api.gateway_config import GatewayConfigSpec

# With these headers of Envoy's a client could set timeouts and retries.
_ENVOYS_PREFIX: Final = "x-envoy-"
# Only this gateway itself writes these, even if its clients are trusted.
_OWN_HEADERS: Final = (DESTINATION, SUBSET, SERVER_HEADER, POLICY_HEADER, CLIENT, *SIDECAR_HEADERS)
_SERVER_NAME: Final = "attache"
# Envoy's default; the longest hold is added.
_IDLE_S: Final = 300.0
# HTTP/2: to a client that is silent for so long, and how long it may take to answer.
_PING_S: Final = 30.0
_PING_ANSWER_S: Final = 20.0
# Of TLS: a client that does not finish it holds memory.
_HANDSHAKE_S: Final = 15.0
_MANAGER: Final = "envoy.filters.network.http_connection_manager"


def listener_resources(
    gateway: GatewayConfigSpec, directory: str, *, longest_wait_s: float = 0.0, needs: Needs = NO_NEEDS
) -> list[dict[str, object]]:
    """Where clients connect, as resources of xDS: one for each address. ``longest_wait_s``: how long extproc may hold a
    request.
    ``needs``: of its routes.

    All connection managers are alike but for their routes. The classes of Envoy's schema turn it into JSON once.
    """
    groups = listener_groups(gateway)
    manager = _connection_manager(gateway, directory, longest_wait_s, needs)
    manager.rds = _routes_of(groups[0], directory)
    plain = to_resource(manager)
    by_address: dict[str, list[ListenerGroup]] = {}
    for group in groups:
        by_address.setdefault(group.address, []).append(group)
    return [_listener(gateway, directory, together, plain) for together in by_address.values()]


def _listener(
    gateway: GatewayConfigSpec, directory: str, groups: Sequence[ListenerGroup], manager: Mapping[str, object]
) -> dict[str, object]:
    """``groups``: of one address. ``manager``: the connection manager of each, but for its routes."""
    first = groups[0]
    name = DEFAULT_ROUTES if first.route_config_name == DEFAULT_ROUTES else f"{DEFAULT_ROUTES}/{first.address}"
    plain = to_resource(
        Listener(
            name=name,
            address=address(first.address),
            # of what filters hold: the bodies of requests
            per_connection_buffer_limit_bytes=gateway.max_body_size,
            tcp_keepalive=keepalive_probes(),
            listener_filters=[] if first.tls is None else [_reads_server_name()],
            filter_chains=[_filter_chain(group, directory) for group in groups],
        )
    )
    chains = cast("list[dict[str, object]]", plain["filter_chains"])
    for chain, group in zip(chains, groups, strict=True):
        rds = to_plain(_routes_of(group, directory))
        chain["filters"] = [{"name": _MANAGER, "typed_config": {**manager, "rds": rds}}]
    return plain


def _filter_chain(group: ListenerGroup, directory: str) -> FilterChain:
    """Without its connection manager. An HTTPS listener without a host name takes what no other one of its address
    does.
    """
    if group.tls is None:
        return FilterChain(filters=[Filter(name=_MANAGER)])
    hostname = group.listeners[0].hostname
    return FilterChain(
        name=group.route_config_name,
        filters=[Filter(name=_MANAGER)],
        filter_chain_match=None if hostname is None else FilterChainMatch(server_names=[hostname.lower()]),
        transport_socket=listener_socket(group.tls, directory),
        transport_socket_connect_timeout=seconds(_HANDSHAKE_S),
    )


def _routes_of(group: ListenerGroup, directory: str) -> Rds:
    return Rds(route_config_name=group.route_config_name, config_source=file_source(directory, group.routes_file))


def _reads_server_name() -> ListenerFilter:
    return ListenerFilter(name="envoy.filters.listener.tls_inspector", typed_config=Packed(TlsInspector()))


def _connection_manager(
    gateway: GatewayConfigSpec, directory: str, longest_wait_s: float, needs: Needs
) -> HttpConnectionManager:
    return HttpConnectionManager(
        stat_prefix="attache",
        early_header_mutation_extensions=[_strip_reserved_headers(gateway)],
        http_filters=http_filters(gateway, directory, needs),
        local_reply_config=local_replies(gateway),
        access_log=[_access_log(gateway)],
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.REJECT_REQUEST,
        common_http_protocol_options=HttpProtocolOptions(
            idle_timeout=seconds(3600),
            # engines' servers read x_name as x-name, which is what we remove
            headers_with_underscores_action=HttpProtocolOptionsHeadersWithUnderscoresAction.DROP_HEADER,
        ),
        http_protocol_options=Http1ProtocolOptions(),
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=1000,
            initial_stream_window_size=1024 * 1024,
            initial_connection_window_size=16 * 1024 * 1024,
            # while a request is held nothing else is sent: load balancers on the way would take the connection for dead
            connection_keepalive=KeepaliveSettings(interval=seconds(_PING_S), timeout=seconds(_PING_ANSWER_S)),
        ),
        # A malformed request ends its stream, not the connection that others share.
        stream_error_on_invalid_http_message=True,
        request_headers_timeout=seconds(30),
        # 0 is no limit
        request_timeout=seconds(gateway.request_timeout + longest_wait_s if gateway.request_timeout else 0.0),
        stream_idle_timeout=seconds(_IDLE_S + longest_wait_s),
        # which engine answers, and in which version, is not for clients
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.OVERWRITE,
        server_name=_SERVER_NAME,
        always_set_request_id_in_response=True,
    )


def _strip_reserved_headers(gateway: GatewayConfigSpec) -> TypedExtensionConfig:
    """Remove reserved headers first: only this gateway, or trusted ones before it, may write them."""
    prefixes = [_ENVOYS_PREFIX]
    if gateway.clients == "Untrusted":
        prefixes = [*RESERVED_PREFIXES, *OBJECTIVE_PREFIXES, _ENVOYS_PREFIX]
    return typed(
        "envoy.http.early_header_mutation.header_mutation",
        EarlyHeaderMutation(
            mutations=[
                HeaderMutation(
                    remove_on_match=HeaderMutationRemoveOnMatch(
                        key_matcher=StringMatcher(prefix=prefix, ignore_case=True)
                    )
                )
                for prefix in prefixes
            ]
            + [HeaderMutation(remove=name) for name in _OWN_HEADERS]
        ),
    )


def _access_log(gateway: GatewayConfigSpec) -> AccessLog:
    """The outcome of each request, sent to extproc in batches with dynamic metadata (ticket, usage, host)."""
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        typed_config=Packed(
            HttpGrpcAccessLogConfig(
                common_config=CommonGrpcAccessLogConfig(
                    log_name=ACCESS_LOG_NAME,
                    grpc_service=extproc_service(),
                    transport_api_version=ApiVersion.V3,
                    buffer_flush_interval=seconds(gateway.access_log_flush),
                    # Streaming engines send headers before they compute, so the first byte of the body is timed.
                    custom_tags=[CustomTag(tag=TTFT_TAG, value="%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%")],
                )
            )
        ),
    )
