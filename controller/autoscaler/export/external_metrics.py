# SPDX-License-Identifier: Apache-2.0
"""The external metrics API, external.metrics.k8s.io/v1beta1: HTTPS for callers with the right to read it.

Mostly the caller is the API server, which forwards requests. It shows a client certificate of an authority in a
ConfigMap, and names the user in headers. Without that certificate the headers are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from controller.autoscaler.export.desired_replicas import METRICS, ExportedTarget, ExportedTargets
from controller.kube.api_resources import CONFIG_MAPS, parse_selector
from controller.kube.authorizer import RequestAuthorizer, ResourceAccess, User
from controller.kube.errors import ClusterError, NotFound
from controller.webhooks.server import ServerTls
from extproc.api.addresses import parse_address
from extproc.page_server import PageServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiohttp.typedefs import Handler

    from controller.kube.client import Client
    from controller.webhooks.certificates import KeyPair

log = logging.getLogger(__name__)

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
GROUP_VERSION: Final = f"{GROUP}/{VERSION}"
ROOT: Final = f"/apis/{GROUP_VERSION}"
CONFIG_MAP: Final = ("kube-system", "extension-apiserver-authentication")
_NAMES = msgspec.json.Decoder(tuple[str, ...])
_POLL_S: Final = 60.0
_OPEN: Final = ("/healthz", "/readyz", "/livez")


def api_group_list() -> dict[str, Any]:
    """What is served at /apis."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group()]}


def api_group() -> dict[str, Any]:
    """What is served at /apis/GROUP."""
    return {"kind": "APIGroup", "apiVersion": "v1", **_group()}


