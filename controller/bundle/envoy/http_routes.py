# SPDX-License-Identifier: Apache-2.0
"""Rules of HTTPRoutes and GRPCRoutes as routes of Envoy: to engines, which extproc picks, to others, or to an answer.

A GRPCRoute matches calls of gRPC, and its clients get statuses of gRPC; otherwise the two are alike. A rule has
conditions (on path, method, headers and parameters) and filters (changes of headers, redirects, other paths and hosts,
mirrors, CORS).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    RuntimeFractionalPercent,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    FilterConfig,
    HeaderMatcher,
    QueryParameterMatcher,
    RedirectAction,
    RedirectActionRedirectResponseCode,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    Route,
    RouteAction,
    RouteActionClusterNotFoundResponseCode,
    RouteActionMaxStreamDuration,
    RouteActionRequestMirrorPolicy,
    RouteActionUpgradeConfig,
    RouteMatch,
    RouteMatchGrpcRouteMatchOptions,
    WeightedCluster,
    WeightedClusterClusterWeight,
)
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import CorsPolicy
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExtProcOverrides,
    ExtProcPerRoute,
    ProcessingMode,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatchAndSubstitute, RegexMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType

from controller.bundle.envoy.clusters import backend_cluster_name, server_cluster_name
from controller.bundle.envoy.envoy_json import duration, to_plain, to_resource
from controller.bundle.envoy.extproc_fail_open import CHANGES_FILTER, body_change_config
from controller.bundle.envoy.filters import BODY_FILTERS, CORS_FILTER, USAGE_FILTERS, processing_mode
from controller.bundle.envoy.local_replies import error_answer
from controller.bundle.envoy.model_routes import configure_grpc, engine_retry_policy
from controller.bundle.envoy.virtual_hosts import match_conditions, path_prefix
from extproc.api.grpc_route import GRPCRoute, effective_matches
from extproc.api.http_route import Backend
from extproc.api.match_patterns import ANY_HOST
from extproc.api.model_server import ModelServer
from extproc.api.reference_checks import backend_key
from extproc.wire_names import (
    GRPC_PROTOCOLS,
    HTTP_ROUTE_KEY,
    LISTENER_KEY,
    NOT_FOR_ENGINES,
    PATH_KEY,
    PATH_PREFIX_KEY,
    SERVER_KEY,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from controller.bundle.envoy.envoy_json import BuildMemo
    from controller.bundle.envoy.virtual_hosts import HostRoutes
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.grpc_route import GatewayApiRoute, GatewayApiRule
    from extproc.api.http_route import (
        BackendRef,
        Cors,
        HeaderModifier,
        HTTPRouteFilter,
        HTTPRouteMatch,
        HTTPRouteRetry,
        PathMatch,
        PathModifier,
        RequestMirror,
        RequestRedirect,
        ValueMatch,
        WeightedBackendRef,
    )
    from extproc.api.http_route import HeaderValue as Header

_NO_BACKEND: Final = "The route has no backend that exists; its owner must mend its backendRefs."
# No cluster is called so: what is sent there is answered 500.
_UNRESOLVED: Final = "unresolved"
# A request that no server has begun on may go to another.
_BACKEND_RETRIES: Final = 2
_BACKEND_RETRY_ON: Final = "connect-failure,refused-stream,reset-before-request"
# What the Gateway API requires for a rule with ``retry``; ``reset`` also covers a try that exceeds its timeout.
_RULE_RETRY_ON: Final = "connect-failure,refused-stream,reset,retriable-status-codes"
_BACKOFF_GROWTH: Final = 10
# Idle timeout of upgraded connections, and of calls that stream.
_STREAM_IDLE_S: Final = 3600.0
# What a reference names; None: nothing that can be served.
Named = ModelServer | Backend | None
# Per-route configuration of filters, by their names, as plain data.
Configs = Mapping[str, object]
_REDIRECT_CODE: Final = RedirectActionRedirectResponseCode
_REDIRECT_CODES: Final = {
    301: _REDIRECT_CODE.MOVED_PERMANENTLY,
    302: _REDIRECT_CODE.FOUND,
    303: _REDIRECT_CODE.SEE_OTHER,
    307: _REDIRECT_CODE.TEMPORARY_REDIRECT,
    308: _REDIRECT_CODE.PERMANENT_REDIRECT,
}
_WELL_KNOWN_PORTS: Final = {"http": 80, "https": 443}
_MILLION: Final = 1_000_000


class VirtualHostContext(msgspec.Struct, frozen=True):
    """Where a rule is served. ``domain``: of the virtual host. ``listener``: its name, None if there is only one.
    ``port``, ``is_tls``: of the listener, as clients see it. ``is_open``: Envoy continues without extproc.
    ``extproc_filters``: those that ask it. ``logs_payloads``: extproc gets headers of answers.
    """

    domain: str
    listener: str | None
    port: int
    is_tls: bool
    is_open: bool
    extproc_filters: tuple[str, ...]
    logs_payloads: bool = False


class BackendResolver:
    """What the HTTPRoutes and GRPCRoutes of a snapshot can refer to."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._servers = {server.metadata.key: server for server in snapshot.servers}
        self._backends = {backend.metadata.key: backend for backend in snapshot.backends}

    def resolve(self, route: GatewayApiRoute, ref: BackendRef) -> Named:
        """What ``ref`` of ``route`` names."""
        key = backend_key(route, ref)
        if ref.kind == "ModelServer":
            return self._servers.get(key)
        backend = self._backends.get(key)
        return None if backend is None or backend.spec.unresolved else backend


