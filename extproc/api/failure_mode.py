# SPDX-License-Identifier: Apache-2.0
"""What Envoy does without extproc, and what of a directory would not hold then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.access_policy import ModelAccessPolicy
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.model_server import ModelServerSpec
    from extproc.api.snapshot import Snapshot

# Tenants and users of callers; extproc knows them.
_WRITTEN_BY_GATEWAYS: Final = "x-attache-"


def failure_mode_of(snapshot: Snapshot) -> Literal["Open", "Close"]:
    """What is configured; if nothing is, Close where requests would get round something in mode Open."""
    if snapshot.gateway.failure_mode is not None:
        return snapshot.gateway.failure_mode
    return "Close" if decided_by_extproc(snapshot) else "Open"


def decided_by_extproc(snapshot: Snapshot) -> list[str]:
    """What holds only while extproc decides, and requests would get round in failure mode Open."""
    found = []
    for route in snapshot.routes:
        if route.spec.rate_limits:
            found.append(f"ModelRoute {route.metadata.key}: rateLimits")
        matches = [rule.model_match for rule in route.spec.rules if rule.model_match is not None]
        if any(name.lower().startswith(_WRITTEN_BY_GATEWAYS) for one in matches for name in one.headers):
            found.append(f"ModelRoute {route.metadata.key}: rules by tenant or user")
    return [*found, *who_may(snapshot.gateway, snapshot.access_policies), *_isolated_caches(snapshot)]


def who_may(gateway: GatewayConfigSpec, policies: Sequence[ModelAccessPolicy]) -> list[str]:
    """What says who may use which models. Envoy cannot say it without extproc, so failure mode Open is refused beside
    it.
    """
    asked = gateway.authentication
    models = [] if asked is None else [one.models for one in asked.api_keys]
    models += [] if asked is None else [one.models for one in asked.api_key_secrets]
    models += [one.models for one in gateway.tenants]
    found = [f"ModelAccessPolicy {one.metadata.key}" for one in policies]
    if any(one is not None for one in models):
        found.insert(0, "GatewayConfig: models of tenants or keys")
    return found


def cache_isolation_of(spec: ModelServerSpec, snapshot: Snapshot) -> str:
    """Whose prompts share a prefix cache of this server: ``Tenant``, ``User``, ``Shared`` or ``Header:NAME``."""
    if spec.cache_isolation is None and spec.cache_scope_header is not None:
        return f"Header:{spec.cache_scope_header}"
    gateway = snapshot.gateway
    return spec.cache_isolation or gateway.cache_isolation or ("Shared" if gateway.authentication is None else "Tenant")


def _isolated_caches(snapshot: Snapshot) -> Iterator[str]:
    for server in snapshot.servers:
        mode = cache_isolation_of(server.spec, snapshot)
        if mode != "Shared":
            yield f"ModelServer {server.metadata.key}: cacheIsolation {mode}"
