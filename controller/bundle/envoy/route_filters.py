# SPDX-License-Identifier: Apache-2.0
"""Filters of HTTPRoutes as settings of Envoy's routes: headers, redirects, other paths and hosts, copies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    RuntimeFractionalPercent,
)
from envoy_data_plane.envoy.config.route.v3 import (
    RedirectAction,
    RedirectActionRedirectResponseCode,
    Route,
    RouteAction,
    RouteActionRequestMirrorPolicy,
    WeightedClusterClusterWeight,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatchAndSubstitute, RegexMatcher
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType

from controller.bundle.envoy.hosts import path_prefix
from extproc.api.host_patterns import ANY_HOST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.http_route import (
        HeaderModifier,
        HTTPRouteFilter,
        HTTPRouteMatch,
        PathModifier,
        RequestMirror,
        RequestRedirect,
    )
    from extproc.api.http_route import (
        HeaderValue as Header,
    )

_CODE: Final = RedirectActionRedirectResponseCode
_CODES: Final = {
    301: _CODE.MOVED_PERMANENTLY,
    302: _CODE.FOUND,
    303: _CODE.SEE_OTHER,
    307: _CODE.TEMPORARY_REDIRECT,
    308: _CODE.PERMANENT_REDIRECT,
}
_WELL_KNOWN_PORTS: Final = {"http": 80, "https": 443}
_MILLION: Final = 1_000_000


def change_headers(target: Route | WeightedClusterClusterWeight, filters: Iterable[HTTPRouteFilter]) -> None:
    """Set what ``filters`` change in the headers of requests and answers."""
    for one in filters:
        if one.request_header_modifier is not None:
            target.request_headers_to_add.extend(_changes(one.request_header_modifier))
            target.request_headers_to_remove.extend(one.request_header_modifier.remove)
        if one.response_header_modifier is not None:
            target.response_headers_to_add.extend(_changes(one.response_header_modifier))
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
    """Where clients are sent.

    ``domain``: of the virtual host, which says the host that was asked for unless it begins with ``*``. ``port`` and
    ``is_tls``: of the listener.
    """
    scheme = redirect.scheme or ("https" if is_tls else "http")
    usual = _WELL_KNOWN_PORTS[scheme]
    # without a port, a new scheme brings its own, and the old scheme stays at the listener's
    final_port = redirect.port or (usual if redirect.scheme else port)
    action = RedirectAction(response_code=_CODES[redirect.status_code])
    if redirect.scheme is not None:
        action.scheme_redirect = redirect.scheme
    host = redirect.hostname or ("" if domain.startswith(ANY_HOST) else domain)
    if host:
        action.host_redirect = host
    # Envoy keeps the port that the client wrote unless it is told a host or a port
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
                numerator=round(_share(mirror) * _MILLION), denominator=FractionalPercentDenominatorType.MILLION
            )
        ),
        disable_shadow_host_suffix_append=True,
    )


def literal(value: str) -> str:
    """A header's value in which Envoy finds no command to replace."""
    return value.replace("%", "%%")


def _share(mirror: RequestMirror) -> float:
    if mirror.fraction is not None:
        return mirror.fraction.numerator / mirror.fraction.denominator
    return 1.0 if mirror.percent is None else mirror.percent / 100


def _changes(modifier: HeaderModifier) -> list[HeaderValueOption]:
    action = HeaderValueOptionHeaderAppendAction
    return [
        *(_header(one, action.OVERWRITE_IF_EXISTS_OR_ADD) for one in _first_of_each(modifier.set)),
        *(_header(one, action.APPEND_IF_EXISTS_OR_ADD) for one in _first_of_each(modifier.add)),
    ]


def _first_of_each(headers: Iterable[Header]) -> Iterable[Header]:
    """Of several for one name, the first counts."""
    found: dict[str, Header] = {}
    for one in headers:
        found.setdefault(one.name.lower(), one)
    return found.values()


def _header(header: Header, action: HeaderValueOptionHeaderAppendAction) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=header.name, value=literal(header.value)), append_action=action)


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


def _substitute(regex: str, new: str) -> RegexMatchAndSubstitute:
    return RegexMatchAndSubstitute(pattern=RegexMatcher(regex=regex), substitution=new.replace("\\", "\\\\"))
