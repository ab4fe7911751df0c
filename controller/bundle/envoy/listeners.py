# SPDX-License-Identifier: Apache-2.0
"""Listeners: their groups, connection managers, TLS by server name, headers stripped from requests, access log.

The listeners of a group share one HTTP connection manager and one route configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import msgspec
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog, AccessLogFilter, NotHealthCheckFilter
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    HttpProtocolOptionsHeadersWithUnderscoresAction,
    KeepaliveSettings,
    TrafficDirection,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, FilterChainMatch, ListenerFilter
from envoy_data_plane.envoy.config.listener.v3 import Listener as EnvoyListener
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig
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

from controller.bundle.envoy.bootstrap import file_config_source
from controller.bundle.envoy.clusters import keepalive_probes
from controller.bundle.envoy.envoy_json import (
    PackedMessage,
    duration,
    envoy_address,
    to_plain,
    to_resource,
    typed_extension,
)
from controller.bundle.envoy.filters import NO_NEEDS, FilterNeeds, extproc_service, http_filters, mirror_filters
from controller.bundle.envoy.inner_listeners import inner_listener
from controller.bundle.envoy.local_replies import local_replies
from controller.bundle.envoy.mirror import MIRRORED, MIRRORED_ROUTES_FILE, has_mirror
from controller.bundle.envoy.request_translation import TRANSLATED, TRANSLATED_ROUTES_FILE, needs_translation
from controller.bundle.envoy.secrets import listener_tls_socket
from controller.bundle.envoy.tracing import TRACE_HEADERS, TRACE_PREFIXES, with_tracing
from controller.bundle.envoy.usage_log import usage_access_log
from extproc.api.addresses import join_host_port, parse_address
from extproc.api.gateway_config import Listener, ListenerTls
from extproc.api.spec import STEPS_LISTENER
from extproc.wire_names import (
    ACCESS_LOG_NAME,
    CALLER_CLIENT,
    CALLER_REPORTS,
    CALLER_TENANT,
    CALLER_USER,
    CLIENT,
    CONTENT_ENCODING,
    DESTINATION,
    GRPC_STATUS,
    MIRROR,
    MIRROR_SOCKET,
    OBJECTIVE_PREFIXES,
    POLICY_HEADER,
    REPORTS,
    RESERVED_PREFIXES,
    RETRY_AFTER,
    SERVER_HEADER,
    SIDECAR_HEADERS,
    SUBSET,
    TRANSLATE,
    TTFT_TAG,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.gateway_config import GatewayConfigSpec

# The route configuration of a gateway that has only ``listen``; the names of others begin with it.
DEFAULT_ROUTES: Final = "attache"
ROUTES_FOLDER: Final = "rds"
# The listener that ``listen`` stands for.
DEFAULT_LISTENER: Final = "default"
# With these headers of Envoy's a client could set timeouts and retries.
_ENVOYS_PREFIX: Final = "x-envoy-"
# Only this gateway itself writes these, even if its clients are trusted.
_OWN_HEADERS: Final = (
    *(DESTINATION, SUBSET, SERVER_HEADER, POLICY_HEADER, TRANSLATE, MIRROR, CLIENT, REPORTS, *SIDECAR_HEADERS),
    # who sees whose usage; a route does not write a name that is not known
    *(CALLER_CLIENT, CALLER_TENANT, CALLER_USER, CALLER_REPORTS),
)
_SERVER_NAME: Final = "attache"
# What the names of its statistics begin with.
_STATISTICS: Final = "attache"
# Envoy's default; the longest hold is added.
_IDLE_S: Final = 300.0
# HTTP/2: to a client that is silent for so long, and how long it may take to answer.
_PING_S: Final = 30.0
_PING_ANSWER_S: Final = 20.0
# Of TLS: a client that does not finish it holds memory.
_HANDSHAKE_S: Final = 15.0
_MANAGER: Final = "envoy.filters.network.http_connection_manager"


class ListenerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Listeners that share one HTTP connection manager and one route configuration.

    ``address``: ``ip:port``, spelled as Envoy spells it. ``listeners``: all plain HTTP listeners of that address, or
    one HTTPS listener. ``tls``: of the HTTPS listener.
    """

    route_config_name: str
    address: str
    listeners: tuple[Listener, ...]
    tls: ListenerTls | None = None

    @property
    def routes_file(self) -> str:
        """Where its route configuration is: Envoy takes one from an RDS file."""
        if self.route_config_name == DEFAULT_ROUTES:
            return "rds.json"
        protocol, _, name = self.route_config_name.removeprefix(f"{DEFAULT_ROUTES}/").partition("/")
        # names have no underscore, so no two share a file
        return f"{ROUTES_FOLDER}/{protocol}-{name.replace('/', '_').replace(':', '_')}.json"


