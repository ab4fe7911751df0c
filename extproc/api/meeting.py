# SPDX-License-Identifier: Apache-2.0
"""Whether Envoy, by its GatewayConfig, reaches the addresses on which extproc listens"""

from __future__ import annotations

import ipaddress
import posixpath
from typing import TYPE_CHECKING

from extproc.api.validation import parse_address, parse_target, worker_addresses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.gateway_config import GatewayConfigSpec


def missed_meeting(gateway: GatewayConfigSpec, listens: Sequence[str]) -> str:
    """What is wrong if Envoy calls where nobody listens, or somebody listens where Envoy does not call; else empty.

    ``listens``: an address for each process of extproc.
    """
    called = worker_addresses(gateway.extproc, gateway.extproc_workers)
    unanswered = [one for one in called if not any(_reaches(one, listener) for listener in listens)]
    uncalled = [one for one in listens if not any(_reaches(call, one) for call in called)]
    if not unanswered and not uncalled:
        return ""
    advice = "make the GatewayConfig's 'extproc' and 'extprocWorkers' and extproc's --listen and --workers agree"
    return f"Envoy is configured to call {_shown(called)}, and extproc listens on {_shown(listens)}; {advice}"


def _shown(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} to {addresses[-1]}"


def _reaches(called: str, listener: str) -> bool:
    """Whether a call to one address arrives at the other, on this machine or through the address of another."""
    if called.startswith("unix:") or listener.startswith("unix:"):
        return _path(called) == _path(listener)
    to, (own, own_port) = parse_target(called), parse_address(listener)
    if to.port != own_port:
        return False
    if not to.is_ip:
        # whose name it is, Envoy's resolver knows
        return True
    target, bound = ipaddress.ip_address(to.host), ipaddress.ip_address(own)
    if bound.is_unspecified:
        # :: takes IPv4 too
        return bound.version == 6 or target.version == 4
    # whoever calls 0.0.0.0 gets 127.0.0.1
    return target == bound or (target.is_unspecified and bound.is_loopback and target.version == bound.version)


def _path(address: str) -> str:
    scheme, _, path = address.partition(":")
    return posixpath.normpath(path) if scheme == "unix" else ""
