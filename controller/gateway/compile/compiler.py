# SPDX-License-Identifier: Apache-2.0
"""Compiles all objects that a gateway serves into its directory and their statuses; only changed objects are compiled.

The result depends on the objects alone, never on the order of their events: after any history it equals the result of a
new compiler for the last state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.access_policies import (
    AccessPolicyCompiler,
    PolicyResult,
    PolicyTargets,
    compile_policies,
)
from controller.gateway.compile.deletion_grace import KINDS as GRACED_KINDS
from controller.gateway.compile.deletion_grace import RESTRICTIONS, GracePeriods
from controller.gateway.compile.gateway_api.compiler import GatewayApiCompiler
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.gateway_api.object_cache import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.gateway_api.object_cache import ROUTES
from controller.gateway.compile.gateway_config import GatewayConfigs, GatewayDocument, GatewayDocumentBuilder
from controller.gateway.compile.model_routes import RouteResult, compile_routes
from controller.gateway.compile.model_servers import ModelServerCompiler, empty_server
from controller.gateway.compile.referenced_secrets import ReferencedObjectKey, bounded_name
from controller.gateway.compile.source_objects import SOURCE_KINDS, SourceObject, decode_source
from controller.kube.conditions import (
    IN_DIRECTORY,
    NO_MISTAKE,
    WantedCondition,
    WantedStatus,
    condition_false,
    condition_true,
)
from extproc.api.config_loader import MAX_DIRECTORY_BYTES, SUFFIXES, max_file_bytes
from extproc.api.config_snapshot import Snapshot, failure_mode_of
from extproc.api.gateway_config import GatewayConfig
from extproc.api.model_route import ModelRoute
from extproc.api.picker_config import accept_any_plugins

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from controller.gateway.compile.deletion_grace import GraceState
    from extproc.api.addresses import Network
    from extproc.api.gateway_config import Listener
    from extproc.api.picker_config import PickerConfigChecker

# Of namespaces in one message.
_MOST_SAID: Final = 3
GATEWAY_FILE: Final = "gateway.json"
# Kinds whose objects are attached to others, by what compiles them.
_POLICIES: Final = {"ModelAccessPolicy": compile_policies}


def directory_size_problem(files: Mapping[str, bytes]) -> str:
    """Why a directory of ``files`` would be refused, and the objects that cause it; empty if it would not be.

    A reader that starts with a directory that is too large serves nothing at all.
    """
    sizes = {name: len(content) for name, content in files.items() if name.endswith(SUFFIXES)}
    for name, size in sizes.items():
        if size > max_file_bytes(name):
            return f"{name} would have {size} bytes, and {max_file_bytes(name)} are read; make that object smaller"
    total = sum(sizes.values())
    if total <= MAX_DIRECTORY_BYTES:
        return ""
    # names begin with kind and namespace
    shares = Counter[str]()
    for name, size in sizes.items():
        shares[name.split(".")[1]] += size
    largest = ", ".join(f"{namespace} {size}" for namespace, size in shares.most_common(_MOST_SAID))
    return (
        f"all objects come to {total} bytes, and {MAX_DIRECTORY_BYTES} are read; "
        f"the namespaces with most of them: {largest}"
    )


class CompileResult(msgspec.Struct, frozen=True):
    """``files``: the whole directory, by name. ``statuses``: of all objects, by kind and key. ``refused``: why this
    result must not be served; empty if it may be. The directory then stays as it is. ``pointers``: Secrets and
    ConfigMaps that must be read before the result is complete. ``graced``: kinds and keys of what was deleted and is
    served on, or got another selector just now. ``again_s``: when the same objects compile to something else; infinity
    for never.
    """

    files: Mapping[str, bytes]
    statuses: Mapping[tuple[str, str], WantedStatus]
    refused: str = ""
    pointers: frozenset[ReferencedObjectKey] = frozenset()
    graced: frozenset[tuple[str, str]] = frozenset()
    again_s: float = math.inf


class Compiler:
    """``put`` takes what changed, ``compile`` gives the outcome.

    ``gateway``: the GatewayConfig to serve, as ``namespace/name``; None: that of the Gateways, or else the defaults.
    ``check_picker``: that of the extproc that reads the directory, or a mistake in one ConfigMap makes it refuse the
    whole. ``grace_s``: for so long ModelRoutes and ModelServers that were deleted are served on; 0: not at all.
    ``networks``: those whose addresses ModelServers may list; None: all.
    """

    def __init__(
        self,
        gateway: str | None = None,
        settings: GatewayApiSettings = GatewayApiSettings(),  # noqa: B008 - frozen
        *,
        check_picker: PickerConfigChecker = accept_any_plugins,
        grace_s: float = 0.0,
        networks: Sequence[Network] | None = None,
    ) -> None:
        self._gateway = gateway
        self._sources: dict[str, dict[str, SourceObject]] = {kind: {} for kind in SOURCE_KINDS}
        # and whether steps have a listener, as of the last compilation of routes
        self._usable: tuple[frozenset[str], bool] = frozenset(), False
        self._routes: Mapping[str, RouteResult] = {}
        self._routes_stale = True
        self._policy_sets = {kind: AccessPolicyCompiler(compile_all) for kind, compile_all in _POLICIES.items()}
        self._policies: Mapping[tuple[str, str], PolicyResult] = {}
        self._api = GatewayApiCompiler(settings, gateway, GatewayConfigs(self._sources["GatewayConfig"]))
        self._documents = GatewayDocumentBuilder(self._api.referenced_object)
        self._servers = ModelServerCompiler(check_picker, self._api.referenced_object, networks)
        self._grace = GracePeriods(grace_s)

    def update_object(self, kind: str, key: str, thing: Mapping[str, Any] | None, now_s: float = 0.0) -> None:
        """An object as it is now; None: it is gone."""
        if thing is None and kind in RESTRICTIONS:
            for ended in self._grace.on_restriction_deleted(kind, key, now_s):
                self._put_state(*ended, None)
        if kind == "Pod":
            self._servers.put_pod(key, thing)
        elif kind == "ConfigMap":
            self._servers.put_picker(key, thing)
        elif kind in GATEWAY_API_KINDS:
            self._api.put(kind, key, thing)
            if kind == "InferencePool":
                self._servers.put_pool(key, thing)
            self._servers.on_referenced_changed(kind, key)
        else:
            self._put_source(kind, key, None if thing is None else decode_source(thing), now_s)

    def compile(self, now_s: float = 0.0) -> CompileResult:
        """The directory and statuses for the current objects."""
        for changed, state in self._grace.advance(now_s).items():
            self._put_state(*changed, state)
        self._servers.compile()
        usable = self._servers.usable
        self._routes_stale |= self._api.compile(usable, self._servers.calls, self._servers.pool_problems())
        has_steps = self._has_steps()
        if self._routes_stale or (usable, has_steps) != self._usable:
            routes = self._sources["ModelRoute"].values()
            self._routes = compile_routes(routes, usable, self._api.listeners, has_steps=has_steps)
            self._routes_stale, self._usable = False, (usable, has_steps)
        documents = dict(self._routing())
        served = self._served(documents)
        self._policies = {
            (kind, key): one for kind, set_ in self._policy_sets.items() for key, one in set_.compile(served).items()
        }
        has_policies = any(kind in RESTRICTIONS and one.document for (kind, _), one in self._policies.items())
        gateway = self._documents.build_document(
            self._config_in_effect(), self._api.listener_documents(), has_policies=has_policies
        )
        files = dict(self._files(gateway, documents))
        statuses = {(one.kind, one.key): one for one in self._statuses(gateway, has_policies=has_policies)}
        pointers = self._api.referenced_keys() | self._servers.referenced_keys() | gateway.pointers
        refused = self._refusal(gateway) or directory_size_problem(files)
        return CompileResult(
            files, statuses, refused, pointers, self._grace.objects_in_grace, self._grace.next_expiry_s
        )

    def _put_source(self, kind: str, key: str, source: SourceObject | None, now_s: float) -> None:
        if kind in GRACED_KINDS:
            self._put_state(kind, key, self._grace.update(kind, key, source, now_s))
            return
        if kind in self._policy_sets:
            self._policy_sets[kind].put(key, source)
            return
        self._put_known(kind, key, source)
        if kind == "GatewayConfig":
            self._api.on_gateway_configs_changed()

    def _put_state(self, kind: str, key: str, state: GraceState | None) -> None:
        """What is served of a ModelRoute or a ModelServer."""
        if kind == "ModelServer":
            self._servers.put_server(key, state)
        else:
            self._put_known(kind, key, None if state is None else state.source)
            self._routes_stale = True

    def _put_known(self, kind: str, key: str, source: SourceObject | None) -> None:
        if source is None:
            self._sources[kind].pop(key, None)
        else:
            self._sources[kind][key] = source

    def _files(
        self, gateway: GatewayDocument, documents: Mapping[tuple[str, str], bytes]
    ) -> Iterator[tuple[str, bytes]]:
        """In writing order: referenced files precede those that refer to them."""
        yield from self._api.certificate_files().items()
        yield from self._servers.connection_files()
        yield from self._servers.picker_files()
        yield GATEWAY_FILE, gateway.content
        for objective in self._sources["InferenceObjective"].values():
            if not objective.mistakes:
                yield file_name(objective.kind, objective.key), objective.document()
        # before what they protect, which must not be served without them: until it is there, readers use nothing of
        # this
        for (kind, key), policy in self._policies.items():
            if policy.document is not None:
                yield file_name(kind, key), policy.document
        for (kind, key), document in documents.items():
            yield file_name(kind, key), document

    def _routing(self) -> Iterator[tuple[tuple[str, str], bytes]]:
        """Routes and what they name, by kind and key."""
        yield from self._backends()
        for key, route in self._routes.items():
            if route.document is not None:
                yield ("ModelRoute", key), route.document
        yield from self._api.route_documents()

    def _has_steps(self) -> bool:
        """Whether the GatewayConfig in effect says where transformers and explainers call."""
        config = self._config_in_effect()
        decoded = None if config is None else config.decoded
        return isinstance(decoded, GatewayConfig) and decoded.spec.steps is not None

    def _served(self, documents: Iterable[tuple[str, str]]) -> PolicyTargets:
        """What policies can be attached to."""
        keys: dict[str, set[str]] = {}
        for kind, key in documents:
            keys.setdefault(kind, set()).add(key)
        config = self._config_in_effect()
        own: tuple[Listener, ...] = ()
        if config is not None and self._api.listeners is None and isinstance(config.decoded, GatewayConfig):
            own = config.decoded.spec.listeners
        return PolicyTargets(
            model_routes=keys.get("ModelRoute", set()),
            model_servers=keys.get("ModelServer", set()),
            gateway_api_routes={(kind, key) for kind in ROUTES for key in keys.get(kind, ())},
            listeners=self._api.listener_names(),
            config=None if config is None else config.key,
            config_listeners={one.name for one in own},
            without_models=self._api.non_inference_routes(),
        )

    def _backends(self) -> Iterator[tuple[tuple[str, str], bytes]]:
        """What routes name."""
        named = {key for route in self._routes.values() for key in route.servers}
        for key, document in self._servers.documents(named.union(self._api.route_server_keys())):
            yield ("ModelServer", key), document
        for kind, key, document in self._api.backend_documents():
            yield (kind, key), document
        for key in {key for route in self._routes.values() for key in route.missing}:
            yield ("ModelServer", key), empty_server(key)

    def _config_in_effect(self) -> SourceObject | None:
        return self._sources["GatewayConfig"].get(self._api.parameters.config or "")

    def _statuses(self, gateway: GatewayDocument, *, has_policies: bool) -> Iterator[WantedStatus]:
        yield from self._servers.statuses()
        yield from (one.status for one in self._routes.values())
        yield from (one.status for one in self._policies.values())
        yield from self._api.statuses(one.attached for one in self._routes.values())
        parameters = self._api.parameters
        for key in {parameters.config, *parameters.named}:
            config = self._sources["GatewayConfig"].get(key or "")
            if config is not None:
                yield self._config_status(config, gateway, has_policies=has_policies)

    def _config_status(self, config: SourceObject, gateway: GatewayDocument, *, has_policies: bool) -> WantedStatus:
        conditions: tuple[WantedCondition, ...] = (
            condition_true("Accepted", gateway.note or NO_MISTAKE),
            *(
                [condition_false("ResolvedRefs", "SecretNotUsable", "; ".join(gateway.missing))]
                if gateway.missing
                else []
            ),
            condition_true("Programmed", IN_DIRECTORY),
        )
        if config.mistakes:
            stays = "nothing is changed until it is corrected; what is served stays"
            message = stays if config.key == self._gateway else "the Gateways that refer to it are not served"
            conditions = (
                condition_false("Accepted", "Invalid", config.mistakes_text()),
                condition_false("Programmed", "Invalid", message),
            )
        elif config.key != self._api.parameters.config:
            message = f"GatewayConfig {self._api.parameters.config} is in effect"
            conditions = condition_true("Accepted", NO_MISTAKE), condition_false("Programmed", "Conflict", message)
        return WantedStatus(
            kind=config.kind,
            key=config.key,
            generation=config.generation,
            conditions=conditions,
            fields=self._failure_mode(config, is_closed=bool(gateway.note) or has_policies),
        )

    def _failure_mode(self, config: SourceObject, *, is_closed: bool) -> Mapping[str, str]:
        """What Envoy does without extproc, for the status."""
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return {}
        if is_closed:
            return {"failureMode": "Close"}
        served = [self._sources["ModelRoute"][key].decoded for key, one in self._routes.items() if one.document]
        snapshot = Snapshot(
            version="",
            routes=tuple(one for one in served if isinstance(one, ModelRoute)),
            servers=tuple(self._servers.served_objects()),
            gateway=config.decoded.spec,
        )
        return {"failureMode": failure_mode_of(snapshot)}

    def _refusal(self, document: GatewayDocument) -> str:
        """Without its GatewayConfig a gateway would serve without the configured authentication."""
        if self._gateway is not None:
            gateway = self._sources["GatewayConfig"].get(self._gateway)
            if gateway is None:
                return f"there is no GatewayConfig {self._gateway}"
            if gateway.mistakes:
                return f"GatewayConfig {self._gateway}: {gateway.mistakes_text()}"
        if document.refused:
            return f"GatewayConfig {self._api.parameters.config} with what it refers to: {document.refused}"
        return ""


def file_name(kind: str, key: str) -> str:
    """Of an object's document in the directory. Namespaces have no dots, so no two objects share a file."""
    return bounded_name(f"{kind.lower()}.{key.replace('/', '.', 1)}", ".json")
