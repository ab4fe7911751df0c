# SPDX-License-Identifier: Apache-2.0
"""Key sets of token issuers that Envoy fetches by itself: each has a cluster of its own.

They are fetched beside the requests, and none waits for one but the first after a start. A set that was fetched so
holds until the next one is here, however long that takes: an issuer that is away logs nobody out. A set that a request
has waited for holds for ``cacheDuration``, in which the next one is fetched. A change of this part of the configuration
begins anew, without a set.

Envoy could hold the listener back until the first set is here, but not where the filter is followed in a file: a change
of it would never fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterDnsLookupFamily
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    DataSource,
    HttpUri,
    SocketAddress,
    TransportSocket,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import JwksAsyncFetch
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import RemoteJwks as EnvoysRemoteJwks
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from controller.bundle.envoy.envoy_json import seconds, to_resource
from controller.bundle.envoy.plain import Packed
from extproc.api.advice import is_ip

if TYPE_CHECKING:
    from extproc.api.authentication import Authentication, RemoteJwks

_HTTPS_PORT: Final = 443
# After a fetch that failed.
_RETRY_S: Final = 2.0


def remote_key_set(issuer: str, remote: RemoteJwks) -> EnvoysRemoteJwks:
    """How Envoy fetches the key set of ``issuer``, which is its name in the configuration."""
    return EnvoysRemoteJwks(
        http_uri=HttpUri(uri=remote.uri, cluster=_cluster_name(issuer), timeout=seconds(remote.timeout)),
        cache_duration=seconds(remote.cache_duration),
        # fast: the listener serves before the first set is here, and a request then waits for it
        async_fetch=JwksAsyncFetch(fast_listener=True, failed_refetch_duration=seconds(_RETRY_S)),
    )


def key_set_clusters(authentication: Authentication | None) -> list[dict[str, object]]:
    """The clusters of all issuers whose key sets are fetched, as resources of xDS."""
    issuers = () if authentication is None else authentication.jwt
    return [
        to_resource(_cluster(_cluster_name(one.name), one.remote_jwks))
        for one in issuers
        if one.remote_jwks is not None
    ]


def _cluster_name(issuer: str) -> str:
    return f"jwks/{issuer}"


def _cluster(name: str, remote: RemoteJwks) -> Cluster:
    parts = urlsplit(remote.uri)
    host, port = parts.hostname or "", parts.port or _HTTPS_PORT
    is_address = is_ip(host)
    endpoint = Endpoint(address=Address(socket_address=SocketAddress(address=host, port_value=port)))
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if is_address else ClusterDiscoveryType.STRICT_DNS,
        dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED,
        connect_timeout=seconds(remote.timeout),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name, endpoints=[LocalityLbEndpoints(lb_endpoints=[LbEndpoint(endpoint=endpoint)])]
        ),
        transport_socket=TransportSocket(
            name="envoy.transport_sockets.tls",
            typed_config=Packed(_tls(host, remote.ca_file, is_address=is_address)),
        ),
    )


def _tls(host: str, ca_file: str, *, is_address: bool) -> UpstreamTlsContext:
    """Who answers must show a certificate for ``host``: whoever gives us keys decides who may come in."""
    kind = SubjectAltNameMatcherSanType.IP_ADDRESS if is_address else SubjectAltNameMatcherSanType.DNS
    return UpstreamTlsContext(
        sni="" if is_address else host,
        common_tls_context=CommonTlsContext(
            validation_context=CertificateValidationContext(
                trusted_ca=DataSource(filename=ca_file),
                match_typed_subject_alt_names=[SubjectAltNameMatcher(san_type=kind, matcher=StringMatcher(exact=host))],
            )
        ),
    )
