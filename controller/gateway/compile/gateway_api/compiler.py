# SPDX-License-Identifier: Apache-2.0
"""Gateways, routes and their backends to documents, files and statuses; only what changed is compiled."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from controller.gateway.compile.gateway_api.backends import (
    UNRESOLVED,
    BackendReferenceResolver,
    ReferenceGrants,
    ServiceBackend,
    backend_document,
    unresolved_document,
)
from controller.gateway.compile.gateway_api.gateways import (
    GatewayConfigChoice,
    GatewayResult,
    advertised_addresses,
    choose_parameters,
    class_parameters_problem,
    class_status,
    compile_gateways,
    listener_documents,
)
from controller.gateway.compile.gateway_api.http_routes import HttpRouteResult, compile_http_route, pool_status
from controller.gateway.compile.gateway_api.listeners import Listeners, TlsCompiler
from controller.gateway.compile.gateway_api.object_cache import GatewayObjects, StaleObjects
from controller.gateway.compile.gateway_api.resource_types import CONTROLLER_NAME, GRPC_ROUTE, GatewayClass
from controller.gateway.compile.gateway_api.route_conflicts import Rivals, find_rivals
from controller.gateway.compile.referenced_secrets import ReferencedObjectKey
from extproc.api.match_patterns import ANY_HOST
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings, GatewayConfigLookup
    from controller.gateway.compile.gateway_api.listeners import ListenerResult, ParentRefResult
    from controller.gateway.compile.referenced_secrets import ReferencedObject
    from controller.kube.conditions import WantedStatus


# Which release of the Gateway API is installed.
_DEFINITION: Final = ReferencedObjectKey("CustomResourceDefinition", "gatewayclasses.gateway.networking.k8s.io")
_RELEASE: Final = "gateway.networking.k8s.io/bundle-version"


class GatewayApiCompiler:
    """``put`` takes what changed, ``compile`` brings everything else up to date.

    ``config``: the GatewayConfig that the role's options name. ``configs``: all GatewayConfigs.
    """

    def __init__(self, settings: GatewayApiSettings, config: str | None, configs: GatewayConfigLookup) -> None:
        self._settings = settings
        self._config = config
        self._configs = configs
        self._observed = GatewayObjects()
        self._stale = StaleObjects()
        self._servers: frozenset[str] = frozenset()
        self._calls: frozenset[str] = frozenset()
        self._grants = ReferenceGrants()
        self._gateways: Mapping[str, GatewayResult] = {}
        self._routes: dict[tuple[str, str], HttpRouteResult] = {}
        self._rivals: Mapping[tuple[str, str], Rivals] = {}
        self._backends = BackendDocuments(self._observed)
        self._pool_problems: Mapping[str, str] = {}
        self.parameters = GatewayConfigChoice(config=config)
        # None while there is no Gateway of ours
        self.listeners: Listeners | None = None

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        """An object as it is now; None: it is gone."""
        self._observed.put(kind, key, thing, self._stale)
        if kind == "Service" and key == self._settings.advertised_service:
            self._stale.gateways = True

    def on_gateway_configs_changed(self) -> None:
        """A GatewayConfig was added, changed or deleted."""
        self._stale.gateways = True

    def compile(self, servers: frozenset[str], calls: frozenset[str], pool_problems: Mapping[str, str]) -> bool:
        """Gateways and routes. ``servers``: keys of usable ModelServers, those of pools included; ``calls``: of those
        that are called by gRPC. ``pool_problems``: why other pools cannot be used, by their keys. Whether listeners
        may take other routes now.
        """
        stale, self._stale = self._stale, StaleObjects(gateways=False)
        stale.changed |= {("ModelServer", key) for key in (servers ^ self._servers) | (calls ^ self._calls)}
        self._servers, self._calls, self._pool_problems = servers, calls, pool_problems
        if stale.all_routes or stale.gateways:
            self._grants = ReferenceGrants(self._observed.grants.values())
        if stale.gateways:
            stale.all_routes |= self._compile_gateways()
        changed = self._compile_routes(stale)
        needed = None
        if changed:
            needed = {one.service for found in self._routes.values() for one in found.resolutions if one.service}
        self._backends.compile(needed, stale.services)
        return stale.all_routes

    def route_server_keys(self) -> Iterator[str]:
        """Keys of the ModelServers that HTTPRoutes and GRPCRoutes go to."""
        for found in self._routes.values():
            for one in found.resolutions:
                if one.kind == "ModelServer":
                    yield object_key(one.namespace, one.name)

    def referenced_keys(self) -> frozenset[ReferencedObjectKey]:
        """The objects that must be read by name."""
        found = frozenset(pointer for one in self._listeners() for pointer in one.pointers)
        return found | {_DEFINITION} if any(map(_is_ours, self._observed.classes.values())) else found

    def certificate_files(self) -> Mapping[str, bytes]:
        """Files of certificates."""
        return {name: content for found in self._listeners() for name, content in found.files.items()}

    def listener_documents(self) -> list[Mapping[str, Any]] | None:
        """The ``listeners`` of the GatewayConfig; None if there is no Gateway of ours."""
        return None if self.listeners is None else listener_documents(self._gateways)

    def listener_names(self) -> Mapping[str, Mapping[str, str]]:
        """By Gateway and by ``sectionName``, what the directory calls the listeners that are served."""
        return {
            key: {one.spec.name: one.name for one in result.listeners if one.document is not None}
            for key, result in self._gateways.items()
        }

    def backend_documents(self) -> Iterator[tuple[str, str, bytes]]:
        """Kind, key and content of what routes name."""
        for key, document in self._backends.documents.items():
            yield "Backend", key, document
        unresolved = {namespace_of(key) for (_, key), found in self._routes.items() if found.needs_unresolved_backend}
        for namespace in sorted(unresolved):
            yield "Backend", f"{namespace}/{UNRESOLVED}", unresolved_document(namespace, UNRESOLVED)

    def route_documents(self) -> Iterator[tuple[tuple[str, str], bytes]]:
        """Kind, key and content of the HTTPRoutes and GRPCRoutes that are served."""
        for key, found in self._routes.items():
            if found.document is not None:
                yield key, found.document

    def non_inference_routes(self) -> frozenset[tuple[str, str]]:
        """Kinds and keys of the routes that go to no ModelServer and no pool, so that extproc has no part in their
        requests.
        """
        return frozenset(
            key for key, found in self._routes.items() if all(one.kind != "ModelServer" for one in found.resolutions)
        )

    def statuses(self, model_routes: Iterable[Collection[str]]) -> Iterator[WantedStatus]:
        """``model_routes``: the names of the listeners that each ModelRoute is attached to."""
        for one in self._observed.classes.values():
            if _is_ours(one):
                yield class_status(one, class_parameters_problem(one, self._configs.problem), self._release())
        attached = Counter(name for found in self._routes.values() for name in found.attached)
        for names in model_routes:
            attached.update(names)
        for result in self._gateways.values():
            yield result.status(attached)
        for found in self._routes.values():
            yield found.status
        yield from self._pool_statuses()

    def _compile_gateways(self) -> bool:
        """Whether their listeners are others now."""
        served = self._observed.served_gateways(self._settings.gateway)
        self.parameters = choose_parameters(served, self._observed.classes, self._config, self._configs.problem)
        service = self._observed.services.get(self._settings.advertised_service)
        published = advertised_addresses(self._settings, service.addresses if service else ())
        tls = TlsCompiler(self._grants, self.referenced_object)
        before = self._gateways
        needs_certificates = self._configs.needs_client_certificates(self.parameters.config)
        self._gateways = compile_gateways(
            served,
            self._settings,
            published,
            self.parameters.problems,
            tls,
            needs_certificates=needs_certificates,
            steps_port=self._configs.transformer_listener_port(self.parameters.config),
        )
        listeners = {key: one.listeners for key, one in self._gateways.items()}
        if listeners == {key: one.listeners for key, one in before.items()} and (self.listeners or not listeners):
            return False
        self.listeners = Listeners(listeners, self._observed.namespaces) if listeners else None
        return True

    def _compile_routes(self, stale: StaleObjects) -> bool:
        """Whether any was compiled or is gone."""
        routes = self._observed.routes
        keys = set(routes) if stale.all_routes else stale.routes & routes.keys()
        if stale.changed and not stale.all_routes:
            keys |= {key for key, found in self._routes.items() if found.references & stale.changed} & routes.keys()
        gone = self._routes.keys() - routes.keys()
        for key in gone:
            del self._routes[key]
        if not keys and not gone:
            return False
        if self._compile_each(keys) or gone or stale.all_routes:
            # those that lose a listener to another route, or have one back
            before, self._rivals = self._rivals, self._find_rivals()
            lost = {key for key in before.keys() | self._rivals.keys() if before.get(key) != self._rivals.get(key)}
            self._compile_each(lost & routes.keys())
        return True

    def _compile_each(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Whether one of them has another claim than before."""
        listeners, references = self.listeners or Listeners({}, {}), self._references()
        has_changed = False
        for key in keys:
            before = self._routes.get(key)
            made = self._routes[key] = compile_http_route(
                self._observed.routes[key], listeners, references, self._settings.gateway, self._rivals.get(key, {})
            )
            has_changed |= before is None or before.claim != made.claim
        return has_changed

    def _find_rivals(self) -> Mapping[tuple[str, str], Rivals]:
        if not any(kind == GRPC_ROUTE.kind for kind, _ in self._routes):
            return {}
        hosts = {one.name: (one.spec.hostname or ANY_HOST).lower() for one in self._listeners()}
        return find_rivals((one.claim for one in self._routes.values()), hosts)

    def _references(self) -> BackendReferenceResolver:
        return BackendReferenceResolver(
            services=self._observed.services,
            pools=self._observed.pools,
            servers=self._servers,
            calls=self._calls,
            grants=self._grants,
        )

    def _pool_statuses(self) -> Iterator[WantedStatus]:
        parents: dict[str, list[ParentRefResult]] = {}
        for found in self._routes.values():
            for key in {one.pool for one in found.resolutions if one.pool}:
                parents.setdefault(key, []).extend(found.parents)
        references = self._references()
        for key, pool in self._observed.pools.items():
            yield pool_status(
                pool,
                parents.get(key, []),
                problem=self._pool_problems.get(key, ""),
                picker_problem=references.picker_problem(pool),
                gateway=self._settings.gateway,
            )

    def referenced_object(self, pointer: ReferencedObjectKey) -> ReferencedObject | None:
        """The target of ``pointer``; None if it does not exist or is not read yet."""
        return self._observed.pointed.get((pointer.compiler_kind, pointer.key))

    def _release(self) -> str | None:
        """The release of the installed Gateway API definitions; None if unknown."""
        found = self.referenced_object(_DEFINITION)
        return None if found is None else found.annotations.get(_RELEASE, "")

    def _listeners(self) -> Iterator[ListenerResult]:
        for result in self._gateways.values():
            yield from result.listeners


class BackendDocuments:
    """The Backend documents of the Services that routes refer to."""

    def __init__(self, observed: GatewayObjects) -> None:
        self._observed = observed
        self._of_service: dict[str, set[ServiceBackend]] = {}
        self.documents: dict[str, bytes] = {}

    def compile(self, needed: Collection[ServiceBackend] | None, stale: Collection[str]) -> None:
        """``needed``: None for those of before. ``stale``: Services that changed."""
        fresh: set[ServiceBackend] = set()
        if needed is not None:
            fresh = {one for one in needed if one.key not in self.documents}
            gone = self.documents.keys() - {one.key for one in needed}
            for key in gone:
                del self.documents[key]
            self._of_service = {}
            for one in needed:
                self._of_service.setdefault(one.service, set()).add(one)
        fresh |= {one for service in stale for one in self._of_service.get(service, ())}
        for one in sorted(fresh):
            found = self._observed.services[one.service]
            self.documents[one.key] = backend_document(one, found, self._observed.slices_of(one.service))


def _is_ours(one: GatewayClass) -> bool:
    return one.spec.controller_name == CONTROLLER_NAME
