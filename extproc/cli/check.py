# SPDX-License-Identifier: Apache-2.0
"""``extproc check``: every mistake in a configuration directory, or a summary of it if there is none.

Notes are on what is valid and does not do what its author may think, each with what to do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.admission.limits import MAX_BUCKETS, RESOURCES
from extproc.api.addresses import parse_address, worker_addresses
from extproc.api.errors import ConfigInvalid
from extproc.api.gateway_config import unreachable_listener
from extproc.api.load import load_directory
from extproc.api.matches import ANY_HOST, have_common_hosts
from extproc.api.references import backend_key, backend_refs
from extproc.api.schema import suggest
from extproc.api.snapshot import decided_by_extproc, failure_mode_of, missing_descriptors, stretched_intervals
from extproc.api.spec import is_attached
from extproc.cli.system import counted, hard_limit, report
from extproc.prefix.index import MOST_BLOCKS, MOST_BLOCKS_IN_ALL, blocks_of_each
from extproc.protocol import LONGEST_MESSAGE_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.authentication import Authentication
    from extproc.api.model_server import ModelServerSpec
    from extproc.api.picker_config import PickerCheck, PickerFile
    from extproc.api.snapshot import Snapshot


def parser(prog: str = "extproc check") -> argparse.ArgumentParser:
    """The words of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Read a configuration directory and report every mistake, with file, line and what to write instead."
        ),
        epilog="Exit status: 0 if the directory can be used, 2 if not.",
    )
    made.add_argument(
        "directory", type=Path, metavar="DIR", help="holds YAML files: ModelServers, ModelRoutes and others"
    )
    made.add_argument(
        "--listen", metavar="ADDRESS", help="where extproc will listen: see whether Envoy is configured to call there"
    )
    made.add_argument("--workers", type=int, default=1, metavar="N", help="how many processes (default: %(default)s)")
    return made


def main(words: list[str], prog: str = "extproc check") -> int:
    """Exit status: 0, or 2 if there is a mistake."""
    made = parser(prog)
    options = made.parse_args(words)
    directory, listens = options.directory, _listens(made, options)
    try:
        snapshot = load_directory(directory, _InstalledPlugins())
        notes = [
            *_undone_by_open(snapshot),
            *_too_long(snapshot),
            *_unrouted_adapters(snapshot),
            *_unknown_models(snapshot),
            *_unreached(snapshot),
            *unrouted_servers(snapshot),
            *literal_stars(snapshot),
            *limits_of_nobody(snapshot),
            *crowded_limits(snapshot),
            *unsalted_messages(snapshot),
            *too_many_watched_files(snapshot),
            *stretched_intervals(snapshot),
            *missing_descriptors(snapshot, hard_limit()),
            *forgotten_prompts(snapshot),
            *_missing_files(snapshot, directory),
            *_notes(snapshot),
        ]
    except ConfigInvalid as error:
        return report(error)
    for note in notes:
        print(f"note: {note}")
    problem = unreachable_listener(snapshot.gateway, listens) if listens else ""
    if problem:
        print(problem, file=sys.stderr)
        return 2
    print(f"{directory} is valid: {_summary(snapshot)}")
    return 0


