# SPDX-License-Identifier: Apache-2.0
"""Resolves a route's reference to a backend: a Service or pool as a document, or the reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controller.gateway.compile.gateway_api.resource_types import GRPC_ROUTE
from controller.gateway.compile.inference_pools import SETTINGS, server_key
from controller.gateway.compile.source_objects import to_canonical_json
from controller.kube.api_resources import partial_metadata
from controller.kube.conditions import WantedCondition, condition_false
from extproc.api.addresses import is_local_or_metadata_host, join_host_port
from extproc.api.error_hints import is_ip
from extproc.api.http_route import ATTACHE_GROUP
from extproc.api.spec import API_VERSION, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from controller.gateway.compile.gateway_api.resource_types import InferencePoolSpec, ReferenceGrant, RouteKind

# The label with the Service of an EndpointSlice.
_SERVICE: Final = "kubernetes.io/service-name"
# An API server takes any number of 32 bits in an EndpointSlice.
_PORTS: Final = range(1, 65536)
# Protocols of Service ports (``appProtocol``), and their names in the documents.
_PROTOCOLS: Final[Mapping[str, str]] = {
    "": "HTTP",
    "http": "HTTP",
    "kubernetes.io/h2c": "H2C",
    "grpc": "H2C",
    "kubernetes.io/ws": "WebSocket",
}
POOL_GROUP: Final = "inference.networking.k8s.io"
# Those by which a GRPCRoute can call; of a port without one, gRPC over HTTP/2 is meant.
_OF_CALLS: Final = ("", "kubernetes.io/h2c", "grpc")
# The Backend of a namespace that stands for what cannot be resolved.
UNRESOLVED: Final = "unresolved"
_NO_CALLS: Final = "is not called by gRPC; give it protocol V2-gRPC or TensorFlow-gRPC"


class ServicePort(msgspec.Struct, frozen=True):
    """A port. ``protocol``: of a Backend document; empty if it is not supported, and then ``said`` is the requested
    one.
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


class EndpointSlice(msgspec.Struct, frozen=True):
    """An EndpointSlice. ``service``: its Service, as ``namespace/name``. ``ports``: numbers by name. ``ready``:
    addresses; ``leaving``: addresses that terminate, and still answer.
    """

    service: str
    ports: Mapping[str, int]
    ready: tuple[str, ...]
    leaving: tuple[str, ...]


