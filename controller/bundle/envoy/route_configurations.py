# SPDX-License-Identifier: Apache-2.0
"""Route configurations: for each group of listeners, the hosts that it serves and the routes of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    FilterConfig,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)

from controller.bundle.envoy.clusters import USAGE_CLUSTER
from controller.bundle.envoy.envoy_json import PackedMessage, duration, to_plain, to_resource
from controller.bundle.envoy.extproc_fail_open import rerouting_config
from controller.bundle.envoy.filters import (
    BODY_FILTERS,
    CORS_FILTER,
    HEALTH_FILTER,
    extproc_filter_names,
    processing_mode,
)
from controller.bundle.envoy.http_routes import (
    BackendResolver,
    Configs,
    VirtualHostContext,
    cors_policy,
    extproc_route_config,
    http_routes,
    no_body_route_config,
    no_inference_route_config,
)
from controller.bundle.envoy.listeners import DEFAULT_LISTENER, listener_groups
from controller.bundle.envoy.local_replies import error_answer
from controller.bundle.envoy.model_routes import (
    default_retry_policy,
    grpc_routes,
    not_found_action,
    path_routes,
    routes_decided_by_extproc,
    routes_without_extproc,
)
from controller.bundle.envoy.virtual_hosts import is_more_specific, listener_domain, virtual_hosts
from extproc.api.addresses import parse_address
from extproc.api.match_patterns import ANY_HOST, covers_domain
from extproc.api.session_affinity import session_token_headers
from extproc.wire_names import (
    BUDGET_HEADERS,
    CALLER_CLIENT,
    CALLER_REPORTS,
    CALLER_TENANT,
    CALLER_USER,
    CLIENT,
    DESTINATION,
    MIRROR,
    NAMESPACE,
    NOT_FOR_ENGINES,
    ORGANIZATION_PATH,
    POLICY_HEADER,
    RATE_LIMIT_HEADERS,
    REPORTS,
    SERVED_HOST,
    SERVED_NAMESPACE,
    SERVER_HEADER,
    TENANT,
    USAGE_PATH,
    USER,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from envoy_data_plane.google.protobuf import Any

    from controller.bundle.envoy.envoy_json import BuildMemo
    from controller.bundle.envoy.listeners import ListenerGroup
    from controller.bundle.envoy.virtual_hosts import HostRoutes
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.gateway_config import GatewayConfigSpec, Listener
    from extproc.api.model_route import ModelRoute

# The gateway's own words, which no server is to read.
_OWN_HEADERS: Final = (DESTINATION, SERVER_HEADER, POLICY_HEADER, MIRROR, CLIENT, TENANT, USER, REPORTS)
# Some 100 bytes a name.
_LARGEST_LIST: Final = 64 * 1024 * 1024
_INVALID: Final = "invalid_request_error"
_NO_ROUTE: Final = "Nothing is served under this host and path."
_OTHER_LISTENER: Final = "Another listener serves this host; connect to it under its own name."
# Reports read many rows; they end by themselves before this.
_REPORT_S: Final = 60.0
_CALLER: Final = ((TENANT, CALLER_TENANT), (CLIENT, CALLER_CLIENT), (USER, CALLER_USER), (REPORTS, CALLER_REPORTS))


def route_configuration(group: ListenerGroup, snapshot: Snapshot, memo: BuildMemo) -> dict[str, object]:
    """The route configuration of ``group``, as a resource of xDS."""
    # CORS is decided before extproc is called: there must be a route for every request
    if snapshot.gateway.listeners or snapshot.gateway_api_routes or snapshot.gateway.cors is not None:
        return _ListenerGroup(group, snapshot, memo).configuration()
    # models alone, for every host
    removed = (*_OWN_HEADERS, *NOT_FOR_ENGINES)
    host = _virtual_host(snapshot, "attache", ANY_HOST, removed=removed)
    own = [*_health_routes(snapshot.gateway, memo), *_usage_routes(snapshot.gateway, memo)]
    configs = _unread(snapshot.gateway, None)
    by_path = path_routes(snapshot, snapshot.routes, configs, memo)
    decided = [*own, *routes_decided_by_extproc(snapshot, memo), *by_path, *_call_routes(snapshot, memo)]
    if snapshot.gateway.failure_mode != "Open":
        # without a route for it, Envoy would let a request that asks for an upgrade wait for ever
        host["routes"] = [*decided, memo.get(_no_model, "")]
        return _configuration(group.route_config_name, [host])
    fallback = _fallback_host(snapshot, DEFAULT_LISTENER, snapshot.routes, memo)
    host["routes"] = [*decided, memo.get(_no_model, _fallback_domain(DEFAULT_LISTENER))]
    return _configuration(group.route_config_name, [host, fallback])


class _ListenerGroup:
    """A group of listeners with HTTPRoutes or several hosts."""

    def __init__(self, group: ListenerGroup, snapshot: Snapshot, memo: BuildMemo) -> None:
        self._group = group
        self._snapshot = snapshot
        self._memo = memo
        self._backends = BackendResolver(snapshot)
        self._are_named = bool(snapshot.gateway.listeners)
        # hosts differ in their names, domains and routes
        self._frame = _virtual_host(snapshot, "frame", ANY_HOST, removed=_OWN_HEADERS)
        self._health = _health_routes(snapshot.gateway, memo)
        self._usage = _usage_routes(snapshot.gateway, memo)
        self._decided = [
            {**one, "request_headers_to_remove": list(NOT_FOR_ENGINES)}
            for one in routes_decided_by_extproc(snapshot, memo)
        ]
        self._attached = {
            one.name: [route for route in snapshot.routes if self._is_attached(route, one)] for one in group.listeners
        }

    def _is_attached(self, route: ModelRoute, listener: Listener) -> bool:
        return route.serves_listener(listener.name if self._are_named else None)

    def configuration(self) -> dict[str, object]:
        others = self._other_domains()
        hosts = [
            host
            for host in virtual_hosts(
                self._group.listeners, self._snapshot.gateway_api_routes, are_named=self._are_named
            )
            if not any(covers_domain(other, host.domain) and is_more_specific(other, host.listener) for other in others)
        ]
        found = [self._host(host) for host in hosts]
        served = {host.domain for host in hosts}
        # a client that reuses its connection for the host of another listener must connect there
        misdirected = [self._refusal(421, _OTHER_LISTENER, "misdirected_request")]
        found.extend({**self._virtual_host(other), "routes": misdirected} for other in others if other not in served)
        if ANY_HOST not in {*served, *others}:
            # load balancers ask by address
            routes = [*self._health, self._refusal(404, _NO_ROUTE, "not_found")]
            found.append({**self._virtual_host(ANY_HOST), "routes": routes})
        if self._snapshot.gateway.failure_mode == "Open":
            served_by = {host.listener.name for host in hosts}
            found.extend(
                _fallback_host(self._snapshot, name, routes, self._memo)
                for name, routes in self._attached.items()
                if routes and name in served_by
            )
        # the port is not part of a host's name
        return {**_configuration(self._group.route_config_name, found), "ignore_port_in_host_matching": True}

    def _host(self, host: HostRoutes) -> dict[str, object]:
        """First what HTTPRoutes match, then models; the rest is answered 404."""
        snapshot, name = self._snapshot, host.listener.name if self._are_named else None
        place = VirtualHostContext(
            domain=host.domain,
            listener=name,
            port=host.listener.public_port or parse_address(self._group.address)[1],
            is_tls=self._group.tls is not None,
            is_open=snapshot.gateway.failure_mode == "Open",
            extproc_filters=extproc_filter_names(snapshot.gateway),
            logs_payloads=snapshot.gateway.payload_log is not None,
        )
        found = self._virtual_host(host.domain)
        routes = [*http_routes(host, place, self._backends, self._memo), *self._health, *self._usage]
        if self._attached[host.listener.name]:
            routes.extend(self._decided)
            by_path = path_routes(
                snapshot, self._attached[host.listener.name], _unread(snapshot.gateway, name), self._memo
            )
            routes.extend({**one, "request_headers_to_remove": list(NOT_FOR_ENGINES)} for one in by_path)
            routes.extend(_call_routes(snapshot, self._memo))
            if name is not None:
                config = self._memo.get(extproc_route_config, extproc_filter_names(snapshot.gateway), name)
                found["typed_per_filter_config"] = {**_cors_config(snapshot.gateway), **config}
            routes.append(self._without_decision(host.listener))
        else:
            routes.append(self._refusal(404, _NO_ROUTE, "not_found"))
        found["routes"] = routes
        return found

    def _without_decision(self, listener: Listener) -> dict[str, object]:
        """The last route where models are served: it is taken only if extproc made no decision."""
        gateway = self._snapshot.gateway
        if gateway.failure_mode == "Open":
            return self._memo.get(_no_model, _fallback_domain(listener.name))
        return self._memo.get(_no_model, "")

    def _other_domains(self) -> list[str]:
        """Domains of other HTTPS listeners of the address, each with connections of its own."""
        if self._group.tls is None:
            return []
        return [
            listener_domain(one)
            for other in listener_groups(self._snapshot.gateway)
            if other != self._group and other.address == self._group.address
            for one in other.listeners
        ]

    def _refusal(self, status: int, message: str, code: str) -> dict[str, object]:
        gateway = self._snapshot.gateway
        off = self._memo.get(no_inference_route_config, gateway.failure_mode == "Open", extproc_filter_names(gateway))
        return {**self._memo.get(_refusal, status, message, code), "typed_per_filter_config": off}

    def _virtual_host(self, domain: str) -> dict[str, object]:
        return {**self._frame, "name": domain, "domains": [domain]}


def _unread(gateway: GatewayConfigSpec, listener: str | None) -> Configs:
    """For routes of requests whose path names the model: nobody reads their bodies, or answers."""
    mode = processing_mode(reads_body=False, logs_payloads=gateway.payload_log is not None)
    return {
        **no_body_route_config(gateway.failure_mode == "Open"),
        **extproc_route_config(extproc_filter_names(gateway), listener, mode=mode),
    }


def _call_routes(snapshot: Snapshot, memo: BuildMemo) -> Iterator[dict[str, object]]:
    return grpc_routes(snapshot, no_body_route_config(snapshot.gateway.failure_mode == "Open"), memo)


def _fallback_domain(listener: str) -> str:
    """A name that no client can send: hosts have no slash."""
    return f"without-extproc/{listener}"


def _fallback_host(
    snapshot: Snapshot, listener: str, routes: Sequence[ModelRoute], memo: BuildMemo
) -> dict[str, object]:
    """The routes of all models of a listener, once for all its hosts; requests that extproc did not decide are routed
    again, as if for this one.
    """
    name, removed = _fallback_domain(listener), (*_OWN_HEADERS, *NOT_FOR_ENGINES)
    host = _virtual_host(snapshot, name, name, removed=removed)
    # what none of them takes is answered 404 by Envoy itself
    host["routes"] = routes_without_extproc(snapshot, routes, memo)
    host["retry_policy"] = memo.get(default_retry_policy)
    return host


def _refusal(status: int, message: str, code: str) -> dict[str, object]:
    """The last route of a host."""
    answer = error_answer(status, message, _INVALID, code)
    return to_plain(Route(name=code, match=RouteMatch(prefix="/"), direct_response=answer))


def _health_routes(gateway: GatewayConfigSpec, memo: BuildMemo) -> list[dict[str, object]]:
    """The route of the gateway's own health, if it has one: it enables the filter, which answers in its place."""
    return [memo.get(_health_route, gateway.health_path)] if gateway.health_path else []


