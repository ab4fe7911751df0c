# SPDX-License-Identifier: Apache-2.0
"""Routes of models: by extproc's decision, or without extproc by the model's name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import DataSource, HeaderValue, HeaderValueOption
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteMatch,
    WeightedCluster,
    WeightedClusterClusterWeight,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import (
    MetadataMatcher,
    MetadataMatcherPathSegment,
    OrMatcher,
    RegexMatcher,
    StringMatcher,
    ValueMatcher,
)

from controller.bundle.envoy.clusters import server_cluster_name
from controller.bundle.envoy.envoy_json import PackedMessage, seconds, to_plain
from controller.bundle.envoy.fallback import across_clusters, attempts_of
from controller.bundle.envoy.without_extproc import CHANGES_FILTER, FALLBACK_MODEL, FALLBACK_NAMESPACE, change_for
from extproc.api.fallback import attempts_name
from extproc.api.model_server import TrafficPolicy
from extproc.protocol import MODELS_PATH, POLICY_HEADER, SERVER_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from envoy_data_plane.google.protobuf import Any

    from controller.bundle.envoy.envoy_json import Memo
    from extproc.api.model_route import ModelMatch, ModelRoute, RouteRule, StringMatch
    from extproc.api.model_server import ModelServer
    from extproc.api.snapshot import Snapshot

_DEFAULT_POLICY: Final = TrafficPolicy()
# ``reset`` covers an engine that dies while a request waits for its first byte; after that byte Envoy retries nothing.
_RETRY_ON: Final = "connect-failure,refused-stream,reset,retriable-status-codes"
_IS_READ: Final = HeaderMatcher(name=":method", string_match=StringMatcher(safe_regex=RegexMatcher(regex="GET|HEAD")))


def decided_routes(snapshot: Snapshot, memo: Memo) -> list[dict[str, object]]:
    """Routes of decided requests: to the cluster that extproc names, one for each time limit and number of retries.

    A route for each ModelServer would be scanned for each request, and repeated in each host. The last route matches
    ModelServers that extproc already uses and Envoy does not have yet.
    """
    policies = {server.spec.traffic_policy.route: server.spec.traffic_policy for server in snapshot.servers}
    named = [memo.get(_decided, name, policies[name]) for name in sorted(policies) if name]
    return [*_with_fallbacks(snapshot, memo), *named, memo.get(_decided, "", _DEFAULT_POLICY)]


def _with_fallbacks(snapshot: Snapshot, memo: Memo) -> list[dict[str, object]]:
    """Routes of decided requests whose rule has fallbacks: one for each time limit and set of reasons."""
    servers = {server.metadata.key: server for server in snapshot.servers}
    found: dict[str, tuple[ModelServer, RouteRule]] = {}
    for route in snapshot.routes:
        for rule in route.spec.rules:
            for one in rule.servers if rule.fallback else ():
                server = servers[route.server_key(one)]
                name = attempts_name(server.spec.traffic_policy, rule.fallback, rule.fallback_retry)
                found.setdefault(name, (server, rule))
    return [memo.get(_decided_with_fallbacks, name, *found[name]) for name in sorted(found)]


def _decided_with_fallbacks(name: str, server: ModelServer, rule: RouteRule) -> dict[str, object]:
    """``server``, ``rule``: any of those with this name."""
    match = RouteMatch(prefix="/", headers=[_is_decided(), _has_policy(name)])
    action = _with_policy(RouteAction(), server.spec.traffic_policy)
    # extproc writes how many attempts there are
    action.retry_policy = attempts_of(_any_retries(), rule.fallback, rule.fallback_retry, attempts=1)
    route = Route(name=f"fallback/{name}", match=match, route=action)
    return across_clusters(route, [[(server.metadata.key, 1)]], is_decided=True)


def _is_decided() -> HeaderMatcher:
    return HeaderMatcher(name=SERVER_HEADER, present_match=True)


def _has_policy(name: str) -> HeaderMatcher:
    return HeaderMatcher(name=POLICY_HEADER, string_match=StringMatcher(exact=name))


def _any_retries() -> RetryPolicy:
    return retries(1) or RetryPolicy()


def _decided(name: str, policy: TrafficPolicy) -> dict[str, object]:
    headers = [_is_decided(), *([_has_policy(name)] if name else [])]
    action = _with_policy(RouteAction(cluster_header=SERVER_HEADER), policy)
    match = RouteMatch(prefix="/", headers=headers)
    return to_plain(Route(name=f"decided/{name or 'default'}", match=match, route=action))


def default_retries() -> dict[str, object]:
    """Of the host with ``routes_without_extproc``: thousands of routes, and most have these."""
    return to_plain(retries(_DEFAULT_POLICY.retry.attempts) or RetryPolicy(num_retries=0))


def routes_without_extproc(snapshot: Snapshot, routes: Sequence[ModelRoute], memo: Memo) -> list[dict[str, object]]:
    """Balancing by model name, with the rules and weights that extproc applies, and the same renaming.

    ``routes``: those of ``snapshot`` that are served here.
    """
    servers = {server.metadata.key: server for server in snapshot.servers}
    found = [to_plain(_models_list(routes))]
    for route in routes:
        named = [servers[route.server_key(one)] for rule in route.spec.rules for one in rule.servers]
        found.extend(memo.get(_of_route, route, *named))
    return found


def _of_route(route: ModelRoute, *servers: ModelServer) -> list[dict[str, object]]:
    """``servers``: those that its rules name, in order, one for each target and fallback."""
    found: list[dict[str, object]] = []
    remaining = iter(servers)
    for number, rule in enumerate(route.spec.rules):
        pairs = [(next(remaining), target.weight) for target in rule.target_models]
        targets = [(server, weight) for server, weight in pairs if weight]
        fallbacks = [next(remaining) for _ in rule.fallback]
        name = f"without-extproc/{route.metadata.key}/{number}"
        if route.spec.model_name is not None:
            match = _match_without_extproc(rule, [route.spec.model_name])
            of_model = Route(name=name, match=match, route=_action(targets))
            if fallbacks:
                found.append(_falling_back(of_model, rule, targets, fallbacks))
            else:
                found.append(to_plain(_changing(of_model, targets, renames=True)))
        if route.spec.lora_adapters:
            match = _match_without_extproc(rule, list(route.spec.lora_adapters))
            of_adapters = Route(name=f"{name}/adapters", match=match, route=_action(targets))
            found.append(to_plain(_changing(of_adapters, targets, renames=False)))
    return found


def _falling_back(
    route: Route, rule: RouteRule, targets: list[tuple[ModelServer, int]], fallbacks: list[ModelServer]
) -> dict[str, object]:
    """The targets by weight, as often as the first one's policy says, then each fallback. The body is as the first
    target's engines read it; each cluster's filter writes its own model.
    """
    first, names = targets[0][0], [one.metadata.key for one in fallbacks]
    own = [(server.metadata.key, weight) for server, weight in targets]
    attempts = first.spec.traffic_policy.retry.attempts
    groups = [own] * (1 + attempts) + [[(name, 1)] for name in names]
    action = _with_policy(RouteAction(), first.spec.traffic_policy)
    action.retry_policy = attempts_of(_any_retries(), rule.fallback, rule.fallback_retry, attempts=len(groups))
    allowed: list[set[str]] = [set(server.spec.allowed_fields) for server in (*(one for one, _ in targets), *fallbacks)]
    degraded = [name for name, one in zip(names, rule.fallback, strict=True) if one.degraded]
    change = change_for(set.intersection(*allowed), model=first.spec.model, degraded=degraded)
    route.route, route.typed_per_filter_config = action, {CHANGES_FILTER: PackedMessage(change)}
    return across_clusters(route, groups)


def _match_without_extproc(rule: RouteRule, names: list[str]) -> RouteMatch:
    match = _match(rule.model_match)
    match.dynamic_metadata = [_asks_for(names)]
    return match


def _changing(route: Route, targets: list[tuple[ModelServer, int]], *, renames: bool) -> Route:
    """``route``, which changes bodies for the engines that the weights choose; ``renames``: the model's name, too."""
    configs: list[dict[str, Any]] = [
        {CHANGES_FILTER: PackedMessage(change_for(spec.allowed_fields, model=spec.model if renames else None))}
        for spec in (server.spec for server, _ in targets)
    ]
    weighted = route.route.weighted_clusters if route.route is not None else None
    if weighted is None:
        route.typed_per_filter_config = configs[0]
    else:
        for cluster, config in zip(weighted.clusters, configs, strict=True):
            cluster.typed_per_filter_config = config
    return route


