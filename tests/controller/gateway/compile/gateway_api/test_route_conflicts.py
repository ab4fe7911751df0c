# SPDX-License-Identifier: Apache-2.0
"""Which of HTTPRoutes and GRPCRoutes a listener takes, against a reading that compares each with each."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gateway.compile.gateway_api.resource_types import GRPC_ROUTE, HTTP_ROUTE, ObjectIdentity, Route
from controller.gateway.compile.gateway_api.route_conflicts import RouteClaim, find_rivals
from extproc.api.match_patterns import covers_domain
from tests.examples import examples

HOSTS = ("a.com", "b.a.com", "c.b.a.com", "*.a.com", "*.b.a.com", "*.com", "other.org")
LISTENERS = {"any": "*", "wide": "*.a.com", "one": "b.a.com"}
claims = st.builds(
    lambda name, kind, created, hosts, listeners: RouteClaim(
        Route(ObjectIdentity(name=name, namespace="n", created=created), (), hosts, {}, kind), listeners
    ),
    st.sampled_from("abcdef"),
    st.sampled_from([HTTP_ROUTE, GRPC_ROUTE]),
    st.sampled_from("123"),
    st.lists(st.sampled_from(HOSTS), max_size=2, unique=True).map(tuple),
    st.frozensets(st.sampled_from(sorted(LISTENERS)), max_size=3),
)


def have_host(listener: str, one: Route, other: Route) -> bool:
    """Whether all three have a host in common: of the three, one is part of both others, or there is none."""
    return any(
        covers_domain(first, host) and covers_domain(second, host) and covers_domain(listener, host)
        for first in one.hostnames or ("*",)
        for second in other.hostnames or ("*",)
        for host in (first, second, listener)
    )


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(claims, max_size=8, unique_by=lambda one: one.route.key))
def test_the_older_of_two_with_a_common_host_is_taken(found: list[RouteClaim]) -> None:
    taken: list[tuple[Route, str]] = []
    lost = set()
    for one in sorted(found, key=lambda one: (one.route.identity.age_sort_key, one.route.kind.kind)):
        for name in one.listeners:
            rivals = [other for other, at in taken if at == name and other.kind != one.route.kind]
            if any(have_host(LISTENERS[name], one.route, other) for other in rivals):
                lost.add((one.route.key, name))
            else:
                taken.append((one.route, name))
    told = find_rivals(found, LISTENERS)
    assert {(key, name) for key, of in told.items() for name in of} == lost
    for key, of in told.items():
        other = "HTTPRoute" if key[0] == "GRPCRoute" else "GRPCRoute"
        assert all(rival.startswith(f"{other} n/") for rival in of.values())
