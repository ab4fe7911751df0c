# SPDX-License-Identifier: Apache-2.0
"""Providers: servers of others that take OpenAI's or Anthropic's API, in place of engines of one's own."""

from __future__ import annotations

import ipaddress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.addresses import is_hostname, join_host_port
from extproc.api.spec import CelRule, Spec
from extproc.hop_by_hop_headers import HOP_BY_HOP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path
    from extproc.api.engine_connection import EngineTls

_PORTS: Final = MappingProxyType({"https": 443, "http": 80})


AwsName = Annotated[str, msgspec.Meta(pattern=patterns.AWS_NAME, max_length=64)]
# A key in one of these would change what a request is, or where it goes.
_NOT_FOR_KEYS: Final = sorted(
    HOP_BY_HOP | {"accept", "content-encoding", "content-length", "content-type", "host", "user-agent"}
)


class ProviderAuth(Spec, frozen=True):
    """How a provider is shown whose requests these are. ``type``: ``Bearer`` writes ``authorization: Bearer KEY`` with
    the key of ``connection``, ``Header`` writes the key alone into another header. ``AWS`` signs requests (SigV4) with
    the profile ``default`` of the credentials file that ``connection`` names as its key, or as the machine that Envoy
    runs on. ``header``: the name of a key's header, such as ``api-key``. ``region``: of AWS, such as ``us-east-1``.
    ``service``: of AWS, ``bedrock`` unless it says another.
    """

    CEL: ClassVar = (
        CelRule("(self.type == 'Header') == has(self.header)", "type: Header needs header, and no other type has one"),
        CelRule("(self.type == 'AWS') == has(self.region)", "type: AWS needs region, and no other type has one"),
        CelRule("self.type == 'AWS' || !has(self.service)", "service is that of type: AWS"),
        CelRule(
            f"!has(self.header) || !self.header.matches('(?i)^({'|'.join(('authorization', *_NOT_FOR_KEYS))})$')",
            "no key is sent in this header; write another one, or type: Bearer for authorization",
        ),
    )

    type: Literal["Bearer", "Header", "AWS"]
    header: Annotated[str, msgspec.Meta(pattern=patterns.HEADER, max_length=100)] | None = None
    region: AwsName | None = None
    service: AwsName | None = None


class Provider(Spec, frozen=True):
    """A server of others, in place of engines. ``host``: its name or IP address. ``port``: of its server.
    ``path_prefix``: stands before the path of each request there, such as ``/api/openai``. ``paths``: by API, the whole
    path of its requests there, with or without a query, where that is another one. ``auth``: how it is shown the key of
    ``connection``; without it, as ``x-api-key`` with Anthropic's APIs, and as ``Bearer`` with others. ``reports_load``:
    it is another Attaché, whose ``loadShownTo`` has this gateway's tenant: extproc asks it how full its engines are.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.reportsLoad) || !self.reportsLoad || !has(self.auth) || self.auth.type == 'Bearer'",
            "another Attaché takes the key as Bearer; write that, or leave reportsLoad out",
        ),
    )

    host: Annotated[str, msgspec.Meta(pattern=patterns.HOST, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 443
    # http: for servers of this machine, and those that need no key.
    scheme: Literal["https", "http"] = "https"
    path_prefix: Annotated[str, msgspec.Meta(pattern=patterns.PATH_PREFIX, max_length=1024)] = ""
    paths: Annotated[
        dict[str, Annotated[str, msgspec.Meta(pattern=patterns.PATH_AND_QUERY, max_length=1024)]],
        msgspec.Meta(max_length=13),
    ] = msgspec.field(default_factory=dict)
    auth: ProviderAuth | None = None
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
    def signs_requests(self) -> bool:
        """Whether requests are signed, in place of a key in them."""
        return self.auth is not None and self.auth.type == "AWS"

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
    if provider.auth is not None:
        yield from _check_auth(provider.auth, (*path, "auth"), has_key=has_key)
        if provider.reports_load and provider.auth.type != "Bearer":
            yield (
                (*path, "reportsLoad"),
                "is of another Attaché, which takes the key as Bearer; write that into auth.type",
            )
    if provider.scheme == "http" and has_key and not provider.is_loopback:
        yield (
            (*path, "scheme"),
            "http would show the key of connection to everybody on the way; write https, or leave the key out",
        )


def _check_auth(auth: ProviderAuth, path: Path, *, has_key: bool) -> Iterator[Finding]:
    """It has the fields of its type, and a key."""
    if (auth.type == "Header") != (auth.header is not None):
        yield (*path, "header"), "is needed by type Header, and by no other; write both or neither"
    if auth.header is not None and auth.header.lower() == "authorization":
        yield (*path, "header"), "has a key of type Bearer; write that in place of Header"
    elif auth.header is not None and auth.header.lower() in _NOT_FOR_KEYS:
        yield (*path, "header"), f"'{auth.header}' has another meaning in each request; write that of keys: api-key"
    if (auth.type == "AWS") != (auth.region is not None):
        yield (*path, "region"), "is needed by type AWS, and by no other; write both or neither"
    if auth.type != "AWS" and auth.service is not None:
        yield (*path, "service"), "is that of type AWS; leave it out"
    if auth.type != "AWS" and not has_key:
        yield path, "has no effect without a key; write connection.apiKeyFile, or in a cluster apiKeyRef"
