# SPDX-License-Identifier: Apache-2.0
"""Listening sockets, and why an address cannot have one: Envoys share a port silently."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path
from typing import Final

from extproc.api.addresses import parse_address

BACKLOG: Final = 1024


def listen(address: str) -> socket.socket:
    """A socket that listens on ``ip:port`` or ``unix:path``; raises ListenFailed."""
    try:
        if address.startswith("unix:"):
            return _listening_at_path(Path(address.removeprefix("unix:")))
        return _listening(*parse_address(address))
    except OSError as error:
        raise ListenFailed(address, error.strerror or str(error)) from None


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


def _listening_at_path(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        # left by a process that has ended
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _listening(host: str, port: int) -> socket.socket:
    """A socket at this address; at ``0.0.0.0`` of IPv6, too, where the machine has it."""
    if host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6():  # noqa: S104 - as it was asked for
        try:
            return _listening_at("::", port, is_dual=True)
        except OSError as error:
            if host == "::" or error.errno == errno.EADDRINUSE:
                raise
    return _listening_at(host, port, is_dual=False)


def _listening_at(host: str, port: int, *, is_dual: bool) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # a port whose last connections linger is free
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted ones inherit it: a gateway whose machine is gone leaves no calls behind
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if made.family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_dual))
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
