# SPDX-License-Identifier: Apache-2.0
"""Shared by the commands: reports of mistakes, bounded pages over HTTP, text for a terminal, descriptors, resolver."""

from __future__ import annotations

import contextlib
import http.client
import math
import resource
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.api.addresses import parse_address
from extproc.api.config_errors import replace_unprintable
from extproc.api.config_loader import ConfigDirectory
from extproc.api.dns_resolver import ResolvedDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from email.message import Message
    from http.client import HTTPResponse
    from typing import IO

    from extproc.api.config_errors import ConfigInvalid
    from extproc.api.dns_resolver import AddressHoldTimes

# A process with 10,000 endpoints and as many tenants has some 30 MB of metrics.
_MOST_BYTES: Final = 128 * 2**20
_PIECE_BYTES: Final = 1 << 20


def resolved_directory(path: Path, patience: AddressHoldTimes) -> ResolvedDirectory:
    """The directory at ``path``; names are resolved by this machine's resolver."""
    clock = time.monotonic  # noqa: TID251 - the edge
    return ResolvedDirectory(ConfigDirectory(path), patience, clock=clock, lookup=resolve_host)


def resolve_host(name: str) -> Sequence[str]:
    """The IP addresses of ``name``: of version 4, or else 6. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    # an engine with addresses of both versions is one engine; a scope (%eth0) is for this machine alone
    fourth = {str(one[4][0]) for one in found if one[0] == socket.AF_INET}
    sixth = {str(one[4][0]) for one in found if one[0] == socket.AF_INET6 and "%" not in str(one[4][0])}
    return sorted(fourth or sixth)


def print_mistakes(error: ConfigInvalid) -> int:
    """Print every mistake and their number to standard error; returns the exit status."""
    print(error, file=sys.stderr)
    print(pluralize(len(error.mistakes), "mistake"), file=sys.stderr)
    return 2


def pluralize(number: int, noun: str) -> str:
    """``1 mistake``, ``2 mistakes``, ``2 policies``, ``2 keys``."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") and not noun.endswith("ey") else f"{number} {noun}s"


def page_url(text: str) -> str:
    """Where pages are, as people write it: a URL, or ``HOST:PORT``."""
    return text if "://" in text else f"http://{text}"


def fetch_page(request: str | urllib.request.Request, *, timeout_s: float) -> bytes:
    """The answer's body, within ``timeout_s`` between two pieces and three times that in all.

    Raises OSError, also for what is no HTTP, for an endless page and for one that comes too slowly; HTTPError for
    another status than 200. Redirects are not followed: a request may have a key, or a prompt.
    """
    try:
        with _opener.open(request, timeout=timeout_s) as answer:  # callers check the scheme
            return _whole(answer, timeout_s)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"no page can be read: {str(error) or type(error).__name__}") from error


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """No request: the redirect is the answer, and an error."""


_opener: Final = urllib.request.build_opener(_Stays)


def _whole(answer: HTTPResponse, timeout_s: float) -> bytes:
    clock = time.monotonic  # noqa: TID251 - an edge
    ends_at_s, pieces, size = clock() + 3 * timeout_s, [], 0
    while piece := answer.read1(_PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > _MOST_BYTES:
            raise OSError(f"the page has no end within {_MOST_BYTES >> 20} MiB")
        if clock() > ends_at_s:
            raise TimeoutError(f"the page has no end within {3 * timeout_s:g} s")
    if answer.length:
        raise OSError("the page ends too early")
    return b"".join(pieces)


def to_printable(text: str) -> str:
    """Without what a terminal would obey, in names and errors that others have chosen; lines stay lines."""
    return replace_unprintable(text, keep="\n")


def descriptor_hard_limit() -> float:
    """The limit to which this process may raise its own."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return math.inf if hard == resource.RLIM_INFINITY else hard


def raise_descriptor_limit() -> float:
    """Raise the soft limit to the hard one, and return it: shells and systemd begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_hard_limit()


def set_process_name(name: str) -> None:
    """For ``ps -o comm``: 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def parse_metrics_address(text: str) -> tuple[str, int] | Path | None:
    """Of ``--metrics``: host and port, the path of a socket, or None: nowhere. Raises ValueError."""
    if text.startswith("unix:"):
        return Path(text.removeprefix("unix:"))
    return None if text == "off" else parse_address(text)
