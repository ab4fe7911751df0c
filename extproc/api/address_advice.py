# SPDX-License-Identifier: Apache-2.0
"""What to say of text that is no address of a server: what it lacks, and how it is written."""

from __future__ import annotations

import ipaddress

_EXAMPLE_PORT = "8000"


def no_address(text: str, *, takes_names: bool) -> str:
    """Why ``text`` is not an address. ``takes_names``: a host name in place of the IP address is one."""
    return f"'{text}' is not an address; {_advice(text, takes_names=takes_names)}"


def _advice(text: str, *, takes_names: bool) -> str:
    host, separator, port = text.rpartition(":")
    if "://" in text:
        bare = text.partition("://")[2].partition("/")[0]
        return f"leave out scheme and path: {bare if ':' in bare else f'{bare}:{_EXAMPLE_PORT}'}"
    inner = next((one for one in (host, text) if ":" in one and is_ip(one)), "")
    if inner:
        return f"write an IPv6 address in brackets and a port after it: [{inner}]:{_EXAMPLE_PORT}"
    if _is_port(text):
        return _about_target(text) if takes_names else _about_own("", text)
    if not separator or text.endswith("]"):
        return f"it has no port: write {text or '127.0.0.1'}:{_EXAMPLE_PORT}"
    if not _is_port(port):
        return f"'{port}' is not a port: write one from 1 to 65535"
    return _about_target(port) if takes_names else _about_own(host, port)


def _about_target(port: str) -> str:
    return f"write IP:PORT or NAME:PORT, such as 127.0.0.1:{port} or engine-0.example.com:{port}"


def _about_own(host: str, port: str) -> str:
    """For where a process listens."""
    own = f"write 0.0.0.0:{port} for all interfaces, or 127.0.0.1:{port} for this machine alone"
    if host in {"", "*"}:
        return own
    if host[:1].isalpha():
        return f"a process listens on an IP address of its own machine, not on a name: {own}"
    return f"write an IP address and a port, such as 127.0.0.1:{port} or [::1]:{port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def is_ip(text: str) -> bool:
    """Whether ``text`` is an IP address, of either version and without a port."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
