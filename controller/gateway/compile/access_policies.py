# SPDX-License-Identifier: Apache-2.0
"""ModelAccessPolicies to documents of the directory, and to statuses.

Every failure closes. An invalid policy denies all requests to its targets, or to its whole namespace if these are
unknown. A target that does not exist is not served, and so cannot be reached either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.inference_pools import server_key
from controller.kube.conditions import WantedCondition, WantedStatus, condition_false, condition_true
from extproc.api.access_policy import TARGET_GROUPS, AccessTarget, ModelAccessPolicy
from extproc.api.config_snapshot import access_restrictions
from extproc.api.spec import API_VERSION, object_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from controller.gateway.compile.source_objects import SourceObject
    from extproc.api.gateway_config import GatewayConfigSpec

_CONFIG_GROUP: Final = API_VERSION.partition("/")[0]


class PolicyTargets(msgspec.Struct, frozen=True, kw_only=True):
    """What policies can be attached to, as it is in the directory.

    ``model_routes``, ``model_servers``: by ``namespace/name``. ``gateway_api_routes``: HTTPRoutes and GRPCRoutes, by
    kind and ``namespace/name``. ``listeners``: of each Gateway by
    ``namespace/name``, the directory's names of its listeners by ``sectionName``. ``config``: the GatewayConfig in
    effect; None: the defaults. ``config_listeners``: names of the listeners that it has itself. ``without_models``:
    those of ``gateway_api_routes`` that go to no ModelServer and no pool.
    """

    model_routes: Collection[str] = ()
    model_servers: Collection[str] = ()
    gateway_api_routes: Collection[tuple[str, str]] = ()
    listeners: Mapping[str, Mapping[str, str]] = {}
    config: str | None = None
    config_listeners: Collection[str] = ()
    without_models: Collection[tuple[str, str]] = ()


class PolicyResult(msgspec.Struct, frozen=True):
    """``document``: None if nothing that is served is concerned."""

    document: bytes | None
    status: WantedStatus


Policies = Mapping[str, PolicyResult]


class AccessPolicyCompiler:
    """All policies of a kind; ``compile_all`` compiles them again where they, or their targets, have changed."""

    def __init__(self, compile_all: Callable[[Iterable[SourceObject], PolicyTargets], Policies]) -> None:
        self._compile_all = compile_all
        self._sources: dict[str, SourceObject] = {}
        self._compiled: tuple[PolicyTargets, dict[str, SourceObject], Policies] | None = None

    def put(self, key: str, source: SourceObject | None) -> None:
        """A policy as it is now; None: it is gone."""
        if source is None:
            self._sources.pop(key, None)
        else:
            self._sources[key] = source

    def compile(self, served: PolicyTargets) -> Policies:
        """Every policy by its key."""
        known = self._compiled
        if known is None or known[0] != served or known[1] != self._sources:
            known = self._compiled = served, dict(self._sources), self._compile_all(self._sources.values(), served)
        return known[2]


def compile_policies(policies: Iterable[SourceObject], served: PolicyTargets) -> dict[str, PolicyResult]:
    """Every policy by its key."""
    return {source.key: _compile(source, served) for source in sorted(policies, key=lambda one: one.key)}


def failure_mode(spec: Mapping[str, Any], decoded: GatewayConfigSpec, *, has_policies: bool) -> tuple[str | None, str]:
    """The failure mode to serve, and why it differs from the requested one; empty if it does not.

    Envoy by itself cannot decide which callers may use which models. So Close is served where access is restricted.
    """
    mode = spec.get("failureMode")
    restricted = access_restrictions(decoded, ())
    if has_policies:
        restricted.append("ModelAccessPolicies")
    if mode != "Open" or not restricted:
        return mode, ""
    return "Close", f"failureMode Open would let requests get round {', '.join(restricted)}, so Close is served"


def _compile(source: SourceObject, served: PolicyTargets) -> PolicyResult:
    targets = _targets(source)
    found: list[AccessTarget] = []
    missing: list[str] = []
    for one in targets or ():
        refs = _resolved(one, source.namespace, served)
        found.extend(refs)
        if not refs:
            missing.append(f"{one.kind} {one.name}" + (f" listener {one.section_name}" if one.section_name else ""))
    accepted, rules = condition_true("Accepted"), source.spec.get("rules", [])
    if source.mistakes:
        what = "its targets" if targets else f"any model of the namespace {source.namespace}"
        accepted = condition_false(
            "Accepted", "Invalid", f"{source.mistakes_text()}; until it is mended, nobody may use {what}"
        )
        rules = []
    resolved, programmed = condition_true("ResolvedRefs"), condition_true("Programmed")
    unasked = [f"{one.kind} {one.name}" for one in found if _is_unasked(one, source.namespace, served)]
    if unasked:
        message = f"{', '.join(unasked)} goes to no ModelServer and no InferencePool; no policy is asked there"
        resolved = condition_false("ResolvedRefs", "NoModelBackend", message)
        if len(unasked) == len(found):
            programmed = condition_false("Programmed", "NoModelBackend", message)
    if missing:
        message = f"{', '.join(missing)} is not there, or not served by this gateway"
        resolved = condition_false("ResolvedRefs", "TargetNotFound", message)
    if targets and not found:
        programmed = condition_false(
            "Programmed", "TargetNotFound", "nothing that it is attached to is served by this gateway"
        )
        return _result(source, None, (accepted, resolved, programmed))
    attached = [_plain(one) for one in dict.fromkeys(found)]
    document = source.document({**({"targetRefs": attached} if attached else {}), "rules": rules})
    return _result(source, document, (accepted, resolved, programmed))


def _is_unasked(one: AccessTarget, namespace: str, served: PolicyTargets) -> bool:
    """Whether requests to ``one`` bypass extproc, which authorises callers."""
    return (one.kind, object_key(namespace, one.name)) in served.without_models


def _targets(source: SourceObject) -> tuple[AccessTarget, ...] | None:
    """None: the whole namespace."""
    if isinstance(source.decoded, ModelAccessPolicy):
        return source.decoded.spec.target_refs or None
    try:
        # another field has a wrong type: its targets may be readable all the same
        return msgspec.convert(source.spec.get("targetRefs"), tuple[AccessTarget, ...]) or None
    except msgspec.ValidationError:
        return None


def _resolved(one: AccessTarget, namespace: str, served: PolicyTargets) -> list[AccessTarget]:
    """What the directory has for ``one``. By its kind, for a policy with the wrong group must not protect nothing."""
    key = object_key(namespace, one.name)
    keys: Collection[str] = ()
    match one.kind:
        case "Gateway":
            sections = served.listeners.get(key, {})
            wanted = sections.values() if one.section_name is None else [sections.get(one.section_name)]
            return [_listener(one, name) for name in wanted if name is not None]
        case "GatewayConfig":
            if key != served.config:
                return []
            is_known = one.section_name is None or one.section_name in served.config_listeners
            return [_listener(one, one.section_name)] if is_known else []
        case "HTTPRoute" | "GRPCRoute":
            keys = {name for kind, name in served.gateway_api_routes if kind == one.kind}
        case "ModelRoute":
            keys = served.model_routes
        case "ModelServer":
            keys = served.model_servers
        case "InferencePool":
            # in a directory, the ModelServer that serves it
            key, keys = server_key(key), served.model_servers
            name = key.removeprefix(f"{namespace}/")
            one = msgspec.structs.replace(one, kind="ModelServer", name=name)
    return [msgspec.structs.replace(one, group=TARGET_GROUPS[one.kind], section_name=None)] if key in keys else []


def _listener(one: AccessTarget, name: str | None) -> AccessTarget:
    """In a directory, listeners are the GatewayConfig's."""
    return msgspec.structs.replace(one, kind="GatewayConfig", group=_CONFIG_GROUP, section_name=name)


def _plain(one: AccessTarget) -> dict[str, Any]:
    plain = {"kind": one.kind, "group": one.group, "name": one.name}
    return plain if one.section_name is None else {**plain, "sectionName": one.section_name}


def _result(source: SourceObject, document: bytes | None, conditions: tuple[WantedCondition, ...]) -> PolicyResult:
    status = WantedStatus(kind=source.kind, key=source.key, generation=source.generation, conditions=conditions)
    return PolicyResult(document, status)
