# SPDX-License-Identifier: Apache-2.0
"""Addresses and host names: their syntax, and which of them objects of a cluster may name."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from extproc.api.error_hints import address_hint, is_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.config_errors import Finding, Path

_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_HOSTNAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST_HOSTNAME: Final = 253
# On documents that were compiled from a cluster's objects: their authors have no rights on the gateway's machine.
OF_CLUSTER: Final = "attache.dev/of-cluster"
# On the same documents, where their authors may list engines in some networks alone: these, with commas.
NETWORKS: Final = "attache.dev/endpoint-networks"
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Where clouds serve credentials and settings of their machines, beside the link-local addresses: AWS by IPv6, Alibaba,
# Oracle, Azure.
_METADATA: Final = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"))
)
# An address in one of these stands for an IPv4 address, which ends so many bits before its end: NAT64 (RFC 6052, 8215),
# 6to4, IPv4-compatible and IPv4-mapped addresses.
_EMBEDDING: Final = (
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("64:ff9b:1::/48"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
    (ipaddress.IPv6Network("::/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
)


def parse_address(text: str) -> tuple[str, int]:
    """IP address and port of ``127.0.0.1:8000``, ``[::1]:8000`` or ``localhost:8000``; raises ValueError.

    For the address on which a process listens: a host name does not determine one. ``localhost`` is 127.0.0.1.
    """
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = "127.0.0.1" if host.lower() == "localhost" else host[1:-1] if is_bracketed else host
    try:
        ip = ipaddress.ip_address(bare) if is_port(port) else None
    except ValueError:
        ip = None
    # found out only for mistakes: a directory has thousands of addresses
    if ip is None or is_bracketed != (ip.version == 6):
        raise ValueError(address_hint(text, takes_names=False))
    return str(ip), int(port)


class HostPort(NamedTuple):
    """A server's address. ``host``: an IP address if ``is_ip``, else a host name in lower case."""

    host: str
    port: int
    is_ip: bool


def join_host_port(host: str, port: int | str) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str) -> HostPort:
    """``10.0.0.1:8000``, ``[::1]:8000`` or ``engine-0.example.com:8000``; raises ValueError."""
    host, _, port = text.rpartition(":")
    if is_hostname(host) and not host.rpartition(".")[2].isdigit():
        try:
            return HostPort(host.lower(), parse_address(f"127.0.0.1:{port}")[1], is_ip=False)
        except ValueError:
            pass
    try:
        return HostPort(*parse_address(text), is_ip=True)
    except ValueError:
        raise ValueError(address_hint(text, takes_names=True)) from None


def parse_envoy_upstream(text: str) -> HostPort:
    """The same for a server that Envoy connects to by itself, for which ``localhost`` is 127.0.0.1."""
    found = parse_endpoint(text)
    return found._replace(host="127.0.0.1", is_ip=True) if found.host == "localhost" else found


def is_hostname(text: str) -> bool:
    """Whether ``text`` can be a host name, of labels that dots separate."""
    return len(text) <= _LONGEST_HOSTNAME and _HOSTNAME.fullmatch(text) is not None


def worker_addresses(address: str, workers: int) -> list[str]:
    """The workers' addresses: consecutive ports, or numbered socket files; unchanged for a single worker."""
    if workers == 1:
        return [address]
    if address.startswith("unix:"):
        return [f"{address}.{number}" for number in range(workers)]
    host, _, port = address.rpartition(":")
    return [f"{host}:{int(port) + number}" for number in range(workers)]


def check_address(text: str, path: Path) -> Iterator[Finding]:
    """``parse_address``, as a finding at ``path``."""
    try:
        parse_address(text)
    except ValueError as error:
        yield path, str(error)


def check_endpoint(text: str, path: Path) -> Iterator[Finding]:
    """``parse_endpoint``, as a finding at ``path``."""
    try:
        parse_endpoint(text)
    except ValueError as error:
        yield path, str(error)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks of ``10.0.0.0/8,fd00::/8``; raises ValueError."""
    return tuple(ipaddress.ip_network(one.strip()) for one in text.split(","))


def is_local_or_metadata_host(host: str) -> bool:
    """Whether an address or a name means this machine, its link, a cloud's metadata service or nobody in particular.

    Whoever may write a ModelServer and a route could reach Envoy's admin interface there, or credentials of the node.
    """
    try:
        written = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return any(
        ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip in _METADATA
        for ip in _meanings(written)
    )


def is_in(host: str, networks: Iterable[Network]) -> bool:
    """Whether the IP address ``host``, and every IPv4 address that it stands for, is in one of ``networks``."""
    known = tuple(networks)
    return all(any(ip in one for one in known) for ip in _meanings(ipaddress.ip_address(host)))


def _meanings(ip: IpAddress) -> Iterator[IpAddress]:
    """The address, and the IPv4 addresses that a gateway of the network may make of it."""
    is_mapped = isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None
    if not is_mapped:
        yield ip
    for network, bits in _EMBEDDING:
        if isinstance(ip, ipaddress.IPv6Address) and ip in network:
            yield ipaddress.IPv4Address(int(ip) >> bits & 0xFFFF_FFFF)
