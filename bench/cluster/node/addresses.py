# SPDX-License-Identifier: Apache-2.0
"""Addresses in 127/8 for pods: on Linux all of them are this machine, without any set-up."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

_NETWORKS: Final = range(1, 255)
_PER_NETWORK: Final = 254 * 255
# who has this port of a network's last address has the network
_CLAIM_PORT: Final = 61_127


class NoAddressLeft(Exception):
    """All addresses of this network, or all networks of this machine, are in use."""


class Addresses:
    """A network ``127.N.0.0/16`` that no other cluster on this machine uses while this is open.

    Each address is handed out once before any of them a second time, as late as possible.
    """

    def __init__(self, networks: Iterable[int] = _NETWORKS) -> None:
        self._claim, self._network = _claimed(networks)
        self._next = 0
        self._taken: set[str] = set()

    def take(self) -> str:
        """A free address; raises NoAddressLeft."""
        for _ in range(_PER_NETWORK):
            # addresses that end in 0 or 255 look like mistakes in logs
            third, fourth = divmod(self._next, 254)
            self._next = (self._next + 1) % _PER_NETWORK
            address = f"127.{self._network}.{third}.{fourth + 1}"
            if address not in self._taken:
                self._taken.add(address)
                return address
        raise NoAddressLeft("this node has no address left for a pod")

    def give_back(self, address: str) -> None:
        """It may be handed out again."""
        self._taken.discard(address)

    def close(self) -> None:
        """The network may be another's."""
        self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _claimed(networks: Iterable[int]) -> tuple[socket.socket, int]:
    for network in networks:
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((f"127.{network}.255.254", _CLAIM_PORT))
        except OSError:  # another has it
            claim.close()
        else:
            return claim, network
    raise NoAddressLeft("other clusters use all networks of 127/8")
