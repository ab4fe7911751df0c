# SPDX-License-Identifier: Apache-2.0
"""One consistent reading of a configuration directory, and what follows from all of it.

Beside the objects: what Envoy does without extproc, which limits need a Redis that is not there, and what reading
thousands of engines costs one process in time and file descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.api.access_policy import ModelAccessPolicy
from extproc.api.admission import FlowControl, InferenceObjective
from extproc.api.gateway_config import GatewayConfigSpec
from extproc.api.grpc_route import GatewayApiRoute, GRPCRoute
from extproc.api.http_route import Backend, HTTPRoute
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer, ModelServerSpec, max_wait_by_field
from extproc.api.picker_config import PickerFile
from extproc.api.picker_flow_control import with_usage_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Tenants and users of callers, which extproc alone has.
_WRITTEN_BY_GATEWAYS: Final = "x-attache-"
# Engines' pages that the process reads. A page of vLLM's costs some 65 us, so these take a sixth of a core.
MOST_SCRAPES_PER_S: Final = 2_500.0
# For connections of Envoys and of readers of pages, files, and libraries: never taken by connections to engines.
RESERVED_DESCRIPTORS: Final = 1_024
# Of a subscription to KV events: two sockets of ZeroMQ, each with a descriptor to wake it, and the connection.
_OF_A_SUBSCRIPTION: Final = 4


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent, validated reading of a configuration directory, sorted by namespace and name.

    ``version`` is a digest of the content: equal directories have equal versions. ``digests``: of each file, as
    ``content_digest`` has it. ``picker_files``: EndpointPickerConfigs by the name of their file; their plugins are
    checked by extproc.
    """

    version: str
    routes: tuple[ModelRoute, ...]
    servers: tuple[ModelServer, ...]
    gateway: GatewayConfigSpec
    objectives: tuple[InferenceObjective, ...] = ()
    http_routes: tuple[HTTPRoute, ...] = ()
    grpc_routes: tuple[GRPCRoute, ...] = ()
    backends: tuple[Backend, ...] = ()
    access_policies: tuple[ModelAccessPolicy, ...] = ()
    picker_files: Mapping[str, PickerFile] = {}
    digests: Mapping[str, str] = {}

    @property
    def gateway_api_routes(self) -> tuple[GatewayApiRoute, ...]:
        """Those by which Envoy routes requests itself."""
        return (*self.http_routes, *self.grpc_routes)

    def flow_control_of(self, spec: ModelServerSpec, namespace: str = "") -> FlowControl | None:
        """A server's own, or else that of its EndpointPickerConfig, with bands for the InferenceObjectives of
        ``namespace``.
        """
        if spec.flow_control is not None or spec.picker_config is None:
            return spec.flow_control
        file = self.picker_files[spec.picker_config]
        named = {one.spec.priority for one in self.objectives if one.metadata.namespace == namespace}
        return with_usage_limits(file.flow_control, file.config, named) if named else file.flow_control

    def max_wait_by_field_of(self, spec: ModelServerSpec) -> dict[str, float]:
        """The longest that a request waits before an engine of the server gets it, by the field that holds it."""
        return max_wait_by_field(spec, self.flow_control_of(spec))


def failure_mode_of(snapshot: Snapshot) -> Literal["Open", "Close"]:
    """The configured mode; without one, Close where mode Open would undo a setting, else Open."""
    if snapshot.gateway.failure_mode is not None:
        return snapshot.gateway.failure_mode
    return "Close" if settings_enforced_by_extproc(snapshot) else "Open"


def settings_enforced_by_extproc(snapshot: Snapshot) -> list[str]:
    """The settings that extproc alone enforces, which failure mode Open would undo."""
    found = []
    for route in snapshot.routes:
        if route.spec.rate_limits:
            found.append(f"ModelRoute {route.metadata.key}: rateLimits")
        if route.spec.guard is not None and route.spec.guard.failure_mode == "Close":
            found.append(f"ModelRoute {route.metadata.key}: guard")
        found += [
            f"ModelRoute {route.metadata.key}: {sets}"
            for sets in {rule.parameter_override_field for rule in route.spec.rules}
            if sets
        ]
        matches = [rule.model_match for rule in route.spec.rules if rule.model_match is not None]
        if any(name.lower().startswith(_WRITTEN_BY_GATEWAYS) for one in matches for name in one.headers):
            found.append(f"ModelRoute {route.metadata.key}: rules by tenant or user")
    return [*found, *access_restrictions(snapshot.gateway, snapshot.access_policies), *_isolated_caches(snapshot)]


def access_restrictions(gateway: GatewayConfigSpec, policies: Sequence[ModelAccessPolicy]) -> list[str]:
    """The settings that restrict who may use which models. Envoy does not enforce them without extproc, so failure mode
    Open is refused beside them.
    """
    authentication = gateway.authentication
    models = [] if authentication is None else [one.models for one in authentication.api_keys]
    models += [] if authentication is None else [one.models for one in authentication.api_key_secrets]
    models += [one.models for one in gateway.tenants]
    found = [f"ModelAccessPolicy {one.metadata.key}" for one in policies]
    if any(one is not None for one in models):
        found.insert(0, "GatewayConfig: models of tenants or keys")
    if authentication is not None and authentication.virtual_keys is not None:
        # a key that is made tomorrow may have models and limits
        found.insert(0, "GatewayConfig: virtualKeys")
    return found


