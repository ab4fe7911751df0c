# SPDX-License-Identifier: Apache-2.0
"""Secrets and ConfigMaps that other objects point to, as files of the directory.

Only what is pointed to is read from the cluster. A compiler says what that is (``Outcome.pointers``), gets it by
``put`` under the pointer's ``compiled_as``, and makes files of it with ``file_of``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from controller.gateway.compile.file_names import bounded_name

if TYPE_CHECKING:
    from collections.abc import Iterable

# Directories read *.json and *.yaml as documents: whoever may write a Secret must not be able to write a document.
_SUFFIX: Final = "data"
# Of bits. Envoy refuses smaller keys.
_SMALLEST_RSA: Final = 2048


class Pointer(msgspec.Struct, frozen=True, order=True):
    """An object that is read by its name: a Secret or ConfigMap that something points to, or a definition. ``key``:
    ``namespace/name``, or the name of a definition.
    """

    kind: Literal["Secret", "ConfigMap", "CustomResourceDefinition"]
    key: str

    @property
    def compiled_as(self) -> str:
        """The kind under which a compiler gets it; ``ConfigMap`` alone are those that hold picker configurations."""
        return "PointedConfigMap" if self.kind == "ConfigMap" else self.kind


class Pointed(msgspec.Struct, frozen=True):
    """What is in it. ``data``: bytes by key, decoded. ``annotations``: of the object."""

    data: Mapping[str, bytes]
    annotations: Mapping[str, str] = {}


def pointed_of(thing: Mapping[str, Any]) -> Pointed:
    """A Secret or ConfigMap as the API server has it; values that are no base64 where they must be are left out."""
    is_secret = thing.get("kind") == "Secret"
    data = {} if is_secret else {name: text.encode() for name, text in (thing.get("data") or {}).items()}
    for name, text in ((thing.get("data") if is_secret else thing.get("binaryData")) or {}).items():
        try:
            data[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue
    return Pointed(data, thing["metadata"].get("annotations") or {})


def file_of(pointer: Pointer, name: str) -> str:
    """The file of the value called ``name``. Names of objects have no underscore, so no two values share a file."""
    return bounded_name(f"{pointer.kind.lower()}.{pointer.key.replace('/', '.', 1)}_{name}", f".{_SUFFIX}")


def files_of(pointer: Pointer, pointed: Pointed, names: Iterable[str]) -> dict[str, bytes]:
    """The files of those values called ``names`` that are there."""
    return {file_of(pointer, name): pointed.data[name] for name in names if name in pointed.data}


def certificate_problem(pointed: Pointed) -> str:
    """Why ``tls.crt`` and ``tls.key`` cannot be used as a server's certificate; empty if they can."""
    missing = [name for name in ("tls.crt", "tls.key") if not pointed.data.get(name)]
    if missing:
        return f"it has no {' and no '.join(missing)}"
    try:
        chain = x509.load_pem_x509_certificates(pointed.data["tls.crt"])
    except ValueError:
        return "tls.crt is not a certificate in PEM"
    try:
        key = serialization.load_pem_private_key(pointed.data["tls.key"], None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return "tls.key is not a private key in PEM without a password"
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size < _SMALLEST_RSA:
        return f"its RSA key has {key.key_size} bits, and Envoy takes none below {_SMALLEST_RSA}"
    return "" if key.public_key() == chain[0].public_key() else "tls.key is not the key of tls.crt"


def authorities_problem(pointed: Pointed, name: str = "ca.crt") -> str:
    """Why the value called ``name`` cannot be used to check certificates; empty if it can."""
    if not pointed.data.get(name):
        return f"it has no {name}"
    try:
        x509.load_pem_x509_certificates(pointed.data[name])
    except ValueError:
        return f"{name} has no certificate in PEM"
    return ""
