# SPDX-License-Identifier: Apache-2.0
"""The listeners of a Gateway: which can be served, with which certificates, and which routes are attached to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.resource_types import (
    GROUP,
    GRPC_ROUTE,
    HTTP_ROUTE,
    NAME_LABEL,
    ListenerSpec,
    ParentRef,
    RouteKind,
)
from controller.gateway.compile.referenced_secrets import (
    ReferencedObject,
    ReferencedObjectKey,
    authorities_problem,
    certificate_problem,
    referenced_file,
    referenced_files,
)
from controller.gateway.compile.source_objects import to_canonical_json
from controller.kube.conditions import WantedCondition, WantedListItem, condition_false, condition_true
from extproc.api.addresses import join_host_port
from extproc.api.document_decoder import decode
from extproc.api.spec import API_VERSION, namespace_of, object_key
from extproc.api.yaml_documents import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from controller.gateway.compile.gateway_api.backends import ReferenceGrants
    from controller.gateway.compile.gateway_api.resource_types import Gateway, Reference

_SECRET_FILES: Final = ("tls.crt", "tls.key")
CLIENT_AUTHORITIES: Final = "clientca."
MODEL_ROUTE: Final = RouteKind("ModelRoute", API_VERSION.partition("/")[0])
_KINDS: Final = (HTTP_ROUTE, GRPC_ROUTE, MODEL_ROUTE)
_PROTOCOLS: Final = ("HTTP", "HTTPS")
_NO_CERTIFICATES: Final = (
    "the GatewayConfig identifies callers by client certificates, and this listener asks for none; "
    "make it HTTPS and write spec.tls.frontend.default.validation in the Gateway"
)
_HIGHEST_PORT: Final = 65535
# Of a listener in the directory; it is part of the name of a file.
_LONGEST_NAME: Final = 200


class TlsResult(msgspec.Struct, frozen=True, kw_only=True):
    """``document``: the listener's ``tls``; None if it cannot be used. ``accepted`` and ``resolved``: conditions that
    differ from the good ones. ``pointers``: all Secrets and ConfigMaps that it refers to.
    """

    document: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = {}
    accepted: WantedCondition | None = None
    resolved: WantedCondition | None = None
    pointers: frozenset[ReferencedObjectKey] = frozenset()


class TlsCompiler:
    """``pointed``: the target of a pointer, None if it does not exist or is not read yet."""

    def __init__(
        self, grants: ReferenceGrants, pointed: Callable[[ReferencedObjectKey], ReferencedObject | None]
    ) -> None:
        self._grants = grants
        self._pointed = pointed

    def compile(self, gateway: Gateway, listener: ListenerSpec) -> TlsResult:
        """The TLS of an HTTPS listener."""
        tls = listener.tls
        if tls is None or tls.mode != "Terminate":
            message = "an HTTPS listener ends TLS here; write tls with mode Terminate and certificateRefs"
            return TlsResult(accepted=condition_false("Accepted", "UnsupportedValue", message))
        certificates: list[Mapping[str, str]] = []
        files: dict[str, bytes] = {}
        pointers: set[ReferencedObjectKey] = set()
        resolved: WantedCondition | None = (
            None if tls.certificate_refs else _bad_certificate("there are no certificateRefs")
        )
        for reference in tls.certificate_refs:
            problem = self._certificate(gateway, reference, pointers, files)
            resolved = resolved or problem
            if problem is None:
                pointer = ReferencedObjectKey("Secret", _key(gateway, reference))
                crt, key = (referenced_file(pointer, name) for name in _SECRET_FILES)
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
        self, gateway: Gateway, reference: Reference, pointers: set[ReferencedObjectKey], files: dict[str, bytes]
    ) -> WantedCondition | None:
        """Why the Secret cannot be used; None, and its files, if it can."""
        if reference.group or reference.kind not in ("", "Secret"):
            return _bad_certificate(f"certificateRefs name Secrets, not {reference.group}/{reference.kind}")
        pointer = ReferencedObjectKey("Secret", _key(gateway, reference))
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
        files.update(referenced_files(pointer, found, _SECRET_FILES))
        return None

    def _authorities(
        self, gateway: Gateway, port: int, pointers: set[ReferencedObjectKey], files: dict[str, bytes]
    ) -> tuple[WantedCondition | None, str, WantedCondition | None]:
        """Why not Accepted; the file of the authorities of clients' certificates, if any; why not ResolvedRefs."""
        validation = gateway.spec.tls.client_validation(port)
        if validation is None:
            return None, "", None
        if validation.mode != "AllowValidOnly":
            message = f"the mode {validation.mode} of client certificates is not supported; write AllowValidOnly"
            return condition_false("Accepted", "UnsupportedValue", message), "", None
        texts = []
        resolved: WantedCondition | None = None
        for reference in validation.ca_certificate_refs:
            text, problem = self._authority(gateway, reference, pointers)
            resolved = resolved or problem
            if text:
                texts.append(text)
        if not texts:
            message = "no caCertificateRef can be used, so that no client could connect"
            return condition_false("Accepted", "NoValidCACertificate", message), "", resolved
        identity = gateway.identity
        name = f"{CLIENT_AUTHORITIES}{identity.namespace}.{identity.name}_{port}.data"
        files[name] = b"\n".join(texts)
        return None, name, resolved

    def _authority(
        self, gateway: Gateway, reference: Reference, pointers: set[ReferencedObjectKey]
    ) -> tuple[bytes, WantedCondition | None]:
        if reference.group or reference.kind != "ConfigMap":
            message = f"caCertificateRefs name ConfigMaps, not {reference.group}/{reference.kind}"
            return b"", condition_false("ResolvedRefs", "InvalidCACertificateKind", message)
        pointer = ReferencedObjectKey("ConfigMap", _key(gateway, reference))
        if not self._may(gateway, reference, "ConfigMap"):
            return b"", _not_permitted("ConfigMap", pointer.key)
        pointers.add(pointer)
        found = self._pointed(pointer)
        problem = "it is not there" if found is None else authorities_problem(found)
        if found is None or problem:
            message = f"the ConfigMap {pointer.key} cannot be used: {problem}"
            return b"", condition_false("ResolvedRefs", "InvalidCACertificateRef", message)
        return found.data["ca.crt"], None

    def _may(self, gateway: Gateway, reference: Reference, kind: str) -> bool:
        own = gateway.identity.namespace
        target = reference.namespace or own
        return self._grants.allows((own, GROUP, "Gateway"), (target, "", kind), reference.name)


