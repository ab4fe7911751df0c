# SPDX-License-Identifier: Apache-2.0
"""Which GatewayConfig is in effect: the one that the Gateways of this role, or their classes, refer to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.api.spec import API_VERSION, object_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.gateway.compile.gateway_api.gateway_spec import Reference
    from controller.gateway.compile.gateway_api.objects import Gateway, GatewayClass

_GROUP = API_VERSION.partition("/")[0]


class Configs(Protocol):
    """What is known of GatewayConfigs, by key."""

    def problem(self, key: str) -> str:
        """Why it cannot be used; empty if it can."""

    def needs_certificates(self, key: str | None) -> bool:
        """Whether callers are identified by client certificates."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: of the GatewayConfig in effect, None for the defaults. ``problems``: why Gateways, by key, cannot
    have what they refer to. ``named``: every GatewayConfig that is referred to.
    """

    config: str | None = None
    problems: Mapping[str, str] = {}
    named: frozenset[str] = frozenset()


def choose_parameters(
    gateways: Sequence[Gateway],
    classes: Mapping[str, GatewayClass],
    given: str | None,
    problem_of: Callable[[str], str],
) -> Parameters:
    """``gateways``: the oldest first. ``given``: what the role was told to serve. ``problem_of``: why a GatewayConfig
    cannot be used, empty if it can.

    There is one Envoy, and it has one configuration: of Gateways that refer to different ones, the oldest decides.
    """
    config, owner = given, "--gateway-config"
    problems: dict[str, str] = {}
    named: set[str] = set()
    for gateway in gateways:
        reference, namespace = _reference(gateway, classes)
        if reference is None:
            continue
        if (reference.group, reference.kind) != (_GROUP, "GatewayConfig"):
            problems[gateway.identity.key] = (
                f"parametersRef names {reference.group}/{reference.kind}; name a GatewayConfig of {_GROUP}"
            )
            continue
        key = object_key(reference.namespace or namespace, reference.name)
        named.add(key)
        problem = problem_of(key)
        if not problem and config not in (None, key):
            problem = f"one Envoy has one GatewayConfig, and {owner} says {config}; run another role with --gateway"
        if problem:
            problems[gateway.identity.key] = f"GatewayConfig {key}: {problem}"
        elif config is None:
            config, owner = key, f"the older Gateway {gateway.identity.key}"
    return Parameters(config=config, problems=problems, named=frozenset(named))


def class_problem(one: GatewayClass, problem_of: Callable[[str], str]) -> str:
    """Why the parametersRef of a GatewayClass cannot be used; empty if it can, or there is none."""
    reference = one.spec.parameters_ref
    if reference is None:
        return ""
    if (reference.group, reference.kind) != (_GROUP, "GatewayConfig") or reference.namespace is None:
        return f"parametersRef must name a GatewayConfig of {_GROUP}, with its namespace"
    return problem_of(object_key(reference.namespace, reference.name))


def _reference(gateway: Gateway, classes: Mapping[str, GatewayClass]) -> tuple[Reference | None, str]:
    """The Gateway's own reference goes before its class's; with the namespace that it means if it says none."""
    own = gateway.spec.infrastructure.parameters_ref
    if own is not None:
        return own, gateway.identity.namespace
    return classes[gateway.spec.gateway_class_name].spec.parameters_ref, ""
