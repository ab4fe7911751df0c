# SPDX-License-Identifier: Apache-2.0
"""The shape of llm-d's sidecar, to compare with: a proxy before a decode engine that makes the prefill leg.

A request with ``x-prefiller-host-port`` is sent there for one token; the ``kv_transfer_params`` of the answer go into
the body for the decode engine, and all bytes of its answer pass through here. There are no retries, limits or metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from bench.micro.instant_engine import EVENTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PREFILLER: Final = "x-prefiller-host-port"
_MOST_BYTES: Final = 64 * 1024 * 1024
_ASKED: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_PASSED_ON: Final = ("content-type", EVENTS)
_HTTP: Final = web.AppKey("http", aiohttp.ClientSession)


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """For the prefill engine: one token, not streamed."""
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    return {**kept, "stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}


class Sidecar:
    """In front of the engine at ``decode``."""

    def __init__(self, decode: str) -> None:
        self._decode = decode

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request, from its body to the last byte of its answer."""
        http, body = request.app[_HTTP], await request.read()
        prefiller = request.headers.get(PREFILLER)
        if prefiller:
            read = msgspec.json.decode(body)
            asked = msgspec.json.encode(prefill_body(read))
            async with http.post(f"http://{prefiller}{request.path}", data=asked) as answer:
                found = msgspec.json.decode(await answer.read())
            body = msgspec.json.encode({**read, "kv_transfer_params": found["kv_transfer_params"]})
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        async with http.request(
            request.method, f"http://{self._decode}{request.path}", data=body, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response


async def _client(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        app[_HTTP] = http
        yield


async def serve(port: int, decode: str) -> None:
    """Serve for ever."""
    app = web.Application(client_max_size=_MOST_BYTES)
    app.cleanup_ctx.append(_client)
    app.router.add_route("*", "/{path:.*}", Sidecar(decode).handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.micro.prefill_sidecar", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decode", required=True, metavar="HOST:PORT", help="the engine that it stands before")
    options = parser.parse_args()
    sys.exit(uvloop.run(serve(options.port, options.decode)))
