# SPDX-License-Identifier: Apache-2.0
"""Addresses and host names: their syntax, and which of them lead to the gateway's own machine."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from extproc.api.advice import no_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.errors import Finding, Path

_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_HOSTNAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST_HOSTNAME: Final = 253


def parse_address(text: str) -> tuple[str, int]:
    """IP address and port of ``127.0.0.1:8000``, ``[::1]:8000`` or ``localhost:8000``; raises ValueError.

    For where a process listens, which a host name does not say. ``localhost`` is 127.0.0.1.
    """
    host, separator, port = text.rpartition(":")
    host = "127.0.0.1" if host.lower() == "localhost" else host
    advice = no_address(text, takes_names=False)
    if not separator or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(advice)
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        raise ValueError(advice) from None
    if is_bracketed != (ip.version == 6):
        raise ValueError(advice)
    return str(ip), int(port)


class HostPort(NamedTuple):
    """Where a server is. ``host``: an IP address if ``is_ip``, else a host name in lower case."""

    host: str
    port: int
    is_ip: bool


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
        raise ValueError(no_address(text, takes_names=True)) from None


def parse_target(text: str) -> HostPort:
    """The same for a server that Envoy connects to by itself, for which ``localhost`` is 127.0.0.1."""
    found = parse_endpoint(text)
    return found._replace(host="127.0.0.1", is_ip=True) if found.host == "localhost" else found


def is_hostname(text: str) -> bool:
    """Whether ``text`` can be a host name, of labels that dots separate."""
    return len(text) <= _LONGEST_HOSTNAME and _HOSTNAME.fullmatch(text) is not None


def worker_addresses(address: str, workers: int) -> list[str]:
    """Where the workers listen: the next ports, or numbered socket files; a single one as it is."""
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


# On documents that were compiled from a cluster's objects: their authors have no rights on the gateway's machine.
OF_CLUSTER: Final = "attache.dev/of-cluster"


def is_own(host: str) -> bool:
    """Whether an address or a name means this machine, its link or nobody in particular.

    Whoever may write a ModelServer and a route could reach Envoy's admin interface there, or a cloud's metadata. An API
    server takes no such address in an EndpointSlice either.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
