# SPDX-License-Identifier: Apache-2.0
"""References between the documents of a directory, and names that only one document may have."""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from typing import TYPE_CHECKING, Any

from extproc.api.access_policy import ModelAccessPolicy
from extproc.api.config_snapshot import access_restrictions
from extproc.api.grpc_route import GRPCRoute
from extproc.api.http_route import ATTACHE_GROUP
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer, check_no_references
from extproc.api.schema_validation import suggest_similar
from extproc.api.spec import STEPS_LISTENER, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from extproc.api.config_errors import Finding, Mistake, Path
    from extproc.api.fallback import Fallback
    from extproc.api.gateway_config import GatewayConfig
    from extproc.api.grpc_route import GatewayApiRoute, GatewayApiRule
    from extproc.api.http_route import BackendRef
    from extproc.api.mirror import Mirror
    from extproc.api.model_route import TargetModel
    from extproc.api.yaml_documents import DirectoryObjects, Document


def check_unique_names(found: Sequence[tuple[Document, Any]], what: str) -> Iterator[Mistake]:
    """No two documents of a kind have the same name."""
    return _unique(found, lambda one: [one.metadata.key], ("metadata", "name"), lambda name: f"the {what} '{name}'")


def check_model_names(found: DirectoryObjects) -> Iterator[Mistake]:
    """On each listener, only one ModelRoute serves a model or adapter of a name."""
    listeners: Sequence[str | None] = [*(found.listeners or (None,)), STEPS_LISTENER]
    # check_names reports two routes with one name
    routes = [next(same) for _, same in groupby(found.of_type(ModelRoute), key=lambda one: one[1].metadata.key)]
    said: set[tuple[str, int, str]] = set()
    for listener in listeners:
        attached = [(document, route) for document, route in routes if route.serves_listener(listener)]
        where = "" if listener in (None, STEPS_LISTENER) else f" of the listener '{listener}'"

        def shown(name: str, where: str = where) -> str:
            return f"the model or adapter '{name}'{where}"

        for mistake in _unique(attached, lambda one: one.spec.model_names, ("spec",), shown):
            # routes without parentRefs meet on every listener
            place = mistake.file, mistake.line, mistake.message.replace(where, "")
            if place not in said:
                said.add(place)
                yield mistake


def check_server_references(server: ModelServer, found: DirectoryObjects) -> Iterator[Finding]:
    """A directory has no pods and no Secrets; the file of its EndpointPickerConfig exists."""
    if server.spec.workload_selector is not None:
        message = "selects pods, which a directory has none of; write endpoints, or apply it to a cluster"
        yield ("spec", "workloadSelector"), message
    yield from check_no_references(server.spec)
    file, pickers = server.spec.picker_config, found.pickers
    if file is not None and file not in pickers and file not in found.unread.files:
        yield (
            ("spec", "pickerConfig"),
            f"no file '{file}' holds an EndpointPickerConfig; {suggest_similar(file, pickers)}",
        )


def check_failure_mode(gateway: GatewayConfig, found: DirectoryObjects) -> Iterator[Finding]:
    """Envoy alone does not serve requests that policies forbid."""
    policies = [policy for _, policy in found.of_type(ModelAccessPolicy)]
    undone = access_restrictions(gateway.spec, policies) if gateway.spec.failure_mode == "Open" else []
    if undone:
        message = f"without extproc, requests would get round {', '.join(undone[:3])}; write Close, or leave it out"
        yield ("spec", "failureMode"), message


def check_no_secret_references(gateway: GatewayConfig, _: DirectoryObjects) -> Iterator[Finding]:
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


