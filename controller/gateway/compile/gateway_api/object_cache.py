# SPDX-License-Identifier: Apache-2.0
"""All objects of the Gateway API as last observed, decoded once, and what a change of one makes stale."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from controller.gateway.compile.gateway_api.backends import EndpointSlice, Service, parse_endpoint_slice, parse_service
from controller.gateway.compile.gateway_api.resource_types import (
    CONTROLLER_NAME,
    GRPC_ROUTE,
    HTTP_ROUTE,
    Gateway,
    GatewayClass,
    InferencePoolSpec,
    ReferenceGrant,
    Route,
    object_labels,
    parse_gateway,
    parse_gateway_class,
    parse_pool,
    parse_reference_grant,
    parse_route,
)
from controller.gateway.compile.referenced_secrets import ReferencedObject, parse_referenced_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

# Kinds of routes.
ROUTES: Final = (HTTP_ROUTE.kind, GRPC_ROUTE.kind)
_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = MappingProxyType(
    {
        "GatewayClass": parse_gateway_class,
        "Gateway": parse_gateway,
        **dict.fromkeys(ROUTES, parse_route),
        "ReferenceGrant": parse_reference_grant,
        "InferencePool": parse_pool,
        "Service": parse_service,
        "EndpointSlice": parse_endpoint_slice,
        "Namespace": object_labels,
    }
)
KINDS: Final = (*_READERS, "Secret", "PointedConfigMap", "CustomResourceDefinition")


class StaleObjects:
    """Objects to compile again. ``changed``: kinds and keys of objects on which routes may depend. ``services``: those
    whose endpoints changed.
    """

    def __init__(self, *, gateways: bool = True) -> None:
        self.gateways = gateways
        self.all_routes = gateways
        self.routes: set[tuple[str, str]] = set()
        self.changed: set[tuple[str, str]] = set()
        self.services: set[str] = set()

    def mark(self, kind: str, key: str) -> None:
        """An object has changed."""
        match kind:
            case "GatewayClass" | "Gateway":
                self.gateways = True
            case "ReferenceGrant":
                self.gateways = self.all_routes = True
            case "Namespace":
                self.all_routes = True
            case _ if kind in ROUTES:
                self.routes.add((kind, key))
            case "InferencePool":
                self.changed.add((kind, key))
            case "Service":
                self.changed.add((kind, key))
                self.services.add(key)


class GatewayObjects:
    """``put`` takes what changed; an object that means the same as before makes nothing stale."""

    def __init__(self) -> None:
        self.classes: dict[str, GatewayClass] = {}
        self.gateways: dict[str, Gateway] = {}
        # HTTPRoutes and GRPCRoutes, by kind and key
        self.routes: dict[tuple[str, str], Route] = {}
        self.grants: dict[str, ReferenceGrant] = {}
        self.pools: dict[str, InferencePoolSpec] = {}
        self.services: dict[str, Service] = {}
        self.namespaces: dict[str, Mapping[str, str]] = {}
        self.pointed: dict[tuple[str, str], ReferencedObject] = {}
        self._slices: dict[str, EndpointSlice] = {}
        self._slices_of: dict[str, dict[str, EndpointSlice]] = {}
        self._tables: Mapping[str, dict[Any, Any]] = {
            "GatewayClass": self.classes,
            "Gateway": self.gateways,
            **dict.fromkeys(ROUTES, self.routes),
            "ReferenceGrant": self.grants,
            "InferencePool": self.pools,
            "Service": self.services,
            "EndpointSlice": self._slices,
            "Namespace": self.namespaces,
        }

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None, stale: StaleObjects) -> None:
        """An object as it is now; None: it is gone."""
        if kind not in _READERS:
            self._put_pointed(kind, key, thing, stale)
            return
        now = None if thing is None else _READERS[kind](thing)
        known = self._tables[kind]
        place = (kind, key) if kind in ROUTES else key
        before = known.get(place)
        if before == now:
            return
        if now is None:
            del known[place]
        else:
            known[place] = now
        if kind == "EndpointSlice":
            self._move_slice(key, before, now, stale)
        stale.mark(kind, key)

    def slices_of(self, service: str) -> Collection[EndpointSlice]:
        """The EndpointSlices of a Service."""
        return self._slices_of.get(service, {}).values()

    def served_gateways(self, only: str | None) -> list[Gateway]:
        """The Gateways of our classes, or ``only`` one of them; the oldest first."""
        ours = {key for key, one in self.classes.items() if one.spec.controller_name == CONTROLLER_NAME}
        found = [one for one in self.gateways.values() if one.spec.gateway_class_name in ours]
        return sorted(
            (one for one in found if only in (None, one.identity.key)), key=lambda one: one.identity.age_sort_key
        )

    def _move_slice(
        self, key: str, before: EndpointSlice | None, now: EndpointSlice | None, stale: StaleObjects
    ) -> None:
        if before is not None:
            self._slices_of[before.service].pop(key, None)
            stale.services.add(before.service)
        if now is not None:
            self._slices_of.setdefault(now.service, {})[key] = now
            stale.services.add(now.service)

    def _put_pointed(self, kind: str, key: str, thing: Mapping[str, Any] | None, stale: StaleObjects) -> None:
        known = self.pointed.pop((kind, key), None)
        now = None if thing is None else parse_referenced_object(thing)
        if now is not None:
            self.pointed[kind, key] = now
        stale.gateways |= known != now