def http_routes(
    host: HostRoutes, place: VirtualHostContext, backends: BackendResolver, memo: BuildMemo
) -> Iterator[dict[str, object]]:
    """The routes of ``host`` for HTTPRoutes and GRPCRoutes, in their order of precedence."""
    # the domain makes a difference to redirects alone: other routes are made once for all hosts
    here, anywhere = _as_json(place), _as_json(msgspec.structs.replace(place, domain=""))
    off = memo.get(no_inference_route_config, place.is_open, place.extproc_filters)
    for entry in host.entries:
        rule = entry.rule_spec
        named = [backends.resolve(entry.route, ref) for ref in _refs(rule)]
        where = here if any(one.request_redirect is not None for one in rule.filters) else anywhere
        yield memo.get(_route, where, off, entry.route, entry.rule, entry.number, *named)


def _as_json(place: VirtualHostContext) -> str:
    return msgspec.json.encode(place).decode()


def filter_needs(routes: Sequence[GatewayApiRoute]) -> tuple[bool, bool]:
    """What the filters of listeners must do for ``routes``: see ``Needs``."""
    filters = [one for route in routes for rule in route.spec.rules for one in rule.filters]
    return any(one.cors is not None for one in filters), bool(routes)


def extproc_route_config(
    filters: tuple[str, ...],
    listener: str | None,
    route: str = "",
    server: str = "",
    path: str = "",
    path_prefix: str = "",
    *,
    mode: ProcessingMode | None = None,
) -> Configs:
    """Metadata of a stream for extproc: its listener, the matching HTTPRoute, its ModelServer, and what the route
    writes in place of the path or its prefix. ``mode``: what extproc gets, where that is not the filter's own.
    """
    metadata = [(LISTENER_KEY, listener), (HTTP_ROUTE_KEY, route), (SERVER_KEY, server)]
    metadata += [(PATH_KEY, path), (PATH_PREFIX_KEY, path_prefix)]
    # other bytes than ASCII cannot be sent
    values = [
        HeaderValue(key=key, value=escape_header_value(quote(value, safe="/-._~:"))) for key, value in metadata if value
    ]
    per_route = ExtProcPerRoute(overrides=ExtProcOverrides(grpc_initial_metadata=values, processing_mode=mode))
    return dict.fromkeys(filters, to_resource(per_route))


def no_inference_route_config(is_open: bool, extproc_filters: tuple[str, ...]) -> Configs:
    """For routes on which extproc has no part, and bodies pass as they are."""
    return {**_disabled(extproc_filters), **no_body_route_config(is_open)}


def no_body_route_config(is_open: bool) -> Configs:
    """For routes on which no filter but extproc's reads bodies."""
    return _disabled((*(BODY_FILTERS if is_open else ()), *USAGE_FILTERS))