def api_resource_list() -> dict[str, Any]:
    """The metrics, as resources, which is how this API lists them."""
    one = {"singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
    found = [{"name": name, **one} for name in METRICS]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": found}


def external_metric_values(metric: str, found: Iterable[ExportedTarget], at: str) -> dict[str, Any]:
    """The values of a metric. No value at all is an error to an HPA, which then changes nothing."""
    items = [
        {
            "metricName": metric,
            "metricLabels": dict(one.labels),
            "timestamp": at,
            "value": format_quantity(one.value(metric)),
        }
        for one in found
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": items}


def api_status_failure(code: int, reason: str, message: str) -> dict[str, Any]:
    """A failure as an API ``Status``."""
    failure = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **failure}


def format_quantity(value: float) -> str:
    """As Kubernetes writes it, to the thousandth."""
    milli = int((Decimal(str(value)) * 1000).to_integral_value())
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def _group() -> dict[str, Any]:
    version = {"groupVersion": GROUP_VERSION, "version": VERSION}
    return {"name": GROUP, "versions": [version], "preferredVersion": version}


class FrontProxySettings(msgspec.Struct, frozen=True):
    """``authority``: PEM; empty: the cluster has no such proxy. ``names``: common names that certificates may have;
    none: any. The headers: in small letters.
    """

    authority: str = ""
    names: tuple[str, ...] = ()
    user_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ()
    extra_prefixes: tuple[str, ...] = ()

    def user_of(self, certificate: Mapping[str, Any] | None, headers: Any) -> User | None:  # noqa: ANN401 - a multi-dict
        """``certificate``: from ssl, verified; None without one."""
        if not certificate or not self.authority:
            return None
        if self.names and _common_name(certificate) not in self.names:
            return None
        name = next((failure for one in self.user_headers if (failure := headers.get(one))), "")
        if not name:
            return None
        groups = tuple(failure for one in self.group_headers for failure in headers.getall(one, ()))
        extra: dict[str, list[str]] = {}
        for header, value in headers.items():
            for prefix in self.extra_prefixes:
                if header.lower().startswith(prefix):
                    extra.setdefault(header.lower().removeprefix(prefix), []).append(value)
        return User(name, groups, extra=tuple((one, tuple(several)) for one, several in sorted(extra.items())))


def parse_front_proxy(config_map: Mapping[str, Any]) -> FrontProxySettings:
    """Raises ValueError."""
    data = config_map.get("data") or {}

    def names(key: str) -> tuple[str, ...]:
        return _NAMES.decode(data.get(key) or "[]")

    def lowered(key: str) -> tuple[str, ...]:
        return tuple(one.lower() for one in names(key))

    return FrontProxySettings(
        authority=data.get("requestheader-client-ca-file", ""),
        names=names("requestheader-allowed-names"),
        user_headers=lowered("requestheader-username-headers"),
        group_headers=lowered("requestheader-group-headers"),
        extra_prefixes=lowered("requestheader-extra-headers-prefix"),
    )


def _common_name(certificate: Mapping[str, Any]) -> str:
    for parts in certificate.get("subject", ()):
        for key, value in parts:
            if key == "commonName":
                return str(value)
    return ""


class ExternalMetricsServer:
    """``run`` listens on ``address``. The API server's authority is read periodically; after a change it stops and
    listens again.
    """

    def __init__(
        self,
        client: Client,
        address: str,
        exports: ExportedTargets,
        callers: RequestAuthorizer,
        poll_s: float = _POLL_S,
    ) -> None:
        self._client = client
        self._address = address
        self._exports = exports
        self._callers = callers
        self._poll_s = poll_s
        self._pair: KeyPair | None = None
        self._tls = ServerTls()
        self._proxy: FrontProxySettings | None = None
        self._has_pair = asyncio.Event()
        self.ready = asyncio.Event()

    def set_certificate(self, pair: KeyPair) -> None:
        """The certificate to show from now on; raises OSError."""
        self._pair = pair
        self._tls.set_certificate(pair)
        self._has_pair.set()

    async def run(self) -> None:
        """Serve until cancelled; raises OSError if the address is taken."""
        await self._has_pair.wait()
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                *(web.get(path, self._healthy) for path in _OPEN),
                web.get("/apis", self._document(api_group_list())),
                web.get(f"/apis/{GROUP}", self._document(api_group())),
                web.get(ROOT, self._document(api_resource_list())),
                web.get(ROOT + "/namespaces/{namespace}/{metric}", self._values),
            ]
        )
        runner = PageServer(app)
        await runner.setup()
        site: web.BaseSite | None = None
        try:
            while True:
                proxy = await self._read()
                if proxy is not None and (site is None or proxy != self._proxy):
                    if site is not None:
                        await site.stop()
                    self._proxy, self._tls = proxy, self._made(proxy)
                    site = await runner.listen(parse_address(self._address), self._tls.context)
                    self.ready.set()
                await asyncio.sleep(self._poll_s if site is not None else 1.0)
        finally:
            await runner.cleanup()

    async def _read(self) -> FrontProxySettings | None:
        """None if it cannot be read now."""
        namespace, name = CONFIG_MAP
        try:
            return parse_front_proxy(await self._client.get(CONFIG_MAPS, name, namespace))
        except NotFound:
            return FrontProxySettings()
        except (ClusterError, ValueError) as error:
            log.warning("the API server's authority cannot be read from ConfigMap %s/%s: %s", namespace, name, error)
            return None

    def _made(self, proxy: FrontProxySettings) -> ServerTls:
        tls = ServerTls()
        if proxy.authority:
            # a caller without a certificate needs a token
            tls.context.verify_mode = ssl.CERT_OPTIONAL
            tls.context.load_verify_locations(cadata=proxy.authority)
        if self._pair is not None:
            tls.set_certificate(self._pair)
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
            if action is not None and not await self._callers.is_allowed(user, action):
                message = (
                    f'User "{user.name}" cannot list resource "{action.resource}" in the namespace "{action.namespace}"'
                )
                return _failed(403, "Forbidden", message)
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
            matches = parse_selector(request.query.get("labelSelector", ""))
        except ValueError as error:
            return _failed(400, "BadRequest", str(error))
        found = [one for one in self._exports.in_namespace(request.match_info["namespace"]) if matches(one.labels)]
        return _json(external_metric_values(metric, found, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")))


def _action(request: web.Request) -> ResourceAccess | None:
    """The action to authorise; None for the list of metrics, which every authenticated user may read."""
    metric = request.match_info.get("metric")
    if metric is None:
        return None
    return ResourceAccess("list", GROUP, metric, request.match_info["namespace"])


def _failed(code: int, reason: str, message: str) -> web.Response:
    return _json(api_status_failure(code, reason, message), code)


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json", status=status)
