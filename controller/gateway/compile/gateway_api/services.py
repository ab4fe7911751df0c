# SPDX-License-Identifier: Apache-2.0
"""A port of a Service, with its EndpointSlices, to a Backend document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.sources import to_bytes
from extproc.api.advice import is_ip
from extproc.api.spec import API_VERSION, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The label that says whose endpoints a slice has.
_SERVICE: Final = "kubernetes.io/service-name"
# What a Service says of a port's protocol, and the documents' word for it.
_PROTOCOLS: Final[Mapping[str, str]] = {
    "": "HTTP",
    "http": "HTTP",
    "kubernetes.io/h2c": "H2C",
    "kubernetes.io/ws": "WebSocket",
}


class ServicePort(msgspec.Struct, frozen=True):
    """A port. ``protocol``: of a Backend document; empty if it is not supported, and then ``said`` is what was
    asked.
    """

    name: str
    protocol: str
    said: str = ""


class Service(msgspec.Struct, frozen=True):
    """A Service. ``is_alias``: it only stands for a host name, and such Services are not supported. ``addresses``: of
    its load balancer, or else its own.
    """

    key: str
    ports: Mapping[int, ServicePort]
    is_alias: bool = False
    addresses: tuple[str, ...] = ()


class Slice(msgspec.Struct, frozen=True):
    """An EndpointSlice. ``service``: whose, as ``namespace/name``. ``ports``: numbers by name. ``ready``: addresses;
    ``leaving``: addresses that end, and still answer.
    """

    service: str
    ports: Mapping[str, int]
    ready: tuple[str, ...]
    leaving: tuple[str, ...]


def service_of(thing: Mapping[str, Any]) -> Service:
    """A Service as the API server has it."""
    metadata, spec = thing["metadata"], thing.get("spec") or {}
    key = object_key(metadata.get("namespace", "default"), metadata["name"])
    ports = {}
    for one in spec.get("ports") or ():
        if one.get("protocol", "TCP") == "TCP":
            said = one.get("appProtocol") or ""
            ports[one["port"]] = ServicePort(one.get("name") or "", _PROTOCOLS.get(said, ""), said)
    ingress = ((thing.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    addresses = [one.get("ip") or one.get("hostname") or "" for one in ingress] or [spec.get("clusterIP") or ""]
    reached = tuple(one for one in addresses if one not in ("", "None"))
    return Service(key, ports, spec.get("type") == "ExternalName", reached)


def slice_of(thing: Mapping[str, Any]) -> Slice | None:
    """An EndpointSlice as the API server has it; None if it is no Service's, or has host names."""
    metadata = thing["metadata"]
    service = (metadata.get("labels") or {}).get(_SERVICE)
    if not service or thing.get("addressType") == "FQDN":
        return None
    ready: list[str] = []
    leaving: list[str] = []
    for one in thing.get("endpoints") or ():
        conditions = one.get("conditions") or {}
        addresses = [address for address in one.get("addresses") or () if is_ip(address)]
        # a slice that says nothing of readiness is one of ready endpoints
        if conditions.get("ready") is not False:
            ready += addresses
        elif conditions.get("serving") and conditions.get("terminating"):
            leaving += addresses
    ports = {one.get("name") or "": one["port"] for one in thing.get("ports") or () if one.get("port")}
    return Slice(object_key(metadata.get("namespace", "default"), service), ports, tuple(ready), tuple(leaving))


def trimmed_slice(thing: Mapping[str, Any]) -> dict[str, Any]:
    """What ``slice_of`` reads."""
    metadata = thing["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion")
    slim = {name: metadata[name] for name in kept if name in metadata}
    service = (metadata.get("labels") or {}).get(_SERVICE)
    slim["labels"] = {} if service is None else {_SERVICE: service}
    endpoints = [
        {name: one[name] for name in ("addresses", "conditions") if name in one} for one in thing.get("endpoints") or ()
    ]
    return {
        "apiVersion": thing.get("apiVersion", "discovery.k8s.io/v1"),
        "kind": thing.get("kind", "EndpointSlice"),
        "metadata": slim,
        "addressType": thing.get("addressType"),
        "ports": thing.get("ports"),
        "endpoints": endpoints,
    }


def backend_name(service: str, port: int) -> str:
    """Of the document: a Service's name and port."""
    return f"service.{service}.{port}"


def backend_document(service: Service, port: int, slices: Iterable[Slice]) -> bytes:
    """The Backend of ``port``, which the Service has. Endpoints that end count only where there are no others."""
    known = service.ports[port]
    slices = list(slices)
    endpoints = sorted(set(_addresses(slices, known.name, leaving=False)))
    endpoints = endpoints or sorted(set(_addresses(slices, known.name, leaving=True)))
    namespace = namespace_of(service.key)
    name = backend_name(service.key.removeprefix(f"{namespace}/"), port)
    return _document(namespace, name, {"endpoints": endpoints, "protocol": known.protocol})


def unresolved_document(namespace: str, name: str) -> bytes:
    """A Backend that stands for references that cannot be resolved."""
    return _document(namespace, name, {"unresolved": True})


def _document(namespace: str, name: str, spec: Mapping[str, Any]) -> bytes:
    metadata = {"name": name, "namespace": namespace}
    return to_bytes({"apiVersion": API_VERSION, "kind": "Backend", "metadata": metadata, "spec": spec})


def _addresses(slices: Iterable[Slice], port: str, *, leaving: bool) -> Iterator[str]:
    for one in slices:
        number = one.ports.get(port)
        if number is None:
            continue
        for address in one.leaving if leaving else one.ready:
            yield f"[{address}]:{number}" if ":" in address else f"{address}:{number}"
