# SPDX-License-Identifier: Apache-2.0
"""Certificates, authorities and keys, each a secret in a file that Envoy watches; and TLS sockets, which name them.

Their content lies in no other file of the bundle, so a new certificate changes neither listeners nor clusters:
connections stay, and the next handshake shows it.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash
from envoy_data_plane.envoy.config.core.v3 import TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CommonTlsContext,
    DownstreamTlsContext,
    SdsSecretConfig,
    Secret,
    TlsParameters,
    TlsParametersTlsProtocol,
    UpstreamTlsContext,
)

from controller.bundle.envoy.bootstrap import file_config_source
from controller.bundle.envoy.envoy_json import PackedMessage, resources_file, to_resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.engine_connection import CertificateFiles, EngineConnection
    from extproc.api.gateway_config import ClientCertificates, Listener, ListenerTls
    from extproc.api.model_server import ModelServerSpec

SECRETS_FOLDER: Final = "secrets"
_ALPN: Final = ("h2", "http/1.1")
_VERSIONS: Final = {"1.2": TlsParametersTlsProtocol.TLSv1_2, "1.3": TlsParametersTlsProtocol.TLSv1_3}


class SecretSource(msgspec.Struct, frozen=True, tag=True):
    """Where a secret comes from. Equal sources are one secret."""

    @property
    def name(self) -> str:
        """How the secret is called, within Envoy and as a file."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))

    @property
    def file(self) -> str:
        """The secret's file in the bundle."""
        return f"{SECRETS_FOLDER}/{self.name}.json"


class Certificate(SecretSource, frozen=True):
    """A certificate with its private key."""

    cert_file: str
    key_file: str


class Authorities(SecretSource, frozen=True):
    """Authorities of the peer's certificates, and revocation lists."""

    ca_file: str
    crl_file: str | None = None


class SystemAuthorities(SecretSource, frozen=True):
    """The authorities that the machine of the bundle's writer trusts."""


class EngineKey(SecretSource, frozen=True):
    """A key that engines require; from a file or a variable of the environment."""

    file_name: str | None
    variable: str | None


class AwsCredentials(SecretSource, frozen=True):
    """Credentials that requests are signed with, of a file as AWS's own tools have it."""

    file_name: str

    @property
    def file(self) -> str:
        """No resource of xDS: Envoy's filter reads it as it is."""
        return f"{SECRETS_FOLDER}/{self.name}.ini"


def certificate_secret(files: CertificateFiles) -> Certificate:
    """The secret of a certificate."""
    return Certificate(files.cert_file, files.key_file)


def client_ca_secret(certificates: ClientCertificates) -> Authorities:
    """The secret by which clients' certificates are checked."""
    return Authorities(certificates.ca_file, certificates.crl_file)


def engine_key_secret(connection: EngineConnection) -> EngineKey:
    """The secret with the engines' key."""
    return EngineKey(connection.api_key_file, connection.api_key_env)


def upstream_credentials(spec: ModelServerSpec) -> EngineKey | AwsCredentials | None:
    """What requests are shown to be the gateway's by; None: nothing, or the machine that Envoy runs on."""
    if not spec.connection.has_key:
        return None
    if spec.provider is not None and spec.provider.signs_requests:
        return AwsCredentials(spec.connection.api_key_file or "")
    return engine_key_secret(spec.connection)


def secret_sources(snapshot: Snapshot) -> tuple[SecretSource, ...]:
    """All secrets of a bundle, each once."""
    found = dict.fromkeys(one for listener in snapshot.gateway.listeners for one in listener_secrets(listener))
    for server in snapshot.servers:
        found.update(dict.fromkeys(server_secrets(server.spec)))
    return tuple(found)


def listener_secrets(listener: Listener) -> Iterator[SecretSource]:
    """What a listener needs."""
    if listener.tls is None:
        return
    for one in listener.tls.certificates:
        yield certificate_secret(one)
    if listener.tls.client_certificates is not None:
        yield client_ca_secret(listener.tls.client_certificates)


