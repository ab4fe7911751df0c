# SPDX-License-Identifier: Apache-2.0
"""The server of all HTTP pages, with bounds of what clients may take that send or read nothing.

aiohttp bounds the size of headers and bodies. This bounds connections and time. An answer may take as long as it likes
while its client reads.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio.sslproto import SSLProtocol
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    import ssl

    from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)
_WITHOUT_LOG: Final[dict[str, Any]] = {"access_log": None}


class PageLimits(msgspec.Struct, frozen=True):
    """``connections``: at a time; further ones are closed. ``begin_s``: until the headers of a connection's first
    request are complete, and likewise for the handshake of TLS before them and for each body behind its headers.
    ``idle_s``: from an answer until the next headers are complete, and while a client reads nothing of an answer.
    ``header_bytes``: of the first line, and of each header.
    """

    connections: int = 512
    begin_s: float = 10.0
    # longer than most clients keep a connection that they may ask on again
    idle_s: float = 75.0
    header_bytes: int = 8190


class PageServer(web.AppRunner):
    """Serves an application where it is told to listen, until ``cleanup``."""

    def __init__(
        self,
        app: web.Application,
        *,
        end_s: float = 60.0,
        limits: PageLimits | None = None,
        cancels: bool = False,
        relays: bool = False,
    ) -> None:
        """``end_s``: for requests that run at ``cleanup``. ``cancels``: a client that leaves ends its request.
        ``relays``: handlers get bodies as they come, compressed ones too, and bound the time that these take.
        """
        self.limits = limits or PageLimits()
        self.relays = relays
        self._is_full = False
        # connections that are in the handshake of TLS
        self.greeting: set[asyncio.BaseProtocol] = set()
        # first what ends the wait for headers; last, and so for those who may ask, the wait for a body
        app.middlewares.insert(0, _note_begin)
        if not relays:
            app.middlewares.append(self._wait_for_body)
        super().__init__(app, shutdown_timeout=end_s, handler_cancellation=cancels, **_WITHOUT_LOG)

    async def listen(self, at: tuple[str, int] | socket.socket, tls: ssl.SSLContext | None = None) -> web.BaseSite:
        """Take connections at an address or of a socket, after ``setup`` and until the result's ``stop``; raises
        OSError.
        """
        site = _Site(self, at, tls)
        await site.start()
        return site

    def make_connection(self) -> _Connection:
        """The other end of a connection."""
        return _Connection(self, cast("web.Server", self.server))

    def has_capacity(self) -> bool:
        """Whether one connection more is taken. Of many in a row that are not, the first is logged."""
        count, most = len(cast("web.Server", self.server).connections) + len(self.greeting), self.limits.connections
        if count >= most and not self._is_full:
            at = ", ".join(f"{one[0]}:{one[1]}" for one in self.addresses)
            log.warning("%d connections to %s are open: further ones are refused", count, at)
        self._is_full = count >= most or (self._is_full and count > most / 2)
        return count < most

    @web.middleware
    async def _wait_for_body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self.limits.begin_s):
                await request.read()
        except TimeoutError:
            answer = web.Response(status=HTTPStatus.REQUEST_TIMEOUT, text="the body took too long\n")
            answer.force_close()
            return answer
        return await handler(request)


@web.middleware
async def _note_begin(request: web.Request, handler: Handler) -> web.StreamResponse:
    cast("_Connection", request.protocol).late.cancel()
    return await handler(request)


class _Site(web.BaseSite):
    def __init__(self, server: PageServer, at: tuple[str, int] | socket.socket, tls: ssl.SSLContext | None) -> None:
        super().__init__(server, ssl_context=tls)
        self._pages = server
        self._at = at

    @property
    def name(self) -> str:
        return str(self._at)

    async def start(self) -> None:
        await super().start()
        create = asyncio.get_running_loop().create_server
        pages, tls = self._pages, self._ssl_context
        connected = pages.make_connection if tls is None else partial(_TlsConnection, pages, tls)
        if isinstance(self._at, socket.socket):
            self._server = await create(connected, sock=self._at)
        else:
            self._server = await create(connected, *self._at)


class _TlsConnection(SSLProtocol):
    """As the event loop would make one, but it counts from the moment at which it is accepted."""

    def __init__(self, pages: PageServer, tls: ssl.SSLContext) -> None:
        self._pages = pages
        self._connection = pages.make_connection()
        # nobody waits for the end of the handshake; the types that others have written know whole seconds only
        waiter: Any = None
        most_s: Any = pages.limits.begin_s
        loop = asyncio.get_running_loop()
        super().__init__(loop, self._connection, tls, waiter, server_side=True, ssl_handshake_timeout=most_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._pages.has_capacity():
            cast("asyncio.Transport", transport).abort()
            return
        self._pages.greeting.add(self._connection)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._pages.greeting.discard(self._connection)
        super().connection_lost(exc)


class _Connection(web.RequestHandler):
    """``late`` closes it, until its first request has begun."""

    __slots__ = ("_pages", "late")

    def __init__(self, pages: PageServer, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        most = pages.limits.header_bytes
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=pages.limits.idle_s,
            max_line_size=most,
            max_field_size=most,
            auto_decompress=not pages.relays,
            **_WITHOUT_LOG,
        )
        self._pages = pages
        self.late: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pages.greeting.discard(self)
        self.late = asyncio.get_running_loop().call_later(self._pages.limits.begin_s, self.force_close)
        if not self._pages.has_capacity():
            self.force_close()
            cast("asyncio.Transport", transport).abort()
            return
        accepted = transport.get_extra_info("socket")
        if accepted.family != socket.AF_UNIX:
            # the system ends what a client does not read
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._pages.limits.idle_s))
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.late.cancel()
        super().connection_lost(exc)
