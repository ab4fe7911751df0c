# SPDX-License-Identifier: Apache-2.0
"""The GatewayConfig in effect as the directory's document: with Gateways' listeners and Secrets' contents in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.conditions import Wanted, fails, holds
from controller.gateway.compile.credentials import SecretContent, resolve, secrets_of
from controller.gateway.compile.policies import failure_mode
from controller.gateway.compile.secrets import Pointer, pointed_of
from controller.gateway.compile.sources import to_bytes
from extproc.config.gateway_config import GatewayConfig, GatewayConfigSpec
from extproc.config.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.gateway.compile.sources import Source

_DEFAULT: Final = {"apiVersion": API_VERSION, "kind": "GatewayConfig", "metadata": {"name": "default"}}


class ConfigDocument(msgspec.Struct, frozen=True):
    """``problems``: Secrets that cannot be used. ``note``: what is served otherwise than it was asked for."""

    content: bytes
    problems: tuple[str, ...] = ()
    note: str = ""

    @property
    def resolved(self) -> Wanted:
        """The condition ResolvedRefs."""
        if self.problems:
            return fails("ResolvedRefs", "SecretNotUsable", "; ".join(self.problems))
        return holds("ResolvedRefs")


def secret_of(thing: Mapping[str, Any]) -> SecretContent:
    """A Secret as the API server has it."""
    return SecretContent(pointed_of(thing).data, thing["metadata"].get("annotations") or {})


def pointers_of(config: Source | None) -> frozenset[Pointer]:
    """The Secrets that a GatewayConfig points to."""
    if config is None or not isinstance(config.decoded, GatewayConfig):
        return frozenset()
    keys = secrets_of(config.decoded.spec.authentication, config.namespace)
    return frozenset(Pointer("Secret", key) for key in keys)


def config_document(
    config: Source | None,
    listeners: Sequence[Mapping[str, Any]] | None,
    secrets: Mapping[str, SecretContent],
    *,
    has_policies: bool,
) -> ConfigDocument:
    """``config``: None for the defaults. ``listeners``: of Gateways, in place of its own; None: its own. ``secrets``:
    those that are there, by ``namespace/name``. ``has_policies``: whether the directory has ModelAccessPolicies.
    """
    changed: dict[str, Any] = {} if config is None else dict(config.spec)
    decoded = GatewayConfigSpec()
    problems: tuple[str, ...] = ()
    if config is not None and isinstance(config.decoded, GatewayConfig):
        decoded = config.decoded.spec
        if decoded.authentication is not None:
            found = resolve(config.spec["authentication"], decoded.authentication, config.namespace, secrets)
            changed["authentication"], problems = found.authentication, found.problems
    if listeners is not None:
        changed["listeners"] = listeners
    mode, note = failure_mode(changed, decoded, has_policies=has_policies)
    if mode is not None:
        changed["failureMode"] = mode
    content = to_bytes({**_DEFAULT, "spec": changed}) if config is None else config.document(changed)
    return ConfigDocument(content, problems, note)
