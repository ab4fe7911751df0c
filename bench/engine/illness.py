# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine that is ill: garbage, nothing, or a byte a second."""

from __future__ import annotations

import asyncio

from aiohttp import web

_GARBAGE = b"<html>It works!</html>"


async def answer_wrongly(http: web.Request, kind: str) -> web.StreamResponse:
    """``kind``: of the fault ``ill``. An answer without an end lasts until the client leaves."""
    await http.read()
    if kind == "garbage":
        return web.Response(body=_GARBAGE, content_type="text/html")
    if kind == "silence":
        await asyncio.Event().wait()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    while True:
        await response.write(b":")
        await asyncio.sleep(1)
