# SPDX-License-Identifier: Apache-2.0
"""Asks Envoy's admin interface which engines of a ModelServer it knows."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from extproc.api.addresses import parse_address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

# While Envoy reads a bundle of thousands of routes it answers nobody for seconds.
_TIMEOUT_S: Final = 5.0
# Ten thousand engines have some 10 MB.
_MOST_BYTES: Final = 64 * 2**20
_DUMP: Final = "/config_dump"
# The bundle's clusters of ModelServers.
_PREFIX: Final = "server/"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where another process listens


class _SocketAddress(msgspec.Struct, frozen=True):
    address: str = ""
    port_value: int = 0


class _Address(msgspec.Struct, frozen=True):
    socket_address: _SocketAddress = _SocketAddress()


class _Endpoint(msgspec.Struct, frozen=True):
    address: _Address = _Address()


class _LbEndpoint(msgspec.Struct, frozen=True):
    endpoint: _Endpoint = _Endpoint()


class _Locality(msgspec.Struct, frozen=True):
    lb_endpoints: list[_LbEndpoint] = []


class _Assignment(msgspec.Struct, frozen=True):
    cluster_name: str = ""
    endpoints: list[_Locality] = []


class _Config(msgspec.Struct, frozen=True):
    endpoint_config: _Assignment = _Assignment()


class _Dump(msgspec.Struct, frozen=True):
    configs: list[_Config] = []


async def endpoints_in_envoy(admin: str, servers: Collection[str]) -> Mapping[str, Collection[tuple[str, int]]] | None:
    """IP address and port of engines by ModelServer (``namespace/name``), without servers that it has no cluster for.

    ``admin``: the address of the interface. None if no Envoy answers there.
    """
    host, port = parse_address(admin)
    host = _ANY.get(host, host)
    place = f"[{host}]" if ":" in host else host
    names = "|".join(re.escape(one) for one in sorted(servers))
    query = {"resource": "dynamic_endpoint_configs", "include_eds": "", "name_regex": f"{_PREFIX}({names})"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"http://{place}:{port}{_DUMP}", params=query, allow_redirects=False) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                return None
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > _MOST_BYTES:
                    return None
            dump = msgspec.json.decode(body, type=_Dump)
    except (OSError, aiohttp.ClientError, ValueError, RecursionError):  # the decoder's error is a ValueError
        return None
    return {
        one.endpoint_config.cluster_name.removeprefix(_PREFIX): frozenset(_addresses(one.endpoint_config))
        for one in dump.configs
    }


def _addresses(assignment: _Assignment) -> Iterator[tuple[str, int]]:
    for locality in assignment.endpoints:
        for one in locality.lb_endpoints:
            yield one.endpoint.address.socket_address.address, one.endpoint.address.socket_address.port_value
