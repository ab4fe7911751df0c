# SPDX-License-Identifier: Apache-2.0
"""What a route's reference to a backend comes to: a Service or pool as a document, or a reason why it cannot be had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.objects import GROUP
from controller.gateway.compile.pools import server_key
from controller.gateway.compile.sources import to_bytes
from controller.kube.conditions import Wanted, fails
from extproc.api.advice import is_ip
from extproc.api.http_route import ATTACHE_GROUP
from extproc.api.spec import API_VERSION, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from controller.gateway.compile.gateway_api.objects import Grant, Pool

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


class Grants:
    """All ReferenceGrants, as the question whether a reference is allowed."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        # (namespace, group, kind) of the target and (namespace, group, kind) of who refers, to names; "" is all
        self._names: dict[tuple[str, ...], set[str]] = {}
        for grant in grants:
            for source in grant.source:
                for target in grant.to:
                    place = grant.identity.namespace, target.group, target.kind
                    who = source.namespace or "", source.group, source.kind
                    self._names.setdefault((*place, *who), set()).add(target.name)

    def allow(self, source: tuple[str, str, str], target: tuple[str, str, str], name: str) -> bool:
        """Whether ``source`` may refer to ``name`` in ``target``; each is namespace, group and kind."""
        if source[0] == target[0]:
            return True
        names = self._names.get((*target, *source), ())
        return "" in names or name in names


POOL_GROUP: Final = "inference.networking.k8s.io"
# The Backend of a namespace that stands for what cannot be resolved.
UNRESOLVED: Final = "unresolved"


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """``kind``, ``namespace`` and ``name`` of a document. ``problem``: why it is the one of unresolved references.
    ``service``: the Service and port of a Backend. ``pool``: the pool, if it is one. ``looked_at``: kinds and keys of
    the objects whose coming and going changes the answer.
    """

    kind: str
    namespace: str
    name: str
    problem: Wanted | None = None
    service: tuple[str, int] | None = None
    pool: str = ""
    looked_at: tuple[tuple[str, str], ...] = ()


class References:
    """``servers``: keys of ModelServers that can be used, those of pools included."""

    def __init__(
        self,
        *,
        services: Mapping[str, Service],
        pools: Mapping[str, Pool],
        servers: Collection[str],
        grants: Grants,
    ) -> None:
        self._services = services
        self._pools = pools
        self._servers = servers
        self._grants = grants

    def resolve(self, namespace: str, reference: Mapping[str, Any]) -> Resolution:
        """``reference``: of an HTTPRoute in ``namespace``, as it was written."""
        group, kind = reference.get("group", ""), reference.get("kind", "Service")
        target = reference.get("namespace") or namespace
        name = reference["name"]
        key = object_key(target, name)
        if (group, kind) not in (("", "Service"), (POOL_GROUP, "InferencePool"), (ATTACHE_GROUP, "ModelServer")):
            said = f"{group or 'core'}/{kind} is no kind of backend; Service, InferencePool and ModelServer are"
            return _unresolved(namespace, "InvalidKind", said)
        if not self._grants.allow((namespace, GROUP, "HTTPRoute"), (target, group, kind), name):
            said = f"no ReferenceGrant of the namespace {target} lets this route use the {kind} {name}"
            return _unresolved(namespace, "RefNotPermitted", said)
        match kind:
            case "Service":
                return self._service(namespace, key, reference.get("port"))
            case "InferencePool":
                return self._pool(namespace, key)
        looked_at = (("ModelServer", key),)
        if key not in self._servers:
            return _unresolved(namespace, "BackendNotFound", f"no usable ModelServer {key}", looked_at)
        return Resolution(kind="ModelServer", namespace=target, name=name, looked_at=looked_at)

    def picker_problem(self, pool: Pool) -> str:
        """Why the endpointPickerRef of ``pool`` does not resolve; empty if it does."""
        if not pool.picker:
            return "its endpointPickerRef names no Service"
        return "" if pool.picker in self._services else f"there is no Service {pool.picker} for its endpointPickerRef"

    def _service(self, namespace: str, key: str, port: int | None) -> Resolution:
        looked_at = (("Service", key),)
        found = self._services.get(key)
        if found is None or found.is_alias:
            said = "stands for a host name, which is not supported" if found else "is not there"
            return _unresolved(namespace, "BackendNotFound", f"the Service {key} {said}", looked_at)
        known = found.ports.get(port or 0)
        if known is None:
            return _unresolved(namespace, "BackendNotFound", f"the Service {key} has no port {port}", looked_at)
        if not known.protocol:
            said = f"port {port} of the Service {key} has appProtocol {known.said}, which is not supported"
            return _unresolved(namespace, "UnsupportedProtocol", said, looked_at)
        target = namespace_of(key)
        name = backend_name(key.removeprefix(f"{target}/"), port or 0)
        return Resolution(kind="Backend", namespace=target, name=name, service=(key, port or 0), looked_at=looked_at)

    def _pool(self, namespace: str, key: str) -> Resolution:
        pool = self._pools.get(key)
        if pool is None:
            said = f"there is no InferencePool {key}"
            return _unresolved(namespace, "BackendNotFound", said, (("InferencePool", key),), pool=key)
        server = server_key(key)
        looked_at = (("InferencePool", key), ("Service", pool.picker), ("ModelServer", server))
        problem = "" if server in self._servers else "its conditions say why"
        problem = problem or ("" if pool.fails_open else self.picker_problem(pool))
        if problem:
            said = f"the InferencePool {key} cannot be used: {problem}"
            return _unresolved(namespace, "BackendNotFound", said, looked_at, pool=key)
        target = namespace_of(key)
        return Resolution(
            kind="ModelServer",
            namespace=target,
            name=server.removeprefix(f"{target}/"),
            pool=key,
            looked_at=looked_at,
        )


def _unresolved(
    namespace: str, reason: str, message: str, looked_at: tuple[tuple[str, str], ...] = (), *, pool: str = ""
) -> Resolution:
    problem = fails("ResolvedRefs", reason, message)
    return Resolution(
        kind="Backend", namespace=namespace, name=UNRESOLVED, problem=problem, looked_at=looked_at, pool=pool
    )
