# SPDX-License-Identifier: Apache-2.0
"""An authority of our own and the certificates and keys that a control plane on loopback needs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_VALID_FOR: Final = dt.timedelta(days=30)
_EARLIER: Final = dt.timedelta(hours=1)


class Authority:
    """Signs certificates that those who have ``certificate`` (PEM) trust."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "attache-bench")])
        built = self._builder(self._name, self._key.public_key())
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = _pem(built.sign(self._key, hashes.SHA256()))

    def issue(self, common_name: str, addresses: Sequence[str] = (), names: Sequence[str] = ()) -> tuple[str, str]:
        """A certificate for a server or client and its private key, both PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        built = self._builder(subject, key.public_key())
        alternatives: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(one)) for one in addresses]
        alternatives += [x509.DNSName(one) for one in names]
        if alternatives:
            built = built.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        built = built.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        return _pem(built.sign(self._key, hashes.SHA256())), private_pem(key)

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.not_valid_before(self._now - _EARLIER)
            .not_valid_after(self._now + _VALID_FOR)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(issuer, critical=False)
        )


def service_account_key_pair() -> tuple[str, str]:
    """A private key for service account tokens and its public key, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return private_pem(key), public.decode()


def private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    """As OpenSSL and Go read it, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def write_private(path: Path, text: str) -> Path:
    """A file that only its owner may read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
