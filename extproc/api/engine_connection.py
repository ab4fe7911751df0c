# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: TLS, and the API key that engines require."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.spec import CelRule, Name, NonEmpty, Spec

DataKey = Annotated[str, msgspec.Meta(pattern=patterns.DATA_KEY, max_length=253)]


class CaCertificateRef(Spec, frozen=True):
    """Certificates in an object of the same namespace. ``kind``: the object's kind. ``name``: the object's name.
    ``key``: of its data.
    """

    name: Name
    kind: Literal["ConfigMap", "Secret"] = "ConfigMap"
    key: DataKey = "ca.crt"


class ClientCertificateRef(Spec, frozen=True):
    """A Secret of the same namespace and the type ``kubernetes.io/tls``. ``name``: the Secret's."""

    name: Name


class ApiKeyRef(Spec, frozen=True):
    """One value of a Secret of the same namespace. ``name``: the Secret's. ``key``: of its data."""

    name: Name
    key: DataKey = "api-key"


class EngineTls(Spec, frozen=True):
    """TLS towards engines; Envoy and extproc use it alike. Both read the files and reload them when they change; names
    are relative to the configuration directory. Objects of a cluster have references in place of files.

    ``ca_file``: the authorities that sign the engines' certificates, in PEM. ``ca_certificate_ref``: the same in a
    cluster. ``server_name``: the name that those certificates have, sent as SNI; endpoints may have their own.
    ``client_certificate``: presented to the engines. ``client_certificate_ref``: the same in a cluster.
    ``insecure_skip_verify``: accept any certificate.
    """

    CEL: ClassVar = (
        CelRule(
            "(has(self.caFile) ? 1 : 0) + (has(self.caCertificateRef) ? 1 : 0) + (self.insecureSkipVerify ? 1 : 0)"
            " == 1",
            "write caCertificateRef (in a directory caFile), or insecureSkipVerify: true",
        ),
        CelRule(
            "!has(self.clientCertificate) || !has(self.clientCertificateRef)",
            "write clientCertificate or clientCertificateRef, not both",
        ),
    )

    ca_file: NonEmpty | None = None
    ca_certificate_ref: CaCertificateRef | None = None
    server_name: NonEmpty | None = None
    client_certificate: CertificateFiles | None = None
    client_certificate_ref: ClientCertificateRef | None = None
    insecure_skip_verify: bool = False


class EngineConnection(Spec, frozen=True):
    """How Envoy and extproc connect to engines. ``tls``: without it, plain HTTP.

    ``api_key_file``: a file with the key that engines require, ``api_key_env``: a variable with it, in the environment
    of the bundle's writer and of extproc. ``api_key_ref``: in a cluster, the Secret with it. It replaces the client's
    own ``authorization``.
    """

    CEL: ClassVar = (
        CelRule(
            "(has(self.apiKeyFile) ? 1 : 0) + (has(self.apiKeyEnv) ? 1 : 0) + (has(self.apiKeyRef) ? 1 : 0) <= 1",
            "write one of apiKeyFile, apiKeyEnv and apiKeyRef",
        ),
    )

    tls: EngineTls | None = None
    api_key_file: NonEmpty | None = None
    api_key_env: NonEmpty | None = None
    api_key_ref: ApiKeyRef | None = None

    def server_name_of(self, endpoint_name: str | None) -> str | None:
        """The name that the certificate of an endpoint must have. ``endpoint_name``: the endpoint's own."""
        return endpoint_name or (None if self.tls is None else self.tls.server_name)

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """All files that it names."""
        tls = self.tls or EngineTls()
        shown = tls.client_certificate
        named = (self.api_key_file, tls.ca_file, *(() if shown is None else (shown.cert_file, shown.key_file)))
        return tuple(one for one in named if one is not None)

    @property
    def references_files_or_variables(self) -> bool:
        """Whether it names files or variables of the machine that Envoy and extproc run on."""
        return self.has_key or bool(self.referenced_files)

    @property
    def has_key(self) -> bool:
        """Whether engines require a key."""
        return self.api_key_file is not None or self.api_key_env is not None


class CertificateFiles(Spec, frozen=True):
    """A certificate. ``cert_file``: it and its chain in PEM. ``key_file``: its private key. The bundle's writer reloads
    both, and Envoy uses a new pair without a restart.
    """

    cert_file: NonEmpty
    key_file: NonEmpty
