# SPDX-License-Identifier: Apache-2.0
"""Which addresses policies may have us ask: whoever may write a policy chooses them, so not all of them are."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Final

from aiohttp.abc import AbstractResolver
from aiohttp.resolver import ThreadedResolver
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.abc import ResolveResult


# Where clouds serve credentials outside of the link-local range: AWS by IPv6, Alibaba, Oracle.
_METADATA: Final = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")))

# Stands for the IPv4 addresses in its last 32 bits.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class NotAllowed(OSError):
    """The address must not be asked; the message says why."""


def is_public_enough(address: str) -> bool:
    """Whether an IP address may be one of a Prometheus. Not: this machine itself, and where clouds serve credentials,
    link-local addresses above all.
    """
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, ipaddress.IPv6Address) and one.ipv4_mapped is not None:
        one = one.ipv4_mapped
    if isinstance(one, ipaddress.IPv6Address) and one in _NAT64:
        one = ipaddress.IPv4Address(int(one) & 0xFFFF_FFFF)
    return not (one.is_loopback or one.is_link_local or one.is_multicast or one.is_unspecified or one in _METADATA)


class Allowed:
    """``prefixes``: URLs below which everything may be asked, whatever their IP addresses, and nothing else; empty: all
    addresses but those that ``is_public_enough`` refuses.
    """

    def __init__(self, prefixes: Sequence[str] = ()) -> None:
        self._prefixes = [URL(one) for one in prefixes]
        for one in self._prefixes:
            if one.scheme not in {"http", "https"} or not one.host or one.user or one.query_string or one.fragment:
                raise ValueError(f"{one} is no URL such as https://prometheus.monitoring.svc:9090")

    @property
    def is_list(self) -> bool:
        """Whether there are prefixes."""
        return bool(self._prefixes)

    def checked(self, address: str) -> URL:
        """The URL of an address; raises NotAllowed."""
        try:
            url = URL(address)
        except ValueError as error:
            raise NotAllowed(f"{address} is no URL: {error}") from None
        if url.scheme not in {"http", "https"} or not url.host:
            raise NotAllowed(f"{address} is no URL with http or https")
        if url.user is not None or url.password is not None or url.query_string or url.fragment:
            raise NotAllowed("the address must have neither a user, nor a query, nor a fragment; use secretRef")
        if self._prefixes:
            if not any(_is_below(url, one) for one in self._prefixes):
                raise NotAllowed(
                    f"{url.origin()} is none of the addresses that the manager may ask (--prometheus-allow)"
                )
            return url
        try:
            good = is_public_enough(url.host)
        except ValueError:
            if not set(url.host) - set("0123456789."):
                # 2130706433 and 127.1 are 127.0.0.1 to some, and no resolver is asked about numbers
                raise NotAllowed(f"{url.host} is neither a name nor an IP address with four numbers") from None
            return url  # a name: the resolver looks at what it stands for
        if not good:
            raise NotAllowed(f"{url.host} is an address that the manager does not ask without --prometheus-allow")
        return url


def _is_below(url: URL, prefix: URL) -> bool:
    if (url.scheme, url.host, url.port) != (prefix.scheme, prefix.host, prefix.port):
        return False
    path, wanted = url.path.rstrip("/"), prefix.path.rstrip("/")
    return ".." not in url.parts and (path == wanted or path.startswith(wanted + "/"))


class CheckedResolver(AbstractResolver):
    """Leaves out IP addresses that must not be asked, after the name was looked up: a name may stand for another one
    later.
    """

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises NotAllowed if nothing is left."""
        found = await self._resolver.resolve(host, port, family)
        good = [one for one in found if is_public_enough(one["host"])]
        if not good:
            raise NotAllowed(f"{host} stands for an address that the manager does not ask without --prometheus-allow")
        return good

    async def close(self) -> None:
        """Nothing is held."""
        await self._resolver.close()
