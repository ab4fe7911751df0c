# SPDX-License-Identifier: Apache-2.0
"""HTTPRoute, as the Gateway API has it: which requests go to which backends, and what is changed on the way.

Source: Gateway API, gateway.networking.k8s.io/v1, HTTPRoute.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from extproc.api.quantities import Duration
from extproc.api.spec import API_VERSION, Metadata, NonEmpty, Spec
from extproc.api.workload import ParentReference, Port

ATTACHE_GROUP = API_VERSION.partition("/")[0]


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
    """Changes of headers. ``set``: overwritten. ``add``: appended to what is there. ``remove``: names."""

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
    """An answer that sends clients elsewhere; what is left out stays as it was asked.

    ``scheme``, ``hostname``, ``path``: where to. ``port``: that of the scheme if one is given, else the listener's.
    ``status_code``: of the answer.
    """

    scheme: Literal["http", "https"] | None = None
    hostname: NonEmpty | None = None
    path: PathModifier | None = None
    port: Port | None = None
    status_code: Literal[301, 302, 303, 307, 308] = 302


class URLRewrite(Spec, frozen=True):
    """What backends get in place of what was asked. ``hostname``: the host. ``path``: the path."""

    hostname: NonEmpty | None = None
    path: PathModifier | None = None


class Fraction(Spec, frozen=True):
    """A share of the requests. ``numerator``: so many. ``denominator``: of so many."""

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
    """A copy of requests goes to a second backend, whose answers are thrown away.

    ``backend_ref``: who gets the copies. ``percent``, ``fraction``: of how many requests; of all, if neither is set.
    """

    backend_ref: BackendRef
    percent: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    fraction: Fraction | None = None


class Cors(Spec, frozen=True):
    """Which scripts of other origins may use the answers.

    ``allow_origins``: ``https://app.example.com``, ``https://*.example.com`` or ``*``. ``allow_credentials``: cookies
    and keys may come along. ``allow_methods``, ``allow_headers``: of requests, ``*`` for all. ``expose_headers``: of
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
    elsewhere.
    ``url_rewrite``: changes host and path. ``cors``: answers browsers that ask for scripts of other origins.
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
    ``port``: of a Service. ``weight``: relative to the others'. ``filters``: for this one alone.
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

    ``codes``: these statuses. ``attempts``: how many tries more. ``backoff``: the shortest time between two.
    """

    codes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=400, le=599)], ...], msgspec.Meta(max_length=16)] = ()
    attempts: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    backoff: Duration | None = None


class HTTPRouteRule(Spec, frozen=True):
    """Some requests, and what is done with them.

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
    """Which requests go where. Of several matches, the most specific decides, as the Gateway API says.

    ``parent_refs``: the listeners that serve it, by ``sectionName``; without them, all. ``hostnames``: only requests to
    these hosts, which may begin with ``*.``. ``rules``: what is done with them.
    """

    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=256)] = ()
    hostnames: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=16)] = ()
    rules: Annotated[tuple[HTTPRouteRule, ...], msgspec.Meta(max_length=16)] = (HTTPRouteRule(),)


class HTTPRoute(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTPRoute document. Between equal matches of two routes, the older decides, then the first by its key."""

    metadata: Metadata
    spec: HTTPRouteSpec
