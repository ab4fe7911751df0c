# SPDX-License-Identifier: Apache-2.0
"""Routes of models: by extproc's decision, or without extproc by the model's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from envoy_data_plane.envoy.config.core.v3 import DataSource, HeaderValue, HeaderValueOption
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteActionClusterNotFoundResponseCode,
    RouteActionMaxStreamDuration,
    RouteMatch,
    WeightedCluster,
    WeightedClusterClusterWeight,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import (
    MetadataMatcher,
    MetadataMatcherPathSegment,
    OrMatcher,
    RegexMatchAndSubstitute,
    RegexMatcher,
    StringMatcher,
    ValueMatcher,
)

from controller.bundle.envoy.clusters import server_cluster_name
from controller.bundle.envoy.envoy_json import PackedMessage, duration, to_plain
from controller.bundle.envoy.extproc_fail_open import (
    CHANGES_FILTER,
    FALLBACK_MODEL,
    FALLBACK_NAMESPACE,
    body_change_config,
)
from controller.bundle.envoy.fallback import fallback_retry_policy, route_across_clusters
from controller.bundle.envoy.local_replies import anthropic_error_answer, error_answer
from controller.bundle.envoy.mirror import has_mirror, mirrored_routes
from controller.bundle.envoy.request_translation import needs_translation, translator_route
from controller.bundle.envoy.response_filters import redirect_status_matcher
from extproc.api.fallback import REFUSALS, attempts_route_name, retried_failures
from extproc.api.model_server import TrafficPolicy
from extproc.wire_names import (
    APIS_BY_PATH,
    CALL_ROOTS,
    GRPC_PROTOCOLS,
    MODELS_PATH,
    PATH_APIS,
    PLAIN_IN_PATHS,
    POLICY_HEADER,
    SERVER_HEADER,
    paths_of_apis,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from envoy_data_plane.google.protobuf import Any

    from controller.bundle.envoy.envoy_json import BuildMemo
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.model_route import ModelMatch, ModelRoute, RouteRule, StringMatch
    from extproc.api.model_server import ModelServer
    from extproc.wire_names import ModelPaths

# A route or another resource of xDS as plain data; per-route configuration of filters, by their names.
Plain = dict[str, object]
Configs = Mapping[str, object]
_ANTHROPIC: Final = tuple(path for path, api in APIS_BY_PATH.items() if api.spec.errors == "anthropic")
# There is no such cluster.
_NOWHERE: Final = "attache-nowhere"
_DEFAULT_POLICY: Final = TrafficPolicy()
# ``reset`` covers an engine that dies while a request waits for its first byte; after that byte Envoy retries nothing.
_RETRY_ON: Final = "connect-failure,refused-stream,reset,retriable-status-codes,retriable-headers"
# Of gRPC: not what the request may be the reason for.
_RETRY_CALLS_ON: Final = "cancelled,resource-exhausted,unavailable"
_IS_READ: Final = HeaderMatcher(name=":method", string_match=StringMatcher(safe_regex=RegexMatcher(regex="GET|HEAD")))


def routes_decided_by_extproc(snapshot: Snapshot, memo: BuildMemo) -> list[dict[str, object]]:
    """Routes of decided requests: to the cluster that extproc names, one for each time limit and number of retries.

    A route for each ModelServer would be scanned for each request, and repeated in each host. The last route matches
    ModelServers that extproc already uses and Envoy does not have yet.
    """
    translated = [memo.get(translator_route)] if needs_translation(snapshot.servers) else []
    found = [*translated, *_with_fallbacks(snapshot, memo), *routes_by_traffic_policy(snapshot, memo)]
    return [*mirrored_routes(found), *found] if has_mirror(snapshot.routes) else found


def routes_by_traffic_policy(snapshot: Snapshot, memo: BuildMemo) -> list[dict[str, object]]:
    """Those of requests that go to one ModelServer alone."""
    calls = has_grpc_servers(snapshot)
    policies = {
        server.spec.traffic_policy.route_settings_text: server.spec.traffic_policy for server in snapshot.servers
    }
    named = [memo.get(_decided, name, policies[name], calls) for name in sorted(policies) if name]
    return [*named, memo.get(_decided, "", _DEFAULT_POLICY, calls)]


def has_grpc_servers(snapshot: Snapshot) -> bool:
    """Whether some ModelServer is called by gRPC."""
    return any(one.spec.protocol in GRPC_PROTOCOLS for one in snapshot.servers)


def _with_fallbacks(snapshot: Snapshot, memo: BuildMemo) -> list[dict[str, object]]:
    """Routes of decided requests whose rule has fallbacks: one for each time limit and set of reasons."""
    servers = {server.metadata.key: server for server in snapshot.servers}
    found: dict[str, tuple[ModelServer, RouteRule]] = {}
    for route in snapshot.routes:
        for rule in route.spec.rules:
            for one in rule.all_targets if rule.fallback else ():
                server = servers[route.server_key(one)]
                name = attempts_route_name(server.spec.traffic_policy, rule.fallback, rule.fallback_retry)
                found.setdefault(name, (server, rule))
    calls = has_grpc_servers(snapshot)
    return [memo.get(_decided_with_fallbacks, name, *found[name], calls) for name in sorted(found)]


def _decided_with_fallbacks(name: str, server: ModelServer, rule: RouteRule, calls: bool) -> dict[str, object]:
    """``server``, ``rule``: any of those with this name."""
    match = RouteMatch(prefix="/", headers=[_is_decided(), _has_policy(name)])
    action = _with_policy(RouteAction(), server.spec.traffic_policy)
    # extproc writes how many attempts there are
    action.retry_policy = fallback_retry_policy(_any_retries(), rule.fallback, rule.fallback_retry, attempts=1)
    if calls:
        configure_grpc(action, server.spec.traffic_policy)
    route = Route(name=f"fallback/{name}", match=match, route=action)
    return route_across_clusters(route, [[(server.metadata.key, 1)]], is_decided=True)


def _is_decided() -> HeaderMatcher:
    return HeaderMatcher(name=SERVER_HEADER, present_match=True)


def _has_policy(name: str) -> HeaderMatcher:
    return HeaderMatcher(name=POLICY_HEADER, string_match=StringMatcher(exact=name))


def _any_retries() -> RetryPolicy:
    return engine_retry_policy(1) or RetryPolicy()


def configure_grpc(action: RouteAction, policy: TrafficPolicy) -> None:
    """Calls of gRPC fail with status 200; those that fail without a message can be tried again. Their clients say how
    long they wait.
    """
    action.max_stream_duration = RouteActionMaxStreamDuration(grpc_timeout_header_max=duration(policy.timeout))
    if action.retry_policy is not None:
        action.retry_policy.retry_on += f",{_RETRY_CALLS_ON}"


def _decided(name: str, policy: TrafficPolicy, calls: bool) -> dict[str, object]:
    headers = [_is_decided(), *([_has_policy(name)] if name else [])]
    action = _with_policy(RouteAction(cluster_header=SERVER_HEADER), policy)
    if calls:
        configure_grpc(action, policy)
    match = RouteMatch(prefix="/", headers=headers)
    return to_plain(Route(name=f"decided/{name or 'default'}", match=match, route=action))


def default_retry_policy() -> dict[str, object]:
    """Of the host with ``routes_without_extproc``: thousands of routes, and most have these."""
    return to_plain(engine_retry_policy(_DEFAULT_POLICY.retry.attempts) or RetryPolicy(num_retries=0))


def routes_without_extproc(
    snapshot: Snapshot, routes: Sequence[ModelRoute], memo: BuildMemo
) -> list[dict[str, object]]:
    """Balancing by model name, with the rules and weights that extproc applies, and the same renaming.

    ``routes``: those of ``snapshot`` that are served here.
    """
    servers = {server.metadata.key: server for server in snapshot.servers}
    found = [to_plain(_models_list(routes)), *_not_translated(routes, servers)]
    for route in routes:
        named = [servers[route.server_key(one)] for rule in route.spec.rules for one in rule.all_targets]
        found.extend(memo.get(_of_route, route, *named))
    return found


def _not_translated(routes: Sequence[ModelRoute], servers: Mapping[str, ModelServer]) -> Iterator[dict[str, object]]:
    """Refusals of requests that need a translation, which only extproc orders: a pair for each set of APIs."""
    found: dict[tuple[str, ...], list[str]] = {}
    for route in routes:
        specs = [one.spec for one in _servers_of(route, servers)]
        if any(one.accepts_translated_requests for one in specs) and all(one.apis for one in specs):
            served = tuple(sorted({path for one in specs for path in paths_of_apis(one.apis or ())}))
            found.setdefault(served, []).extend(route.spec.model_names)
    of_anthropic = HeaderMatcher(name=":path", string_match=_path_in(_ANTHROPIC))
    for served, names in found.items():
        message = f"At the moment this model is served under {', '.join(served)} alone; write there, or try again soon."
        others = HeaderMatcher(name=":path", string_match=_path_in(served), invert_match=True)
        openai = error_answer(400, message, "invalid_request_error", "no_translation")
        for headers, answer in (([others, of_anthropic], anthropic_error_answer(400, message)), ([others], openai)):
            match = RouteMatch(prefix="/", headers=headers, dynamic_metadata=[_asks_for(names)])
            yield to_plain(Route(name="not-translated", match=match, direct_response=answer))


def _path_in(paths: Iterable[str]) -> StringMatcher:
    return StringMatcher(safe_regex=RegexMatcher(regex=f"({'|'.join(map(re.escape, paths))})(\\?.*)?"))


def _servers_of(route: ModelRoute, servers: Mapping[str, ModelServer]) -> list[ModelServer]:
    """Those that its rules name, in order, one for each target."""
    return [servers[route.server_key(target)] for rule in route.spec.rules for target in rule.target_models]


def path_routes(snapshot: Snapshot, routes: Sequence[ModelRoute], configs: Configs, memo: BuildMemo) -> Iterator[Plain]:
    """Routes of requests whose path names the model, so that their bodies need not be read. ``configs``: of filters,
    to that effect. ``routes``: those that are served here.

    Filters obey the first route that matches, so these stand before the one that has bodies read. The decision of
    extproc leads to another route. Without extproc, where that may be, the model's own route decides.
    """
    servers = {server.metadata.key: server for server in snapshot.servers}
    spoken = {one.spec.protocol for one in servers.values()}
    roots = dict.fromkeys(paths.root for api, paths in PATH_APIS if api.spec.protocol in spoken)
    if not roots:
        return
    if snapshot.gateway.failure_mode == "Open":
        for route in routes:
            for one in memo.get(_by_path_of_route, route, *_servers_of(route, servers)):
                yield {**one, "typed_per_filter_config": configs}
    for root in roots:
        yield {**memo.get(_by_path, root), "typed_per_filter_config": configs}


def grpc_routes(snapshot: Snapshot, configs: Configs, memo: BuildMemo) -> Iterator[Plain]:
    """Routes of calls of gRPC. ``configs``: of filters, by which extproc alone reads the messages. Without its decision
    nobody knows their model.
    """
    for root in CALL_ROOTS if has_grpc_servers(snapshot) else ():
        yield {**memo.get(_by_call, root), "typed_per_filter_config": configs}


def _by_call(root: str) -> Plain:
    return to_plain(
        Route(
            name=f"by-call{root}",
            match=RouteMatch(prefix=root),
            # answers 503; a route that answers by itself has no limit of the size of bodies
            route=RouteAction(cluster=_NOWHERE),
        )
    )


def _by_path(root: str) -> Plain:
    return to_plain(Route(name=f"by-path{root}", match=RouteMatch(prefix=root), route=not_found_action()))


def not_found_action() -> RouteAction:
    """Answers 404 as a route that leads somewhere: for one that answers by itself, Envoy has no policy of other
    origins.
    """
    return RouteAction(
        cluster=_NOWHERE, cluster_not_found_response_code=RouteActionClusterNotFoundResponseCode.NOT_FOUND
    )


def _by_path_of_route(route: ModelRoute, *servers: ModelServer) -> list[Plain]:
    """``servers``: see ``_servers_of``."""
    found = []
    remaining = iter(servers)
    for number, rule in enumerate(route.spec.rules):
        pairs = [(next(remaining), target.weight) for target in rule.target_models]
        for api, paths in PATH_APIS:
            targets = [
                (server, weight) for server, weight in pairs if weight and server.spec.protocol == api.spec.protocol
            ]
            for name in route.spec.model_names if targets and not rule.reads_body else ():
                renames = name == route.spec.model_name
                made = _by_path_without_extproc(paths, name, rule, targets, renames=renames)
                made.name = f"without-extproc/{route.metadata.key}/{number}/{api.spec.protocol}/{name}"
                found.append(to_plain(made))
    return found


def _by_path_without_extproc(
    paths: ModelPaths, name: str, rule: RouteRule, targets: list[tuple[ModelServer, int]], *, renames: bool
) -> Route:
    """The paths of one model. Weights choose among engines that have the same name of the model: the path has one."""
    first = targets[0][0].spec.model
    targets = [(server, weight) for server, weight in targets if server.spec.model == first]
    verbs = "|".join(re.escape(verb) for verb in paths.verbs)
    rest = f"((/({'|'.join(paths.selectors)})/[A-Za-z0-9_-][A-Za-z0-9._-]*)?({verbs}))"
    action = _action(targets)
    wanted = paths.root + quote(first if renames else name, safe=PLAIN_IN_PATHS)
    root = re.escape(paths.root + quote(name, safe=PLAIN_IN_PATHS))
    action.regex_rewrite = RegexMatchAndSubstitute(
        pattern=RegexMatcher(regex=f"^{root}{rest}"), substitution=wanted + r"\1"
    )
    match = RouteMatch(safe_regex=RegexMatcher(regex=f"{root}{rest}"))
    if rule.model_match is not None:
        match.headers = list(_headers_of(rule.model_match))
    return Route(match=match, route=action)


def _headers_of(match: ModelMatch) -> Iterator[HeaderMatcher]:
    """A match's conditions, that of the path as one of the header with it: a route has one condition of the path."""
    for name, value in match.headers.items():
        yield HeaderMatcher(name=name.lower(), string_match=_string_matcher(value))
    uri = match.uri
    if uri is not None:
        regex = uri.regex if uri.prefix is None and uri.exact is None else re.escape(uri.exact or uri.prefix or "")
        behind = "[^?]*" if uri.prefix is not None else ""
        yield HeaderMatcher(
            name=":path", string_match=StringMatcher(safe_regex=RegexMatcher(regex=f"({regex}){behind}(\\?.*)?"))
        )


