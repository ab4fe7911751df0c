# SPDX-License-Identifier: Apache-2.0
"""Configurations of any size: models, routes, hosts, adapters, endpoints, keys and tenants, as a directory of files"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

# ModelServers share files, as in directories that people write.
_SERVERS_A_FILE: Final = 50


class ObjectCounts(msgspec.Struct, frozen=True):
    """How many of each there are.

    ``models``: ModelServers. ``routes``: ModelRoutes and HTTPRoutes together; each host has an HTTPRoute of its own.
    ``endpoints``: of all ModelServers together. ``tenants``: each with a share of the keys and of every limit.
    """

    models: int = 1_000
    routes: int = 5_000
    hosts: int = 2_000
    adapters: int = 5_000
    endpoints: int = 20_000
    keys: int = 500
    tenants: int = 200

    def scaled(self, share: float) -> ObjectCounts:
        """The same with ``share`` of each, at least one."""
        return ObjectCounts(
            **{name: max(1, round(count * share)) for name, count in msgspec.structs.asdict(self).items()}
        )

    @property
    def model_routes(self) -> int:
        """Routes that are no HTTPRoutes: one for each model at the least."""
        return max(self.models, self.routes - self.hosts)


class GatewayPorts(msgspec.Struct, frozen=True):
    """Where Envoy and extproc listen, and the port of all engines."""

    listen: str
    admin: str
    extproc: str
    engines: int


def api_key_of(number: int) -> str:
    """The API key of that number."""
    return f"sk-sizes-{number:06d}-0123456789abcdef"


def address_of(number: int, port: int) -> str:
    """The loopback address of the endpoint of that number; one socket may listen for all of them."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}:{port}"


def configuration(sizes: ObjectCounts, gateway: GatewayPorts, mode: Literal["Open", "Close"]) -> dict[str, bytes]:
    """The files of a directory. API keys name models, so that only the mode Close has them."""
    documents = {"gateway.json": [_gateway(sizes, gateway, mode)]}
    for number in range(sizes.models):
        documents.setdefault(f"servers-{number // _SERVERS_A_FILE}.json", []).append(_server(sizes, gateway, number))
    for number in range(sizes.model_routes):
        documents.setdefault(f"routes-{number // _SERVERS_A_FILE}.json", []).append(
            model_route(sizes, number, limited=mode == "Close")
        )
    for number in range(sizes.hosts):
        documents.setdefault(f"hosts-{number // _SERVERS_A_FILE}.json", []).append(_http_route(sizes, number))
    return {name: msgspec.json.encode(all_of_it) for name, all_of_it in documents.items()}


def _gateway(sizes: ObjectCounts, gateway: GatewayPorts, mode: str) -> dict[str, object]:
    spec: dict[str, object] = {
        "listen": gateway.listen,
        "admin": gateway.admin,
        "extproc": gateway.extproc,
        "failureMode": mode,
    }
    if mode == "Close":
        keys = [
            {
                "name": f"key-{number}",
                "tenant": f"tenant-{number % sizes.tenants}",
                "keySHA256": hashlib.sha256(api_key_of(number).encode()).hexdigest(),
            }
            for number in range(sizes.keys)
        ]
        tenants = [{"name": f"tenant-{number}", "models": ["model-*", "adapter-*"]} for number in range(sizes.tenants)]
        spec.update({"authentication": {"apiKeys": keys}, "tenants": tenants})
    return _document("GatewayConfig", "gateway", spec)


def _server(sizes: ObjectCounts, gateway: GatewayPorts, number: int) -> dict[str, object]:
    """With every ``models``-th endpoint."""
    endpoints = [{"address": address_of(one, gateway.engines)} for one in range(number, sizes.endpoints, sizes.models)]
    return _document("ModelServer", f"server-{number}", {"model": f"org/model-{number}", "endpoints": endpoints})


def model_route(sizes: ObjectCounts, number: int, *, limited: bool, name: str = "") -> dict[str, object]:
    """A name for one of the models; the adapters are spread over the routes."""
    adapters = [f"adapter-{one}" for one in range(number, sizes.adapters, sizes.model_routes)]
    target = {"modelServerName": f"server-{number % sizes.models}"}
    spec: dict[str, object] = {
        "modelName": name or f"model-{number}",
        "loraAdapters": adapters,
        "rules": [{"targetModels": [target]}],
    }
    if limited:
        spec["rateLimits"] = [{"per": "Tenant", "unit": "minute", "totalTokens": 1_000_000}]
    return _document("ModelRoute", f"route-{number}", spec)


def _http_route(sizes: ObjectCounts, number: int) -> dict[str, object]:
    backend = {"group": "attache.dev", "kind": "ModelServer", "name": f"server-{number % sizes.models}"}
    match = {"path": {"type": "PathPrefix", "value": "/chat"}}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": f"host-{number}"},
        "spec": {"hostnames": [f"h{number}.example.com"], "rules": [{"matches": [match], "backendRefs": [backend]}]},
    }


def _document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