def _disabled(filters: Iterable[str]) -> Configs:
    return dict.fromkeys(filters, to_resource(FilterConfig(disabled=True)))


def _refs(rule: GatewayApiRule) -> list[BackendRef]:
    """All that a rule refers to: backends, then those that get copies."""
    mirrors = [one.request_mirror.backend_ref for one in rule.filters if one.request_mirror is not None]
    return [*rule.backend_refs, *mirrors]


def _route(
    where: str, off: Configs, route: GatewayApiRoute, rule_number: int, number: int, *named: Named
) -> dict[str, object]:
    """One match of one rule. ``where``: its Place as JSON. ``off``: for requests in which extproc has no part.
    ``named``: what the rule refers to, as ``_refs`` lists it.
    """
    place = msgspec.json.decode(where, type=VirtualHostContext)
    rule = route.spec.rules[rule_number]
    match = effective_matches(rule)[number]
    takes_grpc = isinstance(route, GRPCRoute)
    name = f"{'grpc' if takes_grpc else 'http'}/{route.metadata.key}/{rule_number}/{number}"
    matched = route_match(match)
    if takes_grpc:
        matched.grpc = RouteMatchGrpcRouteMatchOptions()
    found = Route(name=name, match=matched)
    change_headers(found, rule.filters)
    redirect = next((one.request_redirect for one in rule.filters if one.request_redirect is not None), None)
    count = len(rule.backend_refs)
    targets = [(ref, one) for ref, one in zip(rule.backend_refs, named[:count], strict=True) if ref.weight]
    if redirect is not None:
        found.redirect = redirect_action(redirect, match, domain=place.domain, port=place.port, is_tls=place.is_tls)
    elif all(one is None for _, one in targets):
        found.direct_response = _no_backend(takes_grpc=takes_grpc)
    else:
        found.route = _action(rule, targets)
        if takes_grpc:
            _take_calls(found.route, targets)
        change_url(found.route, rule.filters, match)
        found.route.request_mirror_policies = list(_mirrors(rule, named[count:]))
    path = _new_path(rule.filters, match)
    return _with_configs(found, rule, off, [_configs_of(one, place, route.reference, path) for _, one in targets])


def _with_configs(
    found: Route, rule: GatewayApiRule, off: Configs, of_targets: Sequence[Configs | None]
) -> dict[str, object]:
    """``found`` with its filters' metadata. ``of_targets``: None for those without inference.

    Most of these are alike: they are made once and inserted as plain data.
    """
    plain: dict[str, Any] = to_plain(found)
    configs: dict[str, object] = {}
    if found.route is None or not any(of_targets):
        configs.update(off)
    else:
        for cluster, own in zip(plain["route"]["weighted_clusters"]["clusters"], of_targets, strict=True):
            cluster["typed_per_filter_config"] = off if own is None else own
    cors = next((one.cors for one in rule.filters if one.cors is not None), None)
    if cors is not None:
        configs[CORS_FILTER] = to_resource(cors_policy(cors))
    return {**plain, "typed_per_filter_config": configs} if configs else plain


def _configs_of(named: Named, place: VirtualHostContext, route: str, path: tuple[str, str]) -> Configs | None:
    """Metadata for filters about requests to a ModelServer; None for other backends. ``path``: see ``_new_path``."""
    if not isinstance(named, ModelServer):
        return None
    of_server = place.extproc_filters, place.listener, route, named.metadata.key, *path
    if named.spec.protocol != "OpenAI":
        reads = named.spec.protocol in GRPC_PROTOCOLS
        mode = processing_mode(reads_body=reads, logs_payloads=place.logs_payloads)
        return {**no_body_route_config(place.is_open), **extproc_route_config(*of_server, mode=mode)}
    changes = {CHANGES_FILTER: to_resource(body_change_config(named.spec.allowed_fields))} if place.is_open else {}
    return {**extproc_route_config(*of_server), **changes}


