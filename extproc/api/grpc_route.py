# SPDX-License-Identifier: Apache-2.0
"""GRPCRoute, as the Gateway API has it (gateway.networking.k8s.io/v1): an HTTPRoute that matches calls of gRPC.

Its rules have the fields of HTTPRoute's that the kinds have in common, so both are routed by the same code.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api.http_route import (
    HTTPRoute,
    HTTPRouteFilter,
    HTTPRouteMatch,
    HTTPRouteRetry,
    HTTPRouteRule,
    HTTPRouteTimeouts,
    PathMatch,
    ValueMatch,
    WeightedBackendRef,
    check_expression,
    check_header_matches,
    check_hostname,
    check_rule_filters,
)
from extproc.api.spec import NO_CONTROL, DirectoryObject, NonEmpty, ParentReference, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path

_SERVICE: Final = re.compile(r"\.?[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_][A-Za-z_0-9]*)*")
_METHOD: Final = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
GRPC_ROUTE: Final = "grpc:"
_ANY: Final = "[^/]+"
_FILTERS: Final = frozenset({"RequestHeaderModifier", "ResponseHeaderModifier", "RequestMirror"})
_Part = Annotated[str, msgspec.Meta(max_length=1024, pattern=NO_CONTROL)]


class GRPCMethodMatch(Spec, frozen=True):
    """A condition on the call. ``type``: how the two are compared. ``service``: its full name, with the package, or an
    expression for all of it; empty: any. ``method``: likewise.
    """

    type: Literal["Exact", "RegularExpression"] = "Exact"
    service: _Part = ""
    method: _Part = ""


class GRPCRouteMatch(Spec, frozen=True):
    """All given conditions must hold. ``method``: of the call, with its service. ``headers``: of the call."""

    method: GRPCMethodMatch | None = None
    headers: Annotated[tuple[ValueMatch, ...], msgspec.Meta(max_length=16)] = ()

    @property
    def as_http(self) -> HTTPRouteMatch:
        """The same as conditions on a request of HTTP."""
        return HTTPRouteMatch(path=_path_of(self.method), headers=self.headers)


class GRPCRouteRule(Spec, frozen=True):
    """Some calls, and how to handle them.

    ``name``: for people. ``matches``: one of them must hold; without any, all calls match. ``filters``: what is
    changed; headers of calls and answers, and copies (RequestMirror). ``backend_refs``: where calls go, by weight;
    Envoy calls Services and Backends over HTTP/2.
    """

    name: str = ""
    matches: Annotated[tuple[GRPCRouteMatch, ...], msgspec.Meta(max_length=64)] = ()
    filters: Annotated[tuple[HTTPRouteFilter, ...], msgspec.Meta(max_length=16)] = ()
    backend_refs: Annotated[tuple[WeightedBackendRef, ...], msgspec.Meta(max_length=16)] = ()

    # of HTTPRoutes alone
    timeouts: ClassVar = HTTPRouteTimeouts()
    retry: ClassVar[HTTPRouteRetry | None] = None


class GRPCRouteSpec(Spec, frozen=True):
    """Which calls of gRPC go where. Of several matches, the most specific decides, as the Gateway API specifies.

    ``parent_refs``: the listeners that serve it, by ``sectionName``; without them, all. ``hostnames``: only calls to
    these hosts, which may begin with ``*.``. ``rules``: what is done with them.
    """

    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=256)] = ()
    hostnames: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=16)] = ()
    rules: Annotated[tuple[GRPCRouteRule, ...], msgspec.Meta(max_length=16)] = (GRPCRouteRule(),)


class GRPCRoute(DirectoryObject, frozen=True, kw_only=True):
    """A GRPCRoute document. Between equal matches of two routes, the older decides, then the first by its key."""

    spec: GRPCRouteSpec

    @property
    def reference(self) -> str:
        """What requests have of it: ``grpc:namespace/name``, so that it is never taken for an HTTPRoute."""
        return GRPC_ROUTE + self.metadata.key


# Both are routed by Envoy, by host and request.
GatewayApiRoute = HTTPRoute | GRPCRoute
GatewayApiRule = HTTPRouteRule | GRPCRouteRule


def effective_matches(rule: GatewayApiRule) -> tuple[HTTPRouteMatch, ...]:
    """Its matches; without any, all requests match."""
    if isinstance(rule, GRPCRouteRule):
        return tuple(one.as_http for one in rule.matches or (GRPCRouteMatch(),))
    return rule.matches or (HTTPRouteMatch(),)


def check_grpc_route(spec: GRPCRouteSpec) -> Iterator[Finding]:
    """Envoy can apply the route, as ``check_http_route`` has it."""
    for index, hostname in enumerate(spec.hostnames):
        yield from check_hostname(hostname, ("spec", "hostnames", index))
    for number, rule in enumerate(spec.rules):
        path: Path = ("spec", "rules", number)
        for index, match in enumerate(rule.matches):
            at = (*path, "matches", index)
            if match.method is not None:
                yield from _check_method(match.method, (*at, "method"))
            yield from check_header_matches(match.headers, at)
        for index, one in enumerate(rule.filters):
            if one.type not in _FILTERS:
                yield (*path, "filters", index, "type"), f"{one.type} is no filter of GRPCRoutes"
        yield from check_rule_filters(rule.filters, rule.backend_refs, path)


def _check_method(match: GRPCMethodMatch, path: Path) -> Iterator[Finding]:
    if not match.service and not match.method:
        yield path, "has neither service nor method; write one of them, or leave the match out"
    found = list(_check_parts(match, path))
    # two expressions that Envoy takes may come to one that it refuses
    yield from found or (check_expression(_path_of(match).value, path) if match.type == "RegularExpression" else ())


def _check_parts(match: GRPCMethodMatch, path: Path) -> Iterator[Finding]:
    for field, text, exact in (("service", match.service, _SERVICE), ("method", match.method, _METHOD)):
        if text and match.type == "RegularExpression":
            yield from check_expression(text, (*path, field))
        elif text and not exact.fullmatch(text):
            example = "inference.GRPCInferenceService" if field == "service" else "ModelInfer"
            yield (*path, field), f"{text[:100]!a} is no {field}; write one such as {example}"


def _path_of(match: GRPCMethodMatch | None) -> PathMatch:
    """Of the requests of these calls: ``/service/method``."""
    if match is None or not (match.service or match.method):
        return PathMatch()
    if match.type == "Exact" and match.service:
        path = f"/{match.service}"
        return PathMatch(type="Exact", value=f"{path}/{match.method}") if match.method else PathMatch(value=path)
    service, method = match.service or _ANY, match.method or _ANY
    return PathMatch(type="RegularExpression", value=f"/(?:{service})/(?:{method})")