def _of_route(route: ModelRoute, *servers: ModelServer) -> list[dict[str, object]]:
    """``servers``: those that its rules name, in order, one for each target and fallback."""
    found: list[dict[str, object]] = []
    remaining = iter(servers)
    for number, rule in enumerate(route.spec.rules):
        pairs = [(next(remaining), target.weight) for target in rule.target_models]
        targets = [(server, weight) for server, weight in pairs if weight]
        fallbacks = [next(remaining) for _ in rule.fallback]
        if rule.reads_body:
            # Envoy does not know the fields
            continue
        name = f"without-extproc/{route.metadata.key}/{number}"
        if route.spec.model_name is not None:
            match = _match_without_extproc(rule, [route.spec.model_name])
            of_model = Route(name=name, match=match, route=_action(targets))
            if fallbacks:
                found.append(_falling_back(of_model, route, rule, targets, fallbacks))
            else:
                found.append(to_plain(_changing(of_model, targets, of=route)))
        if route.spec.lora_adapters:
            match = _match_without_extproc(rule, list(route.spec.lora_adapters))
            of_adapters = Route(name=f"{name}/adapters", match=match, route=_action(targets))
            found.append(to_plain(_changing(of_adapters, targets)))
    return found


def _response_model(route: ModelRoute, *servers: ModelServer) -> str | None:
    """What answers of ``servers`` have as the model's name; None: what engines write. As extproc decides it."""
    name = route.spec.model_name
    renames = route.spec.response_model == "Requested" and any(one.spec.model != name for one in servers)
    return name if renames else None


