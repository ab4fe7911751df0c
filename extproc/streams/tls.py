# SPDX-License-Identifier: Apache-2.0
"""TLS of the gRPC port: a certificate from files, which are followed, or one of our own."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import ssl
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.file_reloading import Reloadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.x509 import Certificate

    from extproc.metrics.request_metrics import TlsMetrics

log = logging.getLogger(__name__)

# Polling works on every file system; a mounted Secret is replaced by renaming a link.
_POLL_S: Final = 1.0
_OWN_NAME: Final = "attache-extproc"
_OWN_VALID_FOR: Final = dt.timedelta(days=3650)
_EARLIER: Final = dt.timedelta(hours=1)
_RSA_BITS: Final = 2048


class CertificateInvalid(ValueError):
    """The certificate and key cannot be used; the message has the reason."""


class KeyPair(msgspec.Struct, frozen=True):
    """A certificate, or a chain that begins with it, and its private key, both PEM."""

    certificate: bytes
    key: bytes


class TlsFiles(msgspec.Struct, frozen=True):
    """Where a pair is."""

    certificate: Path
    key: Path


class TlsRequirements(msgspec.Struct, frozen=True):
    """What clients must offer. ``min_version``: 1.2 or 1.3. ``ciphers``: suites of TLS 1.2 by OpenSSL's names, with
    colons between them; empty: its own choice.
    """

    min_version: str = "1.2"
    ciphers: str = ""

    @property
    def needs_rsa(self) -> bool:
        """Whether every suite authenticates by an RSA key: a certificate with another key could not be used with it."""
        return bool(self.ciphers) and "ECDSA" not in self.ciphers

    def context(self) -> ssl.SSLContext:
        """Of a server of HTTP/2, without a certificate; raises ValueError if OpenSSL has none of the suites."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_3 if self.min_version == "1.3" else ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["h2"])
        if self.ciphers:
            try:
                made.set_ciphers(self.ciphers)
            except ssl.SSLError:
                raise ValueError(
                    f"OpenSSL has no cipher suite of '{self.ciphers}'; `openssl ciphers` lists them"
                ) from None
        return made


class ReloadingCertificate:
    """The pair presented to new connections: that in ``files`` as it is now, or, if there are none, a self-signed one.

    Open connections keep the pair that they began with. A pair that cannot be used is refused, and the last good one
    stays.

    Raises CertificateInvalid if the first one cannot be used, ImportError without the library cryptography.
    """

    def __init__(
        self,
        files: TlsFiles | None,
        metrics: TlsMetrics,
        now: Callable[[], dt.datetime],
        limits: TlsRequirements = TlsRequirements(),  # noqa: B008 - a frozen struct
    ) -> None:
        self._files = files
        self._limits = limits
        self._metrics = metrics
        self._context = Reloadable(
            partial(_read, files) if files else partial(self_signed, now(), needs_rsa=limits.needs_rsa), self._checked
        )

    @property
    def context(self) -> ssl.SSLContext:
        """For a server. Each handshake goes on with the pair of that moment."""
        made = self._limits.context()
        made.sni_callback = self._use_current
        return made

    def _use_current(self, connection: ssl.SSLObject, *_: object) -> None:
        # OpenSSL calls this at every handshake, whether the client names a server or not
        connection.context = self._context.value

    async def watch_files(self) -> None:
        """Until cancelled, use what the files hold."""
        while self._files is not None:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Use what is in the files now, if it is another pair and can be used."""
        match self._context.poll():
            case "refused":
                self._metrics.on_certificate_refused()
                log.error("the certificate is refused, the last good one stays: %s", self._context.problem)
            case "new" if self._files is not None:
                log.info("new connections are shown the certificate of %s", self._files.certificate)

    def _checked(self, pair: KeyPair) -> ssl.SSLContext:
        """Raises CertificateInvalid."""
        first = _leaf(pair, self._files)
        made = self._limits.context()
        _load(pair, made)
        self._metrics.on_certificate_loaded(first.not_valid_after_utc.timestamp())
        return made


def _load(pair: KeyPair, context: ssl.SSLContext) -> None:
    """Have ``context`` present ``pair``; raises CertificateInvalid. It reads files alone, and a key belongs on no
    disk: this one is in memory.
    """
    with os.fdopen(os.memfd_create("pair"), "wb") as file:
        file.write(pair.certificate + b"\n" + pair.key)
        file.flush()
        try:
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except ssl.SSLError as error:
            raise CertificateInvalid(f"OpenSSL cannot use the certificate: {error.reason}") from None


def self_signed(now: dt.datetime, *, needs_rsa: bool = False) -> KeyPair:
    """A self-signed pair: the connection is encrypted, and clients must not verify the server's identity."""
    from cryptography import x509  # noqa: PLC0415 - only with TLS
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    key = rsa.generate_private_key(65537, _RSA_BITS) if needs_rsa else ec.generate_private_key(ec.SECP256R1())
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
    return KeyPair(signed.public_bytes(serialization.Encoding.PEM), private)


def _read(files: TlsFiles) -> KeyPair:
    try:
        return KeyPair(files.certificate.read_bytes(), files.key.read_bytes())
    except OSError as error:
        raise CertificateInvalid(f"{error.filename}: {error.strerror}") from None


def _leaf(pair: KeyPair, files: TlsFiles | None) -> Certificate:
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
