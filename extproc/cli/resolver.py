# SPDX-License-Identifier: Apache-2.0
"""This machine's resolver: a configuration directory whose host names are resolved."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from extproc.api.host_names import ResolvedDirectory
from extproc.api.load import ConfigDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from extproc.api.host_names import Patience


def resolved_directory(path: Path, patience: Patience) -> ResolvedDirectory:
    """The directory at ``path``; names are looked up as this machine does it."""
    clock = time.monotonic  # noqa: TID251 - the edge
    return ResolvedDirectory(ConfigDirectory(path), patience, clock=clock, lookup=lookup)


def lookup(name: str) -> Sequence[str]:
    """The IP addresses of ``name``: of version 4, or else 6. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    # an engine with addresses of both versions is one engine; a scope (%eth0) is for this machine alone
    fourth = {str(one[4][0]) for one in found if one[0] == socket.AF_INET}
    sixth = {str(one[4][0]) for one in found if one[0] == socket.AF_INET6 and "%" not in str(one[4][0])}
    return sorted(fourth or sixth)
