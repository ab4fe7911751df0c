# SPDX-License-Identifier: Apache-2.0
"""Addresses in 127/8 for pods: on Linux all of them are this machine, without any set-up."""

from __future__ import annotations

import ipaddress
from typing import Final

_FIRST: Final = int(ipaddress.IPv4Address("127.1.0.1"))
_LAST: Final = int(ipaddress.IPv4Address("127.254.255.254"))


class Addresses:
    """Hands out each address of ``network`` once before any of them a second time, as late as possible.

    Two clusters on one machine need different networks; the default is all of 127.1.0.1 to 127.254.255.254.
    """

    def __init__(self, network: str = "") -> None:
        if network:
            hosts = ipaddress.IPv4Network(network)
            self._first, self._last = int(hosts[1]), int(hosts[-2])
        else:
            self._first, self._last = _FIRST, _LAST
        self._next = self._first
        self._taken: set[int] = set()

    def take(self) -> str:
        """A free address; raises RuntimeError if there is none."""
        for _ in range(self._last - self._first + 1):
            address = self._next
            self._next = address + 1 if address < self._last else self._first
            # x.y.z.0 and x.y.z.255 look like mistakes in logs
            if address not in self._taken and address % 256 not in (0, 255):
                self._taken.add(address)
                return str(ipaddress.IPv4Address(address))
        raise RuntimeError("this node has no address left for a pod")

    def give_back(self, address: str) -> None:
        """It may be handed out again."""
        self._taken.discard(int(ipaddress.IPv4Address(address)))
