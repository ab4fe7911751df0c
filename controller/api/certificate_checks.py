# SPDX-License-Identifier: Apache-2.0
"""Whether the content of certificate files can be used; errors name the fix and never quote a file's content."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

if TYPE_CHECKING:
    from datetime import datetime

    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

_CRL: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)

_AWS_FIELDS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_WORD: Final = re.compile(r"[!-~]+")
# Envoy ignores a longer file.
_MOST_CREDENTIALS_BYTES: Final = 4096


class CertificateUnusable(ValueError):
    """What is wrong with a file, and what to write instead."""


def check_key_pair(chain: bytes, key: bytes) -> datetime:
    """When the first of the certificates ends; raises Unusable if ``key`` is not its private key."""
    leaf = _certificates(chain)[0]
    try:
        private = load_pem_private_key(key, password=None)
    except TypeError:
        raise CertificateUnusable(
            "the private key has a password, which nobody could type; write it without one"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateUnusable("the key file has no private key; write one in PEM") from None
    if _plain(private.public_key()) != _plain(leaf.public_key()):
        raise CertificateUnusable("the private key is of another certificate; write the two that belong together")
    return leaf.not_valid_after_utc


def check_authorities(certificates: bytes, revoked: bytes | None) -> datetime:
    """When the first of all ends; raises Unusable."""
    ends_at = [one.not_valid_after_utc for one in _certificates(certificates)]
    if revoked is not None:
        ends_at += [one for one in map(_next_update, _CRL.findall(revoked)) if one is not None]
        if not _CRL.search(revoked):
            raise CertificateUnusable(
                "the file of revoked certificates has no list; write one of each authority in PEM"
            )
    return min(ends_at)


def _certificates(text: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        raise CertificateUnusable(
            "the certificate file has no certificate, or only part of one; write it in PEM"
        ) from None


def _next_update(text: bytes) -> datetime | None:
    try:
        return x509.load_pem_x509_crl(text).next_update_utc
    except ValueError:
        raise CertificateUnusable("a list of revoked certificates cannot be read; write it in PEM") from None


def _plain(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def default_aws_profile(content: bytes) -> str:
    """The profile ``default`` of a credentials file, with the fields that Envoy reads. Raises Unusable."""
    found: dict[str, str] = {}
    is_default = False
    for line in content.decode(errors="replace").splitlines():
        name, _, value = (part.strip() for part in line.partition("="))
        if name.startswith("["):
            is_default = name == "[default]"
        elif is_default and name in _AWS_FIELDS:
            found[name] = value
    lines = [f"{name}={value}\n" for name, value in found.items() if _WORD.fullmatch(value)]
    text = "".join(["[default]\n", *lines])
    if len(lines) < len(found) or not found.keys() >= {*_AWS_FIELDS[:2]} or len(text) > _MOST_CREDENTIALS_BYTES:
        message = f"is no credentials file of AWS; write one of up to {_MOST_CREDENTIALS_BYTES} bytes, with"
        raise CertificateUnusable(f"{message} [default], {_AWS_FIELDS[0]} and {_AWS_FIELDS[1]}")
    return text
