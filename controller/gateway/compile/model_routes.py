# SPDX-License-Identifier: Apache-2.0
"""Which ModelRoutes are served, under which names, and what becomes of references to servers that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.listeners import MODEL_ROUTE, AttachingRoute
from controller.gateway.compile.gateway_api.resource_types import CONTROLLER_NAME, ParentRef
from controller.kube.conditions import (
    IN_DIRECTORY,
    NO_MISTAKE,
    WantedCondition,
    WantedListItem,
    WantedStatus,
    WantedStatusList,
    condition_false,
    condition_true,
)
from extproc.api.model_route import ModelRoute
from extproc.api.spec import STEPS_LISTENER, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from controller.gateway.compile.gateway_api.listeners import Listeners, ParentRefResult
    from controller.gateway.compile.source_objects import SourceObject
    from extproc.api.spec import ParentReference


_NO_STEPS: Final = condition_false(
    "Programmed", "NoListener", "the GatewayConfig has no 'steps', where transformers and explainers call; write it"
)


class RouteResult(msgspec.Struct, frozen=True):
    """``document``: None if the route is not served. ``missing``: servers, by key, that a rule has no substitute for:
    requests of that rule are answered 503. ``servers``: all that it names. ``attached``: names of listeners.
    ``served``: those of them that serve it; the empty name where there is no Gateway. A route of steps is served by
    their own one, with and without Gateways.
    """

    document: bytes | None
    missing: frozenset[str]
    status: WantedStatus
    servers: frozenset[str] = frozenset()
    attached: frozenset[str] = frozenset()
    served: frozenset[str] = frozenset()


def compile_routes(
    routes: Iterable[SourceObject],
    servers: Collection[str],
    listeners: Listeners | None = None,
    *,
    has_steps: bool,
) -> dict[str, RouteResult]:
    """Every route by its key. ``servers``: keys of the ModelServers that can be used. ``listeners``: of Gateways; None
    if there is no Gateway of ours, and then ``parentRefs`` have no effect. ``has_steps``: the GatewayConfig says where
    transformers and explainers call.

    Of two routes with one model name on one listener, the older one has it, as in the Gateway API. The other is not
    served at all: it would be served in part otherwise. A route that no listener serves takes no name from others.
    """
    # by listener and name
    owners: dict[tuple[str, str], str] = {}
    results = {}
    for source in sorted(routes, key=lambda one: one.age_sort_key):
        problem = source.mistakes_text() or _repeated(source)
        if problem:
            results[source.key] = _refused(source, "Invalid", problem)
            continue
        found = _compile(source, servers, listeners, has_steps=has_steps)
        claims = {(listener, name): source.key for listener in found.served for name in _names(source)}
        taken = {name: owners[listener, name] for listener, name in sorted(claims.keys() & owners.keys())}
        if taken:
            message = "; ".join(f"'{name}' belongs to {owner}" for name, owner in taken.items())
            advice = "which is older; use another name, or delete that route"
            results[source.key] = _refused(source, "Conflict", f"{message}, {advice}")
        else:
            results[source.key] = found
            owners.update(claims)
    return results


def _names(source: SourceObject) -> tuple[str, ...]:
    """The model names that clients may request."""
    return source.decoded.spec.model_names if isinstance(source.decoded, ModelRoute) else ()


def _repeated(source: SourceObject) -> str:
    names = _names(source)
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"{', '.join(repeated)} is there twice among modelName and loraAdapters" if repeated else ""


def _compile(
    source: SourceObject, servers: Collection[str], listeners: Listeners | None, *, has_steps: bool
) -> RouteResult:
    missing: set[str] = set()
    absent: list[str] = []
    rules = [
        _with_others(source, _rule(source, rule, servers, missing, absent), servers, absent)
        for rule in source.spec["rules"]
    ]
    resolved = condition_true("ResolvedRefs", "all its ModelServers are there")
    if absent:
        message = f"no usable ModelServer {', '.join(dict.fromkeys(absent))}"
        share = "rules without another target are answered 503" if missing else "the other targets serve its requests"
        resolved = condition_false("ResolvedRefs", "BackendNotFound", f"{message}; {share}")
    spec = {name: value for name, value in source.spec.items() if name != "parentRefs"} | {"rules": rules}
    named = frozenset(
        object_key(source.namespace, one["modelServerName"])
        for rule in rules
        for one in (*rule["targetModels"], *rule.get("fallback", ()), *([rule["mirror"]] if "mirror" in rule else ()))
    )
    is_of_steps = isinstance(source.decoded, ModelRoute) and source.decoded.spec.callers == "Steps"
    if listeners is None or is_of_steps:
        programmed = condition_true("Programmed", IN_DIRECTORY) if has_steps or not is_of_steps else _NO_STEPS
        return _result(
            source,
            source.document(spec),
            (condition_true("Accepted", NO_MISTAKE), resolved, programmed),
            missing,
            named,
            served=(STEPS_LISTENER if is_of_steps else "",),
        )
    parents, attached, served = _attach(source, listeners)
    statuses = _parents(parents, resolved)
    if not served:
        programmed = _not_served(source, parents)
        return _result(
            source, None, (condition_true("Accepted", NO_MISTAKE), resolved, programmed), (), (), attached, statuses
        )
    spec["parentRefs"] = [{"name": "gateway", "sectionName": name} for name in served]
    conditions = condition_true("Accepted", NO_MISTAKE), resolved, condition_true("Programmed", IN_DIRECTORY)
    return _result(source, source.document(spec), conditions, missing, named, attached, statuses, served)


def _attach(source: SourceObject, listeners: Listeners) -> tuple[list[ParentRefResult], list[str], list[str]]:
    """What became of its references, and names of the listeners that it is attached to and of those that are served."""
    asking = AttachingRoute(kind=MODEL_ROUTE, namespace=source.namespace)
    references = _references(source)
    if not references:
        found = listeners.listeners_open_to(asking)
        return [], found, found
    refs = [ParentRef(one.name, one.group, one.kind, one.namespace, one.section_name, one.port) for one in references]
    parents = listeners.attach(asking, refs)
    attached = sorted({name for one in parents for name in one.attached})
    return parents, attached, sorted({name for one in parents for name in one.served})


def _references(source: SourceObject) -> Sequence[ParentReference]:
    return source.decoded.spec.parent_refs if isinstance(source.decoded, ModelRoute) else ()


def _parents(parents: Iterable[ParentRefResult], resolved: WantedCondition) -> WantedStatusList:
    entries = tuple(
        WantedListItem(
            identity={"parentRef": one.reference(), "controllerName": CONTROLLER_NAME},
            conditions=(one.accepted, resolved),
        )
        for one in parents
    )
    return WantedStatusList(name="parents", entries=entries)


def _not_served(source: SourceObject, parents: Sequence[ParentRefResult]) -> WantedCondition:
    """``parents``: of its references, those to Gateways of ours."""
    if not parents and (references := _references(source)):
        names = ", ".join(object_key(one.namespace or source.namespace, one.name) for one in references)
        advice = "name Gateways of our class in parentRefs, or leave it out for all listeners that allow the route"
        return condition_false("Programmed", "NoMatchingParent", f"no Gateway of ours is called {names}; {advice}")
    if not parents:
        why = "while there are Gateways, ModelRoutes are served by their listeners alone"
        advice = f"let a listener's allowedRoutes allow ModelRoutes of the namespace {source.namespace}"
        return condition_false("Programmed", "NoMatchingParent", f"{why}, and none takes it; {advice}")
    refused = next((one.accepted for one in parents if one.accepted.status != "True"), None)
    if refused is not None:
        return condition_false("Programmed", refused.reason, refused.message)
    return condition_false(
        "Programmed", "NoMatchingParent", "no served listener of a Gateway takes it; look at its parentRefs"
    )


def _with_others(
    source: SourceObject, rule: Mapping[str, Any], servers: Collection[str], absent: list[str]
) -> Mapping[str, Any]:
    """The rule with the fallbacks and the mirror that are there: its targets serve without the others."""
    mirrors = [rule["mirror"]] if "mirror" in rule else []
    named = [*rule.get("fallback", ()), *mirrors]
    keys = {one["modelServerName"]: object_key(source.namespace, one["modelServerName"]) for one in named}
    gone = {name for name, key in keys.items() if key not in servers}
    absent.extend(keys[name] for name in sorted(gone))
    targets = {one["modelServerName"] for one in rule["targetModels"] if one.get("weight", 100)}
    # the only target that is left is no fallback of itself
    useless = gone | (targets if len(targets) == 1 else set())
    fallback = [one for one in rule.get("fallback", ()) if one["modelServerName"] not in useless]
    changed = {name: value for name, value in rule.items() if name not in {"fallback", "retry", "mirror"}}
    if fallback:
        changed |= {"fallback": fallback, **({"retry": rule["retry"]} if "retry" in rule else {})}
    if mirrors and mirrors[0]["modelServerName"] not in gone:
        changed["mirror"] = mirrors[0]
    return changed


def _rule(
    source: SourceObject, rule: Mapping[str, Any], servers: Collection[str], missing: set[str], absent: list[str]
) -> Mapping[str, Any]:
    """The rule with the targets that are there; with all of them if none is, for that must not make it a rule less."""
    targets = rule["targetModels"]
    keys = [object_key(source.namespace, target["modelServerName"]) for target in targets]
    absent.extend(key for key in keys if key not in servers)
    present = [target for target, key in zip(targets, keys, strict=True) if key in servers]
    if any(target.get("weight", 100) for target in present):
        return {**rule, "targetModels": present}
    missing.update(key for key in keys if key not in servers)
    return rule


def _refused(source: SourceObject, reason: str, message: str) -> RouteResult:
    conditions = (
        condition_false("Accepted", reason, message),
        condition_false("Programmed", reason, "the route is not served"),
    )
    return _result(source, None, conditions)


def _result(
    source: SourceObject,
    document: bytes | None,
    conditions: tuple[WantedCondition, ...],
    missing: Collection[str] = (),
    servers: Collection[str] = (),
    attached: Collection[str] = (),
    parents: WantedStatusList | None = None,
    served: Collection[str] = (),
) -> RouteResult:
    status = WantedStatus(
        kind=source.kind,
        key=source.key,
        generation=source.generation,
        conditions=conditions,
        lists=(parents or WantedStatusList(name="parents", entries=()),),
    )
    return RouteResult(document, frozenset(missing), status, frozenset(servers), frozenset(attached), frozenset(served))
