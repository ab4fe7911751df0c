# SPDX-License-Identifier: Apache-2.0
"""All objects that a gateway serves, and the directory and statuses that they come to; only what changed is compiled.

The outcome depends on the objects alone, never on the order in which they came: a compiler that was fed a history ends
with what a fresh one makes of its last state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.conditions import IN_DIRECTORY, NO_MISTAKE, Wanted, WantedStatus, fails, holds
from controller.gateway.compile.gateway_api.gateway_api import GatewayApi
from controller.gateway.compile.gateway_api.observed import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.gateway_api.settings import GatewayApiSettings
from controller.gateway.compile.gateway_document import GatewayDocument, GatewayDocuments
from controller.gateway.compile.policies import PolicyResult, Served, compile_policies
from controller.gateway.compile.routes import RouteResult, compile_routes
from controller.gateway.compile.secrets import Pointer
from controller.gateway.compile.server_set import ServerSet
from controller.gateway.compile.servers import empty_server
from controller.gateway.compile.sources import DOCUMENT_KINDS, Source, source_of
from extproc.config.failure_mode import failure_mode_of
from extproc.config.gateway_config import GatewayConfig
from extproc.config.model_route import ModelRoute
from extproc.config.picker_config import check_shape_alone
from extproc.config.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config.picker_config import PickerCheck

GATEWAY_FILE: Final = "gateway.json"


class Outcome(msgspec.Struct, frozen=True):
    """``files``: the whole directory, by name. ``statuses``: of all objects, by kind and key. ``refused``: why nothing of
    this must be served, empty if it may be: what is served already stays. ``pointers``: Secrets and ConfigMaps that
    must be known for this to be complete.
    """

    files: Mapping[str, bytes]
    statuses: Mapping[tuple[str, str], WantedStatus]
    refused: str = ""
    pointers: frozenset[Pointer] = frozenset()


class Compiler:
    """``put`` takes what changed, ``compile`` gives the outcome.

    ``gateway``: the GatewayConfig to serve, as ``namespace/name``; None: that of the Gateways, or else the defaults.
    ``check_picker``: that of the extproc that reads the directory, or a mistake in one ConfigMap makes it refuse the
    whole.
    """

    def __init__(
        self,
        gateway: str | None = None,
        settings: GatewayApiSettings = GatewayApiSettings(),  # noqa: B008 - frozen
        *,
        check_picker: PickerCheck = check_shape_alone,
    ) -> None:
        self._gateway = gateway
        self._sources: dict[str, dict[str, Source]] = {kind: {} for kind in DOCUMENT_KINDS}
        self._servers = ServerSet(check_picker)
        self._usable: frozenset[str] = frozenset()
        self._routes: Mapping[str, RouteResult] = {}
        self._routes_stale = True
        self._policies: Mapping[str, PolicyResult] = {}
        self._api = GatewayApi(settings, gateway, self._config_problem)
        self._documents = GatewayDocuments(self._api.pointed)

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        """An object as it is now; None: it is gone."""
        if kind == "Pod":
            self._servers.put_pod(key, thing)
        elif kind == "ConfigMap":
            self._servers.put_picker(key, thing)
        elif kind in GATEWAY_API_KINDS:
            self._api.put(kind, key, thing)
            if kind == "InferencePool":
                self._servers.put_pool(key, thing)
        else:
            self._put_source(kind, key, None if thing is None else source_of(thing))

    def compile(self) -> Outcome:
        """What the objects come to."""
        self._servers.compile()
        usable = self._servers.usable
        self._routes_stale |= self._api.compile(usable, self._servers.pool_problems)
        if self._routes_stale or usable != self._usable:
            self._routes = compile_routes(self._sources["ModelRoute"].values(), usable, self._api.listeners)
            self._routes_stale, self._usable = False, usable
        policies = self._sources["ModelAccessPolicy"]
        self._policies = compile_policies(policies.values(), self._served()) if policies else {}
        gateway = self._documents.make(
            self._sources["GatewayConfig"].get(self._api.parameters.config or ""),
            self._api.listener_documents(),
            has_policies=bool(policies),
        )
        files = dict(self._files(gateway))
        statuses = {(one.kind, one.key): one for one in self._statuses(gateway)}
        pointers = self._api.pointers() | gateway.pointers
        return Outcome(files, statuses, self._refusal(gateway), pointers)

    def _put_source(self, kind: str, key: str, source: Source | None) -> None:
        if kind == "ModelServer":
            self._servers.put_server(key, source)
            return
        known = self._sources[kind]
        if source is None:
            known.pop(key, None)
        else:
            known[key] = source
        if kind == "ModelRoute":
            self._routes_stale = True
        elif kind == "GatewayConfig":
            self._api.gateway_configs_changed()

    def _files(self, gateway: GatewayDocument) -> Iterator[tuple[str, bytes]]:
        """In writing order: what is referred to comes before what refers to it."""
        yield from self._api.files().items()
        yield from self._servers.picker_files()
        yield GATEWAY_FILE, gateway.content
        for objective in self._sources["InferenceObjective"].values():
            if not objective.mistakes:
                yield file_name(objective.kind, objective.key), objective.document()
        yield from self._backends()
        for key, policy in self._policies.items():
            if policy.document is not None:
                yield file_name("ModelAccessPolicy", key), policy.document
        for key, route in self._routes.items():
            if route.document is not None:
                yield file_name("ModelRoute", key), route.document
        for key, document in self._api.routes():
            yield file_name("HTTPRoute", key), document

    def _backends(self) -> Iterator[tuple[str, bytes]]:
        """What routes name."""
        for key, document in self._server_documents():
            yield file_name("ModelServer", key), document
        for kind, key, document in self._api.documents():
            yield file_name(kind, key), document
        for key in {key for route in self._routes.values() for key in route.missing}:
            yield file_name("ModelServer", key), empty_server(key)

    def _served(self) -> Served:
        """What policies can be attached to."""
        config = self._sources["GatewayConfig"].get(self._api.parameters.config or "")
        own = config.decoded.spec.listeners if config and isinstance(config.decoded, GatewayConfig) else ()
        return Served(
            model_routes={key for key, one in self._routes.items() if one.document is not None},
            model_servers={key for key, _ in self._server_documents()},
            http_routes={key for key, _ in self._api.routes()},
            listeners=self._api.listener_names(),
            config=self._api.parameters.config,
            config_listeners=[one.name for one in own] if self._api.listeners is None else (),
        )

    def _server_documents(self) -> Iterator[tuple[str, bytes]]:
        named = {key for route in self._routes.values() for key in route.servers}
        return self._servers.documents(named.union(self._api.named_servers()))

    def _statuses(self, gateway: GatewayDocument) -> Iterator[WantedStatus]:
        yield from self._servers.statuses()
        yield from (one.status for one in self._routes.values())
        yield from (one.status for one in self._policies.values())
        yield from self._api.statuses(one.attached for one in self._routes.values())
        parameters = self._api.parameters
        for key in {parameters.config, *parameters.named}:
            config = self._sources["GatewayConfig"].get(key or "")
            if config is not None:
                yield self._config_status(config, gateway)

    def _config_status(self, config: Source, gateway: GatewayDocument) -> WantedStatus:
        conditions: tuple[Wanted, ...] = (
            holds("Accepted", gateway.note or NO_MISTAKE),
            holds("Programmed", IN_DIRECTORY),
        )
        if config.mistakes:
            stays = "nothing is changed until it is corrected; what is served stays"
            said = stays if config.key == self._gateway else "the Gateways that refer to it are not served"
            conditions = fails("Accepted", "Invalid", config.complaint()), fails("Programmed", "Invalid", said)
        elif config.key != self._api.parameters.config:
            said = f"GatewayConfig {self._api.parameters.config} is in effect"
            conditions = holds("Accepted", NO_MISTAKE), fails("Programmed", "Conflict", said)
        elif gateway.missing:
            conditions = (*conditions, fails("ResolvedRefs", "SecretNotFound", "; ".join(gateway.missing)))
        return WantedStatus(
            kind=config.kind,
            key=config.key,
            generation=config.generation,
            conditions=conditions,
            fields=self._failure_mode(config),
        )

    def _failure_mode(self, config: Source) -> Mapping[str, str]:
        """What Envoy does without extproc, for the status."""
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return {}
        served = [self._sources["ModelRoute"][key].decoded for key, one in self._routes.items() if one.document]
        snapshot = Snapshot(
            version="",
            routes=tuple(one for one in served if isinstance(one, ModelRoute)),
            servers=tuple(self._servers.decoded()),
            gateway=config.decoded.spec,
        )
        return {"failureMode": failure_mode_of(snapshot)}

    def _config_problem(self, key: str) -> str:
        """Why a GatewayConfig cannot be used; empty if it can."""
        config = self._sources["GatewayConfig"].get(key)
        if config is None:
            return "there is no such GatewayConfig"
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return config.complaint()
        return ""

    def _refusal(self, document: GatewayDocument) -> str:
        """Without its GatewayConfig a gateway would serve without the authentication that it asks for."""
        if self._gateway is not None:
            gateway = self._sources["GatewayConfig"].get(self._gateway)
            if gateway is None:
                return f"there is no GatewayConfig {self._gateway}"
            if gateway.mistakes:
                return f"GatewayConfig {self._gateway}: {gateway.complaint()}"
        if document.refused:
            return f"GatewayConfig {self._api.parameters.config} with what it refers to: {document.refused}"
        return ""


def file_name(kind: str, key: str) -> str:
    """Of an object's document in the directory. Namespaces have no dots, so no two objects share a file."""
    return f"{kind.lower()}.{key.replace('/', '.', 1)}.json"