def _falling_back(
    route: Route,
    model_route: ModelRoute,
    rule: RouteRule,
    targets: list[tuple[ModelServer, int]],
    fallbacks: list[ModelServer],
) -> dict[str, object]:
    """The targets by weight, as often as the first one's policy says, then each fallback. The body is as the first
    target's engines read it; each cluster's filter writes its own model.
    """
    first, names = targets[0][0], [one.metadata.key for one in fallbacks]
    own = [(server.metadata.key, weight) for server, weight in targets]
    attempts = first.spec.traffic_policy.retry.attempts
    groups = [own] * (1 + attempts) + [[(name, 1)] for name in names]
    action = _with_policy(RouteAction(), first.spec.traffic_policy)
    action.retry_policy = fallback_retry_policy(
        _any_retries(), rule.fallback, rule.fallback_retry, attempts=len(groups)
    )
    allowed: list[set[str]] = [set(server.spec.allowed_fields) for server in (*(one for one, _ in targets), *fallbacks)]
    degraded = [name for name, one in zip(names, rule.fallback, strict=True) if one.degraded]
    refusals: dict[str, list[str]] = {
        kind: [server_cluster_name(name) for name, one in zip(names, rule.fallback, strict=True) if kind in one.on]
        for kind in REFUSALS
        if kind in retried_failures(rule.fallback)
    }
    change = body_change_config(
        set.intersection(*allowed),
        model=first.spec.model,
        response_model=_response_model(model_route, *(one for one, _ in targets), *fallbacks),
        degraded=degraded,
        refusals=refusals,
    )
    route.route, route.typed_per_filter_config = action, {CHANGES_FILTER: PackedMessage(change)}
    return route_across_clusters(route, groups)


