# SPDX-License-Identifier: Apache-2.0
"""Checks of ModelAccessPolicies beyond their shape: targets, descriptions of callers."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from extproc.api.access_policy import TARGET_GROUPS
from extproc.api.schema import suggest
from extproc.api.spec import namespace_of, object_key
from extproc.api.unread import Unread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.access_policy import AccessTarget, ModelAccessPolicy, ModelAccessPolicySpec
    from extproc.api.errors import Finding

_WITH_LISTENERS = frozenset({"Gateway", "GatewayConfig"})


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory holds that policies can be attached to. Routes and servers by ``namespace/name``, listeners by
    name.
    """

    model_routes: Collection[str]
    model_servers: Collection[str]
    http_routes: Collection[str]
    listeners: Collection[str]
    unread: Unread = Unread()


def check_access_policy(spec: ModelAccessPolicySpec) -> Iterator[Finding]:
    """Targets are of their kinds' groups, and every description of callers describes something."""
    for index, target in enumerate(spec.target_refs):
        path = ("spec", "targetRefs", index)
        if target.group != TARGET_GROUPS[target.kind]:
            yield (*path, "group"), f"{target.kind} is of another group; write {TARGET_GROUPS[target.kind]}"
        if target.section_name is not None and target.kind not in _WITH_LISTENERS:
            yield (*path, "sectionName"), "names a listener; write it with kind Gateway or GatewayConfig alone"
    for index, rule in enumerate(spec.rules):
        for number, one in enumerate(rule.from_):
            if not (one.tenants or one.users or one.api_keys or one.claims):
                said = "describes nobody; write tenants, users, apiKeys or claims, or leave out from for everybody"
                yield ("spec", "rules", index, "from", number), said


def check_targets(policy: ModelAccessPolicy, known: Targets) -> Iterator[Finding]:
    """A policy whose target is misspelt would protect nothing."""
    namespace = policy.metadata.namespace
    for index, target in enumerate(policy.spec.target_refs):
        path = ("spec", "targetRefs", index)
        if target.kind == "InferencePool":
            yield (
                (*path, "kind"),
                "a directory has no InferencePools; write ModelServer, or apply the policy to a cluster",
            )
            continue
        if target.kind in _WITH_LISTENERS:
            yield from _check_listener(target, known, path)
            continue
        keys = _keys(target, known)
        if object_key(namespace, target.name) not in keys and not known.unread.may_hold(target.name):
            near = [key.removeprefix(f"{namespace}/") for key in keys if namespace_of(key) == namespace]
            yield (*path, "name"), f"no {target.kind} is called '{target.name}' here; {suggest(target.name, near)}"


def _check_listener(target: AccessTarget, known: Targets, path: tuple[str | int, ...]) -> Iterator[Finding]:
    if target.kind == "Gateway":
        yield (*path, "kind"), "a directory has no Gateways; write GatewayConfig, or apply the policy to a cluster"
    elif target.section_name is not None and target.section_name not in known.listeners:
        yield (*path, "sectionName"), f"no listener has this name; {suggest(target.section_name, known.listeners)}"


def _keys(target: AccessTarget, known: Targets) -> Collection[str]:
    match target.kind:
        case "ModelRoute":
            return known.model_routes
        case "ModelServer":
            return known.model_servers
        case _:
            return known.http_routes
