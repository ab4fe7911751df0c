# SPDX-License-Identifier: Apache-2.0
"""The rules of HTTPRoutes and GRPCRoutes by host, in order of precedence: the Gateway API's rules, as plain data.

Source: Gateway API, HTTPRoute and GRPCRoute: precedence in ``hostnames`` and ``matches``; Gateway: listener isolation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extproc.api.gateway_config import Listener
from extproc.api.grpc_route import GatewayApiRoute, effective_matches
from extproc.api.match_patterns import ANY_HOST, covering_domains, covers_domain
from extproc.api.spec import is_attached

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from extproc.api.grpc_route import GatewayApiRule
    from extproc.api.http_route import HTTPRouteMatch, PathMatch, ValueMatch


class RouteEntry(msgspec.Struct, frozen=True):
    """One match of one rule. ``rule`` and ``number``: which rule of ``route``, and which match of that."""

    route: GatewayApiRoute
    rule: int
    number: int

    @property
    def match(self) -> HTTPRouteMatch:
        """Its conditions."""
        return effective_matches(self.rule_spec)[self.number]

    @property
    def rule_spec(self) -> GatewayApiRule:
        """What is done with the requests."""
        return self.route.spec.rules[self.rule]


class HostRoutes(msgspec.Struct, frozen=True):
    """The requests to ``domain`` (``a.b``, ``*.b`` or ``*``) that fit no more specific host of the same address.

    ``listener``: the one that they belong to. ``entries``: the first that holds for a request decides.
    """

    domain: str
    listener: Listener
    entries: tuple[RouteEntry, ...]


def virtual_hosts(
    listeners: Sequence[Listener], routes: Iterable[GatewayApiRoute], *, are_named: bool = True
) -> list[HostRoutes]:
    """The hosts of listeners that share an address, the most specific first.

    A request belongs to the listener with the most specific host name that fits it, and routes attached to that
    listener alone serve it. ``are_named``: routes can name listeners; else all are attached.
    """
    attached = [
        (listener, [one for one in routes if not are_named or is_attached(one.spec.parent_refs, listener.name)])
        for listener in listeners
    ]
    domains = {listener_domain(listener) for listener in listeners}
    for listener, own in attached:
        domains.update(_intersections(listener, own))
    indexed = {listener.name: _by_host_name(own) for listener, own in attached}
    hosts = []
    for domain in sorted(sorted(domains), key=_specificity, reverse=True):
        covering = [listener for listener in listeners if covers_domain(listener_domain(listener), domain)]
        listener = max(covering, key=lambda one: _specificity(listener_domain(one)))
        hosts.append(HostRoutes(domain, listener, _entries(domain, indexed[listener.name])))
    return hosts


def listener_domain(listener: Listener) -> str:
    """What it listens for."""
    return ANY_HOST if listener.hostname is None else listener.hostname.lower()


def is_more_specific(domain: str, listener: Listener) -> bool:
    """Whether hosts that fit both belong to ``domain`` rather than to ``listener``."""
    return _specificity(domain) > _specificity(listener_domain(listener))


def match_conditions(match: HTTPRouteMatch) -> tuple[list[ValueMatch], list[ValueMatch]]:
    """Its conditions on headers and on parameters: of several for one name, the first counts."""
    headers = {one.name.lower(): one for one in reversed(match.headers)}
    parameters = {one.name: one for one in reversed(match.query_params)}
    return (
        [one for one in match.headers if headers[one.name.lower()] is one],
        [one for one in match.query_params if parameters[one.name] is one],
    )


def path_prefix(match: PathMatch) -> str:
    """What a PathPrefix compares by whole elements: without a slash at its end, so that ``/`` is empty."""
    return match.value.rstrip("/")


def _intersections(listener: Listener, routes: Iterable[GatewayApiRoute]) -> Iterator[str]:
    """Domains that the listener and a host name of an attached route have in common."""
    own = listener_domain(listener)
    for route in routes:
        for hostname in route.spec.hostnames:
            other = hostname.lower()
            if covers_domain(own, other):
                yield other
            elif covers_domain(other, own):
                yield own


def _by_host_name(routes: Iterable[GatewayApiRoute]) -> Mapping[str, list[GatewayApiRoute]]:
    """The routes by host name, so that a host need not scan all routes. Those without names serve all hosts."""
    found: dict[str, list[GatewayApiRoute]] = {}
    for route in routes:
        for hostname in dict.fromkeys(one.lower() for one in route.spec.hostnames or (ANY_HOST,)):
            found.setdefault(hostname, []).append(route)
    return found


def _entries(domain: str, routes: Mapping[str, list[GatewayApiRoute]]) -> tuple[RouteEntry, ...]:
    found: list[tuple[tuple[bool, int], RouteEntry]] = []
    seen: set[str] = set()
    # a route counts by the most specific of its names
    for hostname in covering_domains(domain):
        for route in routes.get(hostname, ()):
            if route.reference not in seen:
                seen.add(route.reference)
                rules: Sequence[GatewayApiRule] = route.spec.rules
                found.extend(
                    (_specificity(hostname), RouteEntry(route, number, index))
                    for number, rule in enumerate(rules)
                    for index in range(len(effective_matches(rule)))
                )
    return tuple(entry for _, entry in sorted(found, key=lambda pair: _precedence(*pair)))


def _specificity(domain: str) -> tuple[bool, int]:
    """Whole names before wildcards, long ones before short ones."""
    return not domain.startswith(ANY_HOST), len(domain)


def _precedence(specificity: tuple[bool, int], entry: RouteEntry) -> tuple[object, ...]:
    """What is smaller decides first."""
    match, created = entry.match, entry.route.metadata.creation_timestamp
    headers, parameters = match_conditions(match)
    return (
        (not specificity[0], -specificity[1]),
        _path_rank(match.path),
        match.method is None,
        -len(headers),
        -len(parameters),
        (created is None, created.timestamp() if created is not None else 0.0),
        entry.route.reference,
        entry.rule,
        entry.number,
    )


def _path_rank(match: PathMatch) -> tuple[int, int]:
    """Exact paths, then prefixes by length, then expressions; ``/``, a prefix of every path, comes last.

    The Gateway API leaves the place of expressions to implementations.
    """
    if match.type == "Exact":
        return 0, 0
    if match.type == "RegularExpression":
        return 2, 0
    length = len(path_prefix(match))
    return (1, -length) if length else (3, 0)