def _action(rule: GatewayApiRule, targets: Sequence[tuple[WeightedBackendRef, Named]]) -> RouteAction:
    """Time limits and retries are the first ModelServer's, if there is one: one request has one policy."""
    servers = [one for _, one in targets if isinstance(one, ModelServer)]
    action = RouteAction(
        weighted_clusters=WeightedCluster(clusters=[_weighted(ref, one) for ref, one in targets]),
        cluster_not_found_response_code=RouteActionClusterNotFoundResponseCode.INTERNAL_SERVER_ERROR,
        timeout=duration(servers[0].spec.traffic_policy.timeout if servers else 0.0),
        retry_policy=engine_retry_policy(servers[0].spec.traffic_policy.retry.attempts)
        if servers
        else _backend_retries(),
    )
    if servers:
        # A prompt may wait long for its first token: only the time limit of the whole ends it.
        action.idle_timeout = action.timeout
    if any(isinstance(one, Backend) and one.spec.protocol == "WebSocket" for _, one in targets):
        action.upgrade_configs = [RouteActionUpgradeConfig(upgrade_type="websocket")]
        action.idle_timeout = duration(_STREAM_IDLE_S)
    if rule.retry is not None:
        action.retry_policy = _retries_of(rule.retry)
    request, of_each = rule.timeouts.request, rule.timeouts.backend_request
    if request is not None:
        action.timeout = duration(request)
    if of_each:
        action.retry_policy = action.retry_policy or RetryPolicy(num_retries=0)
        action.retry_policy.per_try_timeout = duration(of_each)
    return action


def _no_backend(*, takes_grpc: bool) -> DirectResponseAction:
    """As the Gateway API has it: status 500, or UNAVAILABLE."""
    if takes_grpc:
        return DirectResponseAction(status=503, body=DataSource(inline_string=_NO_BACKEND))
    return error_answer(500, _NO_BACKEND, "server_error", "no_backend")


def _take_calls(action: RouteAction, targets: Sequence[tuple[WeightedBackendRef, Named]]) -> None:
    """Clients of gRPC say how long they wait, a stream may be silent for long, and a backend that does not exist is
    UNAVAILABLE.
    """
    servers = [one for _, one in targets if isinstance(one, ModelServer)]
    action.cluster_not_found_response_code = RouteActionClusterNotFoundResponseCode.SERVICE_UNAVAILABLE
    if servers:
        configure_grpc(action, servers[0].spec.traffic_policy)
    else:
        # 0: as long as the client says
        action.max_stream_duration = RouteActionMaxStreamDuration(grpc_timeout_header_max=duration(0.0))
        action.idle_timeout = duration(_STREAM_IDLE_S)


def _weighted(ref: WeightedBackendRef, named: Named) -> WeightedClusterClusterWeight:
    """A share of the requests, with the changes for this backend alone."""
    found = WeightedClusterClusterWeight(weight=ref.weight)
    if isinstance(named, ModelServer):
        found.name = server_cluster_name(named.metadata.key)
        found.request_headers_to_remove = list(NOT_FOR_ENGINES)
    else:
        found.name = _UNRESOLVED if named is None else backend_cluster_name(named.metadata.key)
    change_headers(found, ref.filters)
    return found


def _mirrors(rule: GatewayApiRule, named: Sequence[Named]) -> Iterator[RouteActionRequestMirrorPolicy]:
    """Mirrors to existing backends; missing ones are left out, and the request itself is not affected."""
    mirrors = [one.request_mirror for one in rule.filters if one.request_mirror is not None]
    for mirror, one in zip(mirrors, named, strict=True):
        if one is not None:
            key = one.metadata.key
            is_server = isinstance(one, ModelServer)
            yield mirror_policy(mirror, server_cluster_name(key) if is_server else backend_cluster_name(key))


def _retries_of(retry: HTTPRouteRetry) -> RetryPolicy:
    policy = RetryPolicy(retry_on=_RULE_RETRY_ON, retriable_status_codes=list(retry.codes), num_retries=retry.attempts)
    if retry.backoff is not None:
        base, longest = duration(retry.backoff), duration(retry.backoff * _BACKOFF_GROWTH)
        policy.retry_back_off = RetryPolicyRetryBackOff(base_interval=base, max_interval=longest)
    return policy


