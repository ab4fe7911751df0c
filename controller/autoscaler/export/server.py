# SPDX-License-Identifier: Apache-2.0
"""Serves the external metrics API with HTTPS, to those who have the right to read it.

Mostly that is the API server, which passes requests on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from controller.autoscaler.export import documents
from controller.autoscaler.export.exported import METRICS, Exports
from controller.autoscaler.export.front_proxy import CONFIG_MAP, FrontProxy, front_proxy_of
from controller.kube.authorizer import Action, Callers, User
from controller.kube.errors import ClusterError, NotFound
from controller.kube.resources import CONFIG_MAPS, selector
from controller.webhooks.server import ServerTls
from extproc.api.addresses import parse_address

if TYPE_CHECKING:
    from typing import Any

    from aiohttp.typedefs import Handler

    from controller.kube.client import Client
    from controller.webhooks.material import Pair

log = logging.getLogger(__name__)

_LOOK_S: Final = 60.0
_OPEN: Final = ("/healthz", "/readyz", "/livez")


class MetricsServer:
    """``run`` listens on ``address``. The API server's authority is read now and then: with a new one it listens
    anew.
    """

    def __init__(
        self, client: Client, address: str, exports: Exports, callers: Callers, look_s: float = _LOOK_S
    ) -> None:
        self._client = client
        self._address = address
        self._exports = exports
        self._callers = callers
        self._look_s = look_s
        self._pair: Pair | None = None
        self._tls = ServerTls()
        self._proxy: FrontProxy | None = None
        self._has_pair = asyncio.Event()
        self.ready = asyncio.Event()

    def use(self, pair: Pair) -> None:
        """The certificate to show from now on; raises OSError."""
        self._pair = pair
        self._tls.use(pair)
        self._has_pair.set()

    async def run(self) -> None:
        """Until cancelled; raises OSError if the address is taken."""
        await self._has_pair.wait()
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                *(web.get(path, self._healthy) for path in _OPEN),
                web.get("/apis", self._document(documents.groups())),
                web.get(f"/apis/{documents.GROUP}", self._document(documents.group())),
                web.get(documents.ROOT, self._document(documents.resources())),
                web.get(documents.ROOT + "/namespaces/{namespace}/{metric}", self._values),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site: web.TCPSite | None = None
        try:
            while True:
                proxy = await self._read()
                if proxy is not None and (site is None or proxy != self._proxy):
                    if site is not None:
                        await site.stop()
                    self._proxy, self._tls = proxy, self._made(proxy)
                    site = web.TCPSite(runner, *parse_address(self._address), ssl_context=self._tls.context)
                    await site.start()
                    self.ready.set()
                await asyncio.sleep(self._look_s if site is not None else 1.0)
        finally:
            await runner.cleanup()

    async def _read(self) -> FrontProxy | None:
        """None if nothing can be known of it now."""
        namespace, name = CONFIG_MAP
        try:
            return front_proxy_of(await self._client.get(CONFIG_MAPS, name, namespace))
        except NotFound:
            return FrontProxy()
        except (ClusterError, ValueError) as error:
            log.warning("the API server's authority cannot be read from ConfigMap %s/%s: %s", namespace, name, error)
            return None

    def _made(self, proxy: FrontProxy) -> ServerTls:
        tls = ServerTls()
        if proxy.authority:
            # a caller without a certificate needs a token
            tls.context.verify_mode = ssl.CERT_OPTIONAL
            tls.context.load_verify_locations(cadata=proxy.authority)
        if self._pair is not None:
            tls.use(self._pair)
        return tls

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        try:
            user = await self._user(request)
            if user is None:
                return _failed(401, "Unauthorized", "Unauthorized")
            action = _action(request)
            if action is not None and not await self._callers.may(user, action):
                said = (
                    f'User "{user.name}" cannot list resource "{action.resource}" in the namespace "{action.namespace}"'
                )
                return _failed(403, "Forbidden", said)
        except ClusterError as error:
            log.warning("nobody can be let in to %s: %s", request.path, error)
            return _failed(503, "ServiceUnavailable", "the API server cannot be asked who may see this")
        return await handler(request)

    async def _user(self, request: web.Request) -> User | None:
        certificate = request.get_extra_info("peercert")
        proxied = self._proxy.user_of(certificate, request.headers) if self._proxy is not None else None
        return proxied or await self._callers.user_of(request.headers.get("authorization", ""))

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    def _document(self, content: dict[str, Any]) -> Any:  # noqa: ANN401 - aiohttp's handler
        async def show(_: web.Request) -> web.Response:
            return _json(content)

        return show

    async def _values(self, request: web.Request) -> web.Response:
        metric = request.match_info["metric"]
        if metric not in METRICS:
            return _failed(404, "NotFound", f"there is no metric {metric}; there are {', '.join(METRICS)}")
        try:
            matches = selector(request.query.get("labelSelector", ""))
        except ValueError as error:
            return _failed(400, "BadRequest", str(error))
        found = [one for one in self._exports.of(request.match_info["namespace"]) if matches(one.labels)]
        return _json(documents.values(metric, found, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")))


def _action(request: web.Request) -> Action | None:
    """What is asked for; None for what all may see who are known: which metrics there are."""
    metric = request.match_info.get("metric")
    if metric is None:
        return None
    return Action("list", documents.GROUP, metric, request.match_info["namespace"])


def _failed(code: int, reason: str, message: str) -> web.Response:
    return _json(documents.status(code, reason, message), code)


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json", status=status)