def client_snapshot(snapshot: Snapshot) -> Snapshot:
    """What listeners of clients serve."""
    routes = tuple(one for one in snapshot.routes if one.spec.callers == "Clients")
    return snapshot if len(routes) == len(snapshot.routes) else msgspec.structs.replace(snapshot, routes=routes)


def transformer_listener_snapshot(snapshot: Snapshot) -> Snapshot | None:
    """What the listener of transformers and explainers serves; None: there is none.

    It knows no callers: the clients for which they work have been authenticated and charged, and their requests are in
    the usage log.
    """
    if snapshot.gateway.steps is None:
        return None
    gateway = msgspec.structs.replace(
        snapshot.gateway,
        listeners=(Listener(name=STEPS_LISTENER, address=snapshot.gateway.steps),),
        clients="Untrusted",
        authentication=None,
        cors=None,
        usage_log=None,
    )
    routes = tuple(one for one in snapshot.routes if one.spec.callers == "Steps")
    return msgspec.structs.replace(snapshot, gateway=gateway, routes=routes, http_routes=())


def routes_files(snapshot: Snapshot) -> dict[str, str]:
    """The files with the route configurations of a gateway, each with the name of its subscription in Envoy's
    statistics.
    """
    found = {
        one.routes_file: f"http.{_STATISTICS}.rds.{_in_statistics(one.route_config_name)}"
        for view in (client_snapshot(snapshot), transformer_listener_snapshot(snapshot))
        if view is not None
        for one in listener_groups(view.gateway)
    }
    if needs_translation(snapshot.servers):
        found[TRANSLATED_ROUTES_FILE] = f"http.{TRANSLATED}.rds.{TRANSLATED}"
    if has_mirror(snapshot.routes):
        found[MIRRORED_ROUTES_FILE] = f"http.{MIRRORED}.rds.{MIRRORED}"
    return found


def _in_statistics(name: str) -> str:
    """How Envoy spells a name in its statistics."""
    return name.replace(":", "_")


def listener_groups(gateway: GatewayConfigSpec) -> tuple[ListenerGroup, ...]:
    """The groups of ``gateway``, in the order of their first listeners.

    The plain HTTP listeners of one address share a connection before its first host name is known, so they are one
    group. HTTPS listeners are distinguished by the server name of the TLS handshake, so each is a group by itself.
    """
    if not gateway.listeners:
        only = Listener(name=DEFAULT_LISTENER, address=gateway.listen)
        return (ListenerGroup(route_config_name=DEFAULT_ROUTES, address=gateway.listen, listeners=(only,)),)
    shared: dict[tuple[str, str], list[Listener]] = {}
    for listener in gateway.listeners:
        address = normalize_address(listener.address)
        alone = "" if listener.tls is None else listener.name
        shared.setdefault((address, alone), []).append(listener)
    return tuple(_group(address, listeners) for (address, _), listeners in shared.items())


def normalize_address(text: str) -> str:
    """``ip:port`` as it is spelled for all that mean the same; raises ValueError."""
    ip, port = parse_address(text)
    return join_host_port(ip, port)


def _group(address: str, listeners: Sequence[Listener]) -> ListenerGroup:
    first = listeners[0]
    name = f"http/{address}" if first.tls is None else f"https/{first.name}"
    return ListenerGroup(
        route_config_name=f"{DEFAULT_ROUTES}/{name}", address=address, listeners=tuple(listeners), tls=first.tls
    )


def listener_resources(
    gateway: GatewayConfigSpec, directory: str, *, longest_wait_s: float = 0.0, needs: FilterNeeds = NO_NEEDS
) -> list[dict[str, object]]:
    """Where clients connect, as resources of xDS: one for each address. ``longest_wait_s``: how long extproc may hold a
    request.
    ``needs``: of its routes.

    All connection managers are alike but for their routes. The classes of Envoy's schema turn it into JSON once.
    """
    groups = listener_groups(gateway)
    manager = _connection_manager(gateway, directory, longest_wait_s, needs)
    manager.rds = _routes_of(groups[0], directory)
    plain = with_tracing(to_resource(manager), gateway)
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
        EnvoyListener(
            name=name,
            address=envoy_address(first.address),
            # of what filters hold: the bodies of requests
            per_connection_buffer_limit_bytes=gateway.max_body_size,
            tcp_keepalive=keepalive_probes(),
            # a drain closes these listeners alone
            traffic_direction=TrafficDirection.INBOUND,
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
        transport_socket=listener_tls_socket(group.tls, directory),
        transport_socket_connect_timeout=duration(_HANDSHAKE_S),
    )