def _match_without_extproc(rule: RouteRule, names: list[str]) -> RouteMatch:
    match = _match(rule.model_match)
    match.dynamic_metadata = [_asks_for(names)]
    return match


def _changing(route: Route, targets: list[tuple[ModelServer, int]], *, of: ModelRoute | None = None) -> Route:
    """``route``, which changes bodies for the engines that the weights choose. ``of``: requests for its model, whose
    name is changed, too; None: of adapters, which keep theirs.
    """
    configs: list[dict[str, Any]] = []
    for server, _ in targets:
        change = body_change_config(server.spec.allowed_fields)
        if of is not None:
            asked = _response_model(of, server)
            change = body_change_config(server.spec.allowed_fields, model=server.spec.model, response_model=asked)
        configs.append({CHANGES_FILTER: PackedMessage(change)})
    weighted = route.route.weighted_clusters if route.route is not None else None
    if weighted is None:
        route.typed_per_filter_config = configs[0]
    else:
        for cluster, config in zip(weighted.clusters, configs, strict=True):
            cluster.typed_per_filter_config = config
    return route


def _with_policy(action: RouteAction, policy: TrafficPolicy) -> RouteAction:
    action.timeout = duration(policy.timeout)
    # A prompt may wait long for its first token: only the time limit of the whole ends it.
    action.idle_timeout = duration(policy.timeout)
    action.retry_policy = engine_retry_policy(policy.retry.attempts)
    return action


