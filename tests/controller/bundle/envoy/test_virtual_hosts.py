# SPDX-License-Identifier: Apache-2.0
"""Hosts and the order of their rules, against a reading of the Gateway API that looks at one request at a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.bundle.envoy.virtual_hosts import HostRoutes, RouteEntry, match_conditions, path_prefix, virtual_hosts
from extproc.api.gateway_config import Listener
from extproc.api.http_route import HTTPRoute, HTTPRouteMatch, HTTPRouteRule, HTTPRouteSpec, PathMatch, ValueMatch
from extproc.api.match_patterns import covers_domain
from extproc.api.spec import Metadata, ParentReference
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence


class Asked(msgspec.Struct, frozen=True):
    """A request."""

    host: str
    path: str
    method: str
    headers: dict[str, str]
    query: dict[str, str]


def holds(match: HTTPRouteMatch, asked: Asked) -> bool:
    """As Envoy compares."""
    headers, parameters = match_conditions(match)
    return (
        path_holds(match.path, asked.path)
        and match.method in (None, asked.method)
        and all(asked.headers.get(one.name.lower()) == one.value for one in headers)
        and all(asked.query.get(one.name) == one.value for one in parameters)
    )


def path_holds(match: PathMatch, path: str) -> bool:
    if match.type == "Exact":
        return path == match.value
    if match.type == "RegularExpression":
        return match.value == "/.*b" and path.endswith("b")
    wanted, has = match.value.strip("/").split("/"), path.strip("/").split("/")
    return wanted == [""] or has[: len(wanted)] == wanted


def as_envoy_does(hosts: Sequence[HostRoutes], asked: Asked) -> RouteEntry | None:
    """The most specific domain, then its first entry that holds."""
    exact = [host for host in hosts if host.domain == asked.host]
    wildcards = [host for host in hosts if host.domain[:2] == "*." and asked.host.endswith(host.domain[1:])]
    wildcards.sort(key=lambda host: -len(host.domain))
    found = [*exact, *wildcards, *(host for host in hosts if host.domain == "*")]
    return next((entry for entry in found[0].entries if holds(entry.match, asked)), None) if found else None


def matches_host(pattern: str | None, host: str) -> bool:
    if pattern is None or pattern == host:
        return True
    return pattern.startswith("*.") and host.endswith(pattern[1:])


def more_specific(pattern: str | None) -> tuple[int, int]:
    """ "Characters in a matching non-wildcard hostname", then "characters in a matching hostname"."""
    text = pattern or ""
    return (0 if text.startswith("*") else len(text)), len(text)


def by_the_book(listeners: Sequence[Listener], routes: Sequence[HTTPRoute], asked: Asked) -> RouteEntry | None:
    """The spec's words, for one request: its listener, the matches that hold, the best of them."""
    fitting = [one for one in listeners if matches_host(one.hostname, asked.host)]
    if not fitting:
        return None
    listener = max(fitting, key=lambda one: more_specific(one.hostname))
    best: tuple[tuple[object, ...], RouteEntry] | None = None
    for route in routes:
        refs = route.spec.parent_refs
        if refs and all(ref.section_name not in (None, listener.name) for ref in refs):
            continue
        names = [one for one in route.spec.hostnames if matches_host(one, asked.host)]
        if route.spec.hostnames and not names:
            continue
        for rule_number, rule in enumerate(route.spec.rules):
            for number, match in enumerate(rule.matches):
                if not holds(match, asked):
                    continue
                entry = RouteEntry(route, rule_number, number)
                rank = (*max(map(more_specific, names), default=(0, 0)), *rank_of(match))
                if best is None or rank > best[0] or (rank == best[0] and comes_before(entry, best[1])):
                    best = rank, entry
    return None if best is None else best[1]


def rank_of(match: HTTPRouteMatch) -> tuple[object, ...]:
    """More is better."""
    kind, length = match.path.type, len(match.path.value.rstrip("/"))
    order = 3 if kind == "Exact" else 1 if kind == "RegularExpression" else 2 if length else 0
    headers = {one.name.lower() for one in match.headers}
    parameters = {one.name for one in match.query_params}
    prefix = length if kind == "PathPrefix" else 0
    return order, prefix, match.method is not None, len(headers), len(parameters)


def comes_before(entry: RouteEntry, other: RouteEntry) -> bool:
    mine, theirs = entry.route.metadata, other.route.metadata
    if mine.creation_timestamp != theirs.creation_timestamp:
        if mine.creation_timestamp is None or theirs.creation_timestamp is None:
            return theirs.creation_timestamp is None
        return mine.creation_timestamp < theirs.creation_timestamp
    return (mine.key, entry.rule, entry.number) < (theirs.key, other.rule, other.number)


NAMES = ("a.com", "b.a.com", "c.b.a.com", "other.org")
PATTERNS = (*NAMES, "*.a.com", "*.b.a.com", "*.com")
PATHS = ("/", "/a", "/a/", "/a/b", "/ab", "/a/b/c")

