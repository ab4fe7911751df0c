# SPDX-License-Identifier: Apache-2.0
"""Whether an address can be listened on, and why not: Envoys share a port silently."""

from __future__ import annotations

import socket

from extproc.api.addresses import parse_address


def try_to_bind(address: str, where: str = "") -> None:
    """Raises ListenFailed. ``where`` the address is written: for its message."""
    if address.startswith("unix:"):
        return
    host, port = parse_address(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            # a port whose last connections linger is free
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        raise ListenFailed(address, str(error.strerror), where) from None


class ListenFailed(Exception):
    """The address is taken or not ours."""

    def __init__(self, address: str, why: str, where: str = "") -> None:
        written = f" for {where}" if where else ""
        super().__init__(
            f"cannot listen on {address}: {why}; stop what listens there, or write another address{written}"
        )