def _action(targets: list[tuple[ModelServer, int]]) -> RouteAction:
    """Time limits and retries are the first target's: one request has one policy. The default retries are the
    host's.
    """
    policy = targets[0][0].spec.traffic_policy
    action = _with_policy(RouteAction(), policy)
    if policy.retry == _DEFAULT_POLICY.retry:
        action.retry_policy = None
    elif action.retry_policy is None:
        action.retry_policy = RetryPolicy(num_retries=0)
    if len(targets) == 1:
        action.cluster = server_cluster_name(targets[0][0].metadata.key)
    else:
        action.weighted_clusters = WeightedCluster(
            clusters=[
                WeightedClusterClusterWeight(name=server_cluster_name(server.metadata.key), weight=weight)
                for server, weight in targets
            ]
        )
    return action


def engine_retry_policy(attempts: int) -> RetryPolicy | None:
    """The policy of requests to engines; None: no retries."""
    if attempts == 0:
        return None
    return RetryPolicy(
        retry_on=_RETRY_ON,
        # an engine that is overloaded, broken or shutting down fails before its first byte; another engine may serve
        retriable_status_codes=[429, 500, 502, 503, 504],
        retriable_headers=[redirect_status_matcher()],
        num_retries=attempts,
        retry_back_off=RetryPolicyRetryBackOff(base_interval=duration(0.01), max_interval=duration(0.25)),
        # for balancing without extproc: not the same engine again
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=PackedMessage(PreviousHostsPredicate())
            )
        ],
        host_selection_retry_max_attempts=5,
    )


