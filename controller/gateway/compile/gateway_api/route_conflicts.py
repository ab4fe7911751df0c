# SPDX-License-Identifier: Apache-2.0
"""HTTPRoutes and GRPCRoutes that have hosts of a listener in common, of which the listener takes one alone.

Source: Gateway API, GRPCRoute: ``hostnames``. Hosts are looked up, so that many routes cost each other little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from extproc.api.match_patterns import ANY_HOST, covering_domains, covers_domain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from controller.gateway.compile.gateway_api.resource_types import Route

# Of a route: by the listeners that it loses to an older route of the other kind, that route.
Rivals = dict[str, str]


class RouteClaim(NamedTuple):
    """``listeners``: the names of those that ``route`` would be attached to without any other route."""

    route: Route
    listeners: frozenset[str]


def find_rivals(claims: Iterable[RouteClaim], hosts: Mapping[str, str]) -> dict[tuple[str, str], Rivals]:
    """By route, without those that lose no listener. ``hosts``: of listeners, ``*`` for all."""
    claims = sorted(claims, key=lambda one: (one.route.identity.age_sort_key, one.route.kind.kind))
    kinds: dict[str, set[str]] = {}
    for one in claims:
        for name in one.listeners:
            kinds.setdefault(name, set()).add(one.route.kind.kind)
    disputed = {name for name, found in kinds.items() if len(found) > 1}
    taken: dict[tuple[str, str], _Hosts] = {}
    lost: dict[tuple[str, str], Rivals] = {}
    for one in claims:
        kind = one.route.kind.kind
        for name in one.listeners & disputed:
            own = list(_common(hosts[name], one.route.hostnames))
            others = (taken[other, name] for other in kinds[name] - {kind} if (other, name) in taken)
            rival = next((found for other in others for found in map(other.owner, own) if found), "")
            if rival:
                lost.setdefault(one.route.key, {})[name] = rival
            else:
                taken.setdefault((kind, name), _Hosts()).add(own, f"{kind} {one.route.identity.key}")
    return lost


def _common(listener: str, hostnames: Iterable[str]) -> Iterator[str]:
    """The hosts that a route of ``hostnames`` has at a listener."""
    for hostname in hostnames or (ANY_HOST,):
        other = hostname.lower()
        if covers_domain(listener, other):
            yield other
        elif covers_domain(other, listener):
            yield listener


class _Hosts:
    """Hosts and wildcards, each with the route that has it."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        # wildcards under which there is a host
        self._under: dict[str, str] = {}

    def add(self, hosts: Iterable[str], owner: str) -> None:
        """The first owner of a host stays its owner."""
        for host in hosts:
            self._owners.setdefault(host, owner)
            for wildcard in covering_domains(host):
                self._under.setdefault(wildcard, owner)

    def owner(self, host: str) -> str:
        """Who has hosts of ``host``; empty if nobody has."""
        found = next((self._owners[one] for one in covering_domains(host) if one in self._owners), "")
        return found or (self._under.get(host, "") if host.startswith(ANY_HOST) else "")
