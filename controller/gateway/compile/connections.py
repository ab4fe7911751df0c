# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: certificates and keys in Secrets and ConfigMaps as files.

A connection is used wholly or not at all: an engine is never reached without the TLS, or without the key, that its
ModelServer asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.secrets import (
    Pointed,
    Pointer,
    authorities_problem,
    certificate_problem,
    file_of,
    files_of,
)
from controller.kube.conditions import Wanted, fails
from extproc.api.spec import object_key

if TYPE_CHECKING:
    from extproc.api.connection import EngineConnection, EngineTls

_CLIENT_FILES: Final = ("tls.crt", "tls.key")
_LONGEST_KEY: Final = 4096

Read = Callable[[Pointer], Pointed | None]
"""What a pointer points to; None if it is not there, or not known yet."""


class ConnectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """``document``: the connection for the directory; None if it cannot be used, and ``problem`` says why. ``used``:
    what it refers to, for people. ``pointers``: all that was looked at.
    """

    document: Mapping[str, Any] | None
    files: Mapping[str, bytes] = {}
    problem: Wanted | None = None
    used: str = ""
    pointers: frozenset[Pointer] = frozenset()


def compile_connection(
    connection: EngineConnection, given: Mapping[str, Any], namespace: str, read: Read
) -> ConnectionResult:
    """``given``: ``connection`` as its object has it. ``namespace``: the object's, and that of all it refers to."""
    found = _References(namespace, read)
    document = {name: value for name, value in given.items() if name != "apiKeyRef"}
    if connection.tls is not None:
        document["tls"] = _tls(connection.tls, given["tls"], found)
    ref = connection.api_key_ref
    if ref is not None:
        document["apiKeyFile"] = found.file("InvalidApiKeyRef", Pointer("Secret", found.key(ref.name)), ref.key)
    pointers = frozenset(found.used)
    if found.problems:
        said = "; ".join(message for _, message in found.problems)
        return ConnectionResult(
            document=None, problem=fails("ResolvedRefs", found.problems[0][0], said), pointers=pointers
        )
    used = ", ".join(f"the {one.kind} '{one.key.partition('/')[2]}'" for one in found.used)
    return ConnectionResult(document=document, files=found.files, used=used, pointers=pointers)


def _tls(tls: EngineTls, given: Mapping[str, Any], found: _References) -> Mapping[str, Any]:
    references = ("caCertificateRef", "clientCertificateRef")
    document = {name: value for name, value in given.items() if name not in references}
    ca, client = tls.ca_certificate_ref, tls.client_certificate_ref
    if ca is not None:
        document["caFile"] = found.file("InvalidCACertificateRef", Pointer(ca.kind, found.key(ca.name)), ca.key)
    if client is not None:
        pointer = Pointer("Secret", found.key(client.name))
        found.take("InvalidCertificateRef", pointer, _CLIENT_FILES, certificate_problem)
        crt, key = (file_of(pointer, name) for name in _CLIENT_FILES)
        document["clientCertificate"] = {"certFile": crt, "keyFile": key}
    return document


class _References:
    """What the references of one connection come to: ``files``, ``used`` in order, and ``problems`` with reasons."""

    def __init__(self, namespace: str, read: Read) -> None:
        self._namespace = namespace
        self._read = read
        self.files: dict[str, bytes] = {}
        self.used: dict[Pointer, None] = {}
        self.problems: list[tuple[str, str]] = []

    def key(self, name: str) -> str:
        """There is no way to refer to other namespaces."""
        return object_key(self._namespace, name)

    def file(self, reason: str, pointer: Pointer, name: str) -> str:
        """The file of the value called ``name``; ``reason``: of the condition if it cannot be used."""
        check = _key_problem if reason == "InvalidApiKeyRef" else authorities_problem
        self.take(reason, pointer, (name,), lambda pointed: check(pointed, name))
        return file_of(pointer, name)

    def take(self, reason: str, pointer: Pointer, names: tuple[str, ...], problem_of: Callable[[Pointed], str]) -> None:
        """The values called ``names``, if ``problem_of`` has nothing against them."""
        self.used[pointer] = None
        found = self._read(pointer)
        if found is None:
            self.problems.append((reason, f"there is no {pointer.kind} {pointer.key} that this role may read"))
        elif problem := problem_of(found):
            self.problems.append((reason, f"the {pointer.kind} {pointer.key} cannot be used: {problem}"))
        else:
            self.files.update(files_of(pointer, found, names))


def _key_problem(pointed: Pointed, name: str) -> str:
    """Why the value called ``name`` cannot be sent as a key; empty if it can. The value is never repeated."""
    if name not in pointed.data:
        return f"it has no {name}"
    key = pointed.data[name].strip()
    if not 1 <= len(key) <= _LONGEST_KEY or not key.isascii() or not key.decode().isprintable():
        return f"{name} is no key that a header can carry; write one line of up to {_LONGEST_KEY} ASCII characters"
    return ""