def _listens(made: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.listen is None:
        return []
    try:
        if not options.listen.startswith("unix:"):
            parse_address(options.listen)
    except ValueError as error:
        made.error(f"--listen: {error}")
    return worker_addresses(options.listen, max(1, options.workers))


def _undone_by_open(snapshot: Snapshot) -> list[str]:
    """What a directory with failure mode Open gives away."""
    if failure_mode_of(snapshot) == "Close":
        return []
    advice = "has no effect while extproc is down, because of failureMode: Open; write Close, or leave it out"
    return [f"{what} {advice}" for what in decided_by_extproc(snapshot)]


def _too_long(snapshot: Snapshot) -> list[str]:
    """Waits that Envoy ends before extproc does."""
    waits = [(server, snapshot.longest_wait_s_of(server.spec)) for server in snapshot.servers]
    return [
        f"ModelServer {server.metadata.key}: {_who_holds(server.spec)} for up to {wait_s:g} s, and Envoy waits an hour"
        " at most; write timeouts of 59m or less"
        for server, wait_s in waits
        if wait_s and wait_s + snapshot.gateway.message_timeout > LONGEST_MESSAGE_TIMEOUT_S
    ]


def _who_holds(spec: ModelServerSpec) -> str:
    holders = {
        "flowControl": spec.flow_control or spec.picker_config,
        "adapterLoading": spec.adapter_loading,
        "activation": spec.activation,
    }
    named = [name for name, one in holders.items() if one is not None]
    return f"{' and '.join(named)} {'hold' if len(named) > 1 else 'holds'} requests"


def _unrouted_adapters(snapshot: Snapshot) -> list[str]:
    """Adapters that could be loaded and that no client can ask for."""
    asked = {
        (route.server_key(target), adapter)
        for route in snapshot.routes
        for rule in route.spec.rules
        for target in rule.target_models
        for adapter in route.spec.lora_adapters
    }
    return [
        f"ModelServer {server.metadata.key}: no ModelRoute sends requests for the adapter '{adapter.name}' there; add"
        " it to loraAdapters of one"
        for server in snapshot.servers
        if server.spec.adapter_loading is not None
        for adapter in server.spec.adapter_loading.adapters
        if (server.metadata.key, adapter.name) not in asked
    ]


def _unknown_models(snapshot: Snapshot) -> list[str]:
    """Models of tenants, keys and policies that no route serves: maybe misspelt, maybe yet to come."""
    known = {name for route in snapshot.routes for name in (route.spec.model_name, *route.spec.lora_adapters)}
    names = sorted(name for name in known if name is not None)
    return [
        f"no ModelRoute serves '{model}' of the {whose}; {suggest(model, names)}"
        for whose, model in _named_models(snapshot)
        if not any(_fits(model, name) for name in names)
    ]


def _named_models(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    authentication = snapshot.gateway.authentication
    keys = () if authentication is None else authentication.api_keys
    for tenant in snapshot.gateway.tenants:
        yield from ((f"tenant '{tenant.name}'", model) for model in tenant.models or ())
    for key in keys:
        yield from ((f"key '{key.name}'", model) for model in key.models or ())
    for policy in snapshot.access_policies:
        models = dict.fromkeys(model for rule in policy.spec.rules for model in (*rule.models, *rule.base_models))
        yield from ((f"ModelAccessPolicy '{policy.metadata.key}'", model) for model in models)


def _unreached(snapshot: Snapshot) -> Iterator[str]:
    """HTTPRoutes for hosts that no listener of theirs takes."""
    listeners = snapshot.gateway.listeners
    for route in snapshot.http_routes if listeners else ():
        attached = [
            (one.hostname or ANY_HOST).lower() for one in listeners if is_attached(route.spec.parent_refs, one.name)
        ]
        hosts = [one.lower() for one in route.spec.hostnames] or [ANY_HOST]
        if not any(have_common_hosts(own, host) for own in attached for host in hosts):
            yield (
                f"HTTPRoute {route.metadata.key}: no listener that it is attached to takes its hostnames "
                f"({', '.join(hosts)}); change hostnames, or the listener's hostname"
            )


def _fits(pattern: str, name: str) -> bool:
    """A star stands at the beginning or at the end."""
    if pattern.startswith("*"):
        return name.endswith(pattern[1:])
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _missing_files(snapshot: Snapshot, directory: Path) -> list[str]:
    """Files of certificates and keys. They may be elsewhere than where this command runs, so they are no mistake."""
    named = [(f"listener {one.name}", file) for one in snapshot.gateway.listeners for file in one.files]
    servers = [(f"ModelServer {one.metadata.key}", one.spec.connection) for one in snapshot.servers]
    named += [(who, file) for who, connection in servers for file in connection.files]
    return [
        f"{who}: there is no file '{directory / file}' here; without it this is not served"
        for who, file in dict.fromkeys(named)
        if not (directory / file).is_file()
    ]


class _InstalledPlugins:
    """A PickerCheck with the plugins that are installed, which are looked up once, and only if there is a file."""

    def __init__(self) -> None:
        self._check: PickerCheck | None = None

    def __call__(self, file: PickerFile) -> Sequence[str]:
        """What of the file has no effect here; raises ConfigInvalid with every mistake."""
        if self._check is None:
            # numpy, which plugins need, takes longer to load than the whole of this command
            from extproc.llmd.pickers import InstalledPlugins  # noqa: PLC0415

            self._check = InstalledPlugins()
        return self._check(file)


def _notes(snapshot: Snapshot) -> list[str]:
    """What has no effect in the EndpointPickerConfigs; raises ConfigInvalid, also for a plugin that fails."""
    if not snapshot.picker_files:
        return []
    # numpy, which plugins need, takes longer to load than the whole of this command
    from extproc.llmd.pickers import picker_notes  # noqa: PLC0415

    return picker_notes(snapshot, tries_plugins=True)


def _summary(snapshot: Snapshot) -> str:
    endpoints = sum(len(server.spec.endpoints) for server in snapshot.servers)
    parts = [
        counted(len(snapshot.routes), "ModelRoute"),
        f"{counted(len(snapshot.servers), 'ModelServer')} with {counted(endpoints, 'endpoint')}",
    ]
    if snapshot.http_routes:
        parts.append(counted(len(snapshot.http_routes), "HTTPRoute"))
    if snapshot.backends:
        parts.append(counted(len(snapshot.backends), "Backend"))
    if snapshot.objectives:
        parts.append(counted(len(snapshot.objectives), "InferenceObjective"))
    if snapshot.access_policies:
        parts.append(counted(len(snapshot.access_policies), "ModelAccessPolicy"))
    if snapshot.picker_files:
        parts.append(counted(len(snapshot.picker_files), "EndpointPickerConfig"))
    return ", ".join(parts)


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
