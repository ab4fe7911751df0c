# SPDX-License-Identifier: Apache-2.0
"""Providers: servers of others that take OpenAI's or Anthropic's API, in place of engines of one's own."""

from __future__ import annotations

import ipaddress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.addresses import is_hostname, join_host_port
from extproc.api.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.connection import EngineTls
    from extproc.api.errors import Finding, Path

_PORTS: Final = MappingProxyType({"https": 443, "http": 80})


class Provider(Spec, frozen=True):
    """A server of others, in place of engines. ``host``: its name or IP address. ``port``: of its server.
    ``path_prefix``: stands before the path of each request there, such as ``/api/openai``. ``reports_load``: it is
    another Attaché, whose ``loadShownTo`` has this gateway's tenant: extproc asks it how full its engines are.
    """

    host: Annotated[str, msgspec.Meta(pattern=patterns.HOST, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 443
    # http: for servers of this machine, and those that need no key.
    scheme: Literal["https", "http"] = "https"
    path_prefix: Annotated[str, msgspec.Meta(pattern=patterns.PATH_PREFIX, max_length=1024)] = ""
    reports_load: bool = False

    @property
    def address(self) -> str:
        """``host:port``."""
        return join_host_port(self.host, self.port)

    @property
    def authority(self) -> str:
        """What requests have as ``host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else self.address

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine, by its host as written."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def check_provider(provider: Provider, path: Path, *, has_key: bool, tls: EngineTls | None = None) -> Iterator[Finding]:
    """The host can be one, its certificate can be checked, and a key is not sent in the clear. ``tls``: as far as it is
    configured.
    """
    try:
        ipaddress.ip_address(provider.host)
        if provider.scheme == "https" and (tls is None or not (tls.server_name or tls.insecure_skip_verify)):
            yield (*path, "host"), "is an address, and nothing names its certificate; write connection.tls.serverName"
    except ValueError:
        if not is_hostname(provider.host) or provider.host.rpartition(".")[2].isdigit():
            yield (*path, "host"), f"'{provider.host}' {patterns.ADVICE[patterns.HOST]}"
    if provider.scheme == "http" and has_key and not provider.is_loopback:
        yield (
            (*path, "scheme"),
            "http would show the key of connection to everybody on the way; write https, or leave the key out",
        )
