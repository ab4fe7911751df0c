# SPDX-License-Identifier: Apache-2.0
"""The part of a kubelet's server that the API server asks for logs (``kubectl logs``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from bench.cluster.certificates import Authority, write_private

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_PAUSE_S: Final = 0.2
_CHUNK_BYTES: Final = 65_536


@contextlib.asynccontextmanager
async def serving_logs(address: str, find: Callable[[str, str], Path | None]) -> AsyncIterator[int]:
    """Serve logs at a free port of ``address``, which is given.

    ``find(pod, container)``: the file with what a container of the pod ``namespace/name`` has said, if it is known.
    """
    app = web.Application()
    app.add_routes([web.get("/containerLogs/{namespace}/{pod}/{container}", _Logs(find).get)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, 0, ssl_context=await asyncio.to_thread(_context, address))
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


class _Logs:
    """Answers with a log as it stands, its last lines (``tailLines``), and what comes after (``follow``).

    Lines have no times in our logs, so ``sinceTime`` and ``sinceSeconds`` are ignored: more is shown than was asked
    for.
    """

    def __init__(self, find: Callable[[str, str], Path | None]) -> None:
        self._find = find

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One container's log."""
        named = request.match_info
        pod, container = f"{named['namespace']}/{named['pod']}", named["container"]
        path = self._find(pod, container)
        if path is None or not path.is_file():
            return web.Response(status=404, text=f"no log of container {container} in pod {pod}\n")
        answer = web.StreamResponse(headers={"content-type": "text/plain"})
        await answer.prepare(request)
        with path.open("rb") as log:
            if "tailLines" in request.query:
                log.seek(_tail_start(log.read(), int(request.query["tailLines"])))
            while True:
                if chunk := log.read(_CHUNK_BYTES):
                    await answer.write(chunk)
                elif request.query.get("follow") == "true" and self._find(pod, container) is not None:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    break
        await answer.write_eof()
        return answer


def _tail_start(content: bytes, lines: int) -> int:
    """Where the last ``lines`` lines begin."""
    kept = content.splitlines(keepends=True)
    return len(content) - sum(map(len, kept[max(0, len(kept) - lines) :]))


def _context(address: str) -> ssl.SSLContext:
    """A certificate that nobody has reason to trust: the API server does not ask for more unless it is told to."""
    certificate, key = Authority(datetime.now(UTC)).issue("kubelet", [address])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as directory:
        paths = [write_private(Path(directory) / name, text) for name, text in (("cert", certificate), ("key", key))]
        context.load_cert_chain(*map(os.fspath, paths))
    return context