def _health_route(path: str) -> dict[str, object]:
    made = Route(name="health", match=RouteMatch(path=path), direct_response=DirectResponseAction(status=200))
    # the filter has no configuration by route; one without a type enables it, which Envoy's classes cannot write
    enabled = {**to_resource(FilterConfig()), "config": {}}
    return {**to_plain(made), "typed_per_filter_config": {HEALTH_FILTER: enabled}}


def _usage_routes(gateway: GatewayConfigSpec, memo: BuildMemo) -> list[dict[str, object]]:
    """Routes of reports, if there is a process that serves them. Callers are authenticated as for models."""
    if gateway.usage_log is None or gateway.usage_log.api is None:
        return []
    off = memo.get(no_inference_route_config, gateway.failure_mode == "Open", extproc_filter_names(gateway))
    found = [memo.get(_usage_route, path, gateway.usage_log.api) for path in (USAGE_PATH, ORGANIZATION_PATH)]
    return [{**one, "typed_per_filter_config": off} for one in found]


def _usage_route(path: str, api: str) -> dict[str, object]:
    """Headers are changed by the route first, then by the host, which removes the gateway's own: so the caller is
    written under other names. The process at ``api`` is asked by that name, and knows no other.
    """
    added = [
        HeaderValueOption(
            header=HeaderValue(key=ours, value=f"%REQ({written})%"),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for written, ours in _CALLER
    ]
    action = RouteAction(cluster=USAGE_CLUSTER, host_rewrite_literal=api, timeout=duration(_REPORT_S))
    match = RouteMatch(prefix=path) if path.endswith("/") else RouteMatch(path=path)
    return to_plain(Route(name=f"usage{path}", match=match, route=action, request_headers_to_add=added))


def _no_model(fallback: str) -> dict[str, object]:
    """The last route of models, which leads nowhere: 404. ``fallback``: the host under which requests without extproc
    are matched again, if there is one. Of a route that answers by itself, Envoy has no policy of other origins, and no
    limit of the size of bodies: over HTTP/2 that was the window of a stream.
    """
    configs: dict[str, Any] = dict.fromkeys(BODY_FILTERS, PackedMessage(rerouting_config(fallback))) if fallback else {}
    route = Route(
        name="model_not_found", match=RouteMatch(prefix="/"), route=not_found_action(), typed_per_filter_config=configs
    )
    return to_plain(route)


# routes are many, and kept one by one: the messages around them are made with a placeholder in their place
def _virtual_host(snapshot: Snapshot, name: str, domain: str, *, removed: Sequence[str]) -> dict[str, object]:
    """A virtual host without its routes."""
    return to_plain(
        VirtualHost(
            name=name,
            domains=[domain],
            routes=[Route(name="placeholder")],
            request_headers_to_remove=list(removed),
            response_headers_to_add=[*_own_headers(snapshot), *_served_header(snapshot.gateway)],
            request_body_buffer_limit=snapshot.gateway.max_body_size,
            typed_per_filter_config=_cors(snapshot.gateway),
        )
    )


def _cors(gateway: GatewayConfigSpec) -> dict[str, Any]:
    """The gateway's policy; routes may have their own."""
    return {} if gateway.cors is None else {CORS_FILTER: PackedMessage(cors_policy(gateway.cors))}


def _cors_config(gateway: GatewayConfigSpec) -> dict[str, object]:
    """The same as plain data."""
    return {} if gateway.cors is None else {CORS_FILTER: to_resource(cors_policy(gateway.cors))}


def _configuration(name: str, hosts: list[dict[str, object]]) -> dict[str, object]:
    """``hosts`` have routes of their own."""
    made = RouteConfiguration(
        name=name,
        virtual_hosts=[VirtualHost(name="placeholder")],
        # the list of models that Envoy gives by itself has all their names; Envoy's default is 4 KiB
        max_direct_response_body_size_bytes=_LARGEST_LIST,
    )
    resource = to_resource(made)
    resource["virtual_hosts"] = hosts
    return resource


def _own_headers(snapshot: Snapshot) -> list[HeaderValueOption]:
    """The state of the caller's limits and budgets, and where its session is, which extproc writes into metadata."""
    gateway, routes = snapshot.gateway, snapshot.routes
    # those of the key store, too
    keys = () if gateway.authentication is None else gateway.authentication.api_keys
    has_limits = any(route.spec.rate_limits for route in routes) or any(key.rate_limits for key in keys)
    has_budgets = bool(gateway.budgets)
    has_budgets = has_budgets or any(route.spec.budgets for route in routes) or any(key.budgets for key in keys)
    own = (*(RATE_LIMIT_HEADERS if has_limits else ()), *(BUDGET_HEADERS if has_budgets else ()))
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, value=f"%DYNAMIC_METADATA({NAMESPACE}:{name})%"),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name in (*own, *session_token_headers(snapshot))
    ]


def _served_header(gateway: GatewayConfigSpec) -> list[HeaderValueOption]:
    """The response header with the engine that answered, if it is enabled."""
    if gateway.served_header is None:
        return []
    value = f"%DYNAMIC_METADATA({SERVED_NAMESPACE}:{SERVED_HOST})%"
    return [
        HeaderValueOption(
            header=HeaderValue(key=gateway.served_header.lower(), value=value),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    ]
