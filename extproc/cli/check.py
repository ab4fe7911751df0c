# SPDX-License-Identifier: Apache-2.0
"""``extproc check``: every mistake in a configuration directory, or a summary of it if there is none.

Notes are on settings that are valid and may not do what their author expects, each with what to do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.admission.local_limits import MAX_BUCKETS
from extproc.admission.rate_limits import RESOURCES
from extproc.api.addresses import parse_address, worker_addresses
from extproc.api.budgets import budget_title
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import SnapshotLoader, load_directory, max_file_bytes
from extproc.api.config_snapshot import (
    failure_mode_of,
    file_descriptor_warnings,
    kv_event_source_count,
    scrape_interval_warnings,
    settings_enforced_by_extproc,
)
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.api.gateway_config import why_extproc_unreachable
from extproc.api.match_patterns import ANY_HOST, have_common_hosts
from extproc.api.model_server import NO_ENCODE_STAGE, SIDECAR_CONNECTORS, TRANSLATABLE
from extproc.api.picker_config import PICKER_KIND
from extproc.api.reference_checks import backend_key, backend_refs
from extproc.api.schema_validation import suggest_similar
from extproc.api.spec import is_attached
from extproc.api.untrusted_files import open_regular_file
from extproc.cli.common import descriptor_hard_limit, pluralize, print_mistakes
from extproc.prefix import kv_event_decoder
from extproc.prefix.approximate_index import MOST_BLOCKS, MOST_BLOCKS_IN_ALL, max_blocks_per_endpoint
from extproc.wire_names import LONGEST_MESSAGE_TIMEOUT_S, UNREAD_PROTOCOLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from extproc.api.admission import RateLimit
    from extproc.api.authentication import ApiKey, Authentication
    from extproc.api.budgets import Budget
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.cost_tiers import CostTierRouting, TierOverrides
    from extproc.api.model_route import ModelRouteSpec, RouteRule
    from extproc.api.model_server import ModelServerSpec
    from extproc.api.picker_config import PickerConfigChecker, PickerFile
    from extproc.api.slo import Slo

# Of 128, some 40 are for the bundle's own files and endpoints.
_MOST_WATCHED: Final = 80
_ROUND: Final = 128
# By limits' ``per``: the unit that is counted together where requests do not identify their caller.
_ALL_AS_ONE: Final = {"Tenant": "tenant", "User": "user", "ApiKey": "key"}
# Of the fastest alert: all requests miss, and the budget burns no faster.
_FASTEST_BURN: Final = 14.4
_MOST_NAMED: Final = 5
# The value of the label of encoders' roles, whatever its key: llm-d.ai/role, or one of the user's.
_ENCODE: Final = "encode"


def parser(prog: str = "extproc check") -> argparse.ArgumentParser:
    """The words of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Read a configuration directory, or one EndpointPickerConfig, and report every mistake, with file, line and"
            " what to write instead."
        ),
        epilog="Exit status: 0 if it can be used, 2 if not.",
    )
    made.add_argument(
        "directory",
        type=Path,
        metavar="DIR|FILE",
        help="a directory of YAML files: ModelServers, ModelRoutes and others; or the file of an EndpointPickerConfig",
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
    if directory.is_file():
        return _check_picker_file(directory)
    try:
        snapshot = load_directory(directory, _InstalledPlugins())
        notes = [
            *_undone_by_open(snapshot),
            *_too_long(snapshot),
            *_unrouted_adapters(snapshot),
            *_unknown_models(snapshot),
            *_unreached(snapshot),
            *_merged(snapshot),
            *unrouted_servers(snapshot),
            *wildcards_in_model_names(snapshot),
            *limits_without_identity(snapshot),
            *limits_without_callers(snapshot),
            *too_many_limit_levels(snapshot),
            *budgets_without_identity(snapshot),
            *unpriced_servers(snapshot),
            *mixed_currencies(snapshot),
            *payload_logs_without_effect(snapshot),
            *guards_without_effect(snapshot),
            *ineffective_response_caches(snapshot),
            *tiers_without_effect(snapshot),
            *fallbacks_without_effect(snapshot),
            *fallback_cycles(snapshot),
            *mirrors_without_effect(snapshot),
            *ineffective_objectives(snapshot),
            *cache_isolation_gaps(snapshot),
            *unusable_prefill_decode_pairs(snapshot),
            *ineffective_path_model_fields(snapshot),
            *too_many_watched_files(snapshot),
            *scrape_interval_warnings(snapshot),
            *file_descriptor_warnings(snapshot, descriptor_hard_limit()),
            *undersized_prefix_indexes(snapshot),
            *undersized_kv_indexes(snapshot),
            *_without_steps(snapshot),
            *_unreadable_files(snapshot, directory),
            *_notes(snapshot),
        ]
    except ConfigInvalid as error:
        return print_mistakes(error)
    for note in notes:
        print(f"note: {note}")
    problem = why_extproc_unreachable(snapshot.gateway, listens) if listens else ""
    if problem:
        print(problem, file=sys.stderr)
        return 2
    print(f"{directory} is valid: {_summary(snapshot)}")
    return 0


def _check_picker_file(path: Path) -> int:
    """Exit status, as above."""
    most = max_file_bytes(path.name)
    try:
        with path.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        print(f"{path} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    if len(content) > most:
        print(f"{path} has more than {most} bytes, which are read; write a shorter one", file=sys.stderr)
        return 2
    if PICKER_KIND.encode() not in content:
        print(f"{path} is a file, and no {PICKER_KIND}; name the directory that it is in", file=sys.stderr)
        return 2
    try:
        notes = _notes(SnapshotLoader(_InstalledPlugins()).load({path.name: content}))
    except ConfigInvalid as error:
        return print_mistakes(error)
    for note in notes:
        print(f"note: {note}")
    print(f"{path} is a valid {PICKER_KIND}")
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
    """Settings that do not hold in failure mode Open while extproc is away."""
    if failure_mode_of(snapshot) == "Close":
        return []
    advice = "has no effect while extproc is down, because of failureMode: Open; write Close, or leave it out"
    return [f"{what} {advice}" for what in settings_enforced_by_extproc(snapshot)]


def _too_long(snapshot: Snapshot) -> list[str]:
    """Waits that Envoy ends before extproc does."""
    found = [(server.metadata.key, snapshot.max_wait_by_field_of(server.spec)) for server in snapshot.servers]
    return [
        f"ModelServer {key}: {' and '.join(waits)} {'hold' if len(waits) > 1 else 'holds'} requests for up to"
        f" {sum(waits.values()):g} s, and Envoy waits an hour at most; write timeouts of 59m or less"
        for key, waits in found
        if waits and sum(waits.values()) + snapshot.gateway.message_timeout > LONGEST_MESSAGE_TIMEOUT_S
    ]


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
    names = sorted({name for route in snapshot.routes for name in route.spec.model_names})
    return [
        f"no ModelRoute serves '{model}' of the {whose}; {suggest_similar(model, names)}"
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
    """HTTPRoutes and GRPCRoutes for hosts that no listener of theirs takes."""
    listeners = snapshot.gateway.listeners
    for route in snapshot.gateway_api_routes if listeners else ():
        attached = [
            (one.hostname or ANY_HOST).lower() for one in listeners if is_attached(route.spec.parent_refs, one.name)
        ]
        hosts = [one.lower() for one in route.spec.hostnames] or [ANY_HOST]
        if not any(have_common_hosts(own, host) for own in attached for host in hosts):
            yield (
                f"{type(route).__name__} {route.metadata.key}: no listener that it is attached to takes its hostnames "
                f"({', '.join(hosts)}); change hostnames, or the listener's hostname"
            )


def _without_steps(snapshot: Snapshot) -> Iterator[str]:
    """Routes of transformers and explainers that nothing can call."""
    if snapshot.gateway.steps is None:
        for route in snapshot.routes:
            if route.spec.callers == "Steps":
                yield (
                    f"ModelRoute {route.metadata.key}: callers: Steps has no effect, as the GatewayConfig does not say"
                    " where they call; write steps: 127.0.0.1:8081, or leave callers out"
                )


def _merged(snapshot: Snapshot) -> Iterator[str]:
    """HTTPRoutes and GRPCRoutes with a host in common, of which a cluster's gateway serves the older alone."""
    listeners = snapshot.gateway.listeners
    for calls in snapshot.grpc_routes:
        for other in snapshot.http_routes:
            if any(
                (not listeners or all(is_attached(one.spec.parent_refs, name) for one in (calls, other)))
                and any(
                    have_common_hosts(one.lower(), two.lower())
                    for one in calls.spec.hostnames or (ANY_HOST,)
                    for two in other.spec.hostnames or (ANY_HOST,)
                )
                for name in [one.name for one in listeners] or [""]
            ):
                yield (
                    f"GRPCRoute {calls.metadata.key}: the HTTPRoute {other.metadata.key} has a host in common with it; "
                    "here both are served, and in a cluster the older alone; write other hostnames"
                )


def _fits(pattern: str, name: str) -> bool:
    """A star stands at the beginning or at the end."""
    if pattern.startswith("*"):
        return name.endswith(pattern[1:])
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _unreadable_files(snapshot: Snapshot, directory: Path) -> Iterator[str]:
    """Files that documents name. They may be elsewhere than where this command runs, so they are no mistake."""
    for who, name, effect in dict.fromkeys(_named_files(snapshot)):
        file = directory / name
        if problem := _problem_of(file):
            yield f"{who}: '{file}' cannot be read here: {problem}; without it {effect}"


def _named_files(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Who names a file, its name, and what becomes of requests without it."""
    unserved, refused = "this is not served", "these callers get 401"
    for listener in snapshot.gateway.listeners:
        yield from ((f"listener {listener.name}", name, unserved) for name in listener.referenced_files)
    for server in snapshot.servers:
        who, tokenizer = f"ModelServer {server.metadata.key}", server.spec.tokenizer.path
        yield from ((who, name, unserved) for name in server.spec.connection.referenced_files)
        if tokenizer is not None:
            yield who, f"{tokenizer}/tokenizer.json", "the index of prefixes is approximate"
    for picker, file in snapshot.picker_files.items():
        yield from ((picker, name, "engines' metrics are not read") for _, name in file.referenced_files())
    if snapshot.gateway.tracing is not None:
        yield from (("tracing", name, "no spans are sent") for name in snapshot.gateway.tracing.referenced_files)
    for guard in snapshot.gateway.guards:
        yield from ((f"guard {guard.name}", name, "it is not asked") for name in guard.connection.referenced_files)
    asked = snapshot.gateway.authentication
    if asked is not None:
        yield from ((f"key {one.name}", one.key_file, refused) for one in asked.api_keys if one.key_file is not None)
        yield from (
            (f"issuer {one.name}", one.referenced_file, refused) for one in asked.jwt if one.referenced_file is not None
        )


def _problem_of(file: Path) -> str:
    """Why ``file`` cannot be read, empty if it can be."""
    try:
        open_regular_file(file).close()
    except OSError as error:
        return str(error.strerror)
    return ""


class _InstalledPlugins:
    """A PickerConfigChecker with the installed plugins, which are loaded once, and only if there is a file."""

    def __init__(self) -> None:
        self._check: PickerConfigChecker | None = None

    def __call__(self, file: PickerFile) -> Sequence[str]:
        """Notes on parts of the file without effect here; raises ConfigInvalid with every mistake."""
        if self._check is None:
            # numpy, which plugins need, takes longer to load than the whole of this command
            from extproc.llmd.picker_builder import InstalledPluginChecker  # noqa: PLC0415

            self._check = InstalledPluginChecker()
        return self._check(file)


def _notes(snapshot: Snapshot) -> list[str]:
    """Notes on EndpointPickerConfigs' parts without effect; raises ConfigInvalid, also for a plugin that fails."""
    if not snapshot.picker_files:
        return []
    # numpy, which plugins need, takes longer to load than the whole of this command
    from extproc.llmd.picker_builder import picker_notes  # noqa: PLC0415

    return picker_notes(snapshot, tries_plugins=True)


def _summary(snapshot: Snapshot) -> str:
    endpoints = sum(len(server.spec.endpoints) for server in snapshot.servers)
    parts = [
        pluralize(len(snapshot.routes), "ModelRoute"),
        f"{pluralize(len(snapshot.servers), 'ModelServer')} with {pluralize(endpoints, 'endpoint')}",
    ]
    others = [kind for kind in DOCUMENT_KINDS if kind.field and kind.field not in ("routes", "servers")]
    counts = ((len(getattr(snapshot, kind.field)), kind.name) for kind in others)
    parts.extend(pluralize(count, name) for count, name in counts if count)
    if snapshot.gateway.listeners:
        parts.append(pluralize(len(snapshot.gateway.listeners), "listener"))
    authentication = snapshot.gateway.authentication
    # one that is being rotated is there twice
    keys = {} if authentication is None else {one.name: one for one in authentication.api_keys}
    owners: list[ModelRouteSpec | ApiKey] = [*(route.spec for route in snapshot.routes), *keys.values()]
    counted = {
        "API key": len(keys),
        "rate limit": sum(len(one.rate_limits) for one in owners),
        "budget": len(snapshot.gateway.budgets) + sum(len(one.budgets) for one in owners),
    }
    parts.extend(pluralize(count, name) for name, count in counted.items() if count)
    return ", ".join(parts)


def ineffective_objectives(snapshot: Snapshot) -> Iterator[str]:
    """Objectives that are never judged, alerts that can never fire, and targets that contradict each other."""
    specs = {server.metadata.key: server.spec for server in snapshot.servers}
    for route in snapshot.routes:
        servers = route.server_keys
        unreported = sorted(key for key in servers & specs.keys() if specs[key].stream_usage != "Always")
        lowest = min((rule.priority for rule in route.spec.rules), default=0)
        ordered = sorted(route.spec.slo, key=_falling_priority)
        for index, one in enumerate(ordered):
            where = f"ModelRoute {route.metadata.key}: the class '{one.name}' of slo"
            if 1.0 - one.share >= 1.0 / _FASTEST_BURN:
                yield (
                    f"{where} promises {one.share:.4g}: the alert at {_FASTEST_BURN:g} times the error budget can never"
                    " fire, as all requests together do not burn so much; write a larger share, or an alert of your own"
                )
            if one.tpot is not None and unreported:
                yield (
                    f"{where} has tpot, and ModelServer {unreported[0]} has streamUsage: AsRequested: streams whose"
                    " clients do not ask for usage are not judged; write Always, or leave tpot out"
                )
            above = ordered[index - 1].priority if index else None
            if not snapshot.objectives and above is not None and lowest >= above:
                yield (
                    f"{where} has no requests: all rules have priorities of the class '{ordered[index - 1].name}' or"
                    " above, and there is no InferenceObjective; write a lower priority in a rule, or remove the class"
                )
            for rule in route.spec.rules:
                if one.ttft is not None and rule.ttft_target is not None and rule.ttft_target > one.ttft:
                    yield (
                        f"{where} promises ttft {one.ttft}, and a rule has ttftTarget {rule.ttft_target}, by which the"
                        " queue orders; write the shorter one there"
                    )


def _falling_priority(one: Slo) -> int:
    return -one.priority


def limits_without_identity(snapshot: Snapshot) -> Iterator[str]:
    """Limits for each tenant, user or key where requests do not identify their caller: all share one."""
    gateway = snapshot.gateway
    missing = _unknown_callers(gateway.authentication, is_told=gateway.clients == "Trusted")
    for route in snapshot.routes:
        for per in dict.fromkeys(one.per for one in route.spec.rate_limits):
            if per in missing:
                what = f"ModelRoute {route.metadata.key}: the limit per: {per}"
                yield f"{what} is one limit for all clients together, as {missing[per]}, or write per: Route"


def _rules_without_bodies(spec: ModelRouteSpec) -> Iterator[str]:
    for number, rule in enumerate(spec.rules):
        if rule.reads_body:
            yield f"rules[{number}].modelMatch never holds, as bodies are not read of"
        if rule.parameter_override_field:
            yield f"rules[{number}]: {rule.parameter_override_field} changes nothing, as bodies are not read of"


def ineffective_path_model_fields(snapshot: Snapshot) -> Iterator[str]:
    """Parts of ModelRoutes that need what is not read where the path names the model."""
    protocols = {server.metadata.key: server.spec.protocol for server in snapshot.servers}
    for route in snapshot.routes:
        keys = {route.server_key(target) for rule in route.spec.rules for target in rule.target_models}
        found = {protocols[key] for key in keys & protocols.keys()}
        by_path = sorted(found - {"OpenAI"})
        if not by_path:
            continue
        who, spec = f"ModelRoute {route.metadata.key}", route.spec
        in_paths = sorted(found & UNREAD_PROTOCOLS)
        for name in spec.model_names if in_paths else ():
            if "/" in name or name in {".", ".."}:
                yield f"{who}: '{name}' is no segment of a path, in which protocol {in_paths[0]} names it; rename it"
        if "OpenAI" in found:
            continue
        for limit in spec.rate_limits:
            if (limit.input_tokens, limit.output_tokens, limit.total_tokens) != (None, None, None):
                yield (
                    f"{who}: requests of protocol {by_path[0]} have no tokens, as their bodies are not read; limit"
                    " requests"
                )
        yield from (f"{who}: {note} protocol {by_path[0]}" for note in _rules_without_bodies(spec))
        if spec.guard is not None:
            yield f"{who}: the guard '{spec.guard.name}' gets no body, as that is not read with protocol {by_path[0]}"


def _budgets(snapshot: Snapshot) -> Iterator[tuple[str, Sequence[Budget], frozenset[str]]]:
    """Budgets by the object that has them, with the ModelServers whose requests they count."""
    every = frozenset(server.metadata.key for server in snapshot.servers)
    yield "GatewayConfig", snapshot.gateway.budgets, every
    keys = () if snapshot.gateway.authentication is None else snapshot.gateway.authentication.api_keys
    # thousands may have the same
    yield "API keys", [one.as_budget() for one in dict.fromkeys(one for key in keys for one in key.budgets)], every
    for route in snapshot.routes:
        servers = route.server_keys
        yield f"ModelRoute {route.metadata.key}", route.spec.budgets, every & servers


def budgets_without_identity(snapshot: Snapshot) -> Iterator[str]:
    """Budgets for each tenant, user or key, or for some, where requests do not identify their caller."""
    gateway = snapshot.gateway
    missing = _unknown_callers(gateway.authentication, is_told=gateway.clients == "Trusted")
    known = _known_callers(gateway.authentication)
    for where, budgets, _ in _budgets(snapshot):
        for one in budgets:
            what = f"{where}: the {_named(one)}"
            if one.per in missing:
                yield f"{what} is one budget for all clients together, as {missing[one.per]}, or write per: Route"
            for per, names in {"Tenant": one.tenants, "User": one.users, "ApiKey": one.api_keys}.items():
                if names and per in missing:
                    yield f"{what} holds for nobody, as {missing[per]}"
                for name in sorted(set(names) - known.get(per, frozenset(names))):
                    yield f"{what}: no key is, or is of, '{name}'; {suggest_similar(name, known[per])}"


def _named(budget: Budget) -> str:
    shown = budget_title(budget.name, "a key itself")
    return f"budget '{shown}'" if shown == budget.name else shown


def payload_logs_without_effect(snapshot: Snapshot) -> Iterator[str]:
    """Payload logs of which one half is missing: where they go, or which routes log."""
    logged = [one for one in snapshot.routes if one.spec.payload_log is not None]
    if snapshot.gateway.payload_log is None:
        for one in logged:
            what = f"ModelRoute {one.metadata.key}: has payloadLog, but nothing is kept"
            yield f"{what}, as the GatewayConfig does not say where; write payloadLog there, too"
    elif not logged:
        yield "GatewayConfig: has payloadLog, but no ModelRoute has; write it there, too, or leave it out"


def ineffective_response_caches(snapshot: Snapshot) -> Iterator[str]:
    """Response caches that never answer, and those that more callers share than it looks."""
    gateway = snapshot.gateway
    missing = _unknown_callers(gateway.authentication, is_told=gateway.clients == "Trusted")
    protocols = {server.metadata.key: server.spec.protocol for server in snapshot.servers}
    for route in snapshot.routes:
        cache = route.spec.cache
        if cache is None:
            continue
        what = f"ModelRoute {route.metadata.key}: the cache"
        if cache.scope in missing:
            yield f"{what} of scope {cache.scope} is one for all clients together, as {missing[cache.scope]}"
        targets = {route.server_key(target) for rule in route.spec.rules for target in rule.target_models}
        known = {protocols[key] for key in targets & protocols.keys()}
        if known and "OpenAI" not in known:
            yield f"{what} never answers, as bodies of requests with protocol {' or '.join(sorted(known))} are not read"


def guards_without_effect(snapshot: Snapshot) -> Iterator[str]:
    """Guards of which one half is missing: where they are, or whose requests they get."""
    known, named = [one.name for one in snapshot.gateway.guards], set[str]()
    for route in snapshot.routes:
        guard = route.spec.guard
        if guard is None:
            continue
        named.add(guard.name)
        if guard.name not in known:
            what = f"ModelRoute {route.metadata.key}: the GatewayConfig has no guard '{guard.name}'"
            effect = "go on without it" if guard.failure_mode == "Open" else "are refused"
            yield f"{what}, so its requests {effect}; {suggest_similar(guard.name, known)}"
    for name in sorted({*known} - named):
        yield f"GatewayConfig: no ModelRoute names the guard '{name}'; write guard there, or leave it out"


def unpriced_servers(snapshot: Snapshot) -> Iterator[str]:
    """ModelServers without a price where others have one, and budgets of money that count their requests."""
    without = {server.metadata.key for server in snapshot.servers if not server.spec.pricing}
    if len(without) < len(snapshot.servers):
        for key in sorted(without):
            what = "has no price while others have, so its requests are unpriced and spend no money budget"
            yield f"ModelServer {key}: {what}; write pricing"
    for where, budgets, servers in _budgets(snapshot):
        for one in budgets:
            if one.max.money is not None and servers & without:
                free = ", ".join(sorted(servers & without)[:_MOST_NAMED])
                what = f"{where}: the {_named(one)} is of money"
                yield f"{what}, and requests of {free} are unpriced and spend no money budget; write pricing"


def mixed_currencies(snapshot: Snapshot) -> Iterator[str]:
    """Budgets of money that count costs in another currency than their own: amounts are added as they are."""
    used = {server.metadata.key: {one.currency for one in server.spec.pricing} for server in snapshot.servers}
    for where, budgets, servers in _budgets(snapshot):
        found = {currency for server in servers for currency in used[server]}
        for one in budgets:
            if one.max.money is not None and found - {one.currency}:
                others = ", ".join(sorted(found - {one.currency}))
                yield (
                    f"{where}: the {_named(one)} is in {one.currency}, and prices of its ModelServers are in"
                    f" {others}, which count as if they were {one.currency}; write prices in one currency, or a budget"
                    " for each route"
                )


def tiers_without_effect(snapshot: Snapshot) -> Iterator[str]:
    """Tiers that cannot be compared, that have no objective to hold, or whose requests wait nowhere."""
    servers = {server.metadata.key: server.spec for server in snapshot.servers}
    for route in snapshot.routes:
        for number, rule in enumerate(route.spec.rules):
            if rule.tiers is not None:
                keys = (route.server_key(one) for one in rule.target_models if one.weight)
                found = {key: servers[key] for key in keys if key in servers}
                control = {key: snapshot.flow_control_of(spec, route.metadata.namespace) for key, spec in found.items()}
                for note in _tier_notes(rule, found, {key for key, one in control.items() if one is None}):
                    yield f"ModelRoute {route.metadata.key}: rules[{number}].tiers: {note}"


def mirrors_without_effect(snapshot: Snapshot) -> Iterator[str]:
    """Mirrors that no copy can go to."""
    protocols = {server.metadata.key: server.spec.protocol for server in snapshot.servers}
    for route in snapshot.routes:
        for number, rule in enumerate(route.spec.rules):
            protocol = "OpenAI" if rule.mirror is None else protocols.get(route.server_key(rule.mirror), "OpenAI")
            if protocol != "OpenAI":
                yield (
                    f"ModelRoute {route.metadata.key}: rules[{number}].mirror: copies have JSON of protocol OpenAI, and"
                    f" the ModelServer has protocol {protocol}; name another one"
                )


def fallbacks_without_effect(snapshot: Snapshot) -> Iterator[str]:
    """Fallbacks that no request can go to."""
    servers = {server.metadata.key: server.spec for server in snapshot.servers}
    for route in snapshot.routes:
        for number, rule in enumerate(route.spec.rules):
            where = f"ModelRoute {route.metadata.key}: rules[{number}].fallback"
            if rule.fallback and route.spec.model_name is None:
                yield f"{where}: requests for LoRA adapters go to no fallback, and there is no modelName; remove it"
            targets = [servers[route.server_key(one)] for one in rule.target_models if one.weight]
            for one in rule.fallback:
                key = route.server_key(one)
                for note in _fallback_notes(snapshot, targets, servers[key]):
                    yield f"{where}: ModelServer {key} {note}"


def _fallback_notes(snapshot: Snapshot, targets: Sequence[ModelServerSpec], spec: ModelServerSpec) -> Iterator[str]:
    if spec.listed is not None and not spec.listed:
        yield "has no endpoints, so no request goes there; write endpoints, or remove it"
    if spec.pd_group is not None:
        yield "gets no request after an attempt elsewhere if another of its engines would compute the prompt"
    if any(one.pd_group is not None and one.pd_group.leg == "Sidecar" for one in targets):
        yield (
            "gets no request that has gone to a sidecar of a target with another engine for its prompt; write leg:"
            " Gateway there"
        )
    if any(one.stream_usage != spec.stream_usage for one in targets):
        yield "has another streamUsage, so no stream without usage can go on to it; write the same"
    # all attempts have one body
    missing = [one for one in TRANSLATABLE if not _takes(spec, one) and any(_takes(own, one) for own in targets)]
    if spec.accepts_translated_requests and missing:
        yield (
            f"gets requests of {' and '.join(missing)} only if they go there at once: after an attempt elsewhere"
            " nothing is translated; add the APIs to its apis if its engines have them"
        )
    if any(one.accepts_translated_requests for one in targets):
        yield "gets no request that was translated for a target of the rule, unless it goes there at once"
    default = snapshot.gateway.cache_isolation
    # a provider gets no salt
    engines = () if spec.provider is not None else targets
    if any((one.cache_isolation or default) != (spec.cache_isolation or default) for one in engines):
        yield "has another cacheIsolation, so requests would need another body there; write the same"


def _takes(spec: ModelServerSpec, api: str) -> bool:
    return spec.apis is None or api in spec.apis


def fallback_cycles(snapshot: Snapshot) -> Iterator[str]:
    """ModelServers that are each other's fallback: each gets the other's load when that fails."""
    leads: dict[str, set[str]] = {}
    for route in snapshot.routes:
        for rule in route.spec.rules:
            for target in rule.target_models:
                key = route.server_key(target)
                leads.setdefault(key, set()).update({route.server_key(one) for one in rule.fallback} - {key})
    reached = {key: _reached(leads, key) for key in leads}
    for first in sorted(leads):
        circle = sorted(one for one in reached[first] if first in reached.get(one, ()))
        # the first name speaks for all
        if circle and first == circle[0]:
            yield (
                f"ModelServer {first}: its requests fall back to {', '.join(circle[1:])}, and theirs to it; if one"
                " fails, the other has the load of both, up to the budget (rules[].retry): see that it can carry that"
            )


def _reached(leads: Mapping[str, set[str]], start: str) -> set[str]:
    found, ends = set[str](), [start]
    while ends:
        for one in leads.get(ends.pop(), set()) - found:
            found.add(one)
            ends.append(one)
    return found


def _tier_notes(rule: RouteRule, servers: Mapping[str, ModelServerSpec], without_queue: set[str]) -> Iterator[str]:
    every: Sequence[CostTierRouting | TierOverrides] = () if rule.tiers is None else (rule.tiers, *rule.tiers.classes)
    for key, spec in servers.items():
        if not spec.pricing:
            yield f"ModelServer {key} has no price, and counts as the dearest; write pricing"
    currencies = sorted({one.currency for spec in servers.values() for one in spec.pricing})
    if len(currencies) > 1:
        yield f"costs in {' and '.join(currencies)} cannot be compared; write prices in one currency"
    if rule.ttft_target is None and all(one.ttft is None and one.tpot is None for one in every):
        yield "there is no objective, so the cheapest ModelServer gets all requests; write ttft or tpot"
    if any(one.wait for one in every):
        for key in sorted(without_queue):
            yield f"no request waits for ModelServer {key}; write flowControl there, or no wait"


def limits_without_callers(snapshot: Snapshot) -> Iterator[str]:
    """Limits for tenants, users or keys that no caller has."""
    gateway = snapshot.gateway
    missing = _unknown_callers(gateway.authentication, is_told=gateway.clients == "Trusted")
    known = _known_callers(gateway.authentication)
    for route in snapshot.routes:
        for index, limit in enumerate(route.spec.rate_limits):
            named = {"Tenant": limit.tenants, "User": limit.users, "ApiKey": limit.api_keys}
            for per, names in named.items():
                where = f"ModelRoute {route.metadata.key}: rateLimits[{index}]"
                if names and per in missing:
                    yield f"{where} holds for nobody, as {missing[per]}"
                elif per in known:
                    for name in sorted(set(names) - known[per]):
                        yield f"{where}: no key is, or is of, '{name}'; {suggest_similar(name, known[per])}"


def _known_callers(asked: Authentication | None) -> dict[str, frozenset[str]]:
    """All that there are, where the configuration lists every key; by what limits may be for."""
    if asked is None or not asked.api_keys or asked.api_key_secrets:
        return {}
    keys = asked.api_keys
    return {
        "Tenant": frozenset(one.tenant for one in keys),
        "User": frozenset(one.user for one in keys),
        "ApiKey": frozenset(one.name for one in keys),
    }


def _unknown_callers(asked: Authentication | None, *, is_told: bool) -> dict[str, str]:
    """Why no request has a tenant, user or key, and what to write; by limits' ``per``. ``is_told``: gateways in front
    send tenants and users in headers.
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
    named = {server for route in snapshot.routes for server in route.server_keys}
    named |= {backend_key(route, ref) for route in snapshot.gateway_api_routes for ref, _ in backend_refs(route)}
    for server in snapshot.servers:
        if server.metadata.key not in named:
            yield (
                f"ModelServer {server.metadata.key}: no ModelRoute, HTTPRoute or GRPCRoute names it, so no request"
                f" comes to it; write a ModelRoute with targetModels: [{{modelServerName: {server.metadata.name}}}],"
                f" remove it, or run extproc with --pool {server.metadata.name} behind a gateway that something else"
                " configures"
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


def wildcards_in_model_names(snapshot: Snapshot) -> Iterator[str]:
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


def cache_isolation_gaps(snapshot: Snapshot) -> Iterator[str]:
    """Caches that are to be kept apart, and that older engines share for one of the APIs.

    Only where isolation is configured: that of tenants by default, with authentication, is not reported.
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


def unusable_prefill_decode_pairs(snapshot: Snapshot) -> Iterator[str]:
    """Encoders, fields of a leg that nobody makes, and groups in which no pair can be formed."""
    for server in snapshot.servers:
        spec, name = server.spec, server.metadata.key
        if encoders := [one.address for one in spec.endpoints if _ENCODE in one.labels.values()]:
            yield f"ModelServer {name}: {_few(encoders)} have the role encode; {NO_ENCODE_STAGE}"
        if (group := spec.pd_group) is None:
            continue
        if group.connector not in {None, *SIDECAR_CONNECTORS} and not group.has_gateway_prefill:
            yield (
                f"ModelServer {name}: pdGroup.connector has no effect with leg: Sidecar; write leg: Gateway, so that"
                " extproc requests prefills itself, or leave connector out, as LMCache's prefill and decode over NIXL"
                " need a sidecar"
            )
        if group.transfer_port is not None and not group.effective_transfer_port:
            yield (
                f"ModelServer {name}: pdGroup.transferPort has no effect with this leg and connector: extproc writes no"
                " port to an engine; leave it out"
            )
        prefilling, decoding = (
            [one for one in spec.endpoints if role.items() <= one.labels.items()]
            for role in (group.prefill_labels, group.decode_labels)
        )
        if both := [one.address for one in prefilling if one in decoding]:
            yield (
                f"ModelServer {name}: {_few(both)} match both prefillLabels and decodeLabels, and may be asked to"
                " prefill what they decode themselves; give each role labels of its own"
            )
        if neither := [one.address for one in spec.endpoints if one not in prefilling and one not in decoding]:
            yield (
                f"ModelServer {name}: {_few(neither)} match neither prefillLabels nor decodeLabels, and get no request;"
                " see the labels of these endpoints"
            )
        groups = ({one.labels.get(group.group_key, "") for one in role} for role in (prefilling, decoding))
        if spec.endpoints and not set.intersection(*groups):
            yield (
                f"ModelServer {name}: pdGroup forms no pair, as no group has engines with prefillLabels and engines"
                " with decodeLabels; see the endpoints' labels, and groupKey"
            )


def _few(addresses: Sequence[str]) -> str:
    """The first three, and how many more."""
    shown = ", ".join(addresses[:3])
    return shown if len(addresses) <= 3 else f"{shown} and {len(addresses) - 3} more"


def undersized_prefix_indexes(snapshot: Snapshot) -> Iterator[str]:
    """So many endpoints that the index keeps less of each than it would of a few."""
    endpoints = sum(len(one.spec.endpoints) for one in snapshot.servers)
    if max_blocks_per_endpoint(endpoints) < MOST_BLOCKS:
        yield (
            f"{endpoints} endpoints: a process remembers {MOST_BLOCKS_IN_ALL} blocks of prompts, so"
            f" {max_blocks_per_endpoint(endpoints)} of each instead of {MOST_BLOCKS}, and knows less of what large"
            " caches hold; write kvEvents, by which engines tell it, or serve a part of the models from another gateway"
        )


def undersized_kv_indexes(snapshot: Snapshot) -> Iterator[str]:
    """So many sources of KV events that less of each can be tracked than of a few."""
    sources = kv_event_source_count(snapshot.servers)
    blocks_of_each = kv_event_decoder.max_blocks_per_source(sources)
    if blocks_of_each < kv_event_decoder.MOST_BLOCKS:
        yield (
            f"{sources} ranks of engines publish KV events: a process tracks {kv_event_decoder.MOST_BLOCKS_IN_ALL}"
            f" blocks, so {blocks_of_each} of each; of engines with more it uses its own records;"
            " write larger blocks (--block-size), or serve a part of the models from another gateway"
        )


def too_many_limit_levels(snapshot: Snapshot) -> Iterator[str]:
    """More levels of limits than a process keeps, if every tenant and key uses every route."""
    gateway = snapshot.gateway
    keys = () if gateway.authentication is None else gateway.authentication.api_keys
    tenants = {one.tenant for one in keys} | {one.name for one in gateway.tenants}
    callers = {"Tenant": len(tenants), "ApiKey": len(keys)}
    levels = sum(
        _most_accounts(limit, callers) * sum(getattr(limit, resource) is not None for resource in RESOURCES)
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


def _most_accounts(limit: RateLimit, callers: Mapping[str, int]) -> int:
    """Of a limit: those whom it names, or else all callers."""
    named = {"Tenant": limit.tenants, "ApiKey": limit.api_keys}.get(limit.per)
    return len(named) if named else callers.get(limit.per, 1)
