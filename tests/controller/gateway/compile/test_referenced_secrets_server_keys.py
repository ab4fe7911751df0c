# SPDX-License-Identifier: Apache-2.0
"""Keys that Envoy would refuse are refused where the status can say so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from controller.gateway.compile.referenced_secrets import ReferencedObject, certificate_problem


@pytest.mark.parametrize(
    ("bits", "problem"), [(1024, "its RSA key has 1024 bits, and Envoy takes none below 2048"), (2048, "")]
)
def test_rsa_keys_have_2048_bits(bits: int, problem: str) -> None:
    key = rsa.generate_private_key(65537, bits)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a.test")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = made.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    content = {
        "tls.crt": dated.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM),
        "tls.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    assert certificate_problem(ReferencedObject(content)) == problem