def _backend_retries() -> RetryPolicy:
    return RetryPolicy(retry_on=_BACKEND_RETRY_ON, num_retries=_BACKEND_RETRIES)


def route_match(match: HTTPRouteMatch) -> RouteMatch:
    """All conditions of ``match``."""
    headers, parameters = match_conditions(match)
    found = _path_match(match.path)
    found.headers = [HeaderMatcher(name=one.name.lower(), string_match=_value_match(one)) for one in headers]
    if match.method is not None:
        found.headers.append(HeaderMatcher(name=":method", string_match=StringMatcher(exact=match.method)))
    found.query_parameters = [
        QueryParameterMatcher(name=one.name, string_match=_value_match(one)) for one in parameters
    ]
    return found


def _path_match(match: PathMatch) -> RouteMatch:
    if match.type == "Exact":
        return RouteMatch(path=match.value)
    if match.type == "RegularExpression":
        return RouteMatch(safe_regex=RegexMatcher(regex=match.value))
    prefix = path_prefix(match)
    return RouteMatch(path_separated_prefix=prefix) if prefix else RouteMatch(prefix="/")


def _value_match(match: ValueMatch) -> StringMatcher:
    if match.type == "Exact":
        return StringMatcher(exact=match.value)
    return StringMatcher(safe_regex=RegexMatcher(regex=match.value))


def change_headers(target: Route | WeightedClusterClusterWeight, filters: Iterable[HTTPRouteFilter]) -> None:
    """Set what ``filters`` change in the headers of requests and answers."""
    for one in filters:
        if one.request_header_modifier is not None:
            target.request_headers_to_add.extend(_header_changes(one.request_header_modifier))
            target.request_headers_to_remove.extend(one.request_header_modifier.remove)
        if one.response_header_modifier is not None:
            target.response_headers_to_add.extend(_header_changes(one.response_header_modifier))
            target.response_headers_to_remove.extend(one.response_header_modifier.remove)


def change_url(action: RouteAction, filters: Iterable[HTTPRouteFilter], match: HTTPRouteMatch) -> None:
    """Set host and path that the backend gets."""
    for one in filters:
        if one.url_rewrite is not None:
            if one.url_rewrite.hostname is not None:
                action.host_rewrite_literal = one.url_rewrite.hostname
            if one.url_rewrite.path is not None:
                _change_path(action, one.url_rewrite.path, match)


def redirect_action(
    redirect: RequestRedirect, match: HTTPRouteMatch, *, domain: str, port: int, is_tls: bool
) -> RedirectAction:
    """The redirect's target.

    ``domain``: of the virtual host, which is the host in the redirect unless it begins with ``*``. ``port`` and
    ``is_tls``: of the listener.
    """
    scheme = redirect.scheme or ("https" if is_tls else "http")
    usual = _WELL_KNOWN_PORTS[scheme]
    # without a port, a new scheme brings its own, and the old scheme stays at the listener's
    final_port = redirect.port or (usual if redirect.scheme else port)
    action = RedirectAction(response_code=_REDIRECT_CODES[redirect.status_code])
    if redirect.scheme is not None:
        action.scheme_redirect = redirect.scheme
    host = redirect.hostname or ("" if domain.startswith(ANY_HOST) else domain)
    if host:
        action.host_redirect = host
    # Envoy keeps the client's port unless the redirect sets a host or a port
    if final_port != usual or (not host and port not in _WELL_KNOWN_PORTS.values()):
        action.port_redirect = final_port
    if redirect.path is not None and redirect.path.type == "ReplaceFullPath":
        action.path_redirect = redirect.path.replace_full_path or "/"
    elif redirect.path is not None:
        _change_path(action, redirect.path, match)
    return action


def mirror_policy(mirror: RequestMirror, cluster: str) -> RouteActionRequestMirrorPolicy:
    """Copies to ``cluster``, under the host that the request has."""
    return RouteActionRequestMirrorPolicy(
        cluster=cluster,
        runtime_fraction=RuntimeFractionalPercent(
            default_value=FractionalPercent(
                numerator=round(_mirror_share(mirror) * _MILLION), denominator=FractionalPercentDenominatorType.MILLION
            )
        ),
        disable_shadow_host_suffix_append=True,
    )


