# SPDX-License-Identifier: Apache-2.0
"""References between objects, for warnings: the other object may be applied next, or be on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from controller.api.accelerators import is_of_kind
from controller.gateway.compile.servers import LABEL, picker_of
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from controller.webhooks.admission.reviews import Object
    from extproc.api.picker_config import PickerCheck

# Objects by kind and key.
Known = Mapping[str, Mapping[str, Mapping[str, Any]]]

_POLICY_TARGETS: Final = frozenset({"GatewayConfig", "ModelRoute", "ModelServer"})


def route_warnings(key: str, route: Object, known: Known, names_of: Callable[[Object], list[str]]) -> Iterator[str]:
    """ModelServers that are not there, names that another route has, and rules that are never reached."""
    servers = known.get("ModelServer", {})
    for name in dict.fromkeys(_servers_of(route)):
        if object_key(namespace_of(key), name) not in servers:
            yield (
                f"there is no ModelServer '{name}' in this namespace yet; its requests are answered 503 until there is"
            )
    yield from _contested(key, route, known, names_of)
    yield from _unreached(_rules(route))


def _rules(route: Object) -> list[Mapping[str, Any]]:
    rules = (route.get("spec") or {}).get("rules") or ()
    return [one for one in rules if isinstance(one, Mapping)]


def _servers_of(route: Object) -> Iterator[str]:
    for rule in _rules(route):
        for target in rule.get("targetModels") or ():
            if isinstance(target, Mapping) and isinstance(target.get("modelServerName"), str):
                yield target["modelServerName"]


def _contested(key: str, route: Object, known: Known, names_of: Callable[[Object], list[str]]) -> Iterator[str]:
    names = set(names_of(route))
    for other, thing in known.get("ModelRoute", {}).items():
        shared = sorted(names & set(names_of(thing)))
        if other == key or not shared:
            continue
        quoted = ", ".join(f"'{name}'" for name in shared)
        if _age(thing) < _age(route):
            yield f"{quoted} belongs to ModelRoute {other}, which is older; a gateway of both does not serve this route"
        else:
            yield f"a gateway that serves ModelRoute {other}, which is younger, too will serve that no more: {quoted}"


def _age(route: Object) -> tuple[str, str]:
    """As the gateway role tells which is older; what is only being made is the youngest."""
    metadata = route.get("metadata") or {}
    return metadata.get("creationTimestamp") or "9", f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


def _unreached(rules: list[Mapping[str, Any]]) -> Iterator[str]:
    """Rules after one without a match are a mistake, and refused."""
    matches = [rule.get("modelMatch") for rule in rules]
    for number, match in enumerate(matches):
        if match and match in matches[:number]:
            yield f"spec.rules[{number}] is never reached: spec.rules[{matches.index(match)}] has the same match"


def picker_warnings(namespace: str, server: Object, known: Known, check_picker: PickerCheck) -> Iterator[str]:
    """The ConfigMap of a ModelServer's EndpointPickerConfig: it may be missing or wrong."""
    name = (server.get("spec") or {}).get("pickerConfig")
    if not isinstance(name, str):
        return
    key = object_key(namespace, name)
    thing = known.get("ConfigMap", {}).get(key)
    if thing is None:
        yield (
            f"this namespace has no ConfigMap '{name}' with the label {LABEL} yet; the default picker is used until"
            " then"
        )
    elif problem := picker_of(key, thing, check_picker).problem:
        yield f"the ConfigMap '{name}' cannot be used, so the default picker is: {problem}"


def policy_warnings(namespace: str, policy: Object, known: Known) -> Iterator[str]:
    """Targets of a ModelAccessPolicy that are not there."""
    for target in (policy.get("spec") or {}).get("targetRefs") or ():
        kind, name = target.get("kind"), target.get("name")
        if kind in _POLICY_TARGETS and object_key(namespace, str(name)) not in known.get(kind, {}):
            yield f"there is no {kind} '{name}' in this namespace yet; the policy has no effect on it until there is"


def without_policy(namespace: str, name: object, known: Known) -> Iterator[str]:
    """An AutoscalingPolicy that is not there."""
    if isinstance(name, str) and object_key(namespace, name) not in known.get("AutoscalingPolicy", {}):
        yield f"there is no AutoscalingPolicy '{name}' in this namespace yet; nothing is scaled until there is"


def budget_warnings(binding: Object) -> Iterator[str]:
    """Kinds of a binding's budget that no target has, or that a target may have, by the names alone."""
    spec = binding.get("spec") or {}
    targets = [one for one in spec.get("targets") or () if isinstance(one, Mapping)]
    kinds = {str(one.get("name")): one["accelerator"] for one in targets if isinstance(one.get("accelerator"), str)}
    budget = spec.get("budget")
    limits = budget.get("accelerators") if isinstance(budget, Mapping) else None
    for limited in limits if isinstance(limits, Mapping) else ():
        vague = [name for name, kind in kinds.items() if is_of_kind(limited, kind) and not is_of_kind(kind, limited)]
        for name in vague:
            yield (
                f"the budget for '{limited}' does not count target '{name}', whose accelerator is '{kinds[name]}';"
                f" write '{limited}' there if it is one"
            )
        if not vague and not any(is_of_kind(kind, limited) for kind in kinds.values()):
            named = ", ".join(f"'{one}'" for one in sorted(set(kinds.values()))) or "none"
            yield f"the budget for '{limited}' limits nothing: no target is of that kind (they name {named})"


def users_of(kind: str, key: str, known: Known) -> Iterator[str]:
    """Who still names what is to be deleted."""
    namespace, _, name = key.partition("/")
    if kind == "ModelServer":
        for other, route in known.get("ModelRoute", {}).items():
            if namespace_of(other) == namespace and name in _servers_of(route):
                yield f"ModelRoute {other} still names it; requests that have no other target are answered 503"
    elif kind == "AutoscalingPolicy":
        for other, binding in known.get("AutoscalingPolicyBinding", {}).items():
            if namespace_of(other) == namespace and (binding.get("spec") or {}).get("policyRef") == name:
                yield f"AutoscalingPolicyBinding {other} still names it; its targets are not scaled any more"
