# SPDX-License-Identifier: Apache-2.0
"""POSTs to engines and to the runtime agents beside them

What is sent are prompts and calls that change an engine, so it goes to the address in the configuration and nowhere
else: redirects are not followed. What comes back is bounded in bytes and time, and is never unpacked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from extproc.feeds.engine_answers import Unreadable

if TYPE_CHECKING:
    from extproc.api.model_server import ModelServerSpec
    from extproc.feeds.engine_access import EngineAccess

_CONNECT_S: Final = 3.0
_HEADERS: Final = {"content-type": "application/json", "accept-encoding": "identity"}


class Answer(msgspec.Struct, frozen=True):
    """Of any status but a redirect."""

    status: int
    body: bytes


class EngineHttp:
    """Connections to all engines. Made inside the event loop."""

    def __init__(self, access: EngineAccess) -> None:
        """``access``: TLS and keys of engines."""
        self._access = access
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def post(
        self,
        spec: ModelServerSpec,
        address: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        most_bytes: int,
        agent_port: int | None = None,
    ) -> Answer:
        """``body`` is JSON. ``agent_port``: of the agent beside the engine, which speaks plain HTTP, in its place.

        Raises OSError where nobody answers, TimeoutError among them, and Unreadable for what is no such answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._post(spec, address, path, body, most_bytes, agent_port)
        except aiohttp.ClientConnectionError as error:
            raise ConnectionError(f"{address}{path}: {error}") from error
        except aiohttp.ClientError as error:
            raise Unreadable(f"{address}{path} answers no HTTP: {error}; see what runs there") from error

    async def _post(
        self, spec: ModelServerSpec, address: str, path: str, body: bytes, most_bytes: int, agent_port: int | None
    ) -> Answer:
        access = await self._access.of(spec, address)
        is_plain = agent_port is not None or access.tls is None
        host = address if agent_port is None else f"{address.rpartition(':')[0]}:{agent_port}"
        async with self._http.post(
            f"{'http' if is_plain else 'https'}://{host}{path}",
            data=body,
            headers=_HEADERS | ({"authorization": access.authorization} if access.authorization else {}),
            ssl=True if is_plain else access.tls or True,
            server_hostname=None if is_plain else access.server_name,
            allow_redirects=False,
        ) as answer:
            if 300 <= answer.status < 400:
                raise Unreadable(f"{host}{path} redirects ({answer.status}), which is not followed; write where it is")
            read = bytearray()
            async for piece in answer.content.iter_any():
                read += piece
                if len(read) > most_bytes:
                    raise Unreadable(f"{host}{path} answers more than {most_bytes} bytes; see what runs there")
            return Answer(answer.status, bytes(read))