def cache_isolation_of(spec: ModelServerSpec, snapshot: Snapshot) -> str:
    """Which prompts share a prefix cache of this server: ``Tenant``, ``User``, ``Shared`` or ``Header:NAME``."""
    if spec.cache_isolation is None and spec.cache_scope_header is not None:
        return f"Header:{spec.cache_scope_header}"
    gateway = snapshot.gateway
    return spec.cache_isolation or gateway.cache_isolation or ("Shared" if gateway.authentication is None else "Tenant")


def _isolated_caches(snapshot: Snapshot) -> Iterator[str]:
    for server in snapshot.servers:
        mode = cache_isolation_of(server.spec, snapshot)
        if mode != "Shared":
            yield f"ModelServer {server.metadata.key}: cacheIsolation {mode}"


def missing_redis_warnings(snapshot: Snapshot) -> list[str]:
    """A warning for every Global limit and budget: without Redis, machines cannot share it."""
    budgets = [("GatewayConfig", snapshot.gateway.budgets)]
    budgets += [(f"ModelRoute {route.metadata.key}", route.spec.budgets) for route in snapshot.routes]
    found = [
        f"ModelRoute {route.metadata.key}: rateLimits[{index}] is Global, and there is no --redis: "
        + ("all its requests get 503" if limit.without_redis == "Refuse" else "every machine grants it by itself")
        for route in snapshot.routes
        for index, limit in enumerate(route.spec.rate_limits)
        if limit.scope == "Global"
    ]
    found += [
        f"{where}: the budget '{one.name}' is Global, and there is no --redis: "
        + ("all its requests get 503" if one.without_redis == "Refuse" else "every machine grants it by itself")
        for where, given in budgets
        for one in given
        if one.scope == "Global"
    ]
    keys = () if snapshot.gateway.authentication is None else snapshot.gateway.authentication.api_keys
    names = {
        key.name
        for key in keys
        if "Global" in {*(one.scope for one in key.rate_limits), *(one.scope for one in key.budgets)}
    }
    if names:
        what = f"API key {min(names)}" if len(names) == 1 else f"{len(names)} API keys"
        found.append(f"{what}: own limits are Global, and there is no --redis: every machine grants them by itself")
    return found


def scrape_interval_factor(servers: Iterable[ModelServer]) -> float:
    """By what every ``scrapeInterval`` is multiplied, 1 or more, so that reading engines leaves time for requests."""
    specs = [one.spec for one in servers]
    asked_per_s = sum(len(one.endpoints) / one.report_interval_s for one in specs if one.report_interval_s)
    return max(1.0, asked_per_s / MOST_SCRAPES_PER_S)


def max_idle_connections(limit: float) -> float:
    """How many connections to engines may stay open between two reads. ``limit``: descriptors of the process."""
    return max(0.0, limit - max(RESERVED_DESCRIPTORS, limit / 8))


def scrape_interval_warnings(snapshot: Snapshot) -> Iterator[str]:
    """That engines are read less often than configured."""
    stretch = scrape_interval_factor(snapshot.servers)
    if stretch > 1:
        read = [one.spec for one in snapshot.servers if one.spec.report_interval_s]
        endpoints = sum(len(one.endpoints) for one in read)
        shortest_s = min(one.report_interval_s for one in read if one.endpoints)
        yield (
            f"{endpoints} endpoints: their scrapeIntervals ask for {stretch * MOST_SCRAPES_PER_S:.0f} reads a second,"
            f" and one process reads {MOST_SCRAPES_PER_S:.0f}; all intervals are {stretch:.3g} times as long as written"
            f" ({shortest_s:g} s is {shortest_s * stretch:.3g} s); write longer ones where loads change slowly, so that"
            " the others stay as they are"
        )


def kv_event_source_count(servers: Iterable[ModelServer]) -> int:
    """How many data-parallel ranks publish KV events."""
    specs = [one.spec for one in servers]
    return sum(len(one.endpoints) * one.kv_events.data_parallel_size for one in specs if one.kv_events is not None)


def needed_file_descriptors(snapshot: Snapshot) -> int:
    """Descriptors for connections to all engines, and for subscriptions to their events."""
    read = sum(len(one.spec.endpoints) for one in snapshot.servers if one.spec.report_interval_s)
    return read + kv_event_source_count(snapshot.servers) * _OF_A_SUBSCRIPTION


def file_descriptor_warnings(snapshot: Snapshot, limit: float) -> Iterator[str]:
    """That connections to engines are made anew for each read, for want of descriptors."""
    wanted = needed_file_descriptors(snapshot)
    if wanted > max_idle_connections(limit):
        yield (
            f"the engines want {wanted} file descriptors, and a process may have {limit:.0f}, of which some are kept"
            f" for Envoy: connections to engines beyond that are made anew for each read; raise the hard limit to"
            f" {wanted * 8 // 7 + RESERVED_DESCRIPTORS} (ulimit -Hn, LimitNOFILE= of systemd)"
        )
