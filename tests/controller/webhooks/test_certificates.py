# SPDX-License-Identifier: Apache-2.0
"""Certificates are renewed before they end, and nothing is shown that not everybody trusts yet."""

from __future__ import annotations

import base64
import re
import ssl
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from cryptography import x509

from controller.webhooks.certificates import (
    CertificateMaterial,
    KeyPair,
    Lifetimes,
    from_secret,
    renew_if_due,
    to_secret,
)
from controller.webhooks.server import ServerTls

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LIFETIMES = Lifetimes(authority=timedelta(days=90), certificate=timedelta(days=9), settled=timedelta(hours=1))
NAMES = ("attache-manager.attache-system.svc", "127.0.0.1")


def at(material: CertificateMaterial | None, day: float, names: tuple[str, ...] = NAMES) -> CertificateMaterial:
    return renew_if_due(material, names, NOW + timedelta(days=day), LIFETIMES)


def is_trusted(server: KeyPair, authorities: str) -> bool:
    """As an API server checks it: by what is published."""
    certificate = x509.load_pem_x509_certificate(server.certificate.encode())
    for authority in x509.load_pem_x509_certificates(authorities.encode()):
        try:
            certificate.verify_directly_issued_by(authority)
        except Exception:  # noqa: BLE001, S112 - cryptography has several errors for it
            continue
        return True
    return False


@pytest.fixture(scope="module")
def first() -> CertificateMaterial:
    return at(None, 0)


def test_at_first_all_is_made(first: CertificateMaterial) -> None:
    assert is_trusted(first.server, first.ca_bundle)
    certificate = x509.load_pem_x509_certificate(first.server.certificate.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [NAMES[0]]
    assert first.server.ends_at == NOW + timedelta(days=9)
    assert "PRIVATE" not in first.ca_bundle


def test_nothing_is_renewed_before_its_time(first: CertificateMaterial) -> None:
    assert at(first, 5.9) is first


def test_a_certificate_is_renewed_a_third_before_its_end_by_the_same_authority(first: CertificateMaterial) -> None:
    later = at(first, 6.1)
    assert later.authorities == first.authorities
    assert later.server != first.server
    assert is_trusted(later.server, first.ca_bundle), "those who have not heard of anything trust it"


def test_another_name_needs_another_certificate(first: CertificateMaterial) -> None:
    assert at(first, 1, ("other.svc",)).server != first.server


def test_authorities_change_without_a_gap() -> None:
    """Whatever was published an hour ago trusts what is shown now, over a year of looks every half an hour and less."""
    material, published = None, []
    seen = set()
    for step in range(0, 200 * 24, 5):
        day = step / 24
        material = at(material, day)
        seen.add(material.authorities)
        published.append((day, material.ca_bundle))
        earlier = [trusted for when, trusted in published if when <= day - 5 / 24] or [material.ca_bundle]
        assert is_trusted(material.server, earlier[-1])
        assert is_trusted(material.server, material.ca_bundle)
        assert material.server.ends_at > NOW + timedelta(days=day)
    # made, a second, the first gone, a third, and so on
    assert len(seen) >= 5
    assert max(len(one) for one in seen) == 2


def test_the_path_stays_and_a_secret_of_before_gets_one(first: CertificateMaterial) -> None:
    assert at(first, 25).path == first.path
    assert len(at(msgspec.structs.replace(first, path=""), 0).path) == 48


def test_the_path_has_characters_that_an_api_server_takes(first: CertificateMaterial) -> None:
    # a subdomain by RFC 1123
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", first.path)
    refused = msgspec.structs.replace(first, path="cpUE-B40WfORN5F0FYmmUaGFt1DJ21gQ")
    assert re.fullmatch(r"[0-9a-f]{48}", at(refused, 0).path)


def test_a_secret_holds_all_of_it(first: CertificateMaterial) -> None:
    data = to_secret(first)
    assert from_secret(data) == first
    assert base64.b64decode(data["ca.crt"]).decode() == first.ca_bundle


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"material.json": "?"},
        {"material.json": base64.b64encode(b"{}").decode()},
        {
            "material.json": base64.b64encode(
                b'{"authorities": [], "server": {"certificate": "x", "key": "y"}}'
            ).decode()
        },
        {"material.json": None},
    ],
)
def test_a_secret_that_cannot_be_used_is_as_an_empty_one(data: dict[str, str]) -> None:
    assert from_secret(data) is None


def test_a_key_of_another_certificate_cannot_be_used(first: CertificateMaterial) -> None:
    broken = msgspec.structs.replace(first, server=KeyPair(first.server.certificate, first.authorities[0].key))
    assert from_secret(to_secret(broken)) is None


def test_no_struct_shows_a_key(first: CertificateMaterial) -> None:
    assert "PRIVATE" not in repr(first)


def test_a_context_takes_new_certificates(first: CertificateMaterial) -> None:
    tls = ServerTls()
    tls.set_certificate(first.server)
    later = at(first, 6.1).server
    tls.set_certificate(later)
    assert tls.in_use == later
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
