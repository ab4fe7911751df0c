# SPDX-License-Identifier: Apache-2.0
"""Checks of listeners beyond their shape: addresses, host names, TLS, and what goes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.validation import is_hostname, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.errors import Finding, Path
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.listeners import Listener


def check_listeners(spec: GatewayConfigSpec, *, may_come: bool = False) -> Iterator[Finding]:
    """Listeners can be told apart, and show what authentication needs. ``may_come``: Gateways may bring the listeners,
    so that having none is no mistake.
    """
    names: set[str] = set()
    hosts: dict[tuple[tuple[str, int], str], str] = {}
    plain: dict[tuple[str, int], Listener] = {}
    for index, one in enumerate(spec.listeners):
        path: Path = ("spec", "listeners", index)
        if one.name in names:
            yield (*path, "name"), f"'{one.name}' is there already; give each listener a name of its own"
        names.add(one.name)
        if one.hostname is not None and not is_hostname(one.hostname.removeprefix("*.")):
            advice = "write a name such as api.example.com, which may begin with '*.'"
            yield (*path, "hostname"), f"'{one.hostname}' is no host name; {advice}"
        try:
            address = parse_address(one.address)
        except ValueError as error:
            yield (*path, "address"), str(error)
            continue
        first = plain.setdefault(address, one)
        if (first.tls is None) != (one.tls is None):
            advice = "an address has either; write another port"
            yield (*path, "address"), f"is that of '{first.name}', and only one of them has tls; {advice}"
        other = hosts.setdefault((address, (one.hostname or "").lower()), one.name)
        if other != one.name:
            yield path, f"has the address and the host name of '{other}'; change one of them"
    if spec.listeners or not may_come:
        yield from _check_certificates_shown(spec)


def _check_certificates_shown(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """Who authenticates by certificates asks for them on every listener."""
    if spec.authentication is None or not spec.authentication.client_certificates:
        return
    asks = "asks for no client certificate, by which callers are identified; write tls.clientCertificates"
    if not spec.listeners:
        yield ("spec", "listen"), f"{asks} of listeners"
    for index, one in enumerate(spec.listeners):
        if one.tls is None or one.tls.client_certificates is None:
            yield ("spec", "listeners", index), asks