def parse_service(thing: Mapping[str, Any]) -> Service:
    """A Service as the API server has it."""
    metadata, spec = thing["metadata"], thing.get("spec") or {}
    key = object_key(metadata.get("namespace", "default"), metadata["name"])
    ports = {}
    for one in spec.get("ports") or ():
        if one.get("protocol", "TCP") == "TCP":
            message = one.get("appProtocol") or ""
            ports[one["port"]] = ServicePort(one.get("name") or "", _PROTOCOLS.get(message, ""), message)
    ingress = ((thing.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    addresses = [one.get("ip") or one.get("hostname") or "" for one in ingress] or [spec.get("clusterIP") or ""]
    reached = tuple(one for one in addresses if one not in ("", "None"))
    return Service(key, ports, spec.get("type") == "ExternalName", reached)


def parse_endpoint_slice(thing: Mapping[str, Any]) -> EndpointSlice | None:
    """An EndpointSlice as the API server has it; None if it is no Service's, or has host names."""
    metadata = thing["metadata"]
    service = (metadata.get("labels") or {}).get(_SERVICE)
    if not service or thing.get("addressType") == "FQDN":
        return None
    ready: list[str] = []
    leaving: list[str] = []
    for one in thing.get("endpoints") or ():
        conditions = one.get("conditions") or {}
        # an API server lets users write slices of their own, and checks less
        addresses = [text for text in one.get("addresses") or () if is_ip(text) and not is_local_or_metadata_host(text)]
        # endpoints without the condition ``ready`` count as ready
        if conditions.get("ready") is not False:
            ready += addresses
        elif conditions.get("serving") and conditions.get("terminating"):
            leaving += addresses
    ports = {one.get("name") or "": one["port"] for one in thing.get("ports") or () if one.get("port") in _PORTS}
    return EndpointSlice(object_key(metadata.get("namespace", "default"), service), ports, tuple(ready), tuple(leaving))


def trim_endpoint_slice(thing: Mapping[str, Any]) -> dict[str, Any]:
    """What ``parse_endpoint_slice`` reads."""
    slim = partial_metadata(thing)
    service = (thing["metadata"].get("labels") or {}).get(_SERVICE)
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


class ServiceBackend(NamedTuple):
    """A port of a Service, by its key, as routes refer to it. ``takes_grpc``: a GRPCRoute does."""

    service: str
    port: int
    takes_grpc: bool = False

    @property
    def namespace(self) -> str:
        """Of the Service, and of the document."""
        return namespace_of(self.service)

    @property
    def name(self) -> str:
        """Of the document."""
        kind = "grpc" if self.takes_grpc else "service"
        return f"{kind}.{self.service.removeprefix(f'{self.namespace}/')}.{self.port}"

    @property
    def key(self) -> str:
        """Of the document."""
        return object_key(self.namespace, self.name)


def backend_document(backend: ServiceBackend, service: Service, slices: Iterable[EndpointSlice]) -> bytes:
    """``service``: has the port. Endpoints that end count only where there are no others."""
    known = service.ports[backend.port]
    slices = list(slices)
    endpoints = sorted(set(_addresses(slices, known.name, leaving=False)))
    endpoints = endpoints or sorted(set(_addresses(slices, known.name, leaving=True)))
    protocol = "H2C" if backend.takes_grpc else known.protocol
    return _document(backend.namespace, backend.name, {"endpoints": endpoints, "protocol": protocol})


def unresolved_document(namespace: str, name: str) -> bytes:
    """A Backend that stands for references that cannot be resolved."""
    return _document(namespace, name, {"unresolved": True})


def _document(namespace: str, name: str, spec: Mapping[str, Any]) -> bytes:
    metadata = {"name": name, "namespace": namespace}
    return to_canonical_json({"apiVersion": API_VERSION, "kind": "Backend", "metadata": metadata, "spec": spec})


def _addresses(slices: Iterable[EndpointSlice], port: str, *, leaving: bool) -> Iterator[str]:
    for one in slices:
        number = one.ports.get(port)
        if number is None:
            continue
        for address in one.leaving if leaving else one.ready:
            yield join_host_port(address, number)


class ReferenceGrants:
    """All ReferenceGrants; checks whether a reference is allowed."""

    def __init__(self, grants: Iterable[ReferenceGrant] = ()) -> None:
        # (namespace, group, kind) of the target and (namespace, group, kind) of the referrer, to names; "" is all
        self._names: dict[tuple[str, ...], set[str]] = {}
        for grant in grants:
            for source in grant.source:
                for target in grant.to:
                    place = grant.identity.namespace, target.group, target.kind
                    who = source.namespace or "", source.group, source.kind
                    self._names.setdefault((*place, *who), set()).add(target.name)

    def allows(self, source: tuple[str, str, str], target: tuple[str, str, str], name: str) -> bool:
        """Whether ``source`` may refer to ``name`` in ``target``; each is namespace, group and kind."""
        if source[0] == target[0]:
            return True
        names = self._names.get((*target, *source), ())
        return "" in names or name in names


class BackendResolution(msgspec.Struct, frozen=True, kw_only=True):
    """``kind``, ``namespace`` and ``name`` of a document. ``problem``: why the reference is unresolved. ``service``:
    that of a Backend. ``pool``: the pool, if it is one. ``references``: kinds and keys of the objects
    on which the result depends.
    """

    kind: str
    namespace: str
    name: str
    problem: WantedCondition | None = None
    service: ServiceBackend | None = None
    pool: str = ""
    references: tuple[tuple[str, str], ...] = ()


class BackendReferenceResolver:
    """``servers``: keys of ModelServers that can be used, those of pools included; ``calls``: of those that are called
    by gRPC.
    """

    def __init__(
        self,
        *,
        services: Mapping[str, Service],
        pools: Mapping[str, InferencePoolSpec],
        servers: Collection[str],
        calls: Collection[str],
        grants: ReferenceGrants,
    ) -> None:
        self._services = services
        self._pools = pools
        self._servers = servers
        self._calls = calls
        self._grants = grants

    def resolve_backend(self, route: RouteKind, namespace: str, reference: Mapping[str, Any]) -> BackendResolution:
        """``reference``: of a ``route`` in ``namespace``, as it was written."""
        takes_grpc = route == GRPC_ROUTE
        group, kind = reference.get("group", ""), reference.get("kind", "Service")
        target = reference.get("namespace") or namespace
        name = reference["name"]
        key = object_key(target, name)
        if (group, kind) not in (("", "Service"), (POOL_GROUP, "InferencePool"), (ATTACHE_GROUP, "ModelServer")):
            message = f"{group or 'core'}/{kind} is no kind of backend; Service, InferencePool and ModelServer are"
            return _unresolved(namespace, "InvalidKind", message)
        if not self._grants.allows((namespace, route.group, route.kind), (target, group, kind), name):
            message = f"no ReferenceGrant of the namespace {target} lets this route use the {kind} {name}"
            return _unresolved(namespace, "RefNotPermitted", message)
        match kind:
            case "Service":
                return self._service(namespace, key, reference.get("port"), takes_grpc=takes_grpc)
            case "InferencePool":
                return self._pool(namespace, key, takes_grpc=takes_grpc)
        return self._server(namespace, key, takes_grpc=takes_grpc)

    def _server(self, namespace: str, key: str, *, takes_grpc: bool) -> BackendResolution:
        references = (("ModelServer", key),)
        if key not in self._servers:
            return _unresolved(namespace, "BackendNotFound", f"no usable ModelServer {key}", references)
        if takes_grpc and key not in self._calls:
            return _unresolved(namespace, "UnsupportedProtocol", f"the ModelServer {key} {_NO_CALLS}", references)
        target = namespace_of(key)
        return BackendResolution(
            kind="ModelServer", namespace=target, name=key.removeprefix(f"{target}/"), references=references
        )

    def picker_problem(self, pool: InferencePoolSpec) -> str:
        """Why the endpointPickerRef of ``pool`` does not resolve; empty if it does."""
        if not pool.picker:
            return "its endpointPickerRef names no Service"
        return "" if pool.picker in self._services else f"there is no Service {pool.picker} for its endpointPickerRef"

    def _service(self, namespace: str, key: str, port: int | None, *, takes_grpc: bool) -> BackendResolution:
        references = (("Service", key),)
        found = self._services.get(key)
        if found is None or found.is_alias:
            message = "stands for a host name, which is not supported" if found else "is not there"
            return _unresolved(namespace, "BackendNotFound", f"the Service {key} {message}", references)
        known = found.ports.get(port or 0)
        if known is None:
            return _unresolved(namespace, "BackendNotFound", f"the Service {key} has no port {port}", references)
        if not known.protocol or (takes_grpc and known.said not in _OF_CALLS):
            message = f"port {port} of the Service {key} has appProtocol {known.said}, which is not supported"
            return _unresolved(namespace, "UnsupportedProtocol", message, references)
        made = ServiceBackend(key, port or 0, takes_grpc)
        return BackendResolution(
            kind="Backend", namespace=made.namespace, name=made.name, service=made, references=references
        )

    def _pool(self, namespace: str, key: str, *, takes_grpc: bool) -> BackendResolution:
        pool = self._pools.get(key)
        if pool is None:
            message = f"there is no InferencePool {key}"
            return _unresolved(namespace, "BackendNotFound", message, (("InferencePool", key),), pool=key)
        server = server_key(key)
        references = (("InferencePool", key), ("Service", pool.picker), ("ModelServer", server))
        problem = "" if server in self._servers else "its conditions say why"
        problem = problem or ("" if pool.fails_open else self.picker_problem(pool))
        if problem:
            message = f"the InferencePool {key} cannot be used: {problem}"
            return _unresolved(namespace, "BackendNotFound", message, references, pool=key)
        if takes_grpc and server not in self._calls:
            message = f"the InferencePool {key} {_NO_CALLS}, which its annotation {SETTINGS} may have"
            return _unresolved(namespace, "UnsupportedProtocol", message, references, pool=key)
        target = namespace_of(key)
        return BackendResolution(
            kind="ModelServer",
            namespace=target,
            name=server.removeprefix(f"{target}/"),
            pool=key,
            references=references,
        )


def _unresolved(
    namespace: str, reason: str, message: str, references: tuple[tuple[str, str], ...] = (), *, pool: str = ""
) -> BackendResolution:
    problem = condition_false("ResolvedRefs", reason, message)
    return BackendResolution(
        kind="Backend", namespace=namespace, name=UNRESOLVED, problem=problem, references=references, pool=pool
    )
