# SPDX-License-Identifier: Apache-2.0
"""Authorities and certificates for tests: good ones, and ones with every fault."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_DAY: Final = dt.timedelta(days=1)


class Pair:
    """A certificate and its private key, as PEM."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.serial = certificate.serial_number
        self.cert = certificate.public_bytes(serialization.Encoding.PEM)
        self.key = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def write(self, folder: Path, name: str) -> dict[str, str]:
        """Replace both files, as a CertificateFiles names them."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {"certFile": f"{name}.crt", "keyFile": f"{name}.key"}
        for file, content in zip(files.values(), (self.cert, self.key), strict=True):
            draft = folder / f"{file}.new"
            draft.write_bytes(content)
            draft.rename(folder / file)
        return {field: str(folder / file) for field, file in files.items()}


class Authority:
    """Signs certificates. ``cert``: its own, as PEM."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _builder(self._name, self._name, self._key.public_key(), ends_in=30 * _DAY)
        signed = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        signed = signed.add_extension(usage, critical=True)
        self.cert = signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        common_name: str = "somebody",
        *,
        dns: Sequence[str] = (),
        uris: Sequence[str] = (),
        ips: Sequence[str] = (),
        ends_in: dt.timedelta = 30 * _DAY,
    ) -> Pair:
        """A certificate for servers and clients. ``ends_in``: negative if it has ended."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(common_name), self._name, key.public_key(), ends_in=ends_in)
        names: list[x509.GeneralName] = [x509.DNSName(one) for one in dns]
        names += [x509.UniformResourceIdentifier(one) for one in uris]
        names += [x509.IPAddress(ipaddress.ip_address(one)) for one in ips]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return Pair(builder.sign(self._key, hashes.SHA256()), key)

    def revoked(self, *pairs: Pair) -> bytes:
        """The list of revoked certificates, as PEM."""
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - _DAY).next_update(now + 30 * _DAY)
        for one in pairs:
            entry = x509.RevokedCertificateBuilder().serial_number(one.serial).revocation_date(now - _DAY)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def client_context(trusts: Authority, shows: Pair | None = None, folder: Path | None = None) -> ssl.SSLContext:
    """What a client of ``trusts`` uses; with ``shows``, its certificate goes by way of ``folder``."""
    context = ssl.create_default_context(cadata=trusts.cert.decode())
    if shows is not None and folder is not None:
        files = shows.write(folder, f"client-{shows.serial}")
        context.load_cert_chain(files["certFile"], files["keyFile"])
    return context


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, ends_in: dt.timedelta
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - 60 * _DAY)
        .not_valid_after(now + ends_in)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