def _with_policy(action: RouteAction, policy: TrafficPolicy) -> RouteAction:
    action.timeout = seconds(policy.timeout)
    # A prompt may wait long for its first token: only the time limit of the whole ends it.
    action.idle_timeout = seconds(policy.timeout)
    action.retry_policy = retries(policy.retry.attempts)
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


def retries(attempts: int) -> RetryPolicy | None:
    """The policy of requests to engines; None: no retries."""
    if attempts == 0:
        return None
    return RetryPolicy(
        retry_on=_RETRY_ON,
        # an engine that is overloaded, broken or shutting down fails before its first byte; another engine may serve
        retriable_status_codes=[429, 500, 502, 503, 504],
        num_retries=attempts,
        retry_back_off=RetryPolicyRetryBackOff(base_interval=seconds(0.01), max_interval=seconds(0.25)),
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
    names = [
        name for route in routes for name in [route.spec.model_name, *route.spec.lora_adapters] if name is not None
    ]
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "attache"} for name in sorted(names)]
    return Route(
        name="models-without-extproc",
        match=RouteMatch(path=MODELS_PATH, headers=[_IS_READ]),
        direct_response=DirectResponseAction(
            status=200, body=DataSource(inline_string=json.dumps({"object": "list", "data": models}))
        ),
        response_headers_to_add=[HeaderValueOption(header=HeaderValue(key="content-type", value="application/json"))],
    )
