# SPDX-License-Identifier: Apache-2.0
"""TLS of the gRPC port: a certificate from files, which are followed, or one of our own."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.x509 import Certificate

    from extproc.metrics.registry import TlsMetrics

log = logging.getLogger(__name__)

# Polling works on every file system; a mounted Secret is replaced by renaming a link.
_POLL_S: Final = 1.0
_OWN_NAME: Final = "attache-extproc"
_OWN_VALID_FOR: Final = dt.timedelta(days=3650)
_EARLIER: Final = dt.timedelta(hours=1)


class CertificateInvalid(Exception):
    """The certificate and key cannot be used; the message says why."""


class Pair(msgspec.Struct, frozen=True):
    """A certificate, or a chain that begins with it, and its private key, both PEM."""

    certificate: bytes
    key: bytes


class TlsFiles(msgspec.Struct, frozen=True):
    """Where a pair is."""

    certificate: Path
    key: Path


class FollowedCertificate:
    """What new connections are shown: the pair in ``files`` as it is now, or, if there are none, a self-signed one.

    Open connections keep the pair that they began with. A pair that cannot be used is refused, and the last good one
    stays: two files that are replaced one after the other do not fit each other for a moment.

    Raises CertificateInvalid if the first one cannot be used, ImportError without the library cryptography.
    """

    def __init__(self, files: TlsFiles | None, metrics: TlsMetrics, now: Callable[[], dt.datetime]) -> None:
        self._files = files
        self._metrics = metrics
        self._seen: Pair | None = None
        # what was said last, and is not said again
        self._complaint = ""
        pair = self_signed(now()) if files is None else _read(files)
        self._current = self._checked(pair)
        # what gRPC has been given
        self._given = self._current

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """For a port of a gRPC server."""
        # types-grpcio leaves out that None is for "no change"
        return grpc.dynamic_ssl_server_credentials(self._current, self._newer)  # type: ignore[arg-type]

    async def follow(self) -> None:
        """Until cancelled, use what the files hold."""
        while self._files is not None:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self.look, self._files)

    def look(self, files: TlsFiles) -> None:
        """Use what is in ``files`` now, if it is another pair and can be used."""
        try:
            pair = _read(files)
            if pair == self._seen:
                return
            self._current = self._checked(pair)
        except CertificateInvalid as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._metrics.refused()
                log.error("the certificate is refused, the last good one stays: %s", error)
        else:
            self._complaint = ""
            log.info("new connections are shown the certificate of %s", files.certificate)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """For gRPC, which asks at every new connection, in a thread of its own; None: nothing has changed."""
        current = self._current
        if current is self._given:
            return None
        self._given = current
        return current

    def _checked(self, pair: Pair) -> grpc.ServerCertificateConfiguration:
        """Raises CertificateInvalid; the same pair is then not looked at again."""
        self._seen = pair
        first = _leaf(pair, self._files)
        self._metrics.loaded(first.not_valid_after_utc.timestamp())
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])


def self_signed(now: dt.datetime) -> Pair:
    """A pair that nobody vouches for: the connection is encrypted, and clients must not check who serves it."""
    from cryptography import x509  # noqa: PLC0415 - only with TLS
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _OWN_NAME)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _EARLIER).not_valid_after(now + _OWN_VALID_FOR)
    signed = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(_OWN_NAME)]), critical=False).sign(
        key, hashes.SHA256()
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(signed.public_bytes(serialization.Encoding.PEM), private)


def _read(files: TlsFiles) -> Pair:
    try:
        return Pair(files.certificate.read_bytes(), files.key.read_bytes())
    except OSError as error:
        raise CertificateInvalid(f"{error.filename}: {error.strerror}") from None


def _leaf(pair: Pair, files: TlsFiles | None) -> Certificate:
    """The certificate, whose key the other half is; raises CertificateInvalid. ``files``: where the pair is from."""
    from cryptography import x509  # noqa: PLC0415 - only with TLS
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    certificate, key_file = ("its own", "its own") if files is None else (files.certificate, files.key)
    try:
        certificates = x509.load_pem_x509_certificates(pair.certificate)
    except ValueError:
        raise CertificateInvalid(f"{certificate} has no PEM certificate") from None
    try:
        key = load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError):
        raise CertificateInvalid(f"{key_file} has no PEM private key, or one that needs a password") from None
    if key.public_key() != certificates[0].public_key():
        raise CertificateInvalid(f"the private key in {key_file} is not that of the certificate in {certificate}")
    return certificates[0]