def _match(match: ModelMatch | None) -> RouteMatch:
    if match is None:
        return RouteMatch(prefix="/")
    found = _match_path(match.uri)
    found.headers = [
        HeaderMatcher(name=name.lower(), string_match=_string_matcher(value)) for name, value in match.headers.items()
    ]
    return found


def _match_path(uri: StringMatch | None) -> RouteMatch:
    if uri is None:
        return RouteMatch(prefix="/")
    if uri.exact is not None:
        return RouteMatch(path=uri.exact)
    if uri.prefix is not None:
        return RouteMatch(prefix=uri.prefix)
    return RouteMatch(safe_regex=RegexMatcher(regex=uri.regex or ""))


def _string_matcher(match: StringMatch) -> StringMatcher:
    if match.exact is not None:
        return StringMatcher(exact=match.exact)
    if match.prefix is not None:
        return StringMatcher(prefix=match.prefix)
    return StringMatcher(safe_regex=RegexMatcher(regex=match.regex or ""))


def _asks_for(names: list[str]) -> MetadataMatcher:
    values = [ValueMatcher(string_match=StringMatcher(exact=name)) for name in names]
    return MetadataMatcher(
        filter=FALLBACK_NAMESPACE,
        path=[MetadataMatcherPathSegment(key=FALLBACK_MODEL)],
        value=values[0] if len(values) == 1 else ValueMatcher(or_match=OrMatcher(value_matchers=values)),
    )


def _models_list(routes: Iterable[ModelRoute]) -> Route:
    """GET /v1/models, as extproc would list them."""
    names = sorted(name for route in routes for name in route.spec.model_names)
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "attache"} for name in names]
    return Route(
        name="models-without-extproc",
        match=RouteMatch(path=MODELS_PATH, headers=[_IS_READ]),
        direct_response=DirectResponseAction(
            status=200, body=DataSource(inline_string=json.dumps({"object": "list", "data": models}))
        ),
        response_headers_to_add=[HeaderValueOption(header=HeaderValue(key="content-type", value="application/json"))],
    )
