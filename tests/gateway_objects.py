# SPDX-License-Identifier: Apache-2.0
"""Objects of the Gateway API as an API server has them, for tests."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from functools import cache
from typing import Any

from bench.cluster.certificates import Authority

Object = dict[str, Any]

GROUP = "gateway.networking.k8s.io"
LONG_AGO = "2026-01-01T00:00:00Z"


def make(api_version: str, kind: str, name: str, *, namespace: str = "default", **fields: Any) -> Object:  # noqa: ANN401
    """Any object. ``fields``: ``spec``, ``labels``, ``created``, ..."""
    metadata: Object = {
        "name": name,
        "generation": 1,
        "creationTimestamp": fields.pop("created", LONG_AGO),
        "labels": fields.pop("labels", {}),
    }
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def gateway_class(name: str = "attache", controller: str = "attache.dev/gateway", **spec: object) -> Object:
    """A GatewayClass, of ours by default."""
    return make(f"{GROUP}/v1", "GatewayClass", name, namespace="", spec={"controllerName": controller, **spec})


def listener(name: str = "http", port: int = 80, protocol: str = "HTTP", **fields: object) -> Object:
    """A listener. ``fields``: ``hostname``, ``tls``, ``allowedRoutes``."""
    return {"name": name, "port": port, "protocol": protocol, **fields}


def https(name: str = "https", port: int = 443, *secrets: str, **fields: object) -> Object:
    """A listener with the certificates of these Secrets."""
    references = [{"group": "", "kind": "Secret", "name": one} for one in secrets]
    return listener(name, port, "HTTPS", tls={"mode": "Terminate", "certificateRefs": references}, **fields)


def gateway(
    name: str = "web",
    *listeners: Object,
    namespace: str = "default",
    created: str = LONG_AGO,
    has: tuple[str, ...] = (),
    **spec: object,
) -> Object:
    """A Gateway of the class ``attache``. ``has``: addresses in its status."""
    content = {"gatewayClassName": "attache", "listeners": list(listeners or [listener()]), **spec}
    status = {"addresses": [{"type": "IPAddress", "value": one} for one in has]}
    return make(f"{GROUP}/v1", "Gateway", name, namespace=namespace, created=created, spec=content, status=status)


def backend_ref(name: str = "app", port: int | None = 8080, **fields: object) -> Object:
    """A reference to a Service, or with ``group`` and ``kind`` to something else."""
    found: Object = {"group": "", "kind": "Service", "name": name, "weight": 1, **fields}
    return found if port is None else {**found, "port": port}


def http_route(
    name: str = "app",
    *backends: Object,
    parents: tuple[Object, ...] = ({"name": "web"},),
    namespace: str = "default",
    created: str = LONG_AGO,
    rules: list[Object] | None = None,
    **spec: object,
) -> Object:
    """An HTTPRoute with one rule, of these backends, unless ``rules`` are given."""
    content: Object = {"parentRefs": [{"group": GROUP, "kind": "Gateway", **one} for one in parents], **spec}
    content["rules"] = [{"backendRefs": list(backends or [backend_ref()])}] if rules is None else rules
    return make(f"{GROUP}/v1", "HTTPRoute", name, namespace=namespace, created=created, spec=content)


def grpc_route(name: str = "app", *backends: Object, **more: Any) -> Object:  # noqa: ANN401 - as http_route
    """The same as a GRPCRoute."""
    return {**http_route(name, *backends, **more), "kind": "GRPCRoute"}


def grant(source: tuple[str, str, str], target: tuple[str, str], *, namespace: str, name: str = "") -> Object:
    """A ReferenceGrant. ``source``: namespace, group and kind. ``target``: group and kind."""
    to = {"group": target[0], "kind": target[1], **({"name": name} if name else {})}
    spec = {"from": [{"namespace": source[0], "group": source[1], "kind": source[2]}], "to": [to]}
    return make(f"{GROUP}/v1beta1", "ReferenceGrant", "grant", namespace=namespace, spec=spec)


def service(name: str = "app", port: int = 8080, *, namespace: str = "default", **fields: object) -> Object:
    """A Service of one port called ``http``. ``fields``: of the port."""
    ports = [{"name": "http", "port": port, "protocol": "TCP", **fields}]
    return make("v1", "Service", name, namespace=namespace, spec={"ports": ports, "type": "ClusterIP"})


def endpoint_slice(
    service: str,
    *addresses: str,
    name: str = "",
    namespace: str = "default",
    port: int = 3000,
    conditions: Object | None = None,
) -> Object:
    """An EndpointSlice of a Service's port called ``http``."""
    endpoints = [
        {"addresses": [one], "conditions": {"ready": True} if conditions is None else conditions} for one in addresses
    ]
    labels = {"kubernetes.io/service-name": service}
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    return make(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        name or f"{service}-1",
        namespace=namespace,
        labels=labels,
        addressType="IPv4",
        endpoints=endpoints,
        ports=ports,
    )


def pool(name: str = "llama", *, namespace: str = "default", app: str = "llama", **spec: object) -> Object:
    """An InferencePool of the pods of ``app`` on port 8000, whose picker is the Service ``picker``."""
    content = {
        "selector": {"matchLabels": {"app": app}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"group": "", "kind": "Service", "name": "picker", "port": {"number": 9002}},
        **spec,
    }
    return make("inference.networking.k8s.io/v1", "InferencePool", name, namespace=namespace, spec=content)


def namespace(name: str, **labels: str) -> Object:
    """A Namespace."""
    return make("v1", "Namespace", name, namespace="", labels=labels)


@cache
def certificate(name: str = "example.org") -> tuple[bytes, bytes]:
    """A certificate and its key in PEM; the same pair for the same name."""
    crt, key = Authority(datetime.now(UTC)).issue(name, names=(name,))
    return crt.encode(), key.encode()


def tls_secret(name: str = "cert", *, namespace: str = "default", **data: bytes) -> Object:
    """A Secret with a certificate for example.org. ``data``: ``crt`` or ``key`` in place of that one's."""
    crt, key = certificate()
    texts = {"tls.crt": data.get("crt", crt), "tls.key": data.get("key", key)}
    encoded = {name: base64.b64encode(text).decode() for name, text in texts.items()}
    return make("v1", "Secret", name, namespace=namespace, type="kubernetes.io/tls", data=encoded)


def authorities(name: str = "ca", *, namespace: str = "default", text: str = "") -> Object:
    """A ConfigMap with who signs clients' certificates."""
    data = {"ca.crt": text or certificate()[0].decode()}
    return {**make("v1", "ConfigMap", name, namespace=namespace, data=data), "kind": "PointedConfigMap"}
