# SPDX-License-Identifier: Apache-2.0
"""What commands share: reports of mistakes, bounded pages over HTTP, text for a terminal, file descriptors."""

from __future__ import annotations

import http.client
import math
import resource
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from email.message import Message
    from http.client import HTTPResponse
    from typing import IO

    from extproc.api.errors import ConfigInvalid


def report(error: ConfigInvalid) -> int:
    """Print every mistake and their number to standard error; returns the exit status."""
    print(error, file=sys.stderr)
    print(counted(len(error.mistakes), "mistake"), file=sys.stderr)
    return 2


def counted(number: int, noun: str) -> str:
    """``1 mistake``, ``2 mistakes``, ``2 policies``."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


# A process with 10,000 endpoints and as many tenants has some 30 MB of metrics.
_MOST_BYTES: Final = 128 * 2**20
_PIECE_BYTES: Final = 1 << 20


def read_page(request: str | urllib.request.Request, *, timeout_s: float) -> bytes:
    """What is answered, within ``timeout_s`` between two pieces and three times that in all.

    Raises OSError, also for what is no HTTP, for an endless page and for one that comes too slowly; HTTPError for
    another status than 200. Redirects are not followed: a request may have a key, or a prompt.
    """
    try:
        with _opener.open(request, timeout=timeout_s) as answer:  # callers check the scheme
            return _whole(answer, timeout_s)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"no page can be read: {str(error) or type(error).__name__}") from error


class _Stays(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else than it was told."""

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


def printable(text: str) -> str:
    """Without what a terminal would obey, in names and errors that others have chosen; lines stay lines."""
    return "".join([mark if mark.isprintable() or mark == "\n" else "\N{REPLACEMENT CHARACTER}" for mark in text])


def hard_limit() -> float:
    """What this process may raise its limit to."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return math.inf if hard == resource.RLIM_INFINITY else hard


def raise_limit() -> float:
    """Raise the soft limit to the hard one, and return it: shells and systemd begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard_limit()
