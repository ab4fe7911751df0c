# SPDX-License-Identifier: Apache-2.0
"""TLS of the scaler's port: certificate, key and the authorities of clients, read anew when they change."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import msgspec

log = logging.getLogger(__name__)


class TlsFiles(msgspec.Struct, frozen=True):
    """``certificate`` and ``key``: of the server. ``clients``: authorities of those who may call; None: anybody."""

    certificate: Path
    key: Path
    clients: Path | None = None

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """Raises OSError."""
        clients = None if self.clients is None else self.clients.read_bytes()
        return self.certificate.read_bytes(), self.key.read_bytes(), clients


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """New connections use what the files hold then; while they do not fit together, what was good last.

    Raises OSError or ValueError if the first ones cannot be used.
    """
    following = _Following(files)
    return grpc.dynamic_ssl_server_credentials(
        following.first,
        following.newer,  # type: ignore[arg-type]  # types-grpcio leaves out that None is for "no change"
        require_client_authentication=files.clients is not None,
    )


class _Following:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = files.contents()
        self.first = _configuration(*self._seen)

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """For gRPC, which asks at every new connection, in a thread of its own; None: nothing has changed."""
        try:
            contents = self._files.contents()
            if contents == self._seen:
                return None
            self._seen = contents
            return _configuration(*contents)
        except (OSError, ValueError) as error:
            log.error("the certificate is refused, the last good one stays: %s", error)
            return None


def _configuration(certificate: bytes, key: bytes, clients: bytes | None) -> grpc.ServerCertificateConfiguration:
    """Raises ValueError."""
    # gRPC itself says nothing of what it cannot use, it breaks connections
    from cryptography import x509  # noqa: PLC0415 - only with TLS
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    chain = x509.load_pem_x509_certificates(certificate)
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except TypeError:
        raise ValueError("the private key needs a password") from None
    if public != chain[0].public_key():
        raise ValueError("the private key is not that of the certificate")
    if clients is not None:
        x509.load_pem_x509_certificates(clients)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], clients)
