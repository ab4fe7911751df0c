# SPDX-License-Identifier: Apache-2.0
"""Listeners in groups: each has one HTTP connection manager and one route configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.listeners import Listener, ListenerTls
from extproc.api.validation import parse_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.gateway_config import GatewayConfigSpec

# The route configuration of a gateway that has only ``listen``; the names of others begin with it.
DEFAULT_ROUTES: Final = "attache"
ROUTES_FOLDER: Final = "rds"
# The listener that ``listen`` stands for.
DEFAULT_LISTENER: Final = "default"


class ListenerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Listeners that share one HTTP connection manager and one route configuration.

    ``address``: ``ip:port``, spelled as Envoy spells it. ``listeners``: all plain HTTP listeners of that address, or
    one HTTPS listener. ``tls``: of the HTTPS listener.
    """

    route_config_name: str
    address: str
    listeners: tuple[Listener, ...]
    tls: ListenerTls | None = None

    @property
    def routes_file(self) -> str:
        """Where its route configuration is: Envoy takes one from an RDS file."""
        if self.route_config_name == DEFAULT_ROUTES:
            return "rds.json"
        protocol, _, name = self.route_config_name.removeprefix(f"{DEFAULT_ROUTES}/").partition("/")
        # names have no underscore, so no two share a file
        return f"{ROUTES_FOLDER}/{protocol}-{name.replace('/', '_').replace(':', '_')}.json"


def routes_files(gateway: GatewayConfigSpec) -> tuple[str, ...]:
    """The files with the route configurations of a gateway."""
    return tuple(group.routes_file for group in listener_groups(gateway))


def listener_groups(gateway: GatewayConfigSpec) -> tuple[ListenerGroup, ...]:
    """The groups of ``gateway``, in the order of their first listeners.

    The plain HTTP listeners of one address share a connection before its first host name is known, so they are one
    group. HTTPS listeners are told apart by the server name of the TLS handshake, so each is a group by itself.
    """
    if not gateway.listeners:
        only = Listener(name=DEFAULT_LISTENER, address=gateway.listen)
        return (ListenerGroup(route_config_name=DEFAULT_ROUTES, address=gateway.listen, listeners=(only,)),)
    shared: dict[tuple[str, str], list[Listener]] = {}
    for listener in gateway.listeners:
        address = same_address(listener.address)
        alone = "" if listener.tls is None else listener.name
        shared.setdefault((address, alone), []).append(listener)
    return tuple(_group(address, listeners) for (address, _), listeners in shared.items())


def same_address(text: str) -> str:
    """``ip:port`` as it is spelled for all that mean the same; raises ValueError."""
    ip, port = parse_address(text)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _group(address: str, listeners: Sequence[Listener]) -> ListenerGroup:
    first = listeners[0]
    name = f"http/{address}" if first.tls is None else f"https/{first.name}"
    return ListenerGroup(
        route_config_name=f"{DEFAULT_ROUTES}/{name}", address=address, listeners=tuple(listeners), tls=first.tls
    )
