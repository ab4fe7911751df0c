# SPDX-License-Identifier: Apache-2.0
"""What a route's reference to a backend comes to: a document of the directory, or a reason why it cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.gateway_spec import GROUP
from controller.gateway.compile.gateway_api.services import backend_name
from controller.gateway.compile.pools import server_key
from controller.kube.conditions import Wanted, fails
from extproc.api.http_route import ATTACHE_GROUP
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from controller.gateway.compile.gateway_api.grants import Grants
    from controller.gateway.compile.gateway_api.objects import Pool
    from controller.gateway.compile.gateway_api.services import Service

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
