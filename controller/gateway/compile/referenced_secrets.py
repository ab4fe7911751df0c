# SPDX-License-Identifier: Apache-2.0
"""Secrets and ConfigMaps that other objects point to, as files of the directory; connections to engines out of them.

Only referenced objects are read from the cluster. A compiler reports them in ``Outcome.pointers``, receives each by
``put`` under the pointer's ``compiler_kind``, and turns it into files with ``referenced_file``. A connection is used
completely or not at all: an engine is never reached without the TLS and the key that its ModelServer requires.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from controller.api.certificate_checks import CertificateUnusable, default_aws_profile
from controller.kube.conditions import WantedCondition, condition_false
from extproc.api.spec import object_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.engine_connection import EngineConnection, EngineTls

# File systems take 255 bytes, of which the name of a draft needs some. Of a longer name this much is kept.
_LONGEST: Final = 200
_KEPT: Final = 120
# Directories read *.json and *.yaml as documents: a writer of Secrets must not be able to write a document.
_SUFFIX: Final = "data"
# Of bits. Envoy refuses smaller keys.
_SMALLEST_RSA: Final = 2048
_CLIENT_FILES: Final = ("tls.crt", "tls.key")
_LONGEST_KEY: Final = 4096


def bounded_name(stem: str, suffix: str) -> str:
    """``stem`` and ``suffix``. A stem that is too long is cut, and has a digest in place of the rest.

    Names of objects may have 253 characters, and one file that cannot be written would keep all others from use. Stems
    have no ``~``, so no two share a name.
    """
    if len(stem) + len(suffix) > _LONGEST:
        stem = f"{stem[:_KEPT]}~{sha256(stem.encode()).hexdigest()[:32]}"
    return stem + suffix


class ReferencedObjectKey(msgspec.Struct, frozen=True, order=True):
    """An object that is read by its name: a Secret or ConfigMap that something points to, or a definition. ``key``:
    ``namespace/name``, or the name of a definition.
    """

    kind: Literal["Secret", "ConfigMap", "CustomResourceDefinition"]
    key: str

    @property
    def compiler_kind(self) -> str:
        """The kind under which a compiler gets it; ``ConfigMap`` alone are those that hold picker configurations."""
        return "PointedConfigMap" if self.kind == "ConfigMap" else self.kind


class ReferencedObject(msgspec.Struct, frozen=True):
    """What is in it. ``data``: bytes by key, decoded. ``annotations``: of the object."""

    data: Mapping[str, bytes]
    annotations: Mapping[str, str] = {}


def parse_referenced_object(thing: Mapping[str, Any]) -> ReferencedObject:
    """A Secret or ConfigMap as the API server has it; values that are no base64 where they must be are left out."""
    is_secret = thing.get("kind") == "Secret"
    data = {} if is_secret else {name: text.encode() for name, text in (thing.get("data") or {}).items()}
    for name, text in ((thing.get("data") if is_secret else thing.get("binaryData")) or {}).items():
        try:
            data[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue
    return ReferencedObject(data, thing["metadata"].get("annotations") or {})


def referenced_file(pointer: ReferencedObjectKey, name: str) -> str:
    """The file of the value called ``name``. Names of objects have no underscore, so no two values share a file."""
    return bounded_name(f"{pointer.kind.lower()}.{pointer.key.replace('/', '.', 1)}_{name}", f".{_SUFFIX}")


def referenced_files(pointer: ReferencedObjectKey, pointed: ReferencedObject, names: Iterable[str]) -> dict[str, bytes]:
    """The files of those values called ``names`` that are there."""
    return {referenced_file(pointer, name): pointed.data[name] for name in names if name in pointed.data}


def certificate_problem(pointed: ReferencedObject) -> str:
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


def authorities_problem(pointed: ReferencedObject, name: str = "ca.crt") -> str:
    """Why the value called ``name`` cannot be used to check certificates; empty if it can."""
    if not pointed.data.get(name):
        return f"it has no {name}"
    try:
        x509.load_pem_x509_certificates(pointed.data[name])
    except ValueError:
        return f"{name} has no certificate in PEM"
    return ""


Read = Callable[[ReferencedObjectKey], ReferencedObject | None]
"""The target of a pointer; None if it does not exist or is not read yet."""


class CompiledConnection(msgspec.Struct, frozen=True, kw_only=True):
    """``document``: the connection for the directory; None if it cannot be used, and ``problem`` has the reason.
    ``used``: the references, for people. ``pointers``: all Secrets and ConfigMaps read for it.
    """

    document: Mapping[str, Any] | None
    files: Mapping[str, bytes] = {}
    problem: WantedCondition | None = None
    used: str = ""
    pointers: frozenset[ReferencedObjectKey] = frozenset()


def compile_connection(
    connection: EngineConnection, given: Mapping[str, Any], namespace: str, read: Read, *, signs: bool = False
) -> CompiledConnection:
    """``given``: ``connection`` as its object has it. ``namespace``: the object's, and that of all it refers to.
    ``signs``: its key is a credentials file of AWS.
    """
    found = _References(namespace, read)
    document = {name: value for name, value in given.items() if name != "apiKeyRef"}
    if connection.tls is not None:
        document["tls"] = _tls(connection.tls, given["tls"], found)
    ref = connection.api_key_ref
    if ref is not None:
        check = _credentials_problem if signs else _key_problem
        pointer = ReferencedObjectKey("Secret", found.key(ref.name))
        document["apiKeyFile"] = found.file_for("InvalidApiKeyRef", pointer, ref.key, check)
    pointers = frozenset(found.used)
    if found.problems:
        reason = "; ".join(message for _, message in found.problems)
        return CompiledConnection(
            document=None, problem=condition_false("ResolvedRefs", found.problems[0][0], reason), pointers=pointers
        )
    used = ", ".join(f"the {one.kind} '{one.key.partition('/')[2]}'" for one in found.used)
    return CompiledConnection(document=document, files=found.files, used=used, pointers=pointers)


def _tls(tls: EngineTls, given: Mapping[str, Any], found: _References) -> Mapping[str, Any]:
    references = ("caCertificateRef", "clientCertificateRef")
    document = {name: value for name, value in given.items() if name not in references}
    ca, client = tls.ca_certificate_ref, tls.client_certificate_ref
    if ca is not None:
        document["caFile"] = found.file_for(
            "InvalidCACertificateRef", ReferencedObjectKey(ca.kind, found.key(ca.name)), ca.key, authorities_problem
        )
    if client is not None:
        pointer = ReferencedObjectKey("Secret", found.key(client.name))
        found.take("InvalidCertificateRef", pointer, _CLIENT_FILES, certificate_problem)
        crt, key = (referenced_file(pointer, name) for name in _CLIENT_FILES)
        document["clientCertificate"] = {"certFile": crt, "keyFile": key}
    return document


class _References:
    """The resolved references of one connection: ``files``, ``used`` in order, and ``problems`` with reasons."""

    def __init__(self, namespace: str, read: Read) -> None:
        self._namespace = namespace
        self._read = read
        self.files: dict[str, bytes] = {}
        self.used: dict[ReferencedObjectKey, None] = {}
        self.problems: list[tuple[str, str]] = []

    def key(self, name: str) -> str:
        """There is no way to refer to other namespaces."""
        return object_key(self._namespace, name)

    def file_for(
        self, reason: str, pointer: ReferencedObjectKey, name: str, check: Callable[[ReferencedObject, str], str]
    ) -> str:
        """The file of the value called ``name``; ``reason``: of the condition if ``check`` has something against it."""
        self.take(reason, pointer, (name,), lambda pointed: check(pointed, name))
        return referenced_file(pointer, name)

    def take(
        self,
        reason: str,
        pointer: ReferencedObjectKey,
        names: tuple[str, ...],
        problem_of: Callable[[ReferencedObject], str],
    ) -> None:
        """The values called ``names``, if ``problem_of`` has nothing against them."""
        self.used[pointer] = None
        found = self._read(pointer)
        if found is None:
            self.problems.append((reason, f"there is no {pointer.kind} {pointer.key} that this role may read"))
        elif problem := problem_of(found):
            self.problems.append((reason, f"the {pointer.kind} {pointer.key} cannot be used: {problem}"))
        else:
            self.files.update(referenced_files(pointer, found, names))


def _key_problem(pointed: ReferencedObject, name: str) -> str:
    """Why the value called ``name`` cannot be sent as a key; empty if it can. The value is never repeated."""
    if name not in pointed.data:
        return f"it has no {name}"
    key = pointed.data[name].strip()
    if not 1 <= len(key) <= _LONGEST_KEY or not key.isascii() or not key.decode().isprintable():
        return f"{name} is no key that a header can carry; write one line of up to {_LONGEST_KEY} ASCII characters"
    return ""


def _credentials_problem(pointed: ReferencedObject, name: str) -> str:
    """Why the value called ``name`` cannot sign requests; empty if it can. The value is never repeated."""
    try:
        default_aws_profile(pointed.data.get(name, b""))
    except CertificateUnusable as error:
        return f"{name} {error}"
    return ""
