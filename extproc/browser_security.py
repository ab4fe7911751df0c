# SPDX-License-Identifier: Apache-2.0
"""Protects HTTP pages from web pages: what an operator's browser shows can reach what the operator can reach.

By DNS rebinding a web page gives its own name our address, and reads our pages as its own. So a page on a loopback
address is served by IP address and as localhost only. Other addresses are open to their network anyway, and Services
have names of any kind. A request that another site's page sends is refused, as browsers tell it by Fetch Metadata or
Origin. Clients that are no browsers send neither.
"""

from __future__ import annotations

from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

_OWN: Final = frozenset({"same-origin", "none"})


def add_browser_protection(app: web.Application, host: str, *, is_behind_envoy: bool = False) -> None:
    """Before anything else that ``app`` does. ``host``: where it listens, an IP address or localhost.
    ``is_behind_envoy``: Envoy decides which sites may ask.
    """
    if not is_behind_envoy:
        app.middlewares.insert(0, reject_cross_site)
    if host == "localhost" or ip_address(host).is_loopback:
        app.middlewares.insert(0, reject_foreign_host)


@web.middleware
async def reject_foreign_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    """421 to a name other than localhost."""
    if not _is_safe(request.headers.get("Host", "")):
        text = "ask for this page by its IP address, or as localhost: it has no other name\n"
        return web.Response(status=HTTPStatus.MISDIRECTED_REQUEST, text=text)
    return await handler(request)


@web.middleware
async def reject_cross_site(request: web.Request, handler: Handler) -> web.StreamResponse:
    """403 to what another site's page sends; a link there may be followed."""
    is_link = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    if is_cross_site(request) and not is_link:
        return web.Response(status=HTTPStatus.FORBIDDEN, text="pages of other sites are not answered here\n")
    return await handler(request)


def is_cross_site(request: web.Request) -> bool:
    """Whether a browser says that another site's page has caused this request. Over plain HTTP to another machine, it
    may send Origin alone.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site not in _OWN
    return origin is not None and origin.rpartition("://")[2].lower() != request.headers.get("Host", "").lower()


def _is_safe(host: str) -> bool:
    """Whether a Host header has no name that others can give our address to."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    if name in {"", "localhost"} or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_from_loopback(request: web.Request) -> bool:
    """Whether the connection's other end is on this machine, or in this pod. A forwarded port of kubectl is."""
    peer = request.get_extra_info("peername")
    if isinstance(peer, str | bytes):
        # of a Unix socket
        return True
    try:
        address = ip_address(request.remote or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