hostnames = st.lists(st.sampled_from(PATTERNS), max_size=3, unique=True).map(tuple)
paths = st.one_of(
    st.builds(PathMatch, type=st.sampled_from(["Exact", "PathPrefix"]), value=st.sampled_from(PATHS)),
    st.just(PathMatch(type="RegularExpression", value="/.*b")),
)
values = st.lists(
    st.builds(ValueMatch, name=st.sampled_from(["x", "X", "y"]), value=st.sampled_from("12")), max_size=3
).map(tuple)
matches = st.builds(
    HTTPRouteMatch,
    path=paths,
    headers=values,
    query_params=values,
    method=st.sampled_from([None, None, "GET", "POST"]),
)
rules = st.lists(
    st.builds(HTTPRouteRule, matches=st.lists(matches, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=3
).map(tuple)
refs = st.lists(
    st.builds(ParentReference, name=st.just("gateway"), section_name=st.sampled_from(["l0", "l1", "l2", None])),
    max_size=2,
).map(tuple)
times = st.sampled_from([None, datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)])


@st.composite
def directories(draw: st.DrawFn) -> tuple[list[Listener], list[HTTPRoute]]:
    """Up to three listeners of one address, up to four routes."""
    chosen = draw(st.lists(st.sampled_from([None, *PATTERNS]), min_size=1, max_size=3, unique=True))
    listeners = [
        Listener(name=f"l{number}", address="127.0.0.1:80", hostname=hostname) for number, hostname in enumerate(chosen)
    ]
    routes = [
        HTTPRoute(
            metadata=Metadata(name=f"r{number}", creation_timestamp=draw(times)),
            spec=HTTPRouteSpec(parent_refs=draw(refs), hostnames=draw(hostnames), rules=draw(rules)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return listeners, routes


pairs = st.dictionaries(st.sampled_from(["x", "y", "X"]), st.sampled_from("12"), max_size=2)
requests = st.builds(
    Asked,
    host=st.sampled_from((*NAMES, "d.com", "localhost")),
    path=st.sampled_from((*PATHS, "/ab/b", "/a/bc")),
    method=st.sampled_from(["GET", "POST"]),
    headers=pairs.map(lambda found: {name.lower(): value for name, value in found.items()}),
    query=pairs,
)


@settings(max_examples=examples(400), deadline=None)
@given(directories(), st.lists(requests, min_size=1, max_size=8))
def test_the_first_entry_of_a_requests_host_is_what_the_gateway_api_asks_for(
    directory: tuple[list[Listener], list[HTTPRoute]], asked: list[Asked]
) -> None:
    listeners, routes = directory
    hosts = virtual_hosts(listeners, routes)

    for one in asked:
        found, expected = as_envoy_does(hosts, one), by_the_book(listeners, routes, one)
        assert found == expected, one


def route(name: str, *hosts: str, **match: object) -> HTTPRoute:
    spec = HTTPRouteSpec(hostnames=hosts, rules=(HTTPRouteRule(matches=(HTTPRouteMatch(**match),)),))  # type: ignore[arg-type]
    return HTTPRoute(metadata=Metadata(name=name), spec=spec)


def names(host: HostRoutes) -> list[str]:
    return [entry.route.metadata.name for entry in host.entries]


def test_a_more_specific_listener_takes_its_host_away_from_routes_of_others() -> None:
    listeners = [
        Listener(name="wide", address="127.0.0.1:80", hostname="*.example.com"),
        Listener(name="one", address="127.0.0.1:80", hostname="one.example.com"),
    ]
    wide = HTTPRoute(
        metadata=Metadata(name="wide"),
        spec=HTTPRouteSpec(
            parent_refs=(ParentReference(name="gateway", section_name="wide"),),
            hostnames=("one.example.com", "two.example.com"),
        ),
    )

    hosts = virtual_hosts(listeners, [wide])

    assert [(host.domain, host.listener.name, names(host)) for host in hosts] == [
        ("one.example.com", "one", []),
        ("two.example.com", "wide", ["wide"]),
        ("*.example.com", "wide", []),
    ]


def test_without_named_listeners_every_route_is_attached() -> None:
    only = Listener(name="default", address="127.0.0.1:80")
    of_cluster = HTTPRoute(
        metadata=Metadata(name="r"),
        spec=HTTPRouteSpec(parent_refs=(ParentReference(name="gateway", section_name="http"),)),
    )

    (host,) = virtual_hosts([only], [of_cluster], are_named=False)

    assert names(host) == ["r"]


def test_the_order_of_paths() -> None:
    only = Listener(name="default", address="127.0.0.1:80")
    routes = [
        route("slash", path=PathMatch(value="/")),
        route("expression", path=PathMatch(type="RegularExpression", value="/.*")),
        route("short", path=PathMatch(value="/a")),
        route("long", path=PathMatch(value="/a/b")),
        route("exact", path=PathMatch(type="Exact", value="/a/b")),
    ]

    (host,) = virtual_hosts([only], routes)

    assert names(host) == ["exact", "long", "short", "expression", "slash"]


def test_a_slash_at_the_end_of_a_prefix_makes_no_difference() -> None:
    assert path_prefix(PathMatch(value="/a/")) == path_prefix(PathMatch(value="/a")) == "/a"


def test_a_wildcard_stands_for_one_label_or_more() -> None:
    assert covers_domain("*.a.com", "b.a.com")
    assert covers_domain("*.a.com", "c.b.a.com")
    assert covers_domain("*.a.com", "*.b.a.com")
    assert not covers_domain("*.a.com", "a.com")
    assert not covers_domain("*.a.com", "ba.com")
    assert not covers_domain("*.a.com", "*")
