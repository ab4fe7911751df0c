# SPDX-License-Identifier: Apache-2.0
"""Requests to engines and to the runtime agents beside them: TLS, keys and POSTs.

What is sent are prompts and calls that change an engine, so it goes to the address in the configuration and nowhere
else: redirects are not followed. Answers are bounded in bytes and time, and are never decompressed.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import ssl
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from extproc.api.addresses import parse_endpoint
from extproc.engines.engine_responses import UnreadableResponse
from extproc.file_reloading import Reloadable
from extproc.http_body import read_at_most

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from extproc.api.engine_connection import EngineConnection, EngineTls
    from extproc.api.guard_services import GuardService
    from extproc.api.model_server import ModelServerSpec
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)
# Files are read again for a connection that is made this long after they were read last.
_FRESH_S: Final = 2.0
_Content = tuple[bytes | None, ...]
_HEADERS: Final = {"content-type": "application/json", "accept-encoding": "identity"}
# With longer ones, the HTTP client writes a body in pieces.
_PIECE_BYTES: Final = 1 << 16
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class ConnectionSettings(msgspec.Struct, frozen=True):
    """``tls``: None for plain HTTP. ``server_name``: what the certificate must be called. ``authorization``: the
    header.
    """

    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    authorization: str = ""


class _Shown(msgspec.Struct, frozen=True):
    """To engines: as in ``ConnectionSettings``."""

    tls: ssl.SSLContext | None
    authorization: str


_PLAIN: Final = ConnectionSettings()


class EngineCredentials:
    """What a new connection to an engine needs. Files are read in a thread."""

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float], folder: Path = Path()) -> None:
        """``folder``: what names of files are relative to."""
        self.folder = folder
        self._environment = environment
        self._clock = clock
        self._files: dict[EngineConnection, Reloadable[_Content, _Shown]] = {}
        self._read_at_s: dict[EngineConnection, float] = {}

    async def settings_for_engine(
        self, spec: ModelServerSpec, address: str, connection: EngineConnection | None = None
    ) -> ConnectionSettings:
        """For the engine at ``address``. ``connection``: of another port of it, in place of the server's.

        Raises OSError or ValueError if its files were never good.
        """
        connection = spec.connection if connection is None else connection
        if connection.tls is None and not connection.has_key:
            return _PLAIN
        shown = await self._shown(connection)
        own = next((one.server_name for one in spec.endpoints if one.address == address), None)
        name = None if shown.tls is None else connection.server_name_of(own) or ""
        if shown.tls is not None and shown.tls.check_hostname and not name:
            # only an EndpointPickerConfig may leave the name out: certificates then have the address
            name = parse_endpoint(address).host
        return ConnectionSettings(shown.tls, name, shown.authorization)

    async def settings_for_service(self, connection: EngineConnection) -> ConnectionSettings:
        """For a service that is no engine, whose certificate has its host's name.

        Raises OSError or ValueError if its files were never good.
        """
        if connection.tls is None and not connection.has_key:
            return _PLAIN
        shown = await self._shown(connection)
        return ConnectionSettings(shown.tls, None, shown.authorization)

    def retain_only(self, pools: Iterable[Pool], guards: Iterable[GuardService]) -> None:
        """Drop keys and TLS of connections that none of these makes."""
        used = {guard.connection for guard in guards}
        for pool in pools:
            used |= {pool.spec.connection, pool.scrape_config.connection}
        self._files = {one: files for one, files in self._files.items() if one in used}
        self._read_at_s = {one: at_s for one, at_s in self._read_at_s.items() if one in used}

    async def _shown(self, connection: EngineConnection) -> _Shown:
        files, now = self._files.get(connection), self._clock()
        if files is None:
            files = await asyncio.to_thread(self._open, connection)
            self._files[connection], self._read_at_s[connection] = files, now
        elif now - self._read_at_s[connection] >= _FRESH_S:
            self._read_at_s[connection] = now
            if await asyncio.to_thread(files.poll) == "refused":
                log.warning("TLS files or the key of engines cannot be used, the last ones stay: %s", files.problem)
        return files.value

    def _open(self, connection: EngineConnection) -> Reloadable[_Content, _Shown]:
        """Raises OSError and ValueError."""
        return Reloadable(partial(self._read, connection), partial(self._made, connection))

    def _read(self, connection: EngineConnection) -> _Content:
        """The key, if there is one, and the files of TLS. Raises OSError and ValueError."""
        content: list[bytes | None] = [_key_in(self._key_of(connection)).encode()] if connection.has_key else []
        if connection.tls is not None:
            shown = connection.tls.client_certificate
            names = [connection.tls.ca_file, *(() if shown is None else (shown.cert_file, shown.key_file))]
            content += [(self.folder / name).read_bytes() if name is not None else None for name in names]
        return tuple(content)

    def _made(self, connection: EngineConnection, content: _Content) -> _Shown:
        """Raises OSError and ValueError."""
        key = (content[0] or b"").decode() if connection.has_key else ""
        context = None if connection.tls is None else _context(connection.tls, self.folder)
        return _Shown(context, f"Bearer {key}" if key else "")

    def _key_of(self, connection: EngineConnection) -> str:
        if connection.api_key_file is not None:
            return (self.folder / connection.api_key_file).read_text()
        try:
            return self._environment[connection.api_key_env or ""]
        except KeyError:
            raise ValueError(f"the environment variable {connection.api_key_env} is not set; set it") from None


def _key_in(text: str) -> str:
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(
            "the engines' key is empty, or no client can send it in a header; write ASCII letters and digits"
        )
    return key


def _context(tls: EngineTls, folder: Path) -> ssl.SSLContext:
    """Raises OSError; the errors of ssl are such."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.insecure_skip_verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.ca_file is None and not tls.insecure_skip_verify:
        context.load_default_certs()
    if tls.ca_file is not None:
        context.load_verify_locations(folder / tls.ca_file)
    if tls.client_certificate is not None:
        shown = tls.client_certificate
        context.load_cert_chain(folder / shown.cert_file, folder / shown.key_file)
    return context


