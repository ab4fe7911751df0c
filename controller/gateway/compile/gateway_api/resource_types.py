# SPDX-License-Identifier: Apache-2.0
"""Objects of the Gateway API, as far as they are used; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from extproc.api.spec import object_key, requirement_holds

GROUP: Final = "gateway.networking.k8s.io"
CONTROLLER_NAME: Final = "attache.dev/gateway"
# The label that every namespace has of itself.
NAME_LABEL: Final = "kubernetes.io/metadata.name"
T = TypeVar("T")


class ResourceStruct(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """camelCase; unknown fields are ignored: the API server has checked the rest."""


class Reference(ResourceStruct, frozen=True):
    """Of another object. ``namespace``: the referring object's own, if left out."""

    name: str
    group: str = ""
    kind: str = ""
    namespace: str | None = None


class LabelRequirement(ResourceStruct, frozen=True):
    """A condition on a label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """As Kubernetes has it."""
        return requirement_holds(self.key, self.operator, self.values, labels)


class LabelSelector(ResourceStruct, frozen=True):
    """Everything must hold; nothing selects all."""

    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[LabelRequirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether all of it holds for ``labels``."""
        return all(labels.get(name) == value for name, value in self.match_labels.items()) and all(
            one.holds(labels) for one in self.match_expressions
        )


class RouteNamespaces(ResourceStruct, frozen=True):
    """Namespaces whose routes may attach: ``Same``, ``All``, ``Selector`` or ``None``."""

    source: str = msgspec.field(default="Same", name="from")
    selector: LabelSelector = LabelSelector()


class RouteKind(ResourceStruct, frozen=True):
    """A kind of routes."""

    kind: str
    group: str = GROUP


HTTP_ROUTE: Final = RouteKind("HTTPRoute")
GRPC_ROUTE: Final = RouteKind("GRPCRoute")


class AllowedRoutes(ResourceStruct, frozen=True):
    """Which routes may attach to a listener."""

    namespaces: RouteNamespaces = RouteNamespaces()
    kinds: tuple[RouteKind, ...] = ()


class TlsSpec(ResourceStruct, frozen=True):
    """TLS of a listener."""

    mode: str = "Terminate"
    certificate_refs: tuple[Reference, ...] = ()
    options: Mapping[str, str] = {}


class ListenerSpec(ResourceStruct, frozen=True):
    """A listener of a Gateway."""

    name: str
    port: int
    protocol: str
    hostname: str | None = None
    tls: TlsSpec | None = None
    allowed_routes: AllowedRoutes = AllowedRoutes()


class FrontendTlsValidation(ResourceStruct, frozen=True):
    """What clients' certificates are checked with."""

    ca_certificate_refs: tuple[Reference, ...] = ()
    mode: str = "AllowValidOnly"


class FrontendTls(ResourceStruct, frozen=True):
    """TLS towards clients."""

    validation: FrontendTlsValidation | None = None


class PortTls(ResourceStruct, frozen=True):
    """TLS towards clients of one port."""

    port: int
    tls: FrontendTls = FrontendTls()


class FrontendTlsByPort(ResourceStruct, frozen=True):
    """TLS towards clients: of all ports, and of those that differ."""

    default: FrontendTls = FrontendTls()
    per_port: tuple[PortTls, ...] = ()


class GatewayTls(ResourceStruct, frozen=True):
    """TLS of a whole Gateway."""

    frontend: FrontendTlsByPort = FrontendTlsByPort()

    def client_validation(self, port: int) -> FrontendTlsValidation | None:
        """What clients of ``port`` must show."""
        own = next((one.tls for one in self.frontend.per_port if one.port == port), self.frontend.default)
        return own.validation


class Address(ResourceStruct, frozen=True):
    """An address of a Gateway's spec or status."""

    type: str = "IPAddress"
    value: str = ""


class Infrastructure(ResourceStruct, frozen=True):
    """How a Gateway is run. ``parameters_ref``: its GatewayConfig."""

    parameters_ref: Reference | None = None


class GatewaySpec(ResourceStruct, frozen=True):
    """A Gateway's spec."""

    gateway_class_name: str
    listeners: tuple[ListenerSpec, ...] = ()
    addresses: tuple[Address, ...] = ()
    infrastructure: Infrastructure = Infrastructure()
    tls: GatewayTls = GatewayTls()


class ObjectIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which object it is. ``created``: RFC 3339, so that text sorts by time. ``namespace``: empty if it has none."""

    name: str
    namespace: str = ""
    created: str = ""
    generation: int = 0

    @property
    def key(self) -> str:
        """``namespace/name``, or the name alone."""
        return object_key(self.namespace, self.name) if self.namespace else self.name

    @property
    def age_sort_key(self) -> tuple[str, str]:
        """Sorts by age; of two that were made in one second, the first by name counts as older."""
        return self.created, self.key


class ParentRef(ResourceStruct, frozen=True):
    """A reference of a route to a Gateway."""

    name: str
    group: str = GROUP
    kind: str = "Gateway"
    namespace: str | None = None
    section_name: str | None = None
    port: int | None = None


class _AddressStatus(ResourceStruct, frozen=True):
    addresses: tuple[Address, ...] = ()


class Gateway(msgspec.Struct, frozen=True):
    """A Gateway. ``assigned``: the addresses in its status."""

    identity: ObjectIdentity
    spec: GatewaySpec
    assigned: tuple[str, ...] = ()


class ClassSpec(ResourceStruct, frozen=True):
    """The spec of a GatewayClass."""

    controller_name: str
    parameters_ref: Reference | None = None


class GatewayClass(msgspec.Struct, frozen=True):
    """A GatewayClass."""

    identity: ObjectIdentity
    spec: ClassSpec


class Route(msgspec.Struct, frozen=True):
    """An HTTPRoute or a GRPCRoute. ``spec``: as it was written."""

    identity: ObjectIdentity
    parents: tuple[ParentRef, ...]
    hostnames: tuple[str, ...]
    spec: Mapping[str, Any]
    kind: RouteKind = HTTP_ROUTE

    @property
    def key(self) -> tuple[str, str]:
        """Its kind, and ``namespace/name``."""
        return self.kind.kind, self.identity.key


class _BackendShape(ResourceStruct, frozen=True):
    name: str
    group: str = ""
    kind: str = "Service"
    namespace: str | None = None
    port: int | None = None
    filters: tuple[_FilterShape, ...] = ()


class _MirrorShape(ResourceStruct, frozen=True):
    backend_ref: _BackendShape | None = None


class _FilterShape(ResourceStruct, frozen=True):
    request_mirror: _MirrorShape | None = None


class _RuleShape(ResourceStruct, frozen=True):
    filters: tuple[_FilterShape, ...] = ()
    backend_refs: tuple[_BackendShape, ...] = ()


class _RouteSpec(ResourceStruct, frozen=True):
    """``rules``: as far as references are looked for in them."""

    parent_refs: tuple[ParentRef, ...] = ()
    hostnames: tuple[str, ...] = ()
    rules: tuple[_RuleShape, ...] = ()


class InferencePoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An InferencePool, beyond its pods. ``picker``: the Service of its own endpoint picker, as ``namespace/name``;
    empty if it names something else. ``fails_open``: it is used without its picker, too.
    """

    identity: ObjectIdentity
    picker: str = ""
    fails_open: bool = False


class _PickerRef(ResourceStruct, frozen=True):
    group: str | None = None
    kind: str = "Service"
    name: str = ""
    failure_mode: str = ""


class _PoolFields(ResourceStruct, frozen=True):
    endpoint_picker_ref: _PickerRef = _PickerRef()


class GrantSubject(ResourceStruct, frozen=True):
    """The referring ``namespace``, or the target's ``name``; empty: all of the kind."""

    group: str = ""
    kind: str = ""
    namespace: str | None = None
    name: str = ""


class _GrantSpec(ResourceStruct, frozen=True):
    source: tuple[GrantSubject, ...] = msgspec.field(default=(), name="from")
    to: tuple[GrantSubject, ...] = ()


class ReferenceGrant(msgspec.Struct, frozen=True):
    """A ReferenceGrant."""

    identity: ObjectIdentity
    source: tuple[GrantSubject, ...]
    to: tuple[GrantSubject, ...]


def object_identity(thing: Mapping[str, Any]) -> ObjectIdentity:
    """Which object ``thing`` is."""
    metadata = thing["metadata"]
    return ObjectIdentity(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        created=metadata.get("creationTimestamp") or "",
        generation=metadata.get("generation", 0),
    )


def parse_gateway_class(thing: Mapping[str, Any]) -> GatewayClass | None:
    """A GatewayClass; None if it has another shape."""
    spec = _convert(thing.get("spec"), ClassSpec)
    return None if spec is None else GatewayClass(object_identity(thing), spec)


def parse_gateway(thing: Mapping[str, Any]) -> Gateway | None:
    """A Gateway; None if it has another shape, such as two listeners of one name."""
    spec = _convert(thing.get("spec"), GatewaySpec)
    if spec is None or len({one.name for one in spec.listeners}) < len(spec.listeners):
        return None
    status = _convert(thing.get("status"), _AddressStatus) or _AddressStatus()
    return Gateway(object_identity(thing), spec, tuple(one.value for one in status.addresses))


def parse_route(thing: Mapping[str, Any]) -> Route | None:
    """An HTTPRoute or a GRPCRoute; None if it has another shape."""
    spec = _convert(thing.get("spec"), _RouteSpec)
    if spec is None:
        return None
    return Route(
        object_identity(thing), spec.parent_refs, spec.hostnames, thing.get("spec") or {}, RouteKind(thing["kind"])
    )


def parse_reference_grant(thing: Mapping[str, Any]) -> ReferenceGrant | None:
    """A ReferenceGrant; None if it has another shape."""
    spec = _convert(thing.get("spec"), _GrantSpec)
    return None if spec is None else ReferenceGrant(object_identity(thing), spec.source, spec.to)


def parse_pool(thing: Mapping[str, Any]) -> InferencePoolSpec:
    """An InferencePool as the API server has it; one of another shape names no picker."""
    identity = object_identity(thing)
    spec = _convert(thing.get("spec"), _PoolFields) or _PoolFields()
    picker = spec.endpoint_picker_ref
    is_service = not picker.group and picker.kind == "Service" and picker.name
    return InferencePoolSpec(
        identity=identity,
        picker=object_key(identity.namespace, picker.name) if is_service else "",
        fails_open=picker.failure_mode == "FailOpen",
    )


def object_labels(thing: Mapping[str, Any]) -> Mapping[str, str]:
    """The labels of an object."""
    return thing["metadata"].get("labels") or {}


def _convert(value: object, type_: type[T]) -> T | None:
    try:
        return msgspec.convert(value or {}, type_)
    except msgspec.ValidationError:
        return None
