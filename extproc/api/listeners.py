# SPDX-License-Identifier: Apache-2.0
"""Listeners: addresses on which Envoy takes connections, their TLS, and what clients must show."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.api import patterns
from extproc.api.cel import Rule
from extproc.api.spec import NonEmpty, Spec


class CertificateFiles(Spec, frozen=True):
    """A certificate. ``cert_file``: it and its chain in PEM. ``key_file``: its private key. The bundle's writer follows
    both, and Envoy takes a new pair up without a restart.
    """

    cert_file: NonEmpty
    key_file: NonEmpty


class ClientCertificates(Spec, frozen=True):
    """What clients' certificates must be like. ``ca_file``: who signs them, in PEM. ``crl_file``: which of them are
    revoked, one list of each authority, in PEM. ``mode``: ``Require`` refuses a connection without one; ``Optional``
    checks one that is shown. The bundle's writer follows the files.
    """

    ca_file: NonEmpty
    crl_file: NonEmpty | None = None
    mode: Literal["Require", "Optional"] = "Require"


class ListenerTls(Spec, frozen=True):
    """TLS of a listener. ``certificates``: the one whose names fit is shown. ``client_certificates``: what clients must
    show. ``min_version``: older versions of TLS are refused.
    """

    certificates: Annotated[tuple[CertificateFiles, ...], msgspec.Meta(min_length=1, max_length=64)]
    client_certificates: ClientCertificates | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"


class Listener(Spec, frozen=True):
    """One listener. Several may share an address if their ``hostname`` differ.

    ``name``: routes attach to it by this name (``sectionName``); in a cluster ``namespace/gateway/listener``.
    ``address``: ``ip:port``. ``hostname``: only requests to this host, which may begin with ``*.``. ``tls``: without
    it, plain HTTP.
    ``public_port``: where clients connect if it is not the port of ``address``; redirects that name no port use it.
    """

    CEL: ClassVar[tuple[Rule, ...]] = ()

    name: Annotated[str, msgspec.Meta(pattern=patterns.LISTENER, max_length=200)]
    address: NonEmpty
    hostname: NonEmpty | None = None
    tls: ListenerTls | None = None
    public_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """All files that it names."""
        if self.tls is None:
            return ()
        asked = self.tls.client_certificates
        checked = () if asked is None else (asked.ca_file, asked.crl_file)
        pairs = (file for one in self.tls.certificates for file in (one.cert_file, one.key_file))
        return tuple(one for one in (*pairs, *checked) if one is not None)
