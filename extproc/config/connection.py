# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: TLS, and the key that engines ask for."""

from __future__ import annotations

from typing import ClassVar

from extproc.config.cel import Rule
from extproc.config.listeners import CertificateFiles
from extproc.config.spec import NonEmpty, Spec


class EngineTls(Spec, frozen=True):
    """TLS towards engines; Envoy and extproc use it alike. Both read the files, and follow them; names
    are relative to the configuration directory.

    ``ca_file``: who signs the engines' certificates, in PEM. ``server_name``: the name that those certificates have, and
    that is asked for (SNI); endpoints may have their own. ``client_certificate``: shown to the
    engines. ``insecure_skip_verify``: accept any certificate.
    """

    CEL: ClassVar = (Rule("has(self.caFile) != self.insecureSkipVerify", "write caFile, or insecureSkipVerify: true"),)

    ca_file: NonEmpty | None = None
    server_name: NonEmpty | None = None
    client_certificate: CertificateFiles | None = None
    insecure_skip_verify: bool = False


class EngineConnection(Spec, frozen=True):
    """How engines are reached. ``tls``: without it, plain HTTP.

    ``api_key_file``: a file with the key that engines ask for, ``api_key_env``: a variable of the environment with it,
    of the bundle's writer and of extproc. It takes the place of the client's own ``authorization``.
    """

    CEL: ClassVar = (Rule("!has(self.apiKeyFile) || !has(self.apiKeyEnv)", "write apiKeyFile or apiKeyEnv, not both"),)

    tls: EngineTls | None = None
    api_key_file: NonEmpty | None = None
    api_key_env: NonEmpty | None = None

    def server_name_of(self, endpoint_name: str | None) -> str | None:
        """The name that the certificate of an endpoint must have. ``endpoint_name``: the endpoint's own."""
        return endpoint_name or (None if self.tls is None else self.tls.server_name)

    @property
    def files(self) -> tuple[str, ...]:
        """All files that it names."""
        tls = self.tls or EngineTls()
        shown = tls.client_certificate
        named = (self.api_key_file, tls.ca_file, *(() if shown is None else (shown.cert_file, shown.key_file)))
        return tuple(one for one in named if one is not None)

    @property
    def names_files(self) -> bool:
        """Whether it names files or variables of the machine that Envoy and extproc run on."""
        return self.has_key or bool(self.files)

    @property
    def has_key(self) -> bool:
        """Whether engines ask for a key."""
        return self.api_key_file is not None or self.api_key_env is not None