def _routes_of(group: ListenerGroup, directory: str) -> Rds:
    return Rds(
        route_config_name=group.route_config_name, config_source=file_config_source(directory, group.routes_file)
    )


def _reads_server_name() -> ListenerFilter:
    return ListenerFilter(name="envoy.filters.listener.tls_inspector", typed_config=PackedMessage(TlsInspector()))


def _connection_manager(
    gateway: GatewayConfigSpec, directory: str, longest_wait_s: float, needs: FilterNeeds
) -> HttpConnectionManager:
    return HttpConnectionManager(
        stat_prefix=_STATISTICS,
        early_header_mutation_extensions=[_strip_reserved_headers(gateway)],
        http_filters=http_filters(gateway, directory, needs),
        local_reply_config=local_replies(gateway, model_paths=needs.model_paths, calls=needs.calls),
        access_log=_access_logs(gateway, needs),
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.REJECT_REQUEST,
        common_http_protocol_options=HttpProtocolOptions(
            idle_timeout=duration(3600),
            # engines' servers read x_name as x-name, which is what we remove
            headers_with_underscores_action=HttpProtocolOptionsHeadersWithUnderscoresAction.DROP_HEADER,
        ),
        http_protocol_options=Http1ProtocolOptions(),
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=1000,
            initial_stream_window_size=1024 * 1024,
            initial_connection_window_size=16 * 1024 * 1024,
            # while a request is held nothing else is sent: load balancers on the way would take the connection for dead
            connection_keepalive=KeepaliveSettings(interval=duration(_PING_S), timeout=duration(_PING_ANSWER_S)),
        ),
        # A malformed request ends its stream, not the connection that others share.
        stream_error_on_invalid_http_message=True,
        request_headers_timeout=duration(30),
        # 0 is no limit
        request_timeout=duration(gateway.request_timeout + longest_wait_s if gateway.request_timeout else 0.0),
        stream_idle_timeout=duration(_IDLE_S + longest_wait_s),
        # which engine answers, and in which version, is not for clients
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.OVERWRITE,
        server_name=_SERVER_NAME,
        always_set_request_id_in_response=True,
    )


def _strip_reserved_headers(gateway: GatewayConfigSpec) -> TypedExtensionConfig:
    """Remove reserved headers first: only this gateway, or trusted ones before it, may write them."""
    prefixes, names = [_ENVOYS_PREFIX], [*_OWN_HEADERS]
    if gateway.clients == "Untrusted":
        prefixes = [*RESERVED_PREFIXES, *OBJECTIVE_PREFIXES, _ENVOYS_PREFIX]
        if gateway.tracing is not None:
            # whoever may choose the id of a trace decides whether it is sampled
            prefixes += TRACE_PREFIXES
            names += TRACE_HEADERS
    return typed_extension(
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
            + [HeaderMutation(remove=name) for name in names]
        ),
    )


def mirrored_listener(gateway: GatewayConfigSpec, directory: str) -> dict[str, object]:
    """Where Envoy sends copies of requests."""
    rds = Rds(route_config_name=MIRRORED, config_source=file_config_source(directory, MIRRORED_ROUTES_FILE))
    logs = [outcome_log(gateway, calls=False)]
    return inner_listener(gateway, f"{directory}/{MIRROR_SOCKET}", rds, mirror_filters(gateway), logs)


def _access_logs(gateway: GatewayConfigSpec, needs: FilterNeeds) -> list[AccessLog]:
    log = gateway.usage_log
    of_usage = [] if log is None else [usage_access_log(log.path, translates=needs.translates, calls=needs.calls)]
    return [outcome_log(gateway, calls=needs.calls), *of_usage]


def outcome_log(gateway: GatewayConfigSpec, *, calls: bool) -> AccessLog:
    """The outcome of each request, sent to extproc in batches with dynamic metadata (ticket, usage, host). ``calls``:
    some are of gRPC.
    """
    statuses = [GRPC_STATUS] if calls else []
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        # nobody decided those
        filter=AccessLogFilter(not_health_check_filter=NotHealthCheckFilter()),
        typed_config=PackedMessage(
            HttpGrpcAccessLogConfig(
                common_config=CommonGrpcAccessLogConfig(
                    log_name=ACCESS_LOG_NAME,
                    grpc_service=extproc_service(),
                    transport_api_version=ApiVersion.V3,
                    buffer_flush_interval=duration(gateway.access_log_flush),
                    # Streaming engines send headers before they compute, so the first byte of the body is timed.
                    custom_tags=[CustomTag(tag=TTFT_TAG, value="%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%")],
                ),
                additional_response_headers_to_log=[CONTENT_ENCODING, RETRY_AFTER, *statuses],
                additional_response_trailers_to_log=statuses,
            )
        ),
    )
