# SPDX-License-Identifier: Apache-2.0
"""Listeners of requests that Envoy has from itself: those that were translated, and copies.

Each has a socket in the bundle's directory, which only Envoy's user can connect to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    Http1ProtocolOptions,
    HttpProtocolOptions,
    Pipe,
    TrafficDirection,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain
from envoy_data_plane.envoy.config.listener.v3 import Listener as EnvoyListener
from envoy_data_plane.envoy.config.route.v3 import (
    Route,
    RouteConfiguration,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
    Rds,
)

from controller.bundle.envoy.envoy_json import PackedMessage, duration, to_plain, to_resource
from controller.bundle.envoy.local_replies import local_replies
from extproc.wire_names import (
    DESTINATION,
    MIRROR,
    NOT_FOR_ENGINES,
    POLICY_HEADER,
    SERVER_HEADER,
    TRANSLATE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog

    from extproc.api.gateway_config import GatewayConfigSpec

_MANAGER: Final = "envoy.filters.network.http_connection_manager"
_MOST_WAITING_BYTES: Final = 1024 * 1024


def inner_listener(
    gateway: GatewayConfigSpec,
    socket: str,
    rds: Rds,
    filters: Sequence[HttpFilter],
    access_logs: Sequence[AccessLog] = (),
) -> dict[str, object]:
    """A listener of Envoy's own requests, with a socket in the bundle's directory. It is not drained: it lives as long
    as the answers of the first ones.
    """
    manager = HttpConnectionManager(
        stat_prefix=rds.route_config_name,
        http_filters=list(filters),
        access_log=list(access_logs),
        rds=rds,
        local_reply_config=local_replies(gateway),
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=duration(3600)),
        http_protocol_options=Http1ProtocolOptions(),
        # routes have limits
        stream_idle_timeout=duration(0),
        always_set_request_id_in_response=True,
    )
    return to_resource(
        EnvoyListener(
            name=rds.route_config_name,
            address=Address(pipe=Pipe(path=socket, mode=0o600)),
            # of what servers send while who asked takes nothing; not of bodies
            per_connection_buffer_limit_bytes=_MOST_WAITING_BYTES,
            traffic_direction=TrafficDirection.OUTBOUND,
            # the requests have been counted where they came from
            ignore_global_conn_limit=True,
            filter_chains=[
                FilterChain(filters=[Filter(name=_MANAGER, typed_config=PackedMessage(manager))]),
            ],
        )
    )


def inner_routes(name: str, gateway: GatewayConfigSpec, routes: Sequence[dict[str, object]]) -> dict[str, object]:
    """Of an inner listener. ``routes``: of decided requests."""
    host = VirtualHost(
        name=name,
        domains=["*"],
        routes=[Route(name="placeholder")],
        request_headers_to_remove=[DESTINATION, SERVER_HEADER, POLICY_HEADER, TRANSLATE, MIRROR, *NOT_FOR_ENGINES],
        request_body_buffer_limit=_most_bytes(gateway),
    )
    resource = to_resource(RouteConfiguration(name=name, virtual_hosts=[host]))
    resource["virtual_hosts"] = [{**to_plain(host), "routes": list(routes)}]
    return resource


def _most_bytes(gateway: GatewayConfigSpec) -> int:
    """A body may be longer in another API."""
    return 2 * int(gateway.max_body_size)
