# SPDX-License-Identifier: Apache-2.0
"""Clusters of Backends: servers over which Envoy balances by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterEdsClusterConfig
from envoy_data_plane.envoy.config.core.v3 import Http1ProtocolOptions, Http2ProtocolOptions, HttpProtocolOptions
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig as ExplicitHttp

from controller.bundle.envoy.bootstrap import ENDPOINTS_FOLDER, file_source
from controller.bundle.envoy.clusters import (
    IDLE_S,
    UPSTREAM_OPTIONS,
    assignment,
    balancing_policy,
    file_name,
    keepalive,
    plain_endpoint,
    unlimited,
)
from controller.bundle.envoy.envoy_json import seconds, to_plain, to_resource
from controller.bundle.envoy.plain import Packed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.backend import Backend

_CONNECT_S: Final = 5.0


def backend_cluster_name(backend: str) -> str:
    """The cluster of the Backend ``namespace/name``."""
    return f"backend/{backend}"


def backend_endpoints_file(backend: str) -> str:
    """Where the endpoints of the Backend ``namespace/name`` are. No namespace begins with ``_``."""
    return f"{ENDPOINTS_FOLDER}/_backends/{file_name(backend)}"


def backend_cluster(backend: Backend, directory: str) -> Cluster:
    """Balanced by least requests; there is no health to know but a connection that fails."""
    name = backend_cluster_name(backend.metadata.key)
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=ClusterEdsClusterConfig(
            eds_config=file_source(directory, backend_endpoints_file(backend.metadata.key)), service_name=name
        ),
        connect_timeout=seconds(_CONNECT_S),
        load_balancing_policy=balancing_policy("envoy.load_balancing_policies.least_request", LeastRequest()),
        circuit_breakers=unlimited(),
        upstream_connection_options=keepalive(),
        typed_extension_protocol_options={UPSTREAM_OPTIONS: Packed(_protocol(backend))},
    )


def backend_resource(backend: Backend, like: Mapping[str, object], directory: str) -> dict[str, object]:
    """The cluster of ``backend`` as a resource of xDS. ``like``: the one of another Backend of the same protocol.

    The classes of Envoy's schema need some 0.5 ms for a cluster, and clusters of Backends differ in their names alone.
    """
    name, file = backend_cluster_name(backend.metadata.key), backend_endpoints_file(backend.metadata.key)
    source = to_plain(file_source(directory, file))
    return {**like, "name": name, "eds_cluster_config": {"eds_config": source, "service_name": name}}


def backend_endpoints(backend: Backend) -> dict[str, object]:
    """The servers of a Backend, as a resource of xDS."""
    resource = to_resource(assignment(backend_cluster_name(backend.metadata.key), []))
    if backend.spec.endpoints:
        resource["endpoints"] = [{"lb_endpoints": [plain_endpoint(one) for one in backend.spec.endpoints]}]
    return resource


def _protocol(backend: Backend) -> UpstreamOptions:
    if backend.spec.protocol == "H2C":
        return UpstreamOptions(explicit_http_config=ExplicitHttp(http2_protocol_options=Http2ProtocolOptions()))
    return UpstreamOptions(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=seconds(IDLE_S)),
        explicit_http_config=ExplicitHttp(http_protocol_options=Http1ProtocolOptions()),
    )
