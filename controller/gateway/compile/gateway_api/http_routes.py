# SPDX-License-Identifier: Apache-2.0
"""An HTTPRoute or GRPCRoute to its document, and its status and that of its pools, for each of its Gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.backends import BackendResolution
from controller.gateway.compile.gateway_api.listeners import AttachingRoute, ParentRefResult
from controller.gateway.compile.gateway_api.resource_types import CONTROLLER_NAME, GROUP
from controller.gateway.compile.gateway_api.route_conflicts import RouteClaim
from controller.gateway.compile.source_objects import to_canonical_json
from controller.kube.conditions import (
    IN_DIRECTORY,
    WantedCondition,
    WantedListItem,
    WantedStatus,
    WantedStatusList,
    condition_false,
    condition_true,
)
from extproc.api.document_decoder import decode
from extproc.api.http_route import ATTACHE_GROUP
from extproc.api.yaml_documents import Document

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.gateway.compile.gateway_api.backends import BackendReferenceResolver
    from controller.gateway.compile.gateway_api.listeners import Listeners
    from controller.gateway.compile.gateway_api.resource_types import InferencePoolSpec, Route
    from controller.gateway.compile.gateway_api.route_conflicts import Rivals

# Fields of rules without effect here; every other unknown field is refused.
_WITHOUT_EFFECT: Final = ("sessionPersistence",)


def pool_status(
    pool: InferencePoolSpec,
    parents: Iterable[ParentRefResult],
    *,
    problem: str,
    picker_problem: str,
    gateway: str | None,
) -> WantedStatus:
    """``parents``: of the routes that refer to it. ``problem``: why it cannot be used. ``picker_problem``: why its
    endpointPickerRef does not resolve. ``gateway``: the one Gateway that is served, None if all of our classes are.
    """
    accepted: dict[str, bool] = {}
    for one in parents:
        accepted[one.gateway] = accepted.get(one.gateway, False) or one.accepted.status == "True"
    resolved = (
        condition_false("ResolvedRefs", "InvalidExtensionRef", picker_problem)
        if picker_problem
        else condition_true("ResolvedRefs")
    )
    entries = []
    for key in sorted(accepted):
        namespace, _, name = key.partition("/")
        refused = condition_false("Accepted", "HTTPRouteNotAccepted", "the Gateway accepts no route that refers to it")
        if problem:
            refused = condition_false("Accepted", "NotSupportedByParent", problem)
        is_accepted = accepted[key] and not problem
        reference = {"group": GROUP, "kind": "Gateway", "name": name, "namespace": namespace}
        entries.append(
            WantedListItem(
                identity={"parentRef": reference, "controllerName": CONTROLLER_NAME},
                conditions=(condition_true("Accepted") if is_accepted else refused, resolved),
            )
        )
    identity = pool.identity
    return WantedStatus(
        kind="InferencePool",
        key=identity.key,
        generation=identity.generation,
        conditions=(),
        lists=(
            WantedStatusList(name="parents", entries=tuple(entries), controller=CONTROLLER_NAME, gateway=gateway or ""),
        ),
        is_plain=True,
    )


class HttpRouteResult(msgspec.Struct, frozen=True, kw_only=True):
    """``claim``: what it would be attached to without any other route. ``document``: None if it is not served.
    ``attached``: names of listeners. ``resolutions``: of all its references.
    """

    claim: RouteClaim
    document: bytes | None
    attached: frozenset[str]
    parents: tuple[ParentRefResult, ...]
    resolutions: tuple[BackendResolution, ...]
    status: WantedStatus

    @property
    def needs_unresolved_backend(self) -> bool:
        """Whether its document names the Backend that stands for references that cannot be resolved."""
        return self.document is not None and any(one.problem is not None for one in self.resolutions)

    @property
    def references(self) -> frozenset[tuple[str, str]]:
        """Kinds and keys of the objects on which it depends."""
        return frozenset(one for found in self.resolutions for one in found.references)


def compile_http_route(
    route: Route, listeners: Listeners, references: BackendReferenceResolver, gateway: str | None, rivals: Rivals
) -> HttpRouteResult:
    """``gateway``: the one Gateway that is served, None if all of our classes are. ``rivals``: by the listeners that
    it loses, older routes.
    """
    identity = route.identity
    asking = AttachingRoute(kind=route.kind, namespace=identity.namespace, hostnames=route.hostnames)
    parents = listeners.attach(asking, route.parents)
    resolutions: list[BackendResolution] = []
    resolve = _Resolver(route, references, resolutions)
    rules = [resolve.rule(rule) for rule in route.spec.get("rules") or ()]
    claim = RouteClaim(route, frozenset(name for one in parents for name in one.attached))
    parents = [_without(one, rivals) for one in parents]
    served = sorted({name for one in parents for name in one.served})
    content = _content(route, rules, served)
    problem = _problem(content)
    if problem:
        refused = condition_false("Accepted", "UnsupportedValue", problem)
        parents = [_refuse(one, refused) for one in parents]
        claim = RouteClaim(route, frozenset())
    resolved = _resolved(resolutions)
    note = _note(route.spec)
    entries = [_entry(one, resolved, note) for one in _each_once(parents)]
    status = WantedStatus(
        kind=route.kind.kind,
        key=identity.key,
        generation=identity.generation,
        conditions=(),
        lists=(
            WantedStatusList(name="parents", entries=tuple(entries), controller=CONTROLLER_NAME, gateway=gateway or ""),
        ),
        is_plain=True,
    )
    return HttpRouteResult(
        claim=claim,
        document=to_canonical_json(content) if served and not problem else None,
        attached=frozenset(name for one in parents for name in one.attached),
        parents=tuple(parents),
        resolutions=tuple(resolutions),
        status=status,
    )


def _resolved(resolutions: Iterable[BackendResolution]) -> WantedCondition:
    """The reason of the first reference that cannot be resolved, and the messages of all."""
    problems = [one.problem for one in resolutions if one.problem is not None]
    if not problems:
        return condition_true("ResolvedRefs")
    message = "; ".join(dict.fromkeys(one.message for one in problems))
    return condition_false("ResolvedRefs", problems[0].reason, message)


def _content(route: Route, rules: list[Mapping[str, Any]], served: list[str]) -> Mapping[str, Any]:
    identity = route.identity
    metadata = {"name": identity.name, "namespace": identity.namespace}
    if identity.created:
        metadata["creationTimestamp"] = identity.created
    spec: dict[str, Any] = {"parentRefs": [{"name": "gateway", "sectionName": one} for one in served]}
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    if rules:
        spec["rules"] = rules
    return {"apiVersion": f"{GROUP}/v1", "kind": route.kind.kind, "metadata": metadata, "spec": spec}


def _problem(content: Mapping[str, Any]) -> str:
    """What of the route cannot be served; empty if all of it can."""
    _, mistakes = decode(Document("", to_canonical_json(content).decode(), is_json=True))
    return "; ".join(f"{one.path}: {one.message}" if one.path else one.message for one in mistakes)


class _Resolver:
    """Writes rules with what their references come to; ``found`` gets all of these."""

    def __init__(self, route: Route, references: BackendReferenceResolver, found: list[BackendResolution]) -> None:
        self._route = route
        self._references = references
        self._found = found

    def rule(self, rule: Mapping[str, Any]) -> Mapping[str, Any]:
        made = {name: value for name, value in rule.items() if name not in (*_WITHOUT_EFFECT, "filters", "backendRefs")}
        if rule.get("filters"):
            made["filters"] = [self._filter(one) for one in rule["filters"]]
        if rule.get("backendRefs"):
            made["backendRefs"] = [self._backend(one) for one in rule["backendRefs"]]
        return made

    def _backend(self, reference: Mapping[str, Any]) -> Mapping[str, Any]:
        made = dict(self._reference(reference))
        if "weight" in reference:
            made["weight"] = reference["weight"]
        if reference.get("filters"):
            made["filters"] = [self._filter(one) for one in reference["filters"]]
        return made

    def _filter(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        mirror = given.get("requestMirror")
        if not mirror or "backendRef" not in mirror:
            return given
        return {**given, "requestMirror": {**mirror, "backendRef": self._reference(mirror["backendRef"])}}

    def _reference(self, reference: Mapping[str, Any]) -> Mapping[str, Any]:
        found = self._references.resolve_backend(self._route.kind, self._route.identity.namespace, reference)
        self._found.append(found)
        return {"group": ATTACHE_GROUP, "kind": found.kind, "name": found.name, "namespace": found.namespace}


def _without(parent: ParentRefResult, rivals: Rivals) -> ParentRefResult:
    """``parent`` without the listeners that other routes have; not accepted if it is left without any."""
    lost = [one for one in parent.attached if one in rivals]
    if not lost:
        return parent
    attached = tuple(one for one in parent.attached if one not in rivals)
    if not attached:
        message = f"the older {rivals[lost[0]]} has hosts in common with it, and a listener takes one of the two kinds"
        return _refuse(parent, condition_false("Accepted", "HostnameConflict", message))
    served = tuple(one for one in parent.served if one not in rivals)
    return msgspec.structs.replace(parent, attached=attached, served=served)


def _refuse(parent: ParentRefResult, refused: WantedCondition) -> ParentRefResult:
    if parent.accepted.status != "True":
        return parent
    return msgspec.structs.replace(parent, accepted=refused, attached=(), served=())


def _each_once(parents: Iterable[ParentRefResult]) -> list[ParentRefResult]:
    """A status has one item for each reference; of the same reference twice, the first counts."""
    return list({msgspec.json.encode(one.reference()): one for one in reversed(list(parents))}.values())[::-1]


def _entry(parent: ParentRefResult, resolved: WantedCondition, note: str) -> WantedListItem:
    accepted = parent.accepted
    if accepted.status == "True" and note:
        accepted = condition_true("Accepted", note)
    return WantedListItem(
        identity={"parentRef": parent.reference(), "controllerName": CONTROLLER_NAME},
        conditions=(accepted, resolved, _programmed(parent)),
    )


def _programmed(parent: ParentRefResult) -> WantedCondition:
    """The condition Programmed of a route: the Gateway API has it for Gateways alone; it means the same as for our own
    kinds.
    """
    if parent.served:
        return condition_true("Programmed", IN_DIRECTORY)
    why = "none of the listeners that it is attached to is served" if parent.attached else "it is not accepted"
    return condition_false("Programmed", "Invalid", why)


def _note(spec: Mapping[str, Any]) -> str:
    found = {name for rule in spec.get("rules") or () for name in _WITHOUT_EFFECT if name in rule}
    return f"{', '.join(sorted(found))} of rules is not supported and has no effect" if found else ""