def escape_header_value(value: str) -> str:
    """A header's value in which Envoy finds no command to replace."""
    return value.replace("%", "%%")


def _mirror_share(mirror: RequestMirror) -> float:
    if mirror.fraction is not None:
        return mirror.fraction.numerator / mirror.fraction.denominator
    return 1.0 if mirror.percent is None else mirror.percent / 100


def _header_changes(modifier: HeaderModifier) -> list[HeaderValueOption]:
    action = HeaderValueOptionHeaderAppendAction
    return [
        *(_header_option(one, action.OVERWRITE_IF_EXISTS_OR_ADD) for one in _first_of_each(modifier.set)),
        *(_header_option(one, action.APPEND_IF_EXISTS_OR_ADD) for one in _first_of_each(modifier.add)),
    ]


def _first_of_each(headers: Iterable[Header]) -> Iterable[Header]:
    """Of several for one name, the first counts."""
    found: dict[str, Header] = {}
    for one in headers:
        found.setdefault(one.name.lower(), one)
    return found.values()


def _header_option(header: Header, action: HeaderValueOptionHeaderAppendAction) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=header.name, value=escape_header_value(header.value)), append_action=action
    )


def _change_path(action: RouteAction | RedirectAction, modifier: PathModifier, match: HTTPRouteMatch) -> None:
    """The query stays in every case. Slashes at the ends of prefix and replacement make no difference."""
    if modifier.type == "ReplaceFullPath":
        action.regex_rewrite = _substitute("^/.*$", modifier.replace_full_path or "/")
        return
    prefix, new = path_prefix(match.path), (modifier.replace_prefix_match or "").rstrip("/")
    if new and prefix:
        action.prefix_rewrite = new
    elif new:
        # the prefix is the first slash of every path, which is to stay
        action.prefix_rewrite = new + "/"
    elif prefix:
        # what is left of /prefix and /prefix/a begins with a slash, once
        action.regex_rewrite = _substitute(f"^{re.escape(prefix)}/*", "/")


def _new_path(filters: Iterable[HTTPRouteFilter], match: HTTPRouteMatch) -> tuple[str, str]:
    """What stands in place of the path, and of which prefix of it; the prefix is empty for all of it, and both are
    where nothing is written: a prefix that is cut off makes no other path of an engine's.
    """
    modifier = next((one.url_rewrite.path for one in filters if one.url_rewrite is not None), None)
    if modifier is None:
        return "", ""
    if modifier.type == "ReplaceFullPath":
        return modifier.replace_full_path or "/", ""
    action = RouteAction()
    _change_path(action, modifier, match)
    return (action.prefix_rewrite, path_prefix(match.path) or "/") if action.prefix_rewrite else ("", "")


def _substitute(regex: str, new: str) -> RegexMatchAndSubstitute:
    return RegexMatchAndSubstitute(pattern=RegexMatcher(regex=regex), substitution=new.replace("\\", "\\\\"))


# The filter's name in the chain, under which routes and virtual hosts have their policies.
def cors_policy(cors: Cors) -> CorsPolicy:
    """The filter's response to preflight requests, and the headers that it adds to other responses."""
    return CorsPolicy(
        allow_origin_string_match=[_origin(one) for one in cors.allow_origins],
        allow_methods=",".join(cors.allow_methods),
        allow_headers=",".join(cors.allow_headers),
        expose_headers=",".join(cors.expose_headers),
        max_age=str(cors.max_age),
        allow_credentials=cors.allow_credentials,
        # a preflight is never forwarded to the backend, even from an origin that is not allowed
        forward_not_matching_preflights=False,
    )


def _origin(origin: str) -> StringMatcher:
    if "*" not in origin:
        return StringMatcher(exact=origin, ignore_case=True)
    # the one * stands for anything that a host name can have, any number of labels included
    regex = ".*" if origin == "*" else "(?i)" + re.escape(origin).replace(r"\*", "[A-Za-z0-9._-]+")
    return StringMatcher(safe_regex=RegexMatcher(regex=regex))
