# SPDX-License-Identifier: Apache-2.0
"""The spec of a Gateway, as far as it is used; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.api.spec import requirement_holds

GROUP: Final = "gateway.networking.k8s.io"


class Read(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """camelCase; unknown fields are ignored: the API server has checked the rest."""


class Reference(Read, frozen=True):
    """Of another object. ``namespace``: the referring object's own, if left out."""

    name: str
    group: str = ""
    kind: str = ""
    namespace: str | None = None


class Requirement(Read, frozen=True):
    """A condition on a label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """As Kubernetes has it."""
        return requirement_holds(self.key, self.operator, self.values, labels)


class LabelSelector(Read, frozen=True):
    """Everything must hold; nothing selects all."""

    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether all of it holds for ``labels``."""
        return all(labels.get(name) == value for name, value in self.match_labels.items()) and all(
            one.holds(labels) for one in self.match_expressions
        )


class RouteNamespaces(Read, frozen=True):
    """Whose routes may attach: ``Same``, ``All``, ``Selector`` or ``None``."""

    source: str = msgspec.field(default="Same", name="from")
    selector: LabelSelector = LabelSelector()


class RouteKind(Read, frozen=True):
    """A kind of routes."""

    kind: str
    group: str = GROUP


class AllowedRoutes(Read, frozen=True):
    """Which routes may attach to a listener."""

    namespaces: RouteNamespaces = RouteNamespaces()
    kinds: tuple[RouteKind, ...] = ()


class TlsSpec(Read, frozen=True):
    """TLS of a listener."""

    mode: str = "Terminate"
    certificate_refs: tuple[Reference, ...] = ()
    options: Mapping[str, str] = {}


class ListenerSpec(Read, frozen=True):
    """A listener of a Gateway."""

    name: str
    port: int
    protocol: str
    hostname: str | None = None
    tls: TlsSpec | None = None
    allowed_routes: AllowedRoutes = AllowedRoutes()


class Validation(Read, frozen=True):
    """What clients' certificates are checked with."""

    ca_certificate_refs: tuple[Reference, ...] = ()
    mode: str = "AllowValidOnly"


class FrontendTls(Read, frozen=True):
    """TLS towards clients."""

    validation: Validation | None = None


class PortTls(Read, frozen=True):
    """TLS towards clients of one port."""

    port: int
    tls: FrontendTls = FrontendTls()


class Frontend(Read, frozen=True):
    """TLS towards clients: of all ports, and of those that differ."""

    default: FrontendTls = FrontendTls()
    per_port: tuple[PortTls, ...] = ()


class GatewayTls(Read, frozen=True):
    """TLS of a whole Gateway."""

    frontend: Frontend = Frontend()

    def validation(self, port: int) -> Validation | None:
        """What clients of ``port`` must show."""
        own = next((one.tls for one in self.frontend.per_port if one.port == port), self.frontend.default)
        return own.validation


class Address(Read, frozen=True):
    """An address that a Gateway asks for, or has."""

    type: str = "IPAddress"
    value: str = ""


class Infrastructure(Read, frozen=True):
    """How a Gateway is run. ``parameters_ref``: its GatewayConfig."""

    parameters_ref: Reference | None = None


class GatewaySpec(Read, frozen=True):
    """What a Gateway asks for."""

    gateway_class_name: str
    listeners: tuple[ListenerSpec, ...] = ()
    addresses: tuple[Address, ...] = ()
    infrastructure: Infrastructure = Infrastructure()
    tls: GatewayTls = GatewayTls()
