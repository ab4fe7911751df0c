# SPDX-License-Identifier: Apache-2.0
"""ModelAccessPolicy: who may use which models.

What no rule allows is denied, and a rule that denies wins.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.admission import CallerNames
from extproc.api.authentication import Claim, ModelPattern
from extproc.api.schema_validation import suggest_similar
from extproc.api.spec import (
    API_VERSION,
    CelRule,
    DirectoryObject,
    Name,
    NonEmpty,
    Spec,
    namespace_of,
    object_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path
    from extproc.api.yaml_documents import DirectoryObjects

_OURS: Final = API_VERSION.partition("/")[0]
_GATEWAY_API: Final = "gateway.networking.k8s.io"
_INFERENCE: Final = "inference.networking.k8s.io"
# The group that each kind of target belongs to.
TARGET_GROUPS: Final = MappingProxyType(
    {
        "GatewayConfig": _OURS,
        "ModelRoute": _OURS,
        "ModelServer": _OURS,
        "Gateway": _GATEWAY_API,
        "HTTPRoute": _GATEWAY_API,
        "GRPCRoute": _GATEWAY_API,
        "InferencePool": _INFERENCE,
    }
)
TargetKind = Literal["GatewayConfig", "Gateway", "HTTPRoute", "GRPCRoute", "InferencePool", "ModelRoute", "ModelServer"]
_Patterns = Annotated[tuple[ModelPattern, ...], msgspec.Meta(max_length=1000)]
_ServerPattern = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.WILDCARD)]
_SECTIONED: Final = CelRule(
    "!has(self.sectionName) || self.kind in ['Gateway', 'GatewayConfig']",
    "sectionName names a listener; write it with kind Gateway or GatewayConfig alone",
)
_GROUPED: Final = CelRule(
    "self.group == (self.kind in ['Gateway', 'HTTPRoute', 'GRPCRoute'] ? 'gateway.networking.k8s.io' : "
    "self.kind == 'InferencePool' ? 'inference.networking.k8s.io' : 'attache.dev')",
    "the kind is of another group; Gateway, HTTPRoute and GRPCRoute are of gateway.networking.k8s.io, InferencePool is "
    "of inference.networking.k8s.io, and the others are of attache.dev",
)
_WITH_LISTENERS = frozenset({"Gateway", "GatewayConfig"})


class AccessTarget(Spec, frozen=True):
    """The target of a policy: an object of the policy's own namespace.

    ``kind``: the target's kind. A policy of a ``Gateway`` or a ``GatewayConfig`` applies to all requests that arrive
    there, one of an ``HTTPRoute`` or a ``GRPCRoute`` to those that it matches, one of a ``ModelRoute`` to those for
    its model and adapters, one of a ``ModelServer`` or an ``InferencePool`` to those for its engines. ``group``: the
    kind's API group. ``name``: the target's name. ``section_name``: restricts the policy to one listener of a Gateway
    or a GatewayConfig.
    """

    CEL: ClassVar = (_SECTIONED, _GROUPED)

    kind: TargetKind
    name: Name
    group: str = _OURS
    section_name: NonEmpty | None = None


class ClaimMatch(Spec, frozen=True):
    """A claim of the caller's token. ``name``: the claim's name; a dot selects a member of an object. ``values``: the
    claim is one of these, or a list that contains one of them. The words of ``scope`` and ``scp`` are a list.
    """

    name: Claim
    values: Annotated[tuple[NonEmpty, ...], msgspec.Meta(min_length=1, max_length=256)]


class AccessCallers(Spec, frozen=True):
    """A description of callers; all given fields must match. ``tenants``, ``users``: as verified by Envoy; without
    ``tenants``, users of any tenant. ``api_keys``: names of API keys. ``claims``: the token has all of them.
    """

    CEL: ClassVar = (
        CelRule(
            "has(self.tenants) || has(self.users) || has(self.apiKeys) || has(self.claims)",
            "write tenants, users, apiKeys or claims; leave out from for everybody",
        ),
    )

    tenants: CallerNames = ()
    users: CallerNames = ()
    api_keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1000)] = ()
    claims: Annotated[tuple[ClaimMatch, ...], msgspec.Meta(max_length=16)] = ()


class AccessRule(Spec, frozen=True):
    """Who may, or may not, use what. A field that is left out restricts nothing.

    Names may begin or end with ``*``, which stands for any text.

    ``action``: a ``Deny`` wins over every ``Allow``. ``from_``: the rule applies to callers that one of these
    describes. ``models``: names that clients ask for, of models and of adapters, each listed separately.
    ``base_models``: the ``modelName`` of a ModelRoute, with all its adapters; adds to ``models``. ``servers``:
    ``namespace/name`` of ModelServers; only requests that go there.
    """

    action: Literal["Allow", "Deny"] = "Allow"
    from_: Annotated[tuple[AccessCallers, ...], msgspec.Meta(max_length=256)] = msgspec.field(default=(), name="from")
    models: _Patterns = ()
    base_models: _Patterns = ()
    servers: Annotated[tuple[_ServerPattern, ...], msgspec.Meta(max_length=1000)] = ()


class ModelAccessPolicySpec(Spec, frozen=True):
    """What no rule allows is denied. Policies of one target add up; each target of a request that has policies must
    allow it, so a policy of a route never widens one of its gateway.

    ``target_refs``: the objects that it applies to; without them, all ModelRoutes and ModelServers of its namespace.
    ``rules``: without a rule, every request is denied.
    """

    target_refs: Annotated[tuple[AccessTarget, ...], msgspec.Meta(max_length=1000)] = ()
    rules: Annotated[tuple[AccessRule, ...], msgspec.Meta(max_length=1000)] = ()


class ModelAccessPolicy(DirectoryObject, frozen=True, kw_only=True):
    """A ModelAccessPolicy document."""

    spec: ModelAccessPolicySpec


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
                message = "describes nobody; write tenants, users, apiKeys or claims, or leave out from for everybody"
                yield ("spec", "rules", index, "from", number), message


def check_targets(policy: ModelAccessPolicy, found: DirectoryObjects) -> Iterator[Finding]:
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
            yield from _check_listener(target, found.listeners, path)
            continue
        keys = found.keys[target.kind]
        if object_key(namespace, target.name) not in keys and not found.unread.may_hold(target.name):
            near = [key.removeprefix(f"{namespace}/") for key in keys if namespace_of(key) == namespace]
            yield (
                (*path, "name"),
                f"no {target.kind} is called '{target.name}' here; {suggest_similar(target.name, near)}",
            )


def _check_listener(target: AccessTarget, listeners: Sequence[str], path: Path) -> Iterator[Finding]:
    if target.kind == "Gateway":
        yield (*path, "kind"), "a directory has no Gateways; write GatewayConfig, or apply the policy to a cluster"
    elif target.section_name is not None and target.section_name not in listeners:
        yield (*path, "sectionName"), f"no listener has this name; {suggest_similar(target.section_name, listeners)}"
