# SPDX-License-Identifier: Apache-2.0
"""Addresses that a ModelServer of a cluster may list: not those of the gateway's own pod and node."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from extproc.config.validation import parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config.model_server import ModelServerSpec


def own_address(spec: ModelServerSpec) -> str:
    """The first address that means the gateway's own pod or node; empty if there is none.

    Whoever may write a ModelServer and a route could reach Envoy's admin interface there, or a cloud's metadata. An API
    server takes no such address in an EndpointSlice either.
    """
    return next((one for one in _addresses(spec) if _is_own(parse_endpoint(one).host)), "")


def _addresses(spec: ModelServerSpec) -> Iterator[str]:
    for endpoint in spec.endpoints:
        yield from (one for one in (endpoint.address, endpoint.kv_events, endpoint.kv_replay) if one is not None)


def _is_own(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
