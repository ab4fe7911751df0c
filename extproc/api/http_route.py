# SPDX-License-Identifier: Apache-2.0
"""HTTPRoute, as the Gateway API has it (gateway.networking.k8s.io/v1), and Backend: servers that are no engines.

Envoy routes such requests. extproc has no part in those that go to a Backend.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from extproc.api.addresses import check_endpoint
from extproc.api.match_patterns import check_header_name, compile_expression
from extproc.api.quantities import Duration
from extproc.api.spec import API_VERSION, DirectoryObject, NonEmpty, ParentReference, Port, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from extproc.api.config_errors import Finding, Path


ATTACHE_GROUP = API_VERSION.partition("/")[0]
_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOSTNAME: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_IPV4: Final = re.compile(r"[0-9.]+")
_MOST_HOSTNAME: Final = 253
# Paths are normalized before they are compared, so these never match.
_NEVER_IN_PATHS: Final = re.compile(r"//|/\.{1,2}(/|$)|%2[fF]|[\x00-\x20\x7f?#]")
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\*|(\*\.)?[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_SHORTEST_S: Final = 0.001
_LONGEST_S: Final = 366 * 86400.0
# By type: the field of a filter that belongs to it.
_FIELDS: Final = {
    "RequestHeaderModifier": "request_header_modifier",
    "ResponseHeaderModifier": "response_header_modifier",
    "RequestMirror": "request_mirror",
    "RequestRedirect": "request_redirect",
    "URLRewrite": "url_rewrite",
    "CORS": "cors",
}
_SPELLED: Final = {name: re.sub(r"_(\w)", lambda found: found[1].upper(), name) for name in _FIELDS.values()}
# Envoy applies these to one backend; all others to the whole rule.
_OF_BACKENDS: Final = frozenset({"RequestHeaderModifier", "ResponseHeaderModifier"})


class PathMatch(Spec, frozen=True):
    """A condition on the path. ``type``: how ``value`` is compared with it. ``value``: the path, its first elements, or
    an expression for all of it.
    """

    type: Literal["Exact", "PathPrefix", "RegularExpression"] = "PathPrefix"
    value: NonEmpty = "/"


class ValueMatch(Spec, frozen=True):
    """A condition on a header or a query parameter. ``name``: which one; names of headers are case-insensitive.
    ``value``: what it is, or an expression for all of it. ``type``: how the two are compared.
    """

    name: NonEmpty
    value: NonEmpty
    type: Literal["Exact", "RegularExpression"] = "Exact"


class HTTPRouteMatch(Spec, frozen=True):
    """All given conditions must hold. ``path``, ``headers``, ``query_params``, ``method``: of the request."""

    path: PathMatch = PathMatch()
    headers: Annotated[tuple[ValueMatch, ...], msgspec.Meta(max_length=16)] = ()
    query_params: Annotated[tuple[ValueMatch, ...], msgspec.Meta(max_length=16)] = ()
    method: Literal["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"] | None = None


class HeaderValue(Spec, frozen=True):
    """A header. ``name``: case-insensitive. ``value``: as it is sent."""

    name: NonEmpty
    value: NonEmpty


class HeaderModifier(Spec, frozen=True):
    """Changes of headers. ``set``: overwritten. ``add``: appended to existing values. ``remove``: names."""

    set: Annotated[tuple[HeaderValue, ...], msgspec.Meta(max_length=16)] = ()
    add: Annotated[tuple[HeaderValue, ...], msgspec.Meta(max_length=16)] = ()
    remove: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=16)] = ()


class PathModifier(Spec, frozen=True):
    """A new path. ``type``: which of the two is set. ``replace_full_path``: the whole path. ``replace_prefix_match``:
    what takes the place of the prefix that the match names.
    """

    type: Literal["ReplaceFullPath", "ReplacePrefixMatch"]
    replace_full_path: str | None = None
    replace_prefix_match: str | None = None


class RequestRedirect(Spec, frozen=True):
    """An answer that redirects clients; a field that is left out keeps the request's value.

    ``scheme``, ``hostname``, ``path``: where to. ``port``: that of the scheme if one is given, else the listener's.
    ``status_code``: of the answer.
    """

    scheme: Literal["http", "https"] | None = None
    hostname: NonEmpty | None = None
    path: PathModifier | None = None
    port: Port | None = None
    status_code: Literal[301, 302, 303, 307, 308] = 302


class URLRewrite(Spec, frozen=True):
    """Replaces parts of the URL that backends get. ``hostname``: the new host. ``path``: the new path."""

    hostname: NonEmpty | None = None
    path: PathModifier | None = None


class Fraction(Spec, frozen=True):
    """A fraction of the requests. ``numerator``: of the fraction. ``denominator``: of the fraction."""

    numerator: Annotated[int, msgspec.Meta(ge=0)]
    denominator: Annotated[int, msgspec.Meta(ge=1)] = 100


class BackendRef(Spec, frozen=True):
    """A backend. In a directory it is a ModelServer or a Backend of ``attache.dev``; in a cluster an InferencePool, a
    ModelServer or a Service.

    ``group``, ``kind``, ``name``: which object. ``namespace``: of the object; the route's own, if left out. ``port``:
    of a Service.
    """

    name: NonEmpty
    group: str = ""
    kind: NonEmpty = "Service"
    namespace: NonEmpty | None = None
    port: Port | None = None


class RequestMirror(Spec, frozen=True):
    """Envoy copies requests to a second backend and discards its answers.

    ``backend_ref``: the backend that gets the copies. ``percent``, ``fraction``: of how many requests; of all, if
    neither is set.
    """

    backend_ref: BackendRef
    percent: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    fraction: Fraction | None = None


class Cors(Spec, frozen=True):
    """The origins from which scripts may use the answers.

    ``allow_origins``: ``https://app.example.com``, ``https://*.example.com`` or ``*``. ``allow_credentials``: requests
    may carry cookies and keys. ``allow_methods``, ``allow_headers``: of requests, ``*`` for all. ``expose_headers``: of
    answers. ``max_age``: seconds for which browsers may remember this.
    """

    allow_origins: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=64)] = ()
    allow_credentials: bool = False
    allow_methods: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=9)] = ()
    allow_headers: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=64)] = ()
    expose_headers: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=64)] = ()
    max_age: Annotated[int, msgspec.Meta(ge=1)] = 5


class HTTPRouteFilter(Spec, frozen=True):
    """One change of requests or answers. ``type``: which of the other fields is set.

    ``request_header_modifier``: changes headers that the backend gets. ``response_header_modifier``: changes headers
    that the client gets. ``request_mirror``: sends copies to another backend. ``request_redirect``: sends the client
    elsewhere. ``url_rewrite``: changes host and path. ``cors``: answers browsers' requests on behalf of scripts of
    other origins.
    """

    type: Literal[
        "RequestHeaderModifier", "ResponseHeaderModifier", "RequestMirror", "RequestRedirect", "URLRewrite", "CORS"
    ]
    request_header_modifier: HeaderModifier | None = None
    response_header_modifier: HeaderModifier | None = None
    request_mirror: RequestMirror | None = None
    request_redirect: RequestRedirect | None = None
    url_rewrite: URLRewrite | None = None
    cors: Cors | None = None


class WeightedBackendRef(BackendRef, frozen=True):
    """A backend with its share of the requests.

    ``group``, ``kind``, ``name``: which object. ``namespace``: of the object; the route's own, if left out.
    ``port``: of a Service. ``weight``: relative to the others'. ``filters``: only for this backend.
    """

    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1
    filters: Annotated[tuple[HTTPRouteFilter, ...], msgspec.Meta(max_length=16)] = ()


class HTTPRouteTimeouts(Spec, frozen=True):
    """``request``: the longest that an answer may take, with retries. ``backend_request``: of one try. ``0s``: no
    limit.
    """

    request: Duration | None = None
    backend_request: Duration | None = None


class HTTPRouteRetry(Spec, frozen=True):
    """When a request is tried again: if its connection fails or ends without an answer, if one try takes too long, and
    after some statuses.

    ``codes``: these statuses. ``attempts``: number of further tries. ``backoff``: the shortest time between two.
    """

    codes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=400, le=599)], ...], msgspec.Meta(max_length=16)] = ()
    attempts: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    backoff: Duration | None = None


class HTTPRouteRule(Spec, frozen=True):
    """Some requests, and how to handle them.

    ``name``: for people. ``matches``: one of them must hold. ``filters``: what is changed. ``backend_refs``: where
    requests go, by weight. ``timeouts``: how long answers may take. ``retry``: when a request is tried again; without
    it, by the ModelServer's traffic policy, or if no server has begun on it.
    """

    name: str = ""
    matches: Annotated[tuple[HTTPRouteMatch, ...], msgspec.Meta(max_length=64)] = (HTTPRouteMatch(),)
    filters: Annotated[tuple[HTTPRouteFilter, ...], msgspec.Meta(max_length=16)] = ()
    backend_refs: Annotated[tuple[WeightedBackendRef, ...], msgspec.Meta(max_length=16)] = ()
    timeouts: HTTPRouteTimeouts = HTTPRouteTimeouts()
    retry: HTTPRouteRetry | None = None


class HTTPRouteSpec(Spec, frozen=True):
    """Which requests go where. Of several matches, the most specific decides, as the Gateway API specifies.

    ``parent_refs``: the listeners that serve it, by ``sectionName``; without them, all. ``hostnames``: only requests to
    these hosts, which may begin with ``*.``. ``rules``: what is done with them.
    """

    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=256)] = ()
    hostnames: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=16)] = ()
    rules: Annotated[tuple[HTTPRouteRule, ...], msgspec.Meta(max_length=16)] = (HTTPRouteRule(),)


class HTTPRoute(DirectoryObject, frozen=True, kw_only=True):
    """An HTTPRoute document. Between equal matches of two routes, the older decides, then the first by its key."""

    spec: HTTPRouteSpec

    @property
    def reference(self) -> str:
        """What requests have of it: ``namespace/name``."""
        return self.metadata.key


class BackendSpec(Spec, frozen=True):
    """Servers over which Envoy balances without extproc. ``endpoints``: ``ip:port`` or ``name:port``; without any,
    requests are answered 503. ``protocol``: ``H2C`` is HTTP/2 without TLS, ``WebSocket`` lets connections be upgraded.
    ``unresolved``: the reference to it cannot be resolved; requests are answered 500, as the Gateway API specifies.
    """

    endpoints: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=10_000)] = ()
    protocol: Literal["HTTP", "H2C", "WebSocket"] = "HTTP"
    unresolved: bool = False


class Backend(DirectoryObject, frozen=True, kw_only=True):
    """A Backend document."""

    spec: BackendSpec


def check_http_route(spec: HTTPRouteSpec) -> Iterator[Finding]:
    """Envoy can apply the route: every match can be met, every filter has its fields, no two contradict each other."""
    for index, hostname in enumerate(spec.hostnames):
        yield from check_hostname(hostname, ("spec", "hostnames", index))
    for number, rule in enumerate(spec.rules):
        yield from _check_rule(rule, ("spec", "rules", number))


def check_hostname(hostname: str, path: Path) -> Iterator[Finding]:
    """A host name as the Gateway API has it: of lower case, no IP address, ``*.`` at most in front."""
    if not _HOSTNAME.fullmatch(hostname) or _IPV4.fullmatch(hostname) or len(hostname) > _MOST_HOSTNAME:
        yield path, f"{hostname[:100]!a} is no host name; write one such as api.example.com or *.example.com"


def _check_rule(rule: HTTPRouteRule, path: Path) -> Iterator[Finding]:
    for number, match in enumerate(rule.matches):
        at = (*path, "matches", number)
        yield from _check_path(match.path, (*at, "path", "value"))
        yield from check_header_matches(match.headers, at)
        for index, parameter in enumerate(match.query_params):
            yield from _check_value(parameter, (*at, "queryParams", index, "value"))
    yield from check_rule_filters(rule.filters, rule.backend_refs, path)
    yield from _check_together(rule, path)
    yield from _check_timeouts(rule.timeouts, (*path, "timeouts"))
    backoff = None if rule.retry is None else rule.retry.backoff
    if backoff is not None and not _SHORTEST_S <= backoff <= _LONGEST_S:
        advice = f"write a time from {_SHORTEST_S:g}s to {_LONGEST_S:g}s"
        yield (*path, "retry", "backoff"), f"Envoy takes no {backoff} here; {advice}"


def check_header_matches(headers: Iterable[ValueMatch], path: Path) -> Iterator[Finding]:
    """Names that headers can have, and expressions."""
    for index, header in enumerate(headers):
        yield from check_header_name(header.name, (*path, "headers", index, "name"))
        yield from _check_value(header, (*path, "headers", index, "value"))


def check_rule_filters(
    filters: Sequence[HTTPRouteFilter], backends: Iterable[WeightedBackendRef], path: Path
) -> Iterator[Finding]:
    """The filters of a rule and of its backends: every filter has its fields, and stands where it can be applied."""
    yield from _check_filters(filters, (*path, "filters"))
    for number, backend in enumerate(backends):
        at = (*path, "backendRefs", number, "filters")
        yield from _check_filters(backend.filters, at)
        for index, one in enumerate(backend.filters):
            if one.type not in _OF_BACKENDS:
                yield (*at, index, "type"), f"{one.type} is applied to whole rules; write it under the rule's filters"


def _check_path(match: PathMatch, path: Path) -> Iterator[Finding]:
    if match.type == "RegularExpression":
        yield from check_expression(match.value, path)
    elif not match.value.startswith("/") or _NEVER_IN_PATHS.search(match.value):
        yield (
            path,
            f"{match.value[:100]!a} is no path that a request can have; write one such as /v1/files, without query",
        )


def _check_value(match: ValueMatch, path: Path) -> Iterator[Finding]:
    if match.type == "RegularExpression":
        yield from check_expression(match.value, path)


def check_expression(text: str, path: Path) -> Iterator[Finding]:
    """An expression that Envoy can compile."""
    try:
        compile_expression(text)
    except ValueError as error:
        yield path, str(error)


def _check_filters(filters: Sequence[HTTPRouteFilter], path: Path) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, one in enumerate(filters):
        at = (*path, index)
        own = _FIELDS[one.type]
        if getattr(one, own) is None:
            yield at, f"is of type {one.type}, so it needs '{_SPELLED[own]}'"
        for field in _FIELDS.values():
            if field != own and getattr(one, field) is not None:
                yield (*at, _SPELLED[field]), f"does not belong to a filter of type {one.type}; write a filter for each"
        if one.type in seen and one.type != "RequestMirror":
            yield (*at, "type"), f"a second {one.type}; put both into one"
        seen.add(one.type)
        yield from _check_filter(one, at)


def _check_filter(one: HTTPRouteFilter, at: Path) -> Iterator[Finding]:
    for field, modifier in (
        ("requestHeaderModifier", one.request_header_modifier),
        ("responseHeaderModifier", one.response_header_modifier),
    ):
        if modifier is not None:
            yield from _check_modifier(modifier, (*at, field))
    if one.request_mirror is not None:
        yield from _check_mirror(one.request_mirror, (*at, "requestMirror"))
    if one.request_redirect is not None:
        yield from _check_hostname_and_path(
            one.request_redirect.hostname, one.request_redirect.path, (*at, "requestRedirect")
        )
    if one.url_rewrite is not None:
        yield from _check_hostname_and_path(one.url_rewrite.hostname, one.url_rewrite.path, (*at, "urlRewrite"))
    if one.cors is not None:
        yield from check_cors(one.cors, (*at, "cors"))


def _check_modifier(modifier: HeaderModifier, path: Path) -> Iterator[Finding]:
    names = [
        *((("set", index, "name"), one.name) for index, one in enumerate(modifier.set)),
        *((("add", index, "name"), one.name) for index, one in enumerate(modifier.add)),
        *((("remove", index), name) for index, name in enumerate(modifier.remove)),
    ]
    for at, name in names:
        yield from check_header_name(name, (*path, *at))
        if name.lower() == "host":
            yield (*path, *at), "the host is not changed as a header; write a URLRewrite with hostname"


def _check_mirror(mirror: RequestMirror, path: Path) -> Iterator[Finding]:
    if mirror.percent is not None and mirror.fraction is not None:
        yield path, "has both percent and fraction; write one of them"
    if mirror.fraction is not None and mirror.fraction.numerator > mirror.fraction.denominator:
        yield (*path, "fraction"), "is more than all requests; write a numerator up to the denominator"


def _check_hostname_and_path(hostname: str | None, modifier: PathModifier | None, path: Path) -> Iterator[Finding]:
    if hostname is not None:
        yield from check_hostname(hostname, (*path, "hostname"))
        if hostname.startswith("*"):
            yield (*path, "hostname"), "begins with *, and clients need a whole name here; write one"
    if modifier is None:
        return
    is_full = modifier.type == "ReplaceFullPath"
    own = modifier.replace_full_path if is_full else modifier.replace_prefix_match
    other = modifier.replace_prefix_match if is_full else modifier.replace_full_path
    field = "replaceFullPath" if is_full else "replacePrefixMatch"
    if own is None or other is not None:
        yield (*path, "path"), f"is of type {modifier.type}, so it has {field} and nothing else"
    elif (own and not own.startswith("/")) or re.search(r"[\x00-\x20\x7f?#]", own):
        yield (*path, "path", field), f"{own[:100]!a} is no path; write one such as /v1, without query"


def check_cors(cors: Cors, path: Path) -> Iterator[Finding]:
    """Origins that a browser can send, names that headers can have."""
    for index, origin in enumerate(cors.allow_origins):
        if not _ORIGIN.fullmatch(origin):
            advice = "write one such as https://app.example.com, https://*.example.com, or *"
            yield (*path, "allowOrigins", index), f"{origin[:100]!a} is no origin; {advice}"
    for field, names in (("allowHeaders", cors.allow_headers), ("exposeHeaders", cors.expose_headers)):
        for index, name in enumerate(names):
            yield from check_header_name(name, (*path, field, index))


def _check_together(rule: HTTPRouteRule, path: Path) -> Iterator[Finding]:
    redirects = [one for one in rule.filters if one.request_redirect is not None]
    if redirects and any(one.url_rewrite is not None for one in rule.filters):
        yield (*path, "filters"), "has both RequestRedirect and URLRewrite; a redirected request goes to no backend"
    if redirects and rule.backend_refs:
        yield (*path, "backendRefs"), "has no effect beside a RequestRedirect; leave one of the two out"
    paths = [one.request_redirect.path for one in redirects if one.request_redirect is not None]
    paths += [one.url_rewrite.path for one in rule.filters if one.url_rewrite is not None]
    replaces = any(one is not None and one.type == "ReplacePrefixMatch" for one in paths)
    if replaces and any(match.path.type != "PathPrefix" for match in rule.matches):
        yield (*path, "filters"), "ReplacePrefixMatch replaces what a PathPrefix matched; write such matches alone"


def _check_timeouts(timeouts: HTTPRouteTimeouts, path: Path) -> Iterator[Finding]:
    request, backend = timeouts.request, timeouts.backend_request
    for field, value in (("request", request), ("backendRequest", backend)):
        if value is not None and not 0 <= value <= _LONGEST_S:
            yield (*path, field), f"Envoy takes no {value} here; write a time up to {_LONGEST_S:g}s, 0s for none"
    if request and backend is not None and backend > request:
        yield (*path, "backendRequest"), "is longer than request, which ends all tries; write a shorter one"


def check_backend(spec: BackendSpec) -> Iterator[Finding]:
    """Addresses are ``ip:port`` or ``name:port`` and differ."""
    seen: set[str] = set()
    for index, endpoint in enumerate(spec.endpoints):
        path: Path = ("spec", "endpoints", index)
        yield from check_endpoint(endpoint, path)
        if endpoint in seen:
            yield path, f"'{endpoint}' is listed twice; write each server once"
        seen.add(endpoint)
