# SPDX-License-Identifier: Apache-2.0
"""Which Gateways a role serves, and where: what the options of its command say."""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec

ANY: Final = "0.0.0.0"  # noqa: S104 - a gateway is there to be reached
# More addresses than a machine has; a range that is larger was a mistake.
_MOST_ADDRESSES: Final = 1024


class GatewayApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``gateway``: the one Gateway to serve, as ``namespace/name``; None: all of our classes. ``bind``: addresses that
    Envoy binds; with several, each Gateway gets one of its own while there are enough. ``advertise``: what statuses
    say in their place: an IP address, a host name, or ``service/NAMESPACE/NAME``; empty: the bound addresses.
    ``port_offset`` is added to the ports of listeners, so that Envoy need not bind ports below 1024.
    """

    gateway: str | None = None
    bind: tuple[str, ...] = (ANY,)
    advertise: str = ""
    port_offset: int = 0

    @property
    def advertised_service(self) -> str:
        """The Service whose addresses are advertised, as ``namespace/name``; empty if there is none."""
        return self.advertise.removeprefix("service/") if self.advertise.startswith("service/") else ""


def parse_addresses(text: str) -> tuple[str, ...]:
    """The addresses of ``IP[,IP...]`` or of a range such as ``127.0.2.0/24``; raises ValueError with what to write."""
    found: list[str] = []
    for part in text.split(","):
        try:
            network = ipaddress.ip_network(part.strip())
        except ValueError:
            advice = "write IP addresses with commas between them, or a range such as 127.0.2.0/24"
            raise ValueError(f"'{part}' is not an address; {advice}") from None
        if network.num_addresses > _MOST_ADDRESSES:
            raise ValueError(f"'{part}' has more than {_MOST_ADDRESSES} addresses; write a smaller range")
        found += [str(one) for one in (network.hosts() if network.num_addresses > 1 else network)]
    return tuple(dict.fromkeys(found))
