# SPDX-License-Identifier: Apache-2.0
"""The listeners of a Gateway: which can be served, with which certificates, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.objects import GROUP, ListenerSpec, RouteKind
from controller.gateway.compile.secrets import (
    Pointed,
    Pointer,
    authorities_problem,
    certificate_problem,
    file_of,
    files_of,
)
from controller.kube.conditions import Wanted, WantedEntry, fails, holds
from extproc.api.spec import API_VERSION, object_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.gateway.compile.gateway_api.backends import Grants
    from controller.gateway.compile.gateway_api.objects import Gateway, Reference

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


HTTP_ROUTE: Final = RouteKind("HTTPRoute")
MODEL_ROUTE: Final = RouteKind("ModelRoute", API_VERSION.partition("/")[0])
_KINDS: Final = (HTTP_ROUTE, MODEL_ROUTE)
_PROTOCOLS: Final = ("HTTP", "HTTPS")
_NO_CERTIFICATES: Final = (
    "the GatewayConfig identifies callers by client certificates, and this listener asks for none; "
    "make it HTTPS and write spec.tls.frontend.default.validation in the Gateway"
)
_HIGHEST_PORT: Final = 65535
# Of a listener in the directory; it is part of the name of a file.
_LONGEST_NAME: Final = 200


class ListenerResult(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: unique over all Gateways. ``kinds``: of routes that may attach. ``accepted``, ``resolved``,
    ``conflicted``: its conditions. ``document``: None if it is not served. ``files``: what the document names.
    ``refused``: why it is not served although it is accepted; empty if that is not so.
    """

    name: str
    spec: ListenerSpec
    kinds: tuple[RouteKind, ...]
    accepted: Wanted
    resolved: Wanted
    conflicted: Wanted
    document: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = {}
    pointers: frozenset[Pointer] = frozenset()
    refused: str = ""

    @property
    def is_open(self) -> bool:
        """Whether routes can attach to it."""
        return self.accepted.status == "True"

    def asking_for_certificates(self) -> ListenerResult:
        """Itself if it asks for client certificates, by which callers are to be identified, else as one not served."""
        if self.document is None or "clientCertificates" in self.document.get("tls", {}):
            return self
        return msgspec.structs.replace(self, document=None, files={}, refused=_NO_CERTIFICATES)

    def entry(self, attached: int, why_not: str) -> WantedEntry:
        """Its part of the Gateway's status. ``attached``: how many routes are. ``why_not``: why it is not served."""
        programmed = holds("Programmed") if self.document else fails("Programmed", "Invalid", why_not)
        kinds = [{"group": one.group, "kind": one.kind} for one in self.kinds]
        return WantedEntry(
            identity={"name": self.spec.name},
            fields={"attachedRoutes": attached, "supportedKinds": kinds},
            conditions=(self.accepted, programmed, self.resolved, self.conflicted),
        )


class Claims:
    """Which ports and hosts of addresses are taken, by older Gateways that share an address."""

    def __init__(self) -> None:
        self._protocols: dict[tuple[str, int], tuple[str, str]] = {}
        self._hosts: dict[tuple[str, int, str], str] = {}

    def conflict(self, address: str, listener: ListenerSpec) -> Wanted | None:
        """The conflict of ``listener`` with an older Gateway's, if there is one."""
        protocol, owner = self._protocols.get((address, listener.port), (listener.protocol, ""))
        if protocol != listener.protocol:
            said = f"port {listener.port} of {address} speaks {protocol} for the older {owner}"
            return Wanted("Conflicted", "True", "ProtocolConflict", said)
        holder = self._hosts.get((address, listener.port, _host(listener)))
        if holder is not None:
            host = listener.hostname or "every host"
            said = f"{host} on port {listener.port} of {address} belongs to the older {holder}"
            return Wanted("Conflicted", "True", "HostnameConflict", said)
        return None

    def take(self, address: str, listener: ListenerSpec, name: str) -> None:
        """``listener`` is served."""
        self._protocols.setdefault((address, listener.port), (listener.protocol, name))
        self._hosts[address, listener.port, _host(listener)] = name