def check_target_servers(route: ModelRoute, found: DirectoryObjects) -> Iterator[Finding]:
    """Their ModelServers exist."""
    keys = found.keys["ModelServer"]
    for number, rule in enumerate(route.spec.rules):
        named: list[tuple[TargetModel | Fallback | Mirror, Path]] = [
            *((one, ("targetModels", place)) for place, one in enumerate(rule.target_models)),
            *((one, ("fallback", place)) for place, one in enumerate(rule.fallback)),
            *([] if rule.mirror is None else [(rule.mirror, ("mirror",))]),
        ]
        for target, where in named:
            if route.server_key(target) not in keys and not found.unread.may_hold(target.model_server_name):
                path = ("spec", "rules", number, *where, "modelServerName")
                yield path, _none_called("ModelServer", target.model_server_name, route.metadata.namespace, keys)


def check_parents(route: ModelRoute | GatewayApiRoute, found: DirectoryObjects) -> Iterator[Finding]:
    """The listeners that it is attached to exist."""
    for index, ref in enumerate(route.spec.parent_refs if found.listeners else ()):
        if ref.section_name is not None and ref.section_name not in found.listeners:
            advice = suggest_similar(ref.section_name, found.listeners)
            path = ("spec", "parentRefs", index, "sectionName")
            yield path, f"the GatewayConfig has no listener '{ref.section_name}'; {advice}"


def check_backends(route: GatewayApiRoute, found: DirectoryObjects) -> Iterator[Finding]:
    """Its ModelServers and Backends exist; those of a GRPCRoute are called by gRPC."""
    takes_grpc = isinstance(route, GRPCRoute)
    for ref, path in backend_refs(route):
        if ref.group != ATTACHE_GROUP or ref.kind not in ("ModelServer", "Backend"):
            message = f"refers to a {ref.kind} of '{ref.group}', which a directory has none of; "
            yield path, message + f"write kind: ModelServer or kind: Backend, and group: {ATTACHE_GROUP}"
            continue
        keys = found.keys[ref.kind]
        if backend_key(route, ref) not in keys and not found.unread.may_hold(ref.name):
            namespace = ref.namespace or route.metadata.namespace
            yield (*path, "name"), _none_called(ref.kind, ref.name, namespace, keys)
        elif takes_grpc and ref.kind == "ModelServer" and _is_without_grpc(backend_key(route, ref), found):
            advice = "name one with protocol V2-gRPC or TensorFlow-gRPC, or write an HTTPRoute"
            yield (*path, "name"), f"the ModelServer '{ref.name}' is not called by gRPC; {advice}"


def _is_without_grpc(key: str, found: DirectoryObjects) -> bool:
    servers = found.of_type(ModelServer)
    place = bisect_left(servers, key, key=lambda pair: pair[1].metadata.key)
    # one that cannot be read has mistakes of its own
    server = servers[place][1] if place < len(servers) else None
    return server is not None and server.metadata.key == key and not server.spec.takes_grpc


def backend_refs(route: GatewayApiRoute) -> Iterator[tuple[BackendRef, Path]]:
    """Every backend that the route names, copies of requests included, with its place in the document."""
    rules: Sequence[GatewayApiRule] = route.spec.rules
    for number, rule in enumerate(rules):
        path: Path = ("spec", "rules", number)
        for index, one in enumerate(rule.filters):
            if one.request_mirror is not None:
                yield one.request_mirror.backend_ref, (*path, "filters", index, "requestMirror", "backendRef")
        for index, ref in enumerate(rule.backend_refs):
            yield ref, (*path, "backendRefs", index)


def backend_key(route: GatewayApiRoute, ref: BackendRef) -> str:
    """The ``namespace/name`` that ``ref`` names; of the route's own namespace if it names none."""
    return object_key(ref.namespace or route.metadata.namespace, ref.name)


def _none_called(kind: str, name: str, namespace: str, keys: Collection[str]) -> str:
    near = [key.removeprefix(f"{namespace}/") for key in keys if namespace_of(key) == namespace]
    where = "" if namespace == "default" else f" in the namespace '{namespace}'"
    return f"no {kind} is called '{name}'{where}; {suggest_similar(name, near)}"


def _unique(
    found: Sequence[tuple[Document, Any]],
    names: Callable[[Any], Sequence[str]],
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
        if taken:
            yield from document.locate_mistakes(taken)