def _key(gateway: Gateway, reference: Reference) -> str:
    return object_key(reference.namespace or gateway.identity.namespace, reference.name)


def _bad_certificate(message: str) -> WantedCondition:
    return condition_false("ResolvedRefs", "InvalidCertificateRef", message)


def _not_permitted(kind: str, key: str) -> WantedCondition:
    return condition_false(
        "ResolvedRefs", "RefNotPermitted", f"no ReferenceGrant lets this Gateway use the {kind} {key}"
    )


class ListenerResult(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: unique over all Gateways. ``kinds``: of routes that may attach. ``accepted``, ``resolved``,
    ``conflicted``: its conditions. ``document``: None if it is not served. ``files``: what the document names.
    ``refused``: why it is not served although it is accepted; empty if that is not so.
    """

    name: str
    spec: ListenerSpec
    kinds: tuple[RouteKind, ...]
    accepted: WantedCondition
    resolved: WantedCondition
    conflicted: WantedCondition
    document: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = {}
    pointers: frozenset[ReferencedObjectKey] = frozenset()
    refused: str = ""

    @property
    def is_open(self) -> bool:
        """Whether routes can attach to it."""
        return self.accepted.status == "True"

    def require_client_certificates(self) -> ListenerResult:
        """The listener itself if it requires client certificates, by which callers are identified; else the same as not
        served.
        """
        if self.document is None or "clientCertificates" in self.document.get("tls", {}):
            return self
        return msgspec.structs.replace(self, document=None, files={}, refused=_NO_CERTIFICATES)

    def status_entry(self, attached: int, why_not: str) -> WantedListItem:
        """Its part of the Gateway's status. ``attached``: how many routes are. ``why_not``: why it is not served."""
        programmed = (
            condition_true("Programmed") if self.document else condition_false("Programmed", "Invalid", why_not)
        )
        kinds = [{"group": one.group, "kind": one.kind} for one in self.kinds]
        return WantedListItem(
            identity={"name": self.spec.name},
            fields={"attachedRoutes": attached, "supportedKinds": kinds},
            conditions=(self.accepted, programmed, self.resolved, self.conflicted),
        )


class ListenerClaims:
    """Which ports and hosts of addresses are taken, by older Gateways that share an address."""

    def __init__(self, steps_port: int | None = None) -> None:
        """``steps_port``: that of transformers and explainers, which no Gateway can have."""
        self._steps_port = steps_port
        self._protocols: dict[tuple[str, int], tuple[str, str]] = {}
        self._hosts: dict[tuple[str, int, str], str] = {}

    def conflict(self, address: str, listener: ListenerSpec) -> WantedCondition | None:
        """The conflict of ``listener`` with an older Gateway's, or with that of steps, if there is one."""
        if listener.port == self._steps_port:
            message = f"port {listener.port} is that of transformers and explainers (steps of the GatewayConfig)"
            return WantedCondition("Conflicted", "True", "ProtocolConflict", message)
        protocol, owner = self._protocols.get((address, listener.port), (listener.protocol, ""))
        if protocol != listener.protocol:
            message = f"port {listener.port} of {address} speaks {protocol} for the older {owner}"
            return WantedCondition("Conflicted", "True", "ProtocolConflict", message)
        holder = self._hosts.get((address, listener.port, _host(listener)))
        if holder is not None:
            host = listener.hostname or "every host"
            message = f"{host} on port {listener.port} of {address} belongs to the older {holder}"
            return WantedCondition("Conflicted", "True", "HostnameConflict", message)
        return None

    def claim(self, address: str, listener: ListenerSpec, name: str) -> None:
        """``listener`` is served."""
        self._protocols.setdefault((address, listener.port), (listener.protocol, name))
        self._hosts[address, listener.port, _host(listener)] = name


def compile_listeners(
    gateway: Gateway, address: str, offset: int, tls: TlsCompiler, claims: ListenerClaims
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
                message = f"port {one.port} has listeners of several protocols"
                conflict = WantedCondition("Conflicted", "True", "ProtocolConflict", message)
            elif hosts[one.port, _host(one)] > 1:
                message = f"port {one.port} has another listener of this hostname"
                conflict = WantedCondition("Conflicted", "True", "HostnameConflict", message)
            elif address:
                conflict = claims.conflict(address, one)
        results.append(_compile(gateway, one, address, offset, tls, conflict))
    for result in results:
        if result.document is not None:
            claims.claim(address, result.spec, result.name)
    return tuple(results)


def _compile(
    gateway: Gateway,
    listener: ListenerSpec,
    address: str,
    offset: int,
    tls: TlsCompiler,
    conflict: WantedCondition | None,
) -> ListenerResult:
    name = f"{gateway.identity.key}/{listener.name}"
    is_known = listener.protocol in _PROTOCOLS
    kinds, resolved = _kinds(listener) if is_known else ((), condition_true("ResolvedRefs"))
    found = tls.compile(gateway, listener) if listener.protocol == "HTTPS" else TlsResult()
    accepted = _refusal(name, listener, offset, conflict) or found.accepted or condition_true("Accepted")
    document: dict[str, Any] | None = None
    if address and accepted.status == "True" and kinds and (listener.protocol == "HTTP" or found.document):
        document = _document(name, listener, address, offset, found)
        if wrong := _mistakes(document):
            accepted, document = condition_false("Accepted", "UnsupportedValue", wrong), None
    return ListenerResult(
        name=name,
        spec=listener,
        kinds=kinds,
        accepted=accepted,
        resolved=found.resolved or resolved,
        conflicted=conflict or WantedCondition("Conflicted", "False", "NoConflicts"),
        document=document,
        files=found.files if document else {},
        pointers=found.pointers,
    )


def _document(name: str, listener: ListenerSpec, address: str, offset: int, tls: TlsResult) -> dict[str, Any]:
    document: dict[str, Any] = {"name": name, "address": join_host_port(address, listener.port + offset)}
    if offset:
        document["publicPort"] = listener.port
    if listener.hostname:
        document["hostname"] = listener.hostname
    if tls.document:
        document["tls"] = tls.document
    return document


def _mistakes(document: Mapping[str, Any]) -> str:
    """Why readers would refuse a directory with this listener; empty if they would not."""
    config = {"apiVersion": API_VERSION, "kind": "GatewayConfig", "metadata": {"name": "gateway"}}
    content = to_canonical_json({**config, "spec": {"listeners": [document]}})
    _, mistakes = decode(Document("", content.decode(), is_json=True))
    return "; ".join(f"{one.path.rpartition('.')[2]}: {one.message}" for one in mistakes)


def _refusal(
    name: str, listener: ListenerSpec, offset: int, conflict: WantedCondition | None
) -> WantedCondition | None:
    if listener.protocol not in _PROTOCOLS:
        message = f"the protocol {listener.protocol} is not supported; write HTTP or HTTPS"
        return condition_false("Accepted", "UnsupportedProtocol", message)
    if len(name) > _LONGEST_NAME:
        message = f"{name} has more than {_LONGEST_NAME} characters; give the Gateway or the listener a shorter name"
        return condition_false("Accepted", "UnsupportedValue", message)
    if listener.port + offset > _HIGHEST_PORT:
        message = f"port {listener.port} plus the port offset {offset} is no port"
        return condition_false("Accepted", "PortUnavailable", message)
    return None if conflict is None else condition_false("Accepted", conflict.reason, conflict.message)


def _kinds(listener: ListenerSpec) -> tuple[tuple[RouteKind, ...], WantedCondition]:
    listed = listener.allowed_routes.kinds
    if not listed:
        return _KINDS, condition_true("ResolvedRefs")
    strange = [f"{one.group}/{one.kind}" for one in listed if one not in _KINDS]
    kinds = tuple(one for one in _KINDS if one in listed)
    if not strange:
        return kinds, condition_true("ResolvedRefs")
    known = ", ".join(f"{one.group}/{one.kind}" for one in _KINDS)
    message = f"{', '.join(strange)} cannot attach here; {known} can"
    return kinds, condition_false("ResolvedRefs", "InvalidRouteKinds", message)


def _host(listener: ListenerSpec) -> str:
    return (listener.hostname or "").lower()


class AttachingRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route to be attached to listeners. ``hostnames``: empty for all hosts."""

    kind: RouteKind
    namespace: str
    hostnames: tuple[str, ...] = ()


class ParentRefResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one parent reference. ``attached``: names of listeners; ``served``: those of them that Envoy has.
    ``accepted``: the route's condition.
    """

    ref: ParentRef
    gateway: str
    attached: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    accepted: WantedCondition

    def reference(self) -> Mapping[str, Any]:
        """As the route has it, with what it left out of group and kind."""
        found: dict[str, Any] = {"group": self.ref.group, "kind": self.ref.kind, "name": self.ref.name}
        if self.ref.namespace is not None:
            found["namespace"] = self.ref.namespace
        if self.ref.section_name is not None:
            found["sectionName"] = self.ref.section_name
        if self.ref.port is not None:
            found["port"] = self.ref.port
        return found


class Listeners:
    """The listeners of all Gateways that are served, by Gateway. ``labels``: of namespaces, by name."""

    def __init__(
        self, gateways: Mapping[str, tuple[ListenerResult, ...]], labels: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._gateways = gateways
        self._labels = labels

    def attach(self, route: AttachingRoute, parents: Iterable[ParentRef]) -> list[ParentRefResult]:
        """What becomes of those of ``parents`` that are Gateways of ours."""
        found = []
        for ref in parents:
            key = object_key(ref.namespace or route.namespace, ref.name)
            if (ref.group, ref.kind) == (GROUP, "Gateway") and key in self._gateways:
                found.append(self._attach(route, ref, key))
        return found

    def listeners_open_to(self, route: AttachingRoute) -> list[str]:
        """The served listeners of all Gateways that take ``route``, though it names none."""
        return [
            one.name
            for key, listeners in self._gateways.items()
            for one in listeners
            if one.document is not None and self._allows(one, route, namespace_of(key))
        ]

    def _attach(self, route: AttachingRoute, ref: ParentRef, key: str) -> ParentRefResult:
        named: Sequence[ListenerResult] = [
            one
            for one in self._gateways[key]
            if ref.section_name in (None, one.spec.name) and ref.port in (None, one.spec.port)
        ]
        if not named:
            message = f"the Gateway {key} has no listener of this sectionName and port"
            return ParentRefResult(
                ref=ref, gateway=key, accepted=condition_false("Accepted", "NoMatchingParent", message)
            )
        allowed = [one for one in named if self._allows(one, route, namespace_of(key))]
        if not allowed:
            message = f"no listener of the Gateway {key} allows a {route.kind.kind} of the namespace {route.namespace}"
            return ParentRefResult(
                ref=ref, gateway=key, accepted=condition_false("Accepted", "NotAllowedByListeners", message)
            )
        attached = [one for one in allowed if hostnames_intersect(one.spec.hostname, route.hostnames)]
        if not attached:
            hosts = ", ".join(one.spec.hostname or "*" for one in allowed)
            message = f"none of its hostnames is one of the listeners' ({hosts})"
            return ParentRefResult(
                ref=ref, gateway=key, accepted=condition_false("Accepted", "NoMatchingListenerHostname", message)
            )
        return ParentRefResult(
            ref=ref,
            gateway=key,
            attached=tuple(one.name for one in attached),
            served=tuple(one.name for one in attached if one.document is not None),
            accepted=condition_true("Accepted"),
        )

    def _allows(self, listener: ListenerResult, route: AttachingRoute, own: str) -> bool:
        if not listener.is_open or route.kind not in listener.kinds:
            return False
        namespaces = listener.spec.allowed_routes.namespaces
        match namespaces.source:
            case "All":
                return True
            case "Same":
                return route.namespace == own
            case "Selector":
                labels = {NAME_LABEL: route.namespace, **self._labels.get(route.namespace, {})}
                return namespaces.selector.selects(labels)
        return False


def hostnames_intersect(listener: str | None, hostnames: tuple[str, ...]) -> bool:
    """Whether some host is one of both; nothing stands for all hosts."""
    return not listener or not hostnames or any(_overlap(listener.lower(), one.lower()) for one in hostnames)


def _overlap(one: str, other: str) -> bool:
    """``*.`` at the beginning stands for one label or more."""
    if one == other:
        return True
    if one.startswith("*.") and other.endswith(one[1:]):
        return True
    return other.startswith("*.") and one.endswith(other[1:])
