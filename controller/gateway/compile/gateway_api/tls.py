# SPDX-License-Identifier: Apache-2.0
"""TLS of a listener: the certificates and authorities that it points to, as files of the directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.gateway_spec import GROUP
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
    from collections.abc import Callable

    from controller.gateway.compile.gateway_api.gateway_spec import ListenerSpec, Reference
    from controller.gateway.compile.gateway_api.grants import Grants
    from controller.gateway.compile.gateway_api.objects import Gateway

_SECRET_FILES: Final = ("tls.crt", "tls.key")
CLIENT_AUTHORITIES: Final = "clientca."


class TlsResult(msgspec.Struct, frozen=True, kw_only=True):
    """``document``: the listener's ``tls``; None if it cannot be had. ``accepted`` and ``resolved``: conditions that
    are not as they should be. ``pointers``: all that was looked at or would be.
    """

    document: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = {}
    accepted: Wanted | None = None
    resolved: Wanted | None = None
    pointers: frozenset[Pointer] = frozenset()


class TlsCompiler:
    """``pointed``: what a pointer points to, None if it is not there or not known yet."""

    def __init__(self, grants: Grants, pointed: Callable[[Pointer], Pointed | None]) -> None:
        self._grants = grants
        self._pointed = pointed

    def compile(self, gateway: Gateway, listener: ListenerSpec) -> TlsResult:
        """The TLS of an HTTPS listener."""
        tls = listener.tls
        if tls is None or tls.mode != "Terminate":
            said = "an HTTPS listener ends TLS here; write tls with mode Terminate and certificateRefs"
            return TlsResult(accepted=fails("Accepted", "UnsupportedValue", said))
        certificates: list[Mapping[str, str]] = []
        files: dict[str, bytes] = {}
        pointers: set[Pointer] = set()
        resolved: Wanted | None = None if tls.certificate_refs else _bad_certificate("there are no certificateRefs")
        for reference in tls.certificate_refs:
            problem = self._certificate(gateway, reference, pointers, files)
            resolved = resolved or problem
            if problem is None:
                pointer = Pointer("Secret", _key(gateway, reference))
                crt, key = (file_of(pointer, name) for name in _SECRET_FILES)
                certificates.append({"certFile": crt, "keyFile": key})
        accepted, authorities, unresolved = self._authorities(gateway, listener.port, pointers, files)
        resolved = resolved or unresolved
        if accepted is not None or not certificates:
            return TlsResult(accepted=accepted, resolved=resolved, pointers=frozenset(pointers))
        document: dict[str, Any] = {"certificates": certificates}
        if authorities:
            document["clientCertificates"] = {"caFile": authorities}
        return TlsResult(document=document, files=files, resolved=resolved, pointers=frozenset(pointers))

    def _certificate(
        self, gateway: Gateway, reference: Reference, pointers: set[Pointer], files: dict[str, bytes]
    ) -> Wanted | None:
        """Why the Secret cannot be used; None, and its files, if it can."""
        if reference.group or reference.kind not in ("", "Secret"):
            return _bad_certificate(f"certificateRefs name Secrets, not {reference.group}/{reference.kind}")
        pointer = Pointer("Secret", _key(gateway, reference))
        if not self._may(gateway, reference, "Secret"):
            return _not_permitted("Secret", pointer.key)
        pointers.add(pointer)
        found = self._pointed(pointer)
        if found is None:
            advice = "create it, or bind the ClusterRole attache-gateway-secrets in its namespace"
            return _bad_certificate(f"there is no Secret {pointer.key} that this role may read; {advice}")
        problem = certificate_problem(found)
        if problem:
            return _bad_certificate(f"the Secret {pointer.key} cannot be used: {problem}")
        files.update(files_of(pointer, found, _SECRET_FILES))
        return None

    def _authorities(
        self, gateway: Gateway, port: int, pointers: set[Pointer], files: dict[str, bytes]
    ) -> tuple[Wanted | None, str, Wanted | None]:
        """Why not Accepted; the file of the authorities of clients' certificates, if any; why not ResolvedRefs."""
        validation = gateway.spec.tls.validation(port)
        if validation is None:
            return None, "", None
        if validation.mode != "AllowValidOnly":
            said = f"the mode {validation.mode} of client certificates is not supported; write AllowValidOnly"
            return fails("Accepted", "UnsupportedValue", said), "", None
        texts = []
        resolved: Wanted | None = None
        for reference in validation.ca_certificate_refs:
            text, problem = self._authority(gateway, reference, pointers)
            resolved = resolved or problem
            if text:
                texts.append(text)
        if not texts:
            said = "no caCertificateRef can be used, so that no client could connect"
            return fails("Accepted", "NoValidCACertificate", said), "", resolved
        identity = gateway.identity
        name = f"{CLIENT_AUTHORITIES}{identity.namespace}.{identity.name}_{port}.data"
        files[name] = b"\n".join(texts)
        return None, name, resolved

    def _authority(self, gateway: Gateway, reference: Reference, pointers: set[Pointer]) -> tuple[bytes, Wanted | None]:
        if reference.group or reference.kind != "ConfigMap":
            said = f"caCertificateRefs name ConfigMaps, not {reference.group}/{reference.kind}"
            return b"", fails("ResolvedRefs", "InvalidCACertificateKind", said)
        pointer = Pointer("ConfigMap", _key(gateway, reference))
        if not self._may(gateway, reference, "ConfigMap"):
            return b"", _not_permitted("ConfigMap", pointer.key)
        pointers.add(pointer)
        found = self._pointed(pointer)
        problem = "it is not there" if found is None else authorities_problem(found)
        if found is None or problem:
            said = f"the ConfigMap {pointer.key} cannot be used: {problem}"
            return b"", fails("ResolvedRefs", "InvalidCACertificateRef", said)
        return found.data["ca.crt"], None

    def _may(self, gateway: Gateway, reference: Reference, kind: str) -> bool:
        own = gateway.identity.namespace
        target = reference.namespace or own
        return self._grants.allow((own, GROUP, "Gateway"), (target, "", kind), reference.name)


def _key(gateway: Gateway, reference: Reference) -> str:
    return object_key(reference.namespace or gateway.identity.namespace, reference.name)


def _bad_certificate(message: str) -> Wanted:
    return fails("ResolvedRefs", "InvalidCertificateRef", message)


def _not_permitted(kind: str, key: str) -> Wanted:
    return fails("ResolvedRefs", "RefNotPermitted", f"no ReferenceGrant lets this Gateway use the {kind} {key}")
