# SPDX-License-Identifier: Apache-2.0
"""To which listeners a route is attached, and why not to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.gateway.compile.gateway_api.objects import GROUP, NAME_LABEL, ParentRef, RouteKind
from controller.kube.conditions import Wanted, fails, holds
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.gateway.compile.gateway_api.listeners import ListenerResult


class Attaching(msgspec.Struct, frozen=True, kw_only=True):
    """A route that asks for listeners. ``hostnames``: empty for all hosts."""

    kind: RouteKind
    namespace: str
    hostnames: tuple[str, ...] = ()


class ParentResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one parent reference. ``attached``: names of listeners; ``served``: those of them that Envoy has.
    ``accepted``: the route's condition.
    """

    ref: ParentRef
    gateway: str
    attached: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    accepted: Wanted

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

    def attach(self, route: Attaching, parents: Iterable[ParentRef]) -> list[ParentResult]:
        """What becomes of those of ``parents`` that are Gateways of ours."""
        found = []
        for ref in parents:
            key = object_key(ref.namespace or route.namespace, ref.name)
            if (ref.group, ref.kind) == (GROUP, "Gateway") and key in self._gateways:
                found.append(self._attach(route, ref, key))
        return found

    def open_to(self, route: Attaching) -> list[str]:
        """The served listeners of all Gateways that take ``route``, though it names none."""
        return [
            one.name
            for key, listeners in self._gateways.items()
            for one in listeners
            if one.document is not None and self._allows(one, route, namespace_of(key))
        ]

    def _attach(self, route: Attaching, ref: ParentRef, key: str) -> ParentResult:
        named: Sequence[ListenerResult] = [
            one
            for one in self._gateways[key]
            if ref.section_name in (None, one.spec.name) and ref.port in (None, one.spec.port)
        ]
        if not named:
            said = f"the Gateway {key} has no listener of this sectionName and port"
            return ParentResult(ref=ref, gateway=key, accepted=fails("Accepted", "NoMatchingParent", said))
        allowed = [one for one in named if self._allows(one, route, namespace_of(key))]
        if not allowed:
            said = f"no listener of the Gateway {key} allows a {route.kind.kind} of the namespace {route.namespace}"
            return ParentResult(ref=ref, gateway=key, accepted=fails("Accepted", "NotAllowedByListeners", said))
        attached = [one for one in allowed if meets(one.spec.hostname, route.hostnames)]
        if not attached:
            hosts = ", ".join(one.spec.hostname or "*" for one in allowed)
            said = f"none of its hostnames is one of the listeners' ({hosts})"
            return ParentResult(ref=ref, gateway=key, accepted=fails("Accepted", "NoMatchingListenerHostname", said))
        return ParentResult(
            ref=ref,
            gateway=key,
            attached=tuple(one.name for one in attached),
            served=tuple(one.name for one in attached if one.document is not None),
            accepted=holds("Accepted"),
        )

    def _allows(self, listener: ListenerResult, route: Attaching, own: str) -> bool:
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


def meets(listener: str | None, hostnames: tuple[str, ...]) -> bool:
    """Whether some host is one of both; nothing stands for all hosts."""
    return not listener or not hostnames or any(_overlap(listener.lower(), one.lower()) for one in hostnames)


def _overlap(one: str, other: str) -> bool:
    """``*.`` at the beginning stands for one label or more."""
    if one == other:
        return True
    if one.startswith("*.") and other.endswith(one[1:]):
        return True
    return other.startswith("*.") and one.endswith(other[1:])
