# SPDX-License-Identifier: Apache-2.0
"""Notes of ``check`` on what is valid and does not do what its author may think, each with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.admission.limits import RESOURCES
from extproc.admission.local_limits import MAX_BUCKETS
from extproc.api.references import backend_key, backend_refs
from extproc.prefix.index import MOST_BLOCKS, MOST_BLOCKS_IN_ALL, blocks_of_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.authentication import Authentication
    from extproc.api.snapshot import Snapshot

# Of 128, some 40 are for the bundle's own files and endpoints.
_MOST_WATCHED: Final = 80
_ROUND: Final = 128
# What is counted together where nobody says who asks.
_ALL_AS_ONE: Final = {"Tenant": "tenant", "User": "user", "ApiKey": "key"}


def limits_of_nobody(snapshot: Snapshot) -> Iterator[str]:
    """Limits for each tenant, user or key where requests do not say whose they are: all share one."""
    gateway = snapshot.gateway
    missing = _unknown_callers(gateway.authentication, is_told=gateway.clients == "Trusted")
    for route in snapshot.routes:
        for per in dict.fromkeys(one.per for one in route.spec.rate_limits):
            if per in missing:
                what = f"ModelRoute {route.metadata.key}: the limit per: {per}"
                yield f"{what} is one limit for all clients together, as {missing[per]}, or write per: Route"


def _unknown_callers(asked: Authentication | None, *, is_told: bool) -> dict[str, str]:
    """Why nobody has a tenant, user or key, and what to write; by what limits may be for. ``is_told``: by gateways in
    front, in headers.
    """
    if asked is None and is_told:
        return {"ApiKey": "gateways in front tell tenants and users and no keys; write per: Tenant or per: User"}
    if asked is None:
        advice = "write authentication in the GatewayConfig"
        return {per: f"no client has a {one} without authentication; {advice}" for per, one in _ALL_AS_ONE.items()}
    if not asked.api_keys and not asked.api_key_secrets:
        return {"ApiKey": "authentication names no keys; write apiKeys, per: Tenant or per: User"}
    return {}


def unrouted_servers(snapshot: Snapshot) -> Iterator[str]:
    """ModelServers that no client can reach."""
    named = {
        route.server_key(target)
        for route in snapshot.routes
        for rule in route.spec.rules
        for target in rule.target_models
    }
    named |= {backend_key(route, ref) for route in snapshot.http_routes for ref, _ in backend_refs(route)}
    for server in snapshot.servers:
        if server.metadata.key not in named:
            yield (
                f"ModelServer {server.metadata.key}: no ModelRoute or HTTPRoute names it, so no request comes to it;"
                f" write a ModelRoute with targetModels: [{{modelServerName: {server.metadata.name}}}], remove it, or"
                f" run extproc with --pool {server.metadata.name} behind a gateway that something else configures"
            )


def too_many_watched_files(snapshot: Snapshot) -> Iterator[str]:
    """Files of the bundle that Envoy watches, each with an inotify instance of its own: without one it aborts.

    Clusters and endpoints take as many as are free whatever their number, so listeners and secrets alone are counted.
    """
    listeners, connections = snapshot.gateway.listeners, {server.spec.connection for server in snapshot.servers}
    routes = {one.address if one.tls is None else one.name for one in listeners}
    secrets: set[object] = {one for listener in listeners if listener.tls for one in listener.tls.certificates}
    secrets |= {listener.tls.client_certificates for listener in listeners if listener.tls} - {None}
    for connection in connections:
        secrets |= {connection.api_key_file or connection.api_key_env or connection.api_key_ref} - {None}
        if connection.tls is not None:
            secrets |= {connection.tls.ca_file, connection.tls.client_certificate} - {None}
    watched = len(routes) + len(secrets)
    if watched > _MOST_WATCHED:
        yield (
            f"Envoy watches {watched} files of listeners, certificates and keys, and takes an inotify instance of the"
            " machine for each; Linux gives a user 128 by default, and Envoy ends where there is none left: on its"
            f" machine write fs.inotify.max_user_instances = {_ROUND * -(-2 * watched // _ROUND)} into /etc/sysctl.d"
        )


def literal_stars(snapshot: Snapshot) -> Iterator[str]:
    """Names of models that look like patterns."""
    for route in snapshot.routes:
        names = [
            ("modelName", route.spec.model_name or ""),
            *(("loraAdapters", one) for one in route.spec.lora_adapters),
        ]
        for field, name in names:
            if name.startswith("*") or name.endswith("*"):
                yield (
                    f"ModelRoute {route.metadata.key}: {field} '{name}' is no pattern: only requests that ask for the"
                    f" model '{name}', with the star, are taken; write the name that clients ask for, in a ModelRoute"
                    " for each name, or send requests for any model to a ModelServer by an HTTPRoute"
                )


def unsalted_messages(snapshot: Snapshot) -> Iterator[str]:
    """Caches that are to be kept apart, and that older engines share for one of the APIs.

    Only where somebody wrote so: that tenants are kept apart wherever there is authentication is nobody's wish.
    """
    of_gateway = snapshot.gateway.cache_isolation
    for server in snapshot.servers:
        spec = server.spec
        header = None if spec.cache_scope_header is None else f"Header:{spec.cache_scope_header}"
        wanted = spec.cache_isolation or header or of_gateway
        if spec.engine == "vLLM" and wanted not in (None, "Shared"):
            yield (
                f"ModelServer {server.metadata.key}: cacheIsolation {wanted} does not hold on /v1/messages with vLLM"
                " older than June 2026, which ignores cache_salt there; see that the engines are newer, or take the"
                " other paths only, with modelMatch: {uri: {prefix: ...}} in the rules of its ModelRoutes"
            )


def forgotten_prompts(snapshot: Snapshot) -> Iterator[str]:
    """So many endpoints that less is remembered of each than of a few."""
    endpoints = sum(len(one.spec.endpoints) for one in snapshot.servers)
    if blocks_of_each(endpoints) < MOST_BLOCKS:
        yield (
            f"{endpoints} endpoints: a process remembers {MOST_BLOCKS_IN_ALL} blocks of prompts, so"
            f" {blocks_of_each(endpoints)} of each instead of {MOST_BLOCKS}, and knows less of what large caches hold;"
            " write kvEvents, by which engines tell it, or serve a part of the models from another gateway"
        )


def crowded_limits(snapshot: Snapshot) -> Iterator[str]:
    """More levels of limits than a process remembers, if every tenant and key uses every route."""
    gateway = snapshot.gateway
    keys = () if gateway.authentication is None else gateway.authentication.api_keys
    tenants = {one.tenant for one in keys} | {one.name for one in gateway.tenants}
    callers = {"Tenant": len(tenants), "ApiKey": len(keys)}
    levels = sum(
        callers.get(limit.per, 1) * sum(getattr(limit, resource) is not None for resource in RESOURCES)
        for route in snapshot.routes
        for limit in route.spec.rate_limits
        if limit.scope == "Local"
    )
    if levels > MAX_BUCKETS:
        yield (
            f"rateLimits have {levels} levels if every tenant and key uses every ModelRoute, and a process remembers"
            f" {MAX_BUCKETS}: what was used longest ago is forgotten, and is full again; write scope: Global with"
            " --redis, or fewer limits"
        )
