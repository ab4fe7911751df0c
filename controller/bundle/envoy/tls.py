# SPDX-License-Identifier: Apache-2.0
"""TLS on both sides of Envoy: what clients and engines are shown, and what they must show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CommonTlsContext,
    DownstreamTlsContext,
    TlsParameters,
    TlsParametersTlsProtocol,
    UpstreamTlsContext,
)

from controller.bundle.envoy.plain import Packed
from controller.bundle.envoy.secrets import Authorities, authorities, certificate, secret_reference

if TYPE_CHECKING:
    from extproc.api.connection import EngineTls
    from extproc.api.listeners import ListenerTls

_ALPN: Final = ("h2", "http/1.1")
_VERSIONS: Final = {"1.2": TlsParametersTlsProtocol.TLSv1_2, "1.3": TlsParametersTlsProtocol.TLSv1_3}


def listener_socket(tls: ListenerTls, directory: str) -> TransportSocket:
    """TLS of a listener. Of several certificates, Envoy shows the one whose names have the server name asked for."""
    common = CommonTlsContext(
        tls_params=TlsParameters(tls_minimum_protocol_version=_VERSIONS[tls.min_version]),
        tls_certificate_sds_secret_configs=[secret_reference(certificate(one), directory) for one in tls.certificates],
        alpn_protocols=list(_ALPN),
    )
    context = DownstreamTlsContext(common_tls_context=common)
    asked = tls.client_certificates
    if asked is not None:
        common.validation_context_sds_secret_config = secret_reference(authorities(asked), directory)
        context.require_client_certificate = asked.mode == "Require"
        # A resumed session is not checked again: a certificate that has been revoked since would still be good.
        context.disable_stateless_session_resumption = True
        context.disable_stateful_session_resumption = True
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Packed(context))


def engine_socket(tls: EngineTls, directory: str) -> TransportSocket:
    """TLS towards engines. The name that is asked for, and that their certificate must have, stands beside each
    endpoint.
    """
    common = CommonTlsContext(
        tls_params=TlsParameters(
            tls_minimum_protocol_version=_VERSIONS["1.2"], tls_maximum_protocol_version=_VERSIONS["1.3"]
        )
    )
    if tls.client_certificate is not None:
        source = certificate(tls.client_certificate)
        common.tls_certificate_sds_secret_configs = [secret_reference(source, directory)]
    if tls.ca_file is not None:
        common.validation_context_sds_secret_config = secret_reference(Authorities(tls.ca_file), directory)
    context = UpstreamTlsContext(
        common_tls_context=common,
        auto_host_sni=True,
        auto_sni_san_validation=tls.ca_file is not None,
        # a resumed session shows no certificate: one that is no longer trusted would still be good
        max_session_keys=0,
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Packed(context))