class EngineResponse(msgspec.Struct, frozen=True):
    """Of any status but a redirect. ``read_s``: since it began."""

    status: int
    body: bytes
    read_s: float = 0.0


class EngineHttp:
    """Connections to all engines. Made inside the event loop."""

    def __init__(self, access: EngineCredentials, *, most_connections: int = 100) -> None:
        """``access``: TLS and keys of engines. ``most_connections``: 0: any number."""
        self._access = access
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=most_connections),
            timeout=aiohttp.ClientTimeout(total=None),
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
        headers: Mapping[str, str] = _NONE,
    ) -> EngineResponse:
        """``body`` is JSON. ``agent_port``: of the agent beside the engine, which speaks plain HTTP, in its place.
        ``headers``: beside the usual ones.

        Raises OSError without an answer, TimeoutError included, Unreadable for an answer of another form, and another
        ValueError for what cannot be sent.
        """
        call = self._request(spec, address, path, body, agent_port, headers)
        return await _answer_to(call, f"{address}{path}", timeout_s, most_bytes)

    async def get(
        self, spec: ModelServerSpec, address: str, port: int, path: str, *, timeout_s: float, most_bytes: int
    ) -> EngineResponse:
        """From another port of the engine, which speaks plain HTTP, on a connection of its own. Raises as ``post``."""
        place = f"{address.rpartition(':')[0]}:{port}{path}"
        call = self._http.get(
            f"http://{place}",
            headers={"accept-encoding": "identity", "connection": "close"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=float(spec.traffic_policy.connect_timeout)),
        )
        return await _answer_to(call, place, timeout_s, most_bytes)

    async def _request(
        self,
        spec: ModelServerSpec,
        address: str,
        path: str,
        body: bytes,
        agent_port: int | None,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        try:
            access = await self._access.settings_for_engine(spec, address)
        except OSError as error:
            raise ValueError(f"the TLS files or the key of engines cannot be used: {error}") from error
        is_plain = agent_port is not None or access.tls is None
        host = address if agent_port is None else f"{address.rpartition(':')[0]}:{agent_port}"
        own = _HEADERS | ({"authorization": access.authorization} if access.authorization else {})
        return await self._http.post(
            f"{'http' if is_plain else 'https'}://{host}{path}",
            data=io.BytesIO(body) if len(body) > _PIECE_BYTES else body,
            headers={**headers, **own},
            ssl=True if is_plain else access.tls or True,
            server_hostname=None if is_plain else access.server_name,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=float(spec.traffic_policy.connect_timeout)),
        )


async def _answer_to(
    call: Awaitable[aiohttp.ClientResponse], place: str, timeout_s: float, most_bytes: int
) -> EngineResponse:
    """Raises OSError and Unreadable."""
    try:
        async with asyncio.timeout(timeout_s):
            async with await call as answer:
                return await _read(answer, most_bytes)
    except aiohttp.ClientConnectionError as error:
        raise ConnectionError(f"{place}: {_reason(error)}") from error
    except aiohttp.ClientError as error:
        raise UnreadableResponse(f"{place} answers no HTTP: {error}; see what runs there") from error


def _reason(error: aiohttp.ClientConnectionError) -> str:
    """Without the address and the ``ssl:default`` that the library writes, also for plain HTTP."""
    if not isinstance(error, aiohttp.ClientConnectorError) or isinstance(error, aiohttp.ClientSSLError):
        return str(error)
    number = error.errno or 0  # negative: of getaddrinfo
    return f"cannot connect: {os.strerror(number) if number > 0 else error.strerror or error.os_error}"


async def _read(answer: aiohttp.ClientResponse, most_bytes: int) -> EngineResponse:
    """Raises Unreadable."""
    where = f"{answer.url.authority}{answer.url.path}"
    if 300 <= answer.status < 400:
        raise UnreadableResponse(f"{where} redirects ({answer.status}), which is not followed; write where it is")
    clock = asyncio.get_running_loop().time
    began_s = clock()
    body = await read_at_most(answer.content, most_bytes)
    if body is None:
        raise UnreadableResponse(f"{where} answers more than {most_bytes} bytes; see what runs there")
    return EngineResponse(answer.status, body, clock() - began_s)
