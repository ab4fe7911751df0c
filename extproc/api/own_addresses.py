# SPDX-License-Identifier: Apache-2.0
"""Addresses of the gateway's own pod or node, which objects of a cluster must not lead to."""

from __future__ import annotations

import ipaddress
from typing import Final

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
