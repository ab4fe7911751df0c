# SPDX-License-Identifier: Apache-2.0
"""Who may see the pages for people: whoever has the operator's token, as a browser's password or as a bearer token.

What machines read (metrics, readiness, loads, demand) stays open, and nothing can be changed with the token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from aiohttp import web

from extproc.api.status_page_contents import CONSOLE_PATH
from extproc.api.untrusted_files import read_token

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp.typedefs import Handler, Middleware

log = logging.getLogger(__name__)
_GUARDED: Final = (CONSOLE_PATH, "/debug/")
_ASK: Final = {"WWW-Authenticate": 'Basic realm="Attache console", charset="UTF-8"', "Cache-Control": "no-store"}
_REFUSED: Final = "write the operator's token as the password, with any user name, or as authorization: Bearer TOKEN\n"


def token_auth_middleware(file: Path) -> Middleware:
    """``file`` is read for each request, so that a replaced one holds at once. Without it nobody is admitted."""
    known_problem = ""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal known_problem
        # of the route that was found: a path can be written in several ways
        resource = request.match_info.route.resource
        if resource is None or not resource.canonical.startswith(_GUARDED):
            return await handler(request)
        try:
            token = await asyncio.to_thread(read_token, file)
        except (OSError, ValueError) as error:
            if (problem := str(error)) != known_problem:
                log.error("the console's token cannot be read, so nobody sees it: %s", problem)
                known_problem = problem
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text="the token cannot be read; see the log\n")
        known_problem = ""
        if not hmac.compare_digest(_given(request.headers.get("Authorization", "")), token):
            return web.Response(status=HTTPStatus.UNAUTHORIZED, text=_REFUSED, headers=_ASK)
        return await handler(request)

    return guard


def _given(header: str) -> bytes:
    """The token or password of a header; empty if it has none."""
    scheme, _, rest = header.partition(" ")
    given = rest.strip().encode(errors="surrogateescape")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
