# SPDX-License-Identifier: Apache-2.0
"""Addresses of pods: in 127/8, where all of them are this machine, or in a network namespace on a bridge."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Final, Protocol, Self

from bench.cluster.netns import BRIDGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.stack.orphan_reaper import ProcessGuard

_NETWORKS: Final = range(1, 255)
_PER_NETWORK: Final = 254 * 255
# the process that binds this port of a network's last address owns the network
_CLAIM_PORT: Final = 61_127
# reports when it is in its namespace, and runs until it is killed
_HOLDER: Final = ("unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity")


class NoAddressLeft(Exception):
    """All addresses of this network, or all networks of this machine, are in use."""


class LoopbackAddresses:
    """A network ``127.N.0.0/16`` that no other cluster on this machine uses while this is open.

    Each address is handed out once before any of them a second time, as late as possible.
    """

    def __init__(self, networks: Iterable[int] = _NETWORKS) -> None:
        self._claim, self._network = _claimed(networks)
        self._next = 0
        self._taken: set[str] = set()

    def allocate(self) -> str:
        """A free address; raises NoAddressLeft."""
        for _ in range(_PER_NETWORK):
            # addresses that end in 0 or 255 could be taken for mistakes in logs
            third, fourth = divmod(self._next, 254)
            self._next = (self._next + 1) % _PER_NETWORK
            address = f"127.{self._network}.{third}.{fourth + 1}"
            if address not in self._taken:
                self._taken.add(address)
                return address
        raise NoAddressLeft("this node has no address left for a pod")

    def release(self, address: str) -> None:
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


class PodSandbox(Protocol):
    """One pod's place. ``shares_ports``: with other pods, so its servers must listen on ``address`` alone."""

    address: str
    shares_ports: bool

    async def command_prefix(self) -> Sequence[str]:
        """The words in front of a command that make it run in this place; raises OSError."""

    def close(self) -> None:
        """The pod is gone: the address may be another's."""


class PodNetwork(Protocol):
    """Gives pods their places. ``host_ip``: the address of the nodes themselves."""

    host_ip: str

    def create_sandbox(self, *, host_network: bool) -> PodSandbox:
        """A place for a new pod; raises NoAddressLeft."""

    def close(self) -> None:
        """The network may be another's."""


class LoopbackSandbox:
    """An address of 127/8. Ports are free or taken for each address apart, if servers listen on one address only."""

    shares_ports = True

    def __init__(self, addresses: LoopbackAddresses) -> None:
        self._addresses = addresses
        self.address = addresses.allocate()

    async def command_prefix(self) -> Sequence[str]:
        """Nothing: all addresses of 127/8 are here."""
        return ()

    def close(self) -> None:
        """Give the address back."""
        self._addresses.release(self.address)


class LoopbackNetwork:
    """Pods have addresses of 127/8, on any Linux without any right. A pod with ``hostNetwork`` gets one too."""

    host_ip = "127.0.0.1"

    def __init__(self) -> None:
        self._addresses = LoopbackAddresses()

    def create_sandbox(self, *, host_network: bool) -> PodSandbox:  # noqa: ARG002 - see the class
        """A new address."""
        return LoopbackSandbox(self._addresses)

    def close(self) -> None:
        """Give the network back."""
        self._addresses.close()


class HostNetworkSandbox:
    """The network of the nodes themselves (``hostNetwork: true``)."""

    shares_ports = False

    def __init__(self, address: str) -> None:
        self.address = address

    async def command_prefix(self) -> Sequence[str]:
        """Nothing: the nodes run here."""
        return ()

    def close(self) -> None:
        """Nothing was taken."""


class BridgedNetworkNamespace:
    """A network namespace of the pod's own, which a process holds open (as Kubernetes' pause container does)."""

    shares_ports = False

    def __init__(self, network: BridgedNetwork, guard: ProcessGuard) -> None:
        self.address = network.allocate()
        self._network = network
        self._guard = guard
        self._making = asyncio.Lock()
        self._holder: asyncio.subprocess.Process | None = None

    async def command_prefix(self) -> Sequence[str]:
        """Make the namespace when the first container starts."""
        async with self._making:
            if self._holder is None:
                self._holder = await self._make()
        return _inside(self._holder.pid)

    def close(self) -> None:
        """The namespace and its link go with their last process."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._holder.pid, signal.SIGKILL)
            self._guard.remove(self._holder.pid)
        self._network.release(self.address)

    async def _make(self) -> asyncio.subprocess.Process:
        holder = await asyncio.create_subprocess_exec(*_HOLDER, stdout=subprocess.PIPE, start_new_session=True)
        self._guard.add(holder.pid)
        assert holder.stdout is not None
        if not await holder.stdout.readline():
            raise OSError("no network namespace for the pod, see above")
        here = self._network.link_commands(self.address, holder.pid)
        await _ip((), here)
        await _ip(_inside(holder.pid), self._network.pod_commands(self.address))
        return holder


class BridgedNetwork:
    """Pods have addresses of ``range_`` and namespaces of their own on the bridge that ``bench.cluster.netns`` made.

    The first address is the bridge's own and the nodes'; the last 256 are for Gateways and belong to no pod.
    """

    def __init__(self, range_: str, guard: ProcessGuard) -> None:
        self._range = ipaddress.IPv4Network(range_)
        self.host_ip = str(self._range[1])
        self._guard = guard
        self._next = 2
        self._taken: set[str] = set()

    def create_sandbox(self, *, host_network: bool) -> PodSandbox:
        """A new namespace, or the nodes' own."""
        return HostNetworkSandbox(self.host_ip) if host_network else BridgedNetworkNamespace(self, self._guard)

    def allocate(self) -> str:
        """A free address, each once before any a second time; raises NoAddressLeft."""
        end = self._range.num_addresses - 256
        for _ in range(end):
            number, self._next = self._next, max(2, (self._next + 1) % end)
            address = str(self._range[number])
            if number % 256 not in (0, 255) and address not in self._taken:
                self._taken.add(address)
                return address
        raise NoAddressLeft(f"all addresses of {self._range} are in use")

    def release(self, address: str) -> None:
        """It may be handed out again."""
        self._taken.discard(address)

    def link_commands(self, address: str, pid: int) -> list[str]:
        """What ``ip`` does here: a pair of interfaces, one end at the bridge, the other in the namespace of ``pid``."""
        number = int(ipaddress.IPv4Address(address)) - int(self._range.network_address)
        name = f"pod{number}"
        return [
            f"link add {name} type veth peer name eth0 netns {pid}",
            f"link set {name} master {BRIDGE} up",
        ]

    def pod_commands(self, address: str) -> list[str]:
        """What ``ip`` does in the pod's namespace."""
        return [
            f"addr add {address}/{self._range.prefixlen} dev eth0",
            "link set eth0 up",
            f"route add default via {self.host_ip}",
        ]

    def close(self) -> None:
        """Each namespace ends with its pod."""


def _inside(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net", "--")


async def _ip(enter: Sequence[str], commands: Sequence[str]) -> None:
    """Run commands of ``ip``; raises OSError with its output."""
    process = await asyncio.create_subprocess_exec(
        *enter, "ip", "-batch", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await process.communicate("\n".join(commands).encode() + b"\n")
    if process.returncode:
        raise OSError(f"ip: {said.decode().strip()}")
