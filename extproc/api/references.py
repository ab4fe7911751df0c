# SPDX-License-Identifier: Apache-2.0
"""References between the documents of a directory, and names that only one document may have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from extproc.api.access_policy import ModelAccessPolicy, Targets, check_targets
from extproc.api.documents import Document, UnreadDocument
from extproc.api.gateway_config import GatewayConfig
from extproc.api.http_route import ATTACHE_GROUP, Backend, HTTPRoute
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer, check_no_references
from extproc.api.schema import suggest
from extproc.api.snapshot import access_restrictions
from extproc.api.spec import is_attached, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from extproc.api.errors import Finding, Mistake, Path
    from extproc.api.http_route import BackendRef
    from extproc.api.spec import Metadata, ParentReference


class _Named(Protocol):
    @property
    def metadata(self) -> Metadata: ...


class DirectoryObjects(msgspec.Struct, frozen=True):
    """The objects of a directory with their documents, each kind sorted by key. ``pickers``: files of picker configs.
    ``unread``: the documents that are not among them because they could not be read.
    """

    routes: Sequence[tuple[Document, ModelRoute]]
    servers: Sequence[tuple[Document, ModelServer]]
    gateways: Sequence[tuple[Document, GatewayConfig]]
    http_routes: Sequence[tuple[Document, HTTPRoute]]
    backends: Sequence[tuple[Document, Backend]]
    policies: Sequence[tuple[Document, ModelAccessPolicy]] = ()
    pickers: Collection[str] = ()
    unread: UnreadDocument = UnreadDocument()

    @property
    def listeners(self) -> list[str]:
        """Names of listeners; none if there is only ``listen``, to which every route is attached."""
        return [one.name for one in self.gateways[0][1].spec.listeners] if self.gateways else []


def check_references(found: DirectoryObjects) -> Iterator[Mistake]:
    """Every ModelServer, Backend, listener and file that is referred to exists."""
    for document, server in found.servers:
        yield from document.mistakes(_of_server(server, found.pickers, found.unread))
    servers = {server.metadata.key for _, server in found.servers}
    backends = {backend.metadata.key for _, backend in found.backends}
    for document, route in found.routes:
        yield from document.mistakes(_missing_servers(route, servers, found.unread))
        yield from document.mistakes(_missing_listeners(route.spec.parent_refs, found.listeners))
    for document, http_route in found.http_routes:
        yield from document.mistakes(_missing_backends(http_route, servers, backends, found.unread))
        yield from document.mistakes(_missing_listeners(http_route.spec.parent_refs, found.listeners))
    for document, gateway in found.gateways:
        yield from document.mistakes(_secrets(gateway))


def check_policies(found: DirectoryObjects) -> Iterator[Mistake]:
    """Every target of an access policy exists, and Envoy alone does not serve requests that policies forbid."""
    known = Targets(
        model_routes={route.metadata.key for _, route in found.routes},
        model_servers={server.metadata.key for _, server in found.servers},
        http_routes={route.metadata.key for _, route in found.http_routes},
        listeners=set(found.listeners),
        unread=found.unread,
    )
    for document, policy in found.policies:
        yield from document.mistakes(check_targets(policy, known))
    for document, gateway in found.gateways[:1]:
        policies = [policy for _, policy in found.policies]
        undone = access_restrictions(gateway.spec, policies) if gateway.spec.failure_mode == "Open" else []
        if undone:
            message = f"without extproc, requests would get round {', '.join(undone[:3])}; write Close, or leave it out"
            yield from document.mistakes([(("spec", "failureMode"), message)])


def check_names(found: Sequence[tuple[Document, _Named]], what: str) -> Iterator[Mistake]:
    """No two documents of a kind have the same name."""
    return _unique(found, lambda one: [one.metadata.key], ("metadata", "name"), lambda name: f"the {what} '{name}'")


def check_model_names(found: DirectoryObjects) -> Iterator[Mistake]:
    """On each listener, only one ModelRoute serves a model or adapter of a name."""
    listeners: Sequence[str | None] = found.listeners or [None]
    # check_names reports two routes with one name
    routes = [next(same) for _, same in groupby(found.routes, key=lambda one: one[1].metadata.key)]
    said: set[tuple[str, int, str]] = set()
    for listener in listeners:
        attached = [
            (document, route)
            for document, route in routes
            if listener is None or is_attached(route.spec.parent_refs, listener)
        ]
        where = "" if listener is None else f" of the listener '{listener}'"

        def shown(name: str, where: str = where) -> str:
            return f"the model or adapter '{name}'{where}"

        for mistake in _unique(attached, _asked_names, ("spec",), shown):
            # routes without parentRefs meet on every listener
            place = mistake.file, mistake.line, mistake.message.replace(where, "")
            if place not in said:
                said.add(place)
                yield mistake


def _of_server(server: ModelServer, pickers: Collection[str], unread: UnreadDocument) -> Iterator[Finding]:
    if server.spec.workload_selector is not None:
        message = "selects pods, which a directory has none of; write endpoints, or apply it to a cluster"
        yield ("spec", "workloadSelector"), message
    yield from check_no_references(server.spec)
    file = server.spec.picker_config
    if file is not None and file not in pickers and file not in unread.files:
        yield ("spec", "pickerConfig"), f"no file '{file}' holds an EndpointPickerConfig; {suggest(file, pickers)}"


def _secrets(gateway: GatewayConfig) -> Iterator[Finding]:
    """References to Secrets, which the gateway role replaces with the content: a directory has no Secrets."""
    given = gateway.spec.authentication
    if given is None:
        return
    path, said = ("spec", "authentication"), "is in a Secret, which a directory has none of"
    if given.api_key_secrets:
        yield (*path, "apiKeySecrets"), f"{said}; write apiKeys, or apply it to a cluster"
    if given.virtual_keys is not None and given.virtual_keys.secret is not None:
        yield (*path, "virtualKeys", "secret"), f"{said}; leave it out, or apply it to a cluster"
    for index, issuer in enumerate(given.jwt):
        if issuer.jwks_secret is not None:
            yield (*path, "jwt", index, "jwksSecret"), f"{said}; write jwksFile, or apply it to a cluster"


def _missing_servers(route: ModelRoute, keys: Collection[str], unread: UnreadDocument) -> Iterator[Finding]:
    for number, rule in enumerate(route.spec.rules):
        for index, target in enumerate(rule.target_models):
            if route.server_key(target) not in keys and not unread.may_hold(target.model_server_name):
                path = ("spec", "rules", number, "targetModels", index, "modelServerName")
                yield path, _none_called("ModelServer", target.model_server_name, route.metadata.namespace, keys)


def _missing_listeners(parent_refs: Iterable[ParentReference], listeners: Collection[str]) -> Iterator[Finding]:
    if not listeners:
        return
    for index, ref in enumerate(parent_refs):
        if ref.section_name is not None and ref.section_name not in listeners:
            path = ("spec", "parentRefs", index, "sectionName")
            yield (
                path,
                f"the GatewayConfig has no listener '{ref.section_name}'; {suggest(ref.section_name, listeners)}",
            )


def _missing_backends(
    route: HTTPRoute, servers: Collection[str], backends: Collection[str], unread: UnreadDocument
) -> Iterator[Finding]:
    for ref, path in backend_refs(route):
        if ref.group != ATTACHE_GROUP or ref.kind not in ("ModelServer", "Backend"):
            message = f"refers to a {ref.kind} of '{ref.group}', which a directory has none of; "
            yield path, message + f"write kind: ModelServer or kind: Backend, and group: {ATTACHE_GROUP}"
            continue
        keys = servers if ref.kind == "ModelServer" else backends
        if backend_key(route, ref) not in keys and not unread.may_hold(ref.name):
            namespace = ref.namespace or route.metadata.namespace
            yield (*path, "name"), _none_called(ref.kind, ref.name, namespace, keys)


def backend_refs(route: HTTPRoute) -> Iterator[tuple[BackendRef, Path]]:
    """Every backend that the route names, copies of requests included, with its place in the document."""
    for number, rule in enumerate(route.spec.rules):
        path: Path = ("spec", "rules", number)
        for index, one in enumerate(rule.filters):
            if one.request_mirror is not None:
                yield one.request_mirror.backend_ref, (*path, "filters", index, "requestMirror", "backendRef")
        for index, ref in enumerate(rule.backend_refs):
            yield ref, (*path, "backendRefs", index)


def backend_key(route: HTTPRoute, ref: BackendRef) -> str:
    """The ``namespace/name`` that ``ref`` names; of the route's own namespace if it names none."""
    return object_key(ref.namespace or route.metadata.namespace, ref.name)


def _none_called(kind: str, name: str, namespace: str, keys: Collection[str]) -> str:
    near = [key.removeprefix(f"{namespace}/") for key in keys if namespace_of(key) == namespace]
    where = "" if namespace == "default" else f" in the namespace '{namespace}'"
    return f"no {kind} is called '{name}'{where}; {suggest(name, near)}"


def _asked_names(route: ModelRoute) -> list[str]:
    own = [route.spec.model_name] if route.spec.model_name is not None else []
    return [*own, *route.spec.lora_adapters]


def _unique(
    found: Sequence[tuple[Document, Any]],
    names: Callable[[Any], list[str]],
    path: tuple[str, ...],
    shown: Callable[[str], str],
) -> Iterator[Mistake]:
    seen: dict[str, str] = {}
    for document, one in found:
        taken = []
        for name in names(one):
            if name in seen:
                taken.append((path, f"{shown(name)} is already in {seen[name]}; use another name"))
            seen.setdefault(name, document.file)
        yield from document.mistakes(taken)