def compile_listeners(
    gateway: Gateway, address: str, offset: int, tls: TlsCompiler, claims: Claims
) -> tuple[ListenerResult, ...]:
    """In the order of the Gateway. ``address``: where they are bound; empty: nowhere. ``offset``: added to ports."""
    served = [one for one in gateway.spec.listeners if one.protocol in _PROTOCOLS]
    protocols: dict[int, set[str]] = {}
    for one in served:
        protocols.setdefault(one.port, set()).add(one.protocol)
    hosts = Counter((one.port, _host(one)) for one in served)
    results = []
    for one in gateway.spec.listeners:
        conflict = None
        if one.protocol in _PROTOCOLS:
            if len(protocols[one.port]) > 1:
                said = f"port {one.port} has listeners of several protocols"
                conflict = Wanted("Conflicted", "True", "ProtocolConflict", said)
            elif hosts[one.port, _host(one)] > 1:
                said = f"port {one.port} has another listener of this hostname"
                conflict = Wanted("Conflicted", "True", "HostnameConflict", said)
            elif address:
                conflict = claims.conflict(address, one)
        results.append(_compile(gateway, one, address, offset, tls, conflict))
    for result in results:
        if result.document is not None:
            claims.take(address, result.spec, result.name)
    return tuple(results)


def _compile(
    gateway: Gateway, listener: ListenerSpec, address: str, offset: int, tls: TlsCompiler, conflict: Wanted | None
) -> ListenerResult:
    name = f"{gateway.identity.key}/{listener.name}"
    is_known = listener.protocol in _PROTOCOLS
    kinds, resolved = _kinds(listener) if is_known else ((), holds("ResolvedRefs"))
    found = tls.compile(gateway, listener) if listener.protocol == "HTTPS" else TlsResult()
    accepted = _refusal(name, listener, offset, conflict) or found.accepted or holds("Accepted")
    document: dict[str, Any] | None = None
    if address and accepted.status == "True" and kinds and (listener.protocol == "HTTP" or found.document):
        host = f"[{address}]" if ":" in address else address
        document = {"name": name, "address": f"{host}:{listener.port + offset}"}
        if offset:
            document["publicPort"] = listener.port
        if listener.hostname:
            document["hostname"] = listener.hostname
        if found.document:
            document["tls"] = found.document
    return ListenerResult(
        name=name,
        spec=listener,
        kinds=kinds,
        accepted=accepted,
        resolved=found.resolved or resolved,
        conflicted=conflict or Wanted("Conflicted", "False", "NoConflicts"),
        document=document,
        files=found.files if document else {},
        pointers=found.pointers,
    )


def _refusal(name: str, listener: ListenerSpec, offset: int, conflict: Wanted | None) -> Wanted | None:
    if listener.protocol not in _PROTOCOLS:
        said = f"the protocol {listener.protocol} is not supported; write HTTP or HTTPS"
        return fails("Accepted", "UnsupportedProtocol", said)
    if len(name) > _LONGEST_NAME:
        said = f"{name} has more than {_LONGEST_NAME} characters; give the Gateway or the listener a shorter name"
        return fails("Accepted", "UnsupportedValue", said)
    if listener.port + offset > _HIGHEST_PORT:
        said = f"port {listener.port} plus the port offset {offset} is no port"
        return fails("Accepted", "PortUnavailable", said)
    return None if conflict is None else fails("Accepted", conflict.reason, conflict.message)


def _kinds(listener: ListenerSpec) -> tuple[tuple[RouteKind, ...], Wanted]:
    asked = listener.allowed_routes.kinds
    if not asked:
        return _KINDS, holds("ResolvedRefs")
    strange = [f"{one.group}/{one.kind}" for one in asked if one not in _KINDS]
    kinds = tuple(one for one in _KINDS if one in asked)
    if not strange:
        return kinds, holds("ResolvedRefs")
    said = f"{', '.join(strange)} cannot attach here; {GROUP}/HTTPRoute and {MODEL_ROUTE.group}/ModelRoute can"
    return kinds, fails("ResolvedRefs", "InvalidRouteKinds", said)


def _host(listener: ListenerSpec) -> str:
    return (listener.hostname or "").lower()
