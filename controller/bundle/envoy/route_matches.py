# SPDX-License-Identifier: Apache-2.0
"""Conditions of HTTPRoutes as Envoy's: on path, method, headers and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, QueryParameterMatcher, RouteMatch
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from controller.bundle.envoy.hosts import conditions, path_prefix

if TYPE_CHECKING:
    from extproc.api.http_route import HTTPRouteMatch, PathMatch, ValueMatch


def route_match(match: HTTPRouteMatch) -> RouteMatch:
    """All conditions of ``match``."""
    headers, parameters = conditions(match)
    found = _path(match.path)
    found.headers = [HeaderMatcher(name=one.name.lower(), string_match=_value(one)) for one in headers]
    if match.method is not None:
        found.headers.append(HeaderMatcher(name=":method", string_match=StringMatcher(exact=match.method)))
    found.query_parameters = [QueryParameterMatcher(name=one.name, string_match=_value(one)) for one in parameters]
    return found


def _path(match: PathMatch) -> RouteMatch:
    if match.type == "Exact":
        return RouteMatch(path=match.value)
    if match.type == "RegularExpression":
        return RouteMatch(safe_regex=RegexMatcher(regex=match.value))
    prefix = path_prefix(match)
    return RouteMatch(path_separated_prefix=prefix) if prefix else RouteMatch(prefix="/")


def _value(match: ValueMatch) -> StringMatcher:
    if match.type == "Exact":
        return StringMatcher(exact=match.value)
    return StringMatcher(safe_regex=RegexMatcher(regex=match.value))