def server_secrets(spec: ModelServerSpec) -> Iterator[SecretSource]:
    """What connections to engines or to a provider need."""
    connection = spec.connection
    if (credentials := upstream_credentials(spec)) is not None:
        yield credentials
    if spec.uses_tls and (found := _engine_authorities(spec)) is not None:
        yield found
    if connection.tls is None:
        return
    if connection.tls.client_certificate is not None:
        yield certificate_secret(connection.tls.client_certificate)


def _engine_authorities(spec: ModelServerSpec) -> SecretSource | None:
    """By which certificates of engines or of a provider are checked. None: any certificate is accepted."""
    tls = spec.connection.tls
    if tls is not None and tls.ca_file is not None:
        return Authorities(tls.ca_file)
    return SystemAuthorities() if spec.provider is not None and (tls is None or not tls.insecure_skip_verify) else None


def secret_reference(source: SecretSource, directory: str) -> SdsSecretConfig:
    """How listeners and clusters name a secret of the bundle in ``directory``."""
    return SdsSecretConfig(name=source.name, sds_config=file_config_source(directory, source.file))


def secret_file(source: SecretSource, content: Mapping[str, bytes]) -> str:
    """The file of a secret. ``content``: by the name of the field in Envoy's schema."""
    fields = {name: {"inline_bytes": base64.b64encode(text).decode()} for name, text in content.items()}
    kind = {
        Certificate: "tls_certificate",
        Authorities: "validation_context",
        SystemAuthorities: "validation_context",
        EngineKey: "generic_secret",
    }[type(source)]
    # the classes of Envoy's schema would print the key when they fail
    return resources_file([{**to_resource(Secret(name=source.name)), kind: fields}])


def listener_tls_socket(tls: ListenerTls, directory: str) -> TransportSocket:
    """TLS of a listener. Of several certificates, Envoy chooses the one that matches the server name (SNI)."""
    common = CommonTlsContext(
        tls_params=TlsParameters(tls_minimum_protocol_version=_VERSIONS[tls.min_version]),
        tls_certificate_sds_secret_configs=[
            secret_reference(certificate_secret(one), directory) for one in tls.certificates
        ],
        alpn_protocols=list(_ALPN),
    )
    context = DownstreamTlsContext(common_tls_context=common)
    certificates = tls.client_certificates
    if certificates is not None:
        common.validation_context_sds_secret_config = secret_reference(client_ca_secret(certificates), directory)
        context.require_client_certificate = certificates.mode == "Require"
        # A resumed session is not checked again: a certificate that has been revoked since would still be good.
        context.disable_stateless_session_resumption = True
        context.disable_stateful_session_resumption = True
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedMessage(context))


def engine_tls_socket(spec: ModelServerSpec, directory: str) -> TransportSocket | None:
    """TLS towards engines or a provider; None: plain HTTP. The SNI, which the certificate must match, is each
    endpoint's host name.
    """
    if not spec.uses_tls:
        return None
    shown = None if spec.connection.tls is None else spec.connection.tls.client_certificate
    common = CommonTlsContext(
        tls_params=TlsParameters(
            tls_minimum_protocol_version=_VERSIONS["1.2"], tls_maximum_protocol_version=_VERSIONS["1.3"]
        )
    )
    if shown is not None:
        common.tls_certificate_sds_secret_configs = [secret_reference(certificate_secret(shown), directory)]
    trusted = _engine_authorities(spec)
    if trusted is not None:
        common.validation_context_sds_secret_config = secret_reference(trusted, directory)
    context = UpstreamTlsContext(
        common_tls_context=common,
        auto_host_sni=True,
        auto_sni_san_validation=trusted is not None,
        # a resumed session shows no certificate: one that is no longer trusted would still be good
        max_session_keys=0,
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedMessage(context))
